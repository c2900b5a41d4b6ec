"""SimCLR and MoCo v3: formulas in float64, any mesh, teachers, mistakes."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from support import objectives

from bigtrain import main, sharding
from bigtrain.config.errors import ConfigError
from bigtrain.losses import random_views
from bigtrain.models import contrastive_vit
from bigtrain.models.layers import heads
from bigtrain.reports import flops
from bigtrain.tasks import moco_v3, simclr

B, D, F, E = 8, 6, 7, 5
VIT = dict(patch_size=2, width=16, depth=1, mlp_dim=16, num_heads=2)
MODEL = dict(
  **VIT,
  posemb="sincos2d",
  projector_layers=3,
  predictor_layers=2,
  head_hidden=F,
  head_out=E,
)
LOSS = dict(view_area=(0.3, 1.0), chunk=3)
# Of the last images of a batch there are no real ones.
WEIGHT = np.array([1, 1, 1, 1, 1, 1, 0, 0.0])


# Formulas.


def batch_norm(x):
  return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)


def head(p, x):
  """An MLP with batch norms: ReLU after all but the last."""
  layers = sum(name.startswith("Dense") for name in p)
  for i in range(layers):
    x = batch_norm(x @ p[f"Dense_{i}"]["kernel"])
    if i < layers - 1:
      norm = p[f"norm_{i}"]
      x = np.maximum(x * norm["scale"] + norm["bias"], 0)
  return x


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def log_softmax(x):
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def simclr_loss(params, features):
  """As in the paper: over 2 N views, without the view itself."""
  N = len(features)
  x = np.concatenate([features[:, 0], features[:, 1]])
  z = unit(head(params["projector"], x))
  logits = z @ z.T / 0.5
  np.fill_diagonal(logits, -np.inf)
  other = np.concatenate([np.arange(N, 2 * N), np.arange(N)])
  return -log_softmax(logits)[np.arange(2 * N), other].mean()


def moco_loss(params, teacher, features, taught):
  total = 0.0
  for view in range(2):
    z = head(params["projector"], features[:, view])
    q = unit(head(params["predictor"], z))
    k = unit(head(teacher["projector"], taught[:, 1 - view]))
    total -= 2 * 0.3 * np.diag(log_softmax(q @ k.T / 0.3)).mean()
  return total


def head_params(rng, layers, width):
  sizes = [width, *[F] * (layers - 1), E]
  result = {}
  for i in range(layers):
    result[f"Dense_{i}"] = {"kernel": rng.normal(size=sizes[i : i + 2])}
    if i < layers - 1:
      result[f"norm_{i}"] = {
        "scale": rng.uniform(0.5, 1.5, size=F),
        "bias": rng.normal(size=F),
      }
  return result


@pytest.mark.parametrize("place", ["one", "eight"])
def test_the_losses_are_those_of_the_papers(place):
  rng = np.random.default_rng(0)
  model = contrastive_vit.Model(**MODEL)
  params, teacher = (
    {"projector": head_params(rng, 3, D), "predictor": head_params(rng, 2, E)}
    for _ in range(2)
  )
  features, taught = rng.normal(size=(2, B, 2, D))
  real = WEIGHT > 0
  sizes = dict(replica=2, fsdp=4) if place == "eight" else dict(fsdp=1)
  with jax.enable_x64():
    mesh = objectives.make_mesh(**sizes)
    with jax.set_mesh(mesh):
      put = functools.partial(jax.device_put, device=sharding.batch(mesh))
      batch = {"_mask": put(WEIGHT)}
      z = {"features_B2D": put(features), "teacher_features_B2D": put(taught)}

      @jax.jit
      def losses(params, teacher, z, batch):
        ours = simclr.embeddings_loss_fn(
          params, z, batch, model=model, temperature=0.5, chunk=3
        )
        other, _ = moco_v3.embeddings_loss_fn(
          params,
          z,
          batch,
          model=model,
          state={"teacher": teacher},
          temperature=0.3,
          chunk=3,
        )
        return ours["loss"], other["loss"]

      ours, other = losses(params, teacher, z, batch)
  assert ours[1] == other[1] == 6
  expected = simclr_loss(params, features[real])
  assert float(ours[0] / 6) == pytest.approx(expected, rel=1e-5)
  expected = moco_loss(params, teacher, features[real], taught[real])
  assert float(other[0] / 6) == pytest.approx(expected, rel=1e-5)


def test_a_teacher_counts_as_a_forward_pass_alone():
  """Model FLOPs of a step are three times those of the loss."""
  model = contrastive_vit.Model(**MODEL)
  images = jnp.zeros((B, 8, 8, 3))
  batch = {"image": images, "_keys": jax.random.split(jax.random.key(0), B)}
  variables = model.init(jax.random.key(1), images)
  state = {"teacher": variables["params"]}

  def features(variables):
    return moco_v3.embed_fn(
      variables, batch, jax.random.key(2), model=model, state=state, train=True
    )[0]

  def of_teacher(variables):
    return model.apply(variables, jnp.zeros((2 * B, 8, 8, 3)))

  counted = flops.forward_flops(features, variables)
  executed = flops.executed_flops(features, variables)
  # The teacher is as large as the student; two thirds of it are left out.
  teacher = flops.forward_flops(of_teacher, variables)
  assert executed - counted == round(2 * teacher / 3)


def test_the_batch_norm_is_over_the_real_samples_of_all_devices():
  x = np.random.default_rng(0).normal(size=(B, D))
  mesh = objectives.make_mesh(replica=2, fsdp=4)
  placed = jax.device_put(
    (jnp.float32(x), jnp.float32(WEIGHT)), sharding.batch(mesh)
  )
  norm = heads.BatchNorm(affine=False)
  y = jax.jit(lambda x, w: norm.apply({}, x, w))(*placed)
  real = WEIGHT > 0
  np.testing.assert_allclose(y[real], batch_norm(x[real]), rtol=1e-4, atol=1e-5)
  assert np.isfinite(y).all()


# Runs.

TASKS = {
  "simclr": (MODEL | dict(predictor_layers=0), LOSS),
  "moco_v3": (MODEL, LOSS | dict(momentum=0.9)),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", [*TASKS])
def test_gradients_are_equal_on_any_mesh_in_any_microbatches(task):
  arrays = {"image": np.random.default_rng(0).normal(size=(16, 8, 8, 1))}
  model, loss = TASKS[task]

  def of(microbatches, **sizes):
    config = dict(
      total_steps=10,
      input=dict(data=dict(type="arrays", arrays=arrays), batch_size=16),
      microbatches=microbatches,
      model_name="contrastive_vit",
      model=model | dict(dtype="float64"),
      task=task,
      loss=loss,
    )
    return objectives.gradients(config, **sizes)

  expected, sums = of(1, fsdp=1)
  grads, other = of(2, replica=2, fsdp=4)
  largest = max(abs(x).max() for x in expected.values())
  assert largest > 1e-3
  for name, x in grads.items():
    np.testing.assert_allclose(
      x, expected[name], rtol=1e-5, atol=1e-5 * largest, err_msg=name
    )
  for name in ("loss", "accuracy", "effective_rank"):
    ours, theirs = jax.tree.leaves(other[name]), jax.tree.leaves(sums[name])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=name)


def config(tiny_config, task, **changes):
  model, loss = TASKS[task]
  changes = {
    "task": task,
    "model_name": "contrastive_vit",
    "model": dict(model),
    "loss": loss,
    "evals": {},
    "log_steps": 1,
    "keep_ckpts": 9,
  } | changes
  return tiny_config(changes)


@pytest.mark.slow
def test_a_run_of_moco_continues_bit_for_bit_with_frozen_patches(
  tiny_config, tmp_path
):
  frozen = [("embedding/.*", None), (".*", dict(decay_type="constant"))]
  one = config(
    tiny_config, "moco_v3", schedule=frozen, wd=0.1, save_at_start=True
  )
  main.train(one, str(tmp_path / "whole"))
  for stop in (2, None):
    main.train(one | {"stop_at_steps": stop}, str(tmp_path / "cut"))
  first, second = tiny.arrays(tmp_path / "whole"), tiny.arrays(tmp_path / "cut")
  tiny.assert_same(second, first)
  rows = tiny.rows(tmp_path / "whole")
  assert tiny.rows(tmp_path / "cut") == rows
  assert rows[6]["effective_rank"] > 1 and rows[6]["view_distance"] > 0
  assert 0 < rows[6]["image_distance"] < 2
  start = tiny.arrays(tmp_path / "whole", 0)
  for prefix in ("params", "tasks/teacher"):
    name = f"{prefix}/embedding/kernel"
    # The average of equal numbers differs from them by rounding.
    np.testing.assert_allclose(first[name], start[name], rtol=1e-6)
    name = f"{prefix}/projector/Dense_0/kernel"
    assert np.abs(first[name] - start[name]).max() > 1e-3
  np.testing.assert_array_equal(
    first["params/embedding/kernel"], start["params/embedding/kernel"]
  )


@pytest.mark.slow
@pytest.mark.parametrize("task", [*TASKS])
def test_a_collapse_made_on_purpose_ends_the_run(tiny_config, tmp_path, task):
  # A decay that leaves nothing of the kernels, so that all images look alike.
  one = config(
    tiny_config,
    task,
    total_steps=200,
    lr=0.1,
    wd=0.5,
    schedule=dict(decay_type="constant"),
  )
  named = "(features of all images are on one line|of all images are equal)"
  with pytest.raises(RuntimeError, match=rf"step \d+: the .*{named}"):
    main.train(one, str(tmp_path))


@pytest.mark.parametrize(
  "task, changes, message",
  [
    ("simclr", {"loss": dict(temperature=0)}, "config.loss.temperature: exp"),
    ("simclr", {"loss": dict(chunk=0)}, "config.loss.chunk: expected"),
    ("simclr", {"loss": dict(momentum=1)}, "config.loss.momentum: unknown"),
    ("moco_v3", {"model.predictor_layers": 0}, "predictor_layers=0: expected"),
    ("moco_v3", {"model.head_norm": "layer"}, "config.model.head_norm: unkno"),
    ("moco_v3", {"model.head_out": 0}, "config.model.head_out: expected"),
    ("moco_v3", {"loss": dict(momentun=1)}, "momentun: unknown.*'momentum'"),
  ],
)
def test_mistakes_have_their_line(
  tiny_config, tmp_path, task, changes, message
):
  with pytest.raises(ConfigError, match=message):
    main.train(config(tiny_config, task, **changes), str(tmp_path))


def test_ready_views_are_two():
  three = types.SimpleNamespace(shape=(4, 3, 8, 8, 1))
  with pytest.raises(ConfigError, match="expected 2 views .* 'views' with 3"):
    random_views.two({"views": three}, None, None)
