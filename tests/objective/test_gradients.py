"""Gradients: equal to the gradient of the mean loss over the whole batch."""

import functools
import pathlib
import re
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from bigtrain import main, metrics, sharding
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.models import cappa, resnet, vit
from bigtrain.objective import gradients, microbatching
from bigtrain.tasks import captioning, classification


class Net(nn.Module):
  """Dense, batch statistics, dense."""

  @nn.compact
  def __call__(self, x, *, train=False):
    x = nn.Dense(8, name="first")(x)
    mean = self.variable("stats", "mean", jnp.zeros, (8,))
    if train:
      mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
    return nn.Dense(3, name="second")(jnp.tanh(x))


MODEL = Net()


def loss_fn(variables, batch, rng):
  out, mutable = MODEL.apply(
    variables, batch["x"], train=True, mutable=["stats"]
  )
  loss = jnp.sum((out - batch["y"]) ** 2, -1)
  weight = batch["weight"]
  return {
    "loss": metrics.pair(loss, weight),
    "size": metrics.pair(jnp.ones_like(loss)),
  }, mutable


def make(batch_size=32):
  rng = np.random.default_rng(0)
  batch = {
    "x": rng.normal(size=(batch_size, 5)).astype(np.float32),
    "y": rng.normal(size=(batch_size, 3)).astype(np.float32),
    # Uneven padding: the first half has little weight.
    "weight": (np.arange(batch_size) % 7 > (np.arange(batch_size) < 16) * 4),
  }
  variables = dict(jax.jit(MODEL.init)(jax.random.key(0), batch["x"][:1]))
  return batch, variables.pop("params"), variables


def run(microbatches, mesh_sizes, trainable=None):
  batch, params, mutable = make()
  mesh = sharding.make_mesh(
    *mesh_sizes, devices=jax.devices()[: mesh_sizes[0] * mesh_sizes[1]]
  )
  batch = jax.device_put(batch, sharding.batch(mesh))
  params, mutable = jax.device_put((params, mutable), sharding.replicated(mesh))
  trainable = trainable or jax.tree.map(lambda _: True, params)

  @jax.jit
  def fn(params, mutable, batch):
    return gradients.make(
      loss_fn,
      trainable=trainable,
      microbatches=microbatches,
      mesh=mesh,
    )({"params": params, "mutable": mutable, "step": 0}, batch)

  return jax.device_get(fn(params, mutable, batch))


@pytest.mark.parametrize("mesh_sizes", [(1, 1), (2, 4)])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_the_gradient_is_of_the_weighted_mean(microbatches, mesh_sizes):
  batch, params, mutable = make()

  def plain(params):
    out, _ = MODEL.apply(
      {"params": params, **mutable}, batch["x"], train=True, mutable=["stats"]
    )
    loss = jnp.sum((out - batch["y"]) ** 2, -1)
    return jnp.sum(loss * batch["weight"]) / jnp.sum(batch["weight"])

  loss, expected = jax.jit(jax.value_and_grad(plain))(params)
  grads, pairs, _ = run(microbatches, mesh_sizes)
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  assert pairs["loss"][1] == batch["weight"].sum()
  assert pairs["size"] == (32, 32)
  mean = pairs["loss"][0] / pairs["loss"][1]
  np.testing.assert_allclose(mean, loss, rtol=1e-5)


def test_mutable_collections_pass_through_the_microbatches_in_order():
  batch, params, mutable = make()
  expected = mutable["stats"]["mean"]
  for i in range(4):
    out = batch["x"][i::4] @ params["first"]["kernel"]
    expected = 0.9 * expected + 0.1 * out.mean(0)
  _, _, result = run(4, (2, 4))
  np.testing.assert_allclose(
    result["stats"]["mean"], expected, rtol=1e-5, atol=1e-6
  )


def test_frozen_parameters_have_no_gradient():
  _, params, _ = make()
  trainable = jax.tree.map(lambda _: True, params)
  trainable["first"] = jax.tree.map(lambda _: False, params["first"])
  whole, _, _ = run(2, (1, 8))
  grads, _, _ = run(2, (1, 8), trainable)
  assert set(grads) == {"second"}
  np.testing.assert_allclose(
    grads["second"]["kernel"], whole["second"]["kernel"], rtol=1e-6
  )


def test_splitting_needs_no_communication():
  mesh = sharding.make_mesh(2, 4)
  spec = jax.ShapeDtypeStruct((64, 5), "float32", sharding=sharding.batch(mesh))
  text = (
    jax.jit(lambda x: microbatching.split(x, 4, mesh))
    .lower(spec)
    .compile()
    .as_text()
  )
  for collective in ("all-to-all", "all-gather", "collective-permute"):
    assert collective not in text


def test_microbatches_by_number_or_by_size():
  mesh = sharding.make_mesh()
  read = lambda **keys: microbatching.read(settings.Config(keys), 64, mesh)
  assert read() == 1
  assert read(microbatches=4) == 4
  assert read(microbatch_examples=16) == 4
  with pytest.raises(ConfigError, match="48 does not divide the batch of 64"):
    read(microbatch_examples=48)


def compiled_gradient(model, microbatches, batch, mesh, task=classification):
  """A jitted gradient of a task's loss; specs of params, mutable and batch."""
  loss_fn = functools.partial(task.loss_fn, model=model, train=True)

  def fn(params, mutable, batch):
    return gradients.make(
      loss_fn,
      trainable=jax.tree.map(lambda _: True, params),
      microbatches=microbatches,
      mesh=mesh,
    )({"params": params, "mutable": mutable, "step": 0}, batch)

  def init():
    one = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), batch)
    return model.init(jax.random.key(0), **task.inputs(one))

  spec = dict(jax.eval_shape(init))
  batch = sharding.batch_spec(jax.eval_shape(lambda: batch), mesh)
  return jax.jit(fn), spec.pop("params"), spec, batch


@pytest.mark.slow
def test_microbatches_save_memory():
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  model = vit.Model(variant="S/16", num_classes=1000, scan=True)
  batch = {
    "image": jax.ShapeDtypeStruct((64, 224, 224, 3), "float32"),
    "labels": jax.ShapeDtypeStruct((64,), "int32"),
  }
  bytes_of = {}
  for microbatches in (1, 8):
    fn, *specs = compiled_gradient(model, microbatches, batch, mesh)
    program = fn.lower(*specs).compile()
    bytes_of[microbatches] = program.memory_analysis().temp_size_in_bytes
  assert bytes_of[8] <= 0.25 * bytes_of[1], bytes_of


def random_values(specs):
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: (0.1 * rng.normal(size=x.shape)).astype(np.float32), specs
  )


def relative(one, other):
  """Distance between two trees, relative to the norm of the second."""
  one, other = (
    np.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
    for tree in (one, other)
  )
  return np.linalg.norm(one - other) / np.linalg.norm(other)


def vit_case(rng):
  sizes = dict(patch_size=4, width=32, depth=2, num_heads=2)
  labels = rng.integers(10, size=32).astype(np.int32)
  image = rng.normal(size=(32, 16, 16, 3)).astype(np.float32)
  return vit.Model(num_classes=10, **sizes), classification, image, labels


def captions_case(rng):
  sizes = dict(patch_size=4, width=32, depth=1, num_heads=2)
  model = cappa.Model(
    vocab_size=20, max_len=6, mask_token=True, decoder_dropout=0.0, **sizes
  )
  # Captions of one to six tokens, the short ones all in the second half.
  lengths = 1 + np.arange(32) % 6 // (1 + (np.arange(32) > 15))
  fits = np.arange(6) < lengths[:, None]
  labels = np.where(fits, rng.integers(2, 20, (32, 6)), 0)
  image = rng.normal(size=(32, 16, 16, 3)).astype(np.float32)
  return model, captioning, image, labels.astype(np.int32)


def resnet_case(rng):
  # Batch normalisation mixes the examples of a microbatch, so its gradients
  # depend on the number of microbatches by definition, unless all microbatches
  # have the same images. Only labels and padding differ here. The last stage
  # has 2 x 2 positions, the fewest for which variances make sense.
  image = rng.normal(size=(8, 64, 64, 3)).astype(np.float32).repeat(4, 0)
  labels = rng.integers(10, size=32).astype(np.int32)
  model = resnet.Model(num_classes=10, depth=26, width=0.125)
  return model, classification, image, labels


@pytest.mark.slow
@pytest.mark.parametrize("case", [vit_case, captions_case, resnet_case])
def test_microbatches_and_devices_do_not_change_the_gradients_of_models(case):
  model, task, image, labels = case(np.random.default_rng(1))
  batch = {
    "image": image,
    "labels": labels,
    # The first half and the first of four interleaved parts are mostly padding.
    "_mask": (np.arange(32) % 5 > (np.arange(32) < 16) * 3).astype(np.float32)
    * (np.arange(32) % 4 + np.arange(32) // 24 > 0),
  }
  grads_of = {}
  for devices in (1, 8):
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])
    for microbatches in (1, 4):
      with jax.set_mesh(mesh):
        fn, params, mutable, _ = compiled_gradient(
          model, microbatches, batch, mesh, task
        )
        values = random_values(params), random_values(mutable)
        params, mutable = jax.device_put(
          (values[0], jax.tree.map(np.abs, values[1])),
          sharding.replicated(mesh),
        )
        placed = jax.device_put(batch, sharding.batch(mesh))
        grads, _, _ = fn(params, mutable, placed)
        grads_of[devices, microbatches] = jax.device_get(grads)
  far = {
    cut: error
    for cut, grads in grads_of.items()
    if not (error := relative(grads, grads_of[1, 1])) < 1e-5
  }
  assert not far


def test_a_number_of_microbatches_that_does_not_divide():
  mesh = sharding.make_mesh()
  microbatching.check(64, 4, mesh)
  with pytest.raises(ConfigError, match=r"batch of 64 on 8 .* nearest .* is 2"):
    microbatching.check(64, 3, mesh)
  with pytest.raises(ConfigError, match="at least 1, got 0"):
    microbatching.check(64, 0, mesh)


def test_a_task_may_replace_the_gradients(tiny_config, tmp_path, monkeypatch):
  # The example of docs/training.md: sharpness-aware steps.
  page = (pathlib.Path(__file__).parents[2] / "docs/training.md").read_text()
  task = types.ModuleType("users.sharp")
  vars(task).update(vars(classification))
  (code,) = re.findall(
    r"```python\n(import jax[^`]*gradients_fn.*?)```", page, re.S
  )
  exec(code, vars(task))
  monkeypatch.setitem(sys.modules, "users.sharp", task)
  changes = {"evals": {}, "lr": 0.1, "microbatches": 2, "weight_stats": "none"}
  main.train(tiny_config(changes), str(tmp_path / "plain"))
  config = tiny_config(changes | {"task": "users.sharp"})
  main.train(config, str(tmp_path / "sharp"))
  plain, sharp = (tiny.rows(tmp_path / name) for name in ("plain", "sharp"))
  # The loss of step 1 is that of the climbed parameters.
  assert plain[1]["loss"] < sharp[1]["loss"] < plain[1]["loss"] + 0.1
  assert sharp[6]["loss"] < sharp[1]["loss"]
  # The same result after a resume.
  for stop in (3, None):
    main.train(config | {"stop_at_steps": stop}, str(tmp_path / "cut"))
  assert tiny.rows(tmp_path / "cut") == sharp
