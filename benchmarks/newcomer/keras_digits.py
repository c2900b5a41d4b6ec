"""KERAS_BACKEND=jax python keras_digits.py"""

import os

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

FOLDER = "runs/newcomer_keras"
x, y = load_digits(return_X_y=True)
x = (x.reshape(-1, 8, 8, 1) / 8 - 1).astype("float32")
order = np.random.default_rng(0).permutation(len(x))
train, test = order[360:], order[:360]


class AddPositions(layers.Layer):
  def build(self, shape):
    self.positions = self.add_weight(shape=shape[1:], initializer="normal")

  def call(self, x):
    return x + self.positions


def make_model():
  inputs = keras.Input((8, 8, 1))
  h = layers.Conv2D(64, 2, strides=2)(inputs)
  h = AddPositions()(layers.Reshape((16, 64))(h))
  for _ in range(2):
    n = layers.LayerNormalization()(h)
    h = h + layers.MultiHeadAttention(4, 16)(n, n)
    n = layers.LayerNormalization()(h)
    h = h + layers.Dense(64)(layers.Dense(128, "gelu")(n))
  h = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(h))
  return keras.Model(inputs, layers.Dense(10)(h))


keras.utils.set_random_seed(0)
steps = 30 * -(-len(train) // 128)
schedule = keras.optimizers.schedules.CosineDecay(
  0.0, steps - steps // 10, warmup_target=2e-3, warmup_steps=steps // 10
)
model = make_model()
model.compile(
  optimizer=keras.optimizers.Adam(schedule),
  loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  metrics=["accuracy"],
)
model.fit(
  x[train],
  y[train],
  batch_size=128,
  epochs=30,
  verbose=2,
  validation_data=(x[test], y[test]),
  callbacks=[
    keras.callbacks.BackupAndRestore(f"{FOLDER}/backup"),
    keras.callbacks.CSVLogger(f"{FOLDER}/log.csv", append=True)
    if os.makedirs(FOLDER, exist_ok=True) is None
    else None,
  ],
)
model.save(f"{FOLDER}/model.keras")
print("accuracy", model.evaluate(x[test], y[test], verbose=0)[1])
logits = keras.ops.convert_to_numpy(model(x[test][:1]))
print("label", y[test][0], "predicted", logits.argmax(-1)[0])
