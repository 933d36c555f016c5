"""``DistributedOptimizer`` for Keras, on several ranks of one job."""

import functools
import os

import pytest
from torch.utils.data import DataLoader

pytestmark = [
    pytest.mark.slow,
    # Keras' own, with NumPy 2
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def on_ranks():
    """Run all checks on a rank; return what each has found, by its name."""
    import keras
    import numpy as np

    import nbelastic.keras as hvd

    hvd.init()
    ops = keras.ops
    rank, size = hvd.rank(), hvd.size()
    found = {}

    def model_of(optimizer, *, layers=(4, 1), **options):
        begin = keras.initializers.GlorotUniform
        dense = [
            keras.layers.Dense(n, use_bias=False, kernel_initializer=begin(seed=n)) for n in layers
        ]
        model = keras.Sequential([keras.layers.Input((3,)), *dense])
        model.compile(optimizer, loss="mse", **options)
        return model

    def data(seed):
        made = np.random.default_rng(seed)
        return [made.normal(size=(8, width)).astype("float32") for width in (3, 1)]

    def joined(parts):
        return [np.concatenate(each) for each in zip(*parts, strict=True)]

    def difference(one, other, variables=slice(None)):
        pairs = zip(one.get_weights()[variables], other.get_weights()[variables], strict=True)
        return max(float(np.abs(a - b).max()) for a, b in pairs)

    def compare(name, make, steps=3, how=None, **options):
        """Train on a part of each batch, and on all of it: what all ranks together should do."""
        mine = model_of(hvd.DistributedOptimizer(make(), **how or {}), **options)
        whole = model_of(make(), **options)
        for step in range(steps):
            parts = [data(10 * step + r) for r in range(size)]
            mine.train_on_batch(*parts[rank])
            whole.train_on_batch(*joined(parts))
        found[name] = difference(mine, whole)

    sgd = keras.optimizers.SGD
    compare("sgd", lambda: sgd(0.1, momentum=0.9))
    compare("adam", lambda: keras.optimizers.Adam(0.1))
    compare("clipped after averaging", lambda: sgd(0.1, global_clipnorm=0.05))
    compare("weight decay and average", lambda: keras.optimizers.AdamW(0.1, use_ema=True))
    compare("Keras accumulates", lambda: sgd(0.1, gradient_accumulation_steps=2), steps=4)
    compare("eagerly", lambda: sgd(0.1), run_eagerly=True)
    scaled = keras.optimizers.LossScaleOptimizer
    if keras.config.backend() != "jax":
        compare("scaled loss", lambda: scaled(sgd(0.1), initial_scale=64.0))
    compare("predivided", lambda: sgd(0.1), how={"gradient_predivide_factor": 2.0})
    compare("compressed", lambda: sgd(0.1), how={"compression": hvd.Compression.bf16})

    # Sums of two batches on each rank, averaged over ranks.
    for average in (False, True):
        optimizer = hvd.DistributedOptimizer(
            sgd(0.1), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        model = model_of(optimizer)
        for step in range(2):
            model.train_on_batch(*data(step * size + rank))
        expected = model_of(sgd(0.1 if average else 0.2))
        expected.train_on_batch(*joined([data(number) for number in range(2 * size)]))
        found[f"passes, averaged: {average}"] = difference(model, expected)
        found[f"iterations, averaged: {average}"] = int(ops.convert_to_numpy(optimizer.iterations))

    # Gradients that no backward() has left in the variables, of two batches.
    given = keras.Variable(np.zeros(2, "float32"))
    optimizer = hvd.DistributedOptimizer(sgd(1.0), backward_passes_per_step=2)
    for step in range(2):
        optimizer.apply([ops.ones(2) * (rank + step)], [given])
    found["given"] = ops.convert_to_numpy(given).tolist()

    # Some layers stay local, with gradients divided by the number of ranks.
    model = model_of(sgd(0.1))
    local = model.layers[0]
    model.compile(hvd.PartialDistributedOptimizer(sgd(0.1), local_layers=local), loss="mse")
    own = model_of(sgd(0.1 / size))
    model.train_on_batch(*data(rank))
    own.train_on_batch(*data(rank))
    found["local"] = difference(model, own, slice(1))
    gathered = hvd.allgather_object([each.tolist() for each in model.get_weights()])
    found["local differs, the rest does not"] = (
        gathered[0][0] != gathered[1][0],
        gathered[0][1] == gathered[1][1],
    )

    # An infinity on one rank has all ranks skip the step.
    if keras.config.backend() != "jax":
        model = model_of(hvd.DistributedOptimizer(scaled(sgd(0.1), initial_scale=2.0)))
        before = [each.copy() for each in model.get_weights()]
        x, y = data(1)
        model.train_on_batch(x * (np.inf if rank == 1 else 1.0), y)
        same = all(map(np.array_equal, model.get_weights(), before))
        found["infinity"] = (same, float(ops.convert_to_numpy(model.optimizer.dynamic_scale)))

    # Values of all kinds.
    found["allreduce"] = (
        hvd.allreduce(float(rank)),
        hvd.allreduce(np.array([rank, 1.0]), op=hvd.Sum).tolist(),
        ops.convert_to_numpy(hvd.allreduce(ops.ones(2) * rank)).tolist(),
    )
    found["allgather"] = hvd.allgather(np.full((rank + 1, 1), rank)).ravel().tolist()
    variable = keras.Variable(np.full(2, float(rank)))
    hvd.broadcast_variables([variable], 1)
    found["broadcast"] = ops.convert_to_numpy(variable).tolist()
    return found


def test_it_is_as_one_rank_with_all_batches(keras_crew):
    results = keras_crew.fit(on_ranks, np=2).results()
    limits = {"compressed": 1e-2}
    for found in results:
        for name, value in found.items():
            if isinstance(value, float):
                assert value < limits.get(name, 1e-6), name
        assert found["iterations, averaged: False"] == 1
        assert found["given"] == [-2.0, -2.0]
        assert found["local differs, the rest does not"] == (True, True)
        assert found.get("infinity", (True, 1.0)) == (True, 1.0)
        assert found["allreduce"] == (0.5, [1.0, 2.0], [0.5, 0.5])
        assert found["allgather"] == [0, 1, 1]
        assert found["broadcast"] == [1.0, 1.0]


def test_a_saved_model_needs_no_nbelastic(one_rank, tmp_path):
    hvd = one_rank
    import keras
    import numpy as np

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    plain = keras.optimizers.SGD(0.25, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain)
    assert optimizer is plain
    model.compile(optimizer, loss="mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    config = keras.saving.serialize_keras_object(optimizer)
    assert "nbelastic" not in str(config)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert "Reducing" not in str(type(loaded.optimizer).__mro__)
    again = hvd.load_model(path)
    assert type(again.optimizer).__name__ == "SGD"
    assert "Reducing" in str(type(again.optimizer).__mro__)
    for mine, other in zip(again.optimizer.variables, optimizer.variables, strict=True):
        assert np.allclose(*map(keras.ops.convert_to_numpy, (mine, other)))
    again.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert type(optimizer).from_config(optimizer.get_config()).momentum == 0.5


@pytest.mark.backends("tensorflow")
def test_what_xla_compiles_cannot_call_back(one_rank):
    hvd = one_rank
    import keras

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse", jit_compile=True)
    hvd.elastic.KerasState(model)
    assert not model.jit_compile


def test_what_cannot_be_is_refused(one_rank):
    hvd = one_rank
    import keras
    import numpy as np

    sgd, rows, dense = keras.optimizers.SGD, np.ones((4, 2)), keras.layers.Dense
    model = keras.Sequential([keras.layers.Input((2,)), dense(1)])
    model.compile(sgd(), "mse")
    wrap, state = hvd.PartialDistributedOptimizer, hvd.elastic.KerasState
    fit = functools.partial(hvd.elastic.fit, state(model))
    keep = keras.callbacks.BackupAndRestore("/nowhere")
    loader = DataLoader(rows, 2, sampler=hvd.elastic.ElasticSampler(rows))
    plain = sgd()

    def refuses(says, call, *arguments, **options):
        with pytest.raises(ValueError, match=says):
            call(*arguments, **options)

    refuses("optimizer of Keras 3", wrap, "sgd")
    refuses("at least 1", wrap, plain, backward_passes_per_step=0)
    refuses("process_set", wrap, plain, process_set=1)
    refuses("must be a layer", wrap, plain, local_layers=["dense"])
    refuses("already", wrap, hvd.DistributedOptimizer(sgd()))
    scaled = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd()))
    refuses("each rank would skip other steps", state, model, scaled)
    if keras.config.backend() == "jax":
        refuses(
            "cannot be distributed on the JAX", wrap, keras.optimizers.LossScaleOptimizer(sgd())
        )
    assert "Reducing" not in str(type(plain).__mro__)
    refuses("not built", state, keras.Sequential([dense(1)]))
    refuses("whose gradients are not averaged", fit, rows, rows[:, :1])
    refuses("cannot be dealt to ranks", fit, (each for each in rows))
    refuses("different lengths", fit, rows, rows[:3])
    refuses("epochs=0", fit, rows, rows, epochs=0)
    refuses("steps_per_epoch=0", fit, rows, rows, steps_per_epoch=0)
    refuses("validation_split=1.5", fit, rows, rows, validation_split=1.5)
    refuses("4 samples cannot be split so", fit, rows, rows, validation_split=0.99)
    refuses("only for arrays", fit, loader, validation_split=0.5)
    refuses("a restore from a file would undo it", fit, rows, rows, callbacks=[keep])
    model.other = model.optimizer  # as a GAN's; what compile() made by itself has no name
    model.compile(metrics=[])
    refuses("optimizers of its own", fit, rows, rows)


def test_settings_of_keras_in_the_kernel_reach_its_ranks(monkeypatch):
    import keras

    from nbelastic.cluster.payload import keras_settings, take_settings

    values = {"floatx": "float64", "epsilon": 1e-3, "image_data_format": "channels_first"}
    values["dtype_policy"] = "mixed_bfloat16"

    def found():
        now = {name: getattr(keras.config, name)() for name in values}
        return {**now, "dtype_policy": now["dtype_policy"].name}

    def take(new):
        for name, value in new.items():
            getattr(keras.config, f"set_{name}")(value)

    before, backend = found(), {"KERAS_BACKEND": os.environ["KERAS_BACKEND"]}
    try:
        take(values)
        settings = keras_settings()
        take(before)
        assert keras_settings() == backend  # the rest is as by default
        monkeypatch.setenv("KERAS_BACKEND", "none of them")
        take_settings(settings)
        assert found() == values
        assert backend.items() <= os.environ.items()
    finally:
        take(before)
