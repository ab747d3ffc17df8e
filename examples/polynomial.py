# polynomial.py: horovodrun -np 2 python polynomial.py
import keras
import tensorflow as tf

import ringtrain.keras as hvd
from ringtrain import make_parallel

hvd.init()  # gives each rank its own GPU or cores
x = tf.reshape(tf.linspace(-1.0, 1.0, 1000), [-1, 1])  # the whole batch, on every rank
target = 5 * x**2 + 3
coefficients = tf.Variable(tf.zeros([3, 1]))
optimizer = keras.optimizers.Adam(0.05)
optimizer.build([coefficients])


@make_parallel(combine="mean")
def loss(x, target):  # sees this rank's rows alone
    y = tf.concat([x**2, x, tf.ones_like(x)], axis=1) @ coefficients
    return tf.reduce_mean((y - target) ** 2)


@tf.function
def step():
    with tf.GradientTape() as tape:
        whole = loss(x=x, target=target)  # the mean over all rows, on every rank
    optimizer.apply(tape.gradient(whole, [coefficients]), [coefficients])


for _ in range(1000):
    step()
print(f"{hvd.rank()} {coefficients.numpy().ravel()}\n", end="")  # close to 5, 0, 3 on every rank
