"""Files of callbacks on rank 0, in one process."""

from __future__ import annotations

import pytest

keras = pytest.importorskip("keras")


@pytest.fixture
def logger_of(tmp_path):
    import nbelastic.keras as hvd

    hvd.init()

    def make():
        logger = hvd.elastic.OnRankZero(keras.callbacks.CSVLogger(str(tmp_path / "log.csv")))
        logger.set_model(keras.Sequential())
        logger.on_train_begin()
        return logger

    yield make
    hvd.shutdown()


def end(logger, epoch):
    logger.on_epoch_begin(epoch)
    logger.on_epoch_end(epoch, {"loss": 1.0})


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("in_epoch", [False, True])
def test_a_log_goes_on_with_each_epoch_once(logger_of, tmp_path, is_new, in_epoch):
    logger = logger_of()
    logger.goes_on(0, False)
    end(logger, 0)
    if in_epoch:
        end(logger, 1)  # and a failure takes it back
    if is_new:
        logger.callback.csv_file.close()  # as its process has ended
        logger = logger_of()
    logger.goes_on(1, in_epoch)
    end(logger, 1)
    logger.on_train_end()
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1"]
