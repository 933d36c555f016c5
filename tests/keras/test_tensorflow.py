"""Horovod's TensorFlow interface: operations, their gradients and errors, eagerly and compiled."""

import pytest

from nbelastic.errors import RanksDisagree

pytestmark = [pytest.mark.slow, pytest.mark.backends("tensorflow")]


def on_ranks():
    """Run all checks on a rank of two; return what each has found, by its name."""
    import keras
    import numpy as np
    import tensorflow as tf

    import nbelastic.tensorflow as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    first = hvd.add_process_set([0])
    found = {}

    # For each operation what it is given, what it does, and the gradient's weights of its result.
    rows = np.arange(4.0, dtype="float32") + 10 * rank
    operations = {
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5),
        "average": hvd.allreduce,
        "compressed": lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16),
        "grouped": lambda x: hvd.grouped_allreduce([x, 2 * x])[1],
        "allgather": lambda x: hvd.grouped_allgather([x, x[rank:]])[1],
        "broadcast": lambda x: hvd.broadcast(x, 1),
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=2.0),
        "alltoall": hvd.alltoall,
        "splits": lambda x: hvd.alltoall(x, [1, 3])[0],
    }

    def both(name, operation):
        def with_gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = operation(x)
                y = tf.reduce_sum(y * tf.range(1.0, 1.0 + tf.cast(tf.shape(y)[0], y.dtype)))
            return operation(x), tape.gradient(y, x)

        x = tf.constant(rows)
        eagerly = with_gradient(x)
        compiled = tf.function(with_gradient)(x)
        for one, other in zip(eagerly, compiled, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
        return [each.numpy().tolist() for each in map(tf.convert_to_tensor, compiled)]

    found["operations"] = {name: both(name, each) for name, each in operations.items()}

    @tf.function
    def numbers():
        ops = (hvd.rank_op, hvd.size_op, hvd.local_rank_op, hvd.local_size_op)
        return [op() for op in ops] + [hvd.process_set_included_op(first.process_set_id)]

    found["numbers"] = [int(each) for each in numbers()]

    @tf.function
    def broadcasts():
        hvd.broadcast_variables(variables, root_rank=1)

    variables = [tf.Variable(rank + 1.0), tf.Variable([rank == 1, True])]
    broadcasts()
    found["broadcast"] = [each.numpy().tolist() for each in variables]
    shape = tf.constant([3, 2])
    slices = tf.IndexedSlices(tf.ones((1, 2)) * (rank + 1), tf.constant([rank]), shape)
    found["slices"] = tf.convert_to_tensor(hvd.allreduce(slices)).numpy().tolist()
    weight = keras.Variable(tf.zeros((3, 2)))
    hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([slices], [weight])
    found["sparse"] = (-weight.numpy()).tolist()

    # A tape whose embedding is sparse, and another variable that stays on its rank.
    table, local = tf.Variable(tf.ones((3, 1))), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [rank])) * local * (rank + 1)
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(local)
    own, shared = tape.get_local_and_global_gradients(loss, [table, local])
    found["tape"] = float(own[0][1]), tf.convert_to_tensor(shared[0][1]).numpy().ravel().tolist()
    if rank == 0:
        found["set"] = float(hvd.allreduce(5.0, process_set=first))
        with tf.GradientTape() as tape:
            loss = 3 * local
        tape = hvd.DistributedGradientTape(tape, process_set=first)
        found["set's tape"] = float(tape.gradient(loss, local))

    # Statistics of all samples, of which ranks have different numbers; and the gradient of these.
    samples = tf.constant(np.random.default_rng(0).normal(size=(6, 3)), "float32")
    places = slice(0, 2) if rank == 0 else slice(2, 6)
    cosines, results = tf.cos(samples), []
    for layer, part in (
        (hvd.SyncBatchNormalization(), places),
        (keras.layers.BatchNormalization(), slice(6)),
    ):
        x = samples[part]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(y * cosines[part])
        results.append([y, tape.gradient(loss, x), layer.moving_mean, layer.moving_variance])
    (y, gradient, *mine), (all_y, all_gradients, *whole) = results
    pairs = [(y, all_y[places]), (gradient, all_gradients[places]), *zip(mine, whole, strict=True)]
    found["batch norm"] = max(float(tf.reduce_max(abs(one - other))) for one, other in pairs)

    found["errors"] = []
    for kind, call in (
        (tf.errors.FailedPreconditionError, lambda: hvd.allreduce(tf.ones(rank + 1))),
        (tf.errors.InvalidArgumentError, lambda: hvd.alltoall(tf.ones(3))),
        (NotImplementedError, lambda: hvd.allreduce(slices, op=hvd.Min)),
    ):
        try:
            call()
        except kind as error:
            found["errors"].append(error)
    try:  # a fault that is handled by hand, as Horovod's users did before there was a state
        tf.function(lambda: hvd.allreduce(tf.zeros(rank + 1)))()
    except tf.errors.UnknownError:
        hvd.init()
        hvd.broadcast_variables([local], root_rank=0)
        found["errors"].append(float(hvd.allreduce(1.0, op=hvd.Sum)))
    last = hvd.allreduce(1.0, op=hvd.Sum) if rank else None
    found["join"] = float(last or 1.0), int(hvd.join()) in range(size)
    return found


# Results and gradients on both ranks, with weights 1, 2, … on the results.
SUMS, WEIGHTS = [5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0]
GATHERED = [0.0, 1.0, 2.0, 3.0, 11.0, 12.0, 13.0]
EXPECTED = {
    "allreduce": [[SUMS, WEIGHTS]] * 2,
    "average": [[SUMS, WEIGHTS]] * 2,
    "compressed": [[SUMS, WEIGHTS]] * 2,
    "grouped": [[[10.0, 12.0, 14.0, 16.0], [2.0, 4.0, 6.0, 8.0]]] * 2,
    "allgather": [[GATHERED, WEIGHTS], [GATHERED, [0.0, 5.0, 6.0, 7.0]]],
    "broadcast": [[[10.0, 11.0, 12.0, 13.0], each] for each in ([0.0] * 4, WEIGHTS)],
    "reducescatter": [[each, [4.0, 8.0, 4.0, 8.0]] for each in ([20.0, 24.0], [28.0, 32.0])],
    "alltoall": [
        [[0.0, 1.0, 10.0, 11.0], [1.0, 2.0, 1.0, 2.0]],
        [[2.0, 3.0, 12.0, 13.0], [3.0, 4.0, 3.0, 4.0]],
    ],
    "splits": [
        [[0.0, 10.0], [1.0, 1.0, 2.0, 3.0]],
        [[1.0, 2.0, 3.0, 11.0, 12.0, 13.0], [2.0, 4.0, 5.0, 6.0]],
    ],
}


def test_operations_and_their_gradients_are_horovods(keras_crew):
    for rank, found in enumerate(keras_crew.fit(on_ranks, np=2).results()):
        assert found["operations"] == {name: each[rank] for name, each in EXPECTED.items()}
        assert found["numbers"] == [rank, 2, rank, 2, 1 - rank]
        assert found["broadcast"] == [2.0, [True, True]]
        assert found["slices"] == found["sparse"] == [[0.5, 0.5], [1.0, 1.0], [0.0, 0.0]]
        assert found["tape"] == ((rank + 1) / 2, [0.5, 1.0, 0.0])
        assert found["batch norm"] < 1e-6
        assert [type(each) for each in found["errors"]] == [
            RanksDisagree,  # as a kernel reads it, which may have no TensorFlow
            ValueError,
            NotImplementedError,
            float,
        ]
        assert found["join"] == (1.0, True)
        assert rank or (found["set"], found["set's tape"]) == (5.0, 3.0)
