"""``elastic.fit`` on real workers that are killed, leave and join."""

import pytest

from tests.keras.conftest import BACKEND
from tests.keras.training import Training
from tests.support.clusters import kinds, sizes, until
from tests.support.training import Fault

pytestmark = [
    pytest.mark.slow,
    # Keras' own, with NumPy 2
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def check(results, work):
    """Check what must be true of every training: ranks agree, and no sample was missed."""
    first = results[0]
    for each in results:
        for name in ("digest", "history", "epochs", "wait", "plateau", "best", "told"):
            assert each[name] == first[name], name
        assert each["begins"] == 1
        assert each["own"] == (True, True)
    assert first["epochs"] == list(range(len(first["epochs"]))) == first["told"]
    lines = [line.split(",")[0] for line in (work.marks / "log.csv").read_text().splitlines()]
    assert list(dict.fromkeys(lines)) == ["epoch", *map(str, first["epochs"])]
    whole = not work.steps and all(fault.kind != "stop" for fault in work.faults)
    for seen in first["history"]["seen"] if whole else ():
        least, most = seen % 1000, seen // 1000
        assert least == 1
        assert most <= 2  # shares of different lengths are padded


@pytest.mark.parametrize("batch", [1, 5])
def test_a_killed_worker(keras_crew, tmp_path, batch):
    """A worker takes its place in an epoch, or where only the epoch's end is left."""
    work = Training(
        tmp_path, faults=(Fault(1, 1, 2), Fault(0, 2, batch, "whole")), epochs=5, patience=9
    )
    job = keras_crew.fit(work, np=3, min_np=2)
    check(job.results(), work)
    assert sizes(job) == [3, 2, 3]
    assert sum(each["newcomer"] for each in job.results()) == 1
    assert job.results()[0]["epochs"] == [0, 1, 2, 3, 4]
    assert "skip_synchronize" not in str(job.logs()), "Keras' own step is no mistake of the user's"


def test_a_worker_killed_at_the_end_of_an_epoch(keras_crew, tmp_path):
    work = Training(tmp_path, faults=(Fault(0, 1, 0, "end"),), patience=9)
    job = keras_crew.fit(work, np=2, min_np=1)
    check(job.results(), work)
    assert sizes(job)[:2] == [2, 1]


@pytest.mark.backends("torch")
def test_with_a_loader_kills_and_a_join_change_nothing(keras_crew, tmp_path):
    """Bits of the model, EarlyStopping, ReduceLROnPlateau and History as without any fault."""
    marks = [tmp_path / name for name in ("undisturbed", "disturbed")]
    for each in marks:
        each.mkdir()
    plain = Training(marks[0], loader=True, epochs=8)
    expected = keras_crew.fit(plain, np=3).results()[0]
    faults = (
        *(Fault(1, 0, 2), Fault(0, 1, 3, "whole"), Fault(0, 2, 0), Fault(1, 2, 2)),
        Fault(0, 3, 1, "whole"),
    )
    work = Training(marks[1], faults, loader=True, epochs=8)
    job = keras_crew.fit(work, np=3, min_np=1)
    check(job.results(), work)
    found = job.results()[0]
    assert [event.kind for event in job.history].count("lost") == 3
    assert max(sizes(job)[1:]) > min(sizes(job))  # some have joined
    assert found["digest"] == expected["digest"]
    assert found["epochs"] == expected["epochs"]
    for name in ("wait", "plateau"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        assert found["history"][name] == pytest.approx(values, rel=1e-5), name


def test_ranks_leave_and_join_without_a_fault(keras_crew, tmp_path):
    """With a DataLoader and a train_step of the user's; nothing is rolled back."""
    faults = (Fault(0, 1, 1, "wait"), Fault(0, 2, 1, "wait"))
    work = Training(tmp_path, faults, epochs=4, patience=9, own_step=True, loads=BACKEND == "torch")
    job = keras_crew.fit(work, np=3, min_np=1, block=False)
    for number, ranks in enumerate((2, 3)):
        until((tmp_path / f"fault-{number}").exists, "the rank waits", timeout=60)
        job.scale(max_np=ranks)
    check(job.results(), work)
    assert sizes(job) == [3, 2, 3]
    assert "lost" not in kinds(job)


def test_all_ranks_stop_where_one_does(keras_crew, tmp_path):
    work = Training(tmp_path, faults=(Fault(1, 1, 0, "stop"),), epochs=9, patience=9)
    job = keras_crew.fit(work, np=2)
    check(job.results(), work)
    assert job.results()[0]["epochs"] == [0, 1]
    assert job.results()[0]["history"]["seen"][0] == 1001  # of the epoch before: each sample once
    assert (tmp_path / "best.keras").exists()
    assert sizes(job) == [2]


def test_epochs_of_a_number_of_steps(keras_crew, tmp_path):
    """An epoch of three batches goes on in the data, which have four, also after a kill."""
    work = Training(tmp_path, faults=(Fault(1, 1, 2),), epochs=4, patience=9, steps=3)
    job = keras_crew.fit(work, np=3, min_np=2)
    check(job.results(), work)
    assert sizes(job)[:2] == [3, 2]
    assert [each["batches"] for each in job.results()] == [12] * len(job.results())


def test_arguments_of_keras_fit(one_rank):
    """Which samples are trained and evaluated, and which epochs there are."""
    import keras
    import numpy as np

    hvd, seen = one_rank, []

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((epoch, logs["sum"], logs.get("val_sum")))

    def fit(x, *rest, **options):
        seen.clear()
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        count = keras.metrics.MeanMetricWrapper(lambda y, _: y, name="sum")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
        model.compile(optimizer, "mse", metrics=[count])
        state = hvd.elastic.KerasState(model)
        options = {"batch_size": 2, "callbacks": [Seen()], "verbose": 0, **options}
        hvd.elastic.fit(state, x, *rest, **options)
        return [(epoch, *(each and round(each, 3) for each in more)) for epoch, *more in seen]

    # The mean of targets 0, 1, …, 9: of all, of the first eight and the last two.
    x, y = np.ones((10, 1), "float32"), np.arange(10.0, dtype="float32")[:, None]
    assert fit(x, y, validation_split=0.2) == [(0, 3.5, 8.5)]
    # Two data epochs of five batches, in epochs of two batches.
    one_after_other = {"steps_per_epoch": 2, "shuffle": False}
    assert fit(x, y, epochs=5, **one_after_other) == [
        *((0, 1.5, None), (1, 5.5, None), (2, 4.5, None), (3, 3.5, None), (4, 7.5, None))
    ]
    assert fit(x, y, initial_epoch=3, epochs=4, validation_data=(x, y), validation_steps=3) == [
        (3, 4.5, 2.5)
    ]
    validation = hvd.elastic.ElasticDataset(10, batch_size=4, read=lambda at: (x[at], y[at]))
    assert fit(x, y, epochs=3, validation_data=validation, validation_freq=[1, 3]) == [
        *((0, 4.5, 4.5), (1, 4.5, None), (2, 4.5, 4.5))
    ]
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = DataLoader(rows, 2, sampler=hvd.elastic.ElasticSampler(rows))
    assert fit(loader, validation_data=loader, validation_steps=5) == [(0, 4.5, 4.5)]
    assert fit(loader, validation_data=DataLoader(rows, 2), validation_steps=3) == [(0, 4.5, 2.5)]


def test_the_trained_model_comes_back(keras_crew):
    import keras
    import numpy as np

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    untrained = model.get_weights()

    def train():
        import keras
        import numpy as np

        import nbelastic.keras as hvd

        hvd.init()
        keras.layers.Dense(1)  # names of later layers differ from those of the notebook
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        rows = np.ones((8, 2), np.float32)
        hvd.elastic.fit(hvd.elastic.KerasState(model), rows, rows[:, :1] * 3, epochs=1)
        return model.get_weights()

    job = keras_crew.fit(train, np=2, pull="model")
    job.pull()
    for ours, theirs, before in zip(model.get_weights(), job.result(), untrained, strict=True):
        assert np.array_equal(ours, theirs)
        assert not np.array_equal(ours, before)
