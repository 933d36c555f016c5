"""Faults handled by hand, as Horovod's users did before there was a state."""

import os

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.5)
optimizer.build(model.trainable_variables)
x = np.ones((4, 3), "float32")


@tf.function
def step(wrong):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - 1.0))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    if wrong:  # another shape on each rank
        hvd.allreduce(tf.zeros(hvd.rank() + 1))
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


step(False)
caught = ""
try:
    step(True)
except tf.errors.UnknownError as error:
    caught = type(error).__name__
    hvd.init()
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
loss = float(step(False))
weights = float(sum(np.abs(each).sum() for each in model.get_weights()))
print(f"done caught={caught} weights={weights:.6f} {os.environ.get('NOTHING', '')}")
