"""Callbacks that write on rank 0, or know what others need; in one process."""

import pytest

keras = pytest.importorskip("keras")


def test_a_log_is_continued_by_the_next_rank_0(one_rank, tmp_path):
    for epoch in range(2):
        logger = one_rank.elastic.OnRankZero(keras.callbacks.CSVLogger(str(tmp_path / "log.csv")))
        logger.set_model(keras.Sequential())
        logger.on_train_begin()
        logger.goes_on(epoch, False)
        logger.on_epoch_begin(epoch)
        logger.on_epoch_end(epoch, {"loss": 1.0})
        logger.callback.csv_file.close()  # as its process has ended
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1"]


def test_a_threshold_has_its_sign_on_ranks_that_join_or_go_back():
    """Keras negates ``min_delta`` at the end of a callback's first epoch, once."""
    from nbelastic.keras.callbacks.fit_callbacks import FitProgress

    kind = keras.callbacks.EarlyStopping
    stoppings = [kind("val_loss", min_delta=0.1, patience=9) for _ in range(2)]
    old, new = (FitProgress([each]) for each in stoppings)
    old.callbacks.begin(False, lambda *_: stoppings[0].on_train_begin())
    first = old.content()
    stoppings[0].on_epoch_end(0, {"val_loss": 1.0})
    old.take(first, own=True)
    stoppings[0].on_epoch_end(0, {"val_loss": 1.0})
    new.take(old.content(), own=False)
    new.callbacks.begin(False, lambda *_: stoppings[1].on_train_begin())
    for each in stoppings:
        each.on_epoch_end(1, {"val_loss": 0.95})  # better, and by less than that
        assert (each.best, each.wait) == (1.0, 1)
