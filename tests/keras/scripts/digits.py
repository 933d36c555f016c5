"""Digits by ``model.fit``, in the shape of Horovod's elastic example for Keras.

With ``MARKS``, a folder, rank 1 kills itself once, and training goes on until a rank has joined.
"""

import os
import signal
import time

import horovod.keras as hvd
import keras
import numpy as np

hvd.init()

made = np.random.default_rng(0)
x = made.random((512, 8, 8, 1)).astype("float32")
y = x.reshape(512, 4, 16).mean(2).argmax(1)

marks = os.environ["MARKS"]
lr = 0.001
epochs = int(os.environ.get("EPOCHS", "6"))
begin = keras.initializers.GlorotUniform(seed=1)
model = keras.Sequential(
    [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(4, 3, activation="relu", kernel_initializer=begin),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(4, activation="softmax", kernel_initializer=begin),
    ]
)

# Horovod: adjust learning rate based on number of workers.
optimizer = keras.optimizers.Adam(lr * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(
    optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"]
)


def first(name):
    try:
        os.close(os.open(os.path.join(marks, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Harm(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if hvd.rank() == 1 and state.epoch == 1 and batch == 3 and first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.005)


def on_state_reset():
    model.optimizer.learning_rate = lr * hvd.size()
    if hvd.rank() == 0:
        with open(os.path.join(marks, "resets"), "a") as out:
            print(hvd.size(), state.epoch, state.batch, file=out)


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])

callbacks = [
    Harm(),
    hvd.callbacks.MetricAverageCallback(),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(os.path.join(marks, "checkpoint.keras")))


def batches():
    dice = np.random.default_rng(hvd.rank())
    while True:
        chosen = dice.integers(0, len(x), 16)
        yield x[chosen], y[chosen]


@hvd.elastic.run
def train(state):
    # Horovod: adjust number of steps based on number of workers.
    model.fit(
        batches(),
        steps_per_epoch=24 // hvd.size(),
        callbacks=callbacks,
        epochs=epochs - state.epoch,
        verbose=0,
    )


train(state)
weights = float(sum(np.abs(each).sum() for each in model.get_weights()[::2]))
rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
print(
    f"done epoch={state.epoch} size={hvd.size()} iterations="
    f"{int(keras.ops.convert_to_numpy(model.optimizer.iterations))} "
    f"weights={weights:.6f} rate={rate / hvd.size():.4f}"
)
