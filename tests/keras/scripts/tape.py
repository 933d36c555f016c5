"""A loop of one's own in TensorFlow 2, in the shape of Horovod's elastic example."""

import os
import signal
import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()

marks = os.environ["MARKS"]
lr = 0.01
made = np.random.default_rng(hvd.rank())
x = made.normal(size=(64, 6)).astype("float32")
y = x.sum(1, keepdims=True)
model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="tanh"), tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.Adam(lr * hvd.size())


@tf.function
def train_one_batch(data, target, allreduce=True):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(data, training=True) - target))
    # Horovod: add Horovod Distributed GradientTape.
    if allreduce:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


# Horovod: initialize model and optimizer state so we can synchronize across workers.
train_one_batch(x[:16], y[:16], allreduce=False)


def first(name):
    try:
        os.close(os.open(os.path.join(marks, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 5):
        for state.batch in range(state.batch, 20):
            if hvd.rank() == 1 and (state.epoch, state.batch) == (1, 7) and first("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            start = 16 * (state.batch % 4)
            train_one_batch(x[start : start + 16], y[start : start + 16])
            time.sleep(0.01)
            if state.batch % 5 == 0:
                state.commit()
        state.batch = 0


def on_state_reset():
    optimizer.learning_rate.assign(lr * hvd.size())
    if hvd.rank() == 0:
        with open(os.path.join(marks, "resets"), "a") as out:
            print(hvd.size(), state.epoch, state.batch, file=out)


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
weights = float(sum(np.abs(each).sum() for each in model.get_weights()))
print(
    f"done epoch={state.epoch + 1} size={hvd.size()} iterations={int(optimizer.iterations)} "
    f"weights={weights:.6f} rate={float(optimizer.learning_rate) / hvd.size():.4f}"
)
