"""All parts that a user can provide, in one file outside of the package."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from bigtrain import metrics
from bigtrain.pp import registry


@registry.register("my_double")
def my_double():
  return registry.Op(lambda features, u: {"x": features["x"] * 2})


class Source:
  spec = {"x": (np.dtype("float32"), (3,))}

  def __init__(self, length):
    self.length = length

  def __len__(self):
    return self.length

  def read(self, indices):
    return {"x": np.stack([indices] * 3, 1).astype(np.float32)}

  def where(self, index):
    return f"number {index}"

  def fingerprint(self):
    return f"mine {self.length}"


class Model(nn.Module):
  @nn.compact
  def __call__(self, x, *, train=False):
    return nn.Dense(1, name="only")(x)[:, 0]


def inputs(batch):
  return {"x": batch["x"]}


def loss_fn(variables, batch, rng, *, model, train, scale=1.0):
  out = model.apply(variables, **inputs(batch))
  x_B = batch["x"][:, 0]
  return {
    "loss": metrics.pair(scale * out**2),
    "seen": metrics.pair(x_B),
    "largest": metrics.Max.of(x_B),
    "values": metrics.Histogram.of(x_B, high=128.0, bins=4),
  }, {}


def predict_fns(model):
  def shifted(variables, batch, *, by=0.0):
    return model.apply(variables, **inputs(batch)) + by

  return {"shifted": shifted}


class Evaluator:
  def __init__(self, predict_fn, context, *, at):
    self.predict_fn, self.at = predict_fn, jnp.full((1, 3), at)

  def run(self, variables, step):
    return {"out": float(self.predict_fn(variables, {"x": self.at})[0])}


class Hook:
  calls = []

  def __init__(self, tag, *, context):
    self.tag, self.context = tag, context

  def before_train(self, step):
    self.calls.append(("before_train", step, self.tag))

  def before_step(self, step):
    self.calls.append(("before_step", step))

  def after_step(self, step):
    self.calls.append(("after_step", step))

  def after_row(self, step, row):
    self.calls.append(("after_row", step, "loss" in row))
    if step == 4:
      self.context.stop("enough")

  def after_train(self, step, end):
    self.calls.append(("after_train", step, end.how))
