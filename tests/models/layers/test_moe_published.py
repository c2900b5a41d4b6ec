"""Experts of published families against transformers' own layers.

Outputs and gradients are of tests/golden/make_moe.py, in float32.
"""

import functools
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, rounding

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.losses import token_losses
from bigtrain.models.layers import mlp, moe

pytestmark = pytest.mark.golden

GOLDEN = pathlib.Path(__file__).parents[2] / "golden/hf_moe.npz"
E, F, J = 8, 6, 3
CLIP = mlp.Clip(limit=0.7, alpha=1.702, up_offset=1)
TOP = moe.Groups(4, 2, "top2")

# Options of the experts by case.
CASES = {
  "mixtral": dict(),
  "olmoe": dict(normalize=False),
  "granitemoe": dict(score="softmax_of_top"),
  "qwen2_moe": dict(normalize=False, shared_dim=4, shared_gate=True),
  "glm4_moe": dict(
    score="sigmoid",
    selection_bias=True,
    groups=TOP,
    scale=2.5,
    shared_experts=2,
  ),
  "deepseek_v2": dict(
    normalize=False,
    groups=TOP._replace(score="max"),
    scale=1.5,
    shared_experts=1,
  ),
  "gpt_oss": dict(score="softmax_of_top"),
}
MESHES = [
  pytest.param(None, dict(fsdp=2, sequence=2, tensor=2), id="gathered"),
  pytest.param("fsdp", dict(fsdp=2, sequence=2, tensor=2), id="fsdp"),
  pytest.param("tensor", dict(fsdp=2, tensor=4), id="tensor"),
]


class Layer(nn.Module):
  """What blocks do with experts; their MLPs are wider than an expert."""

  options: moe.Options
  clip: mlp.Clip | None
  use_bias: tuple[str, ...]

  @nn.compact
  def __call__(self, x, real):
    dense = mlp.Options(11, "swiglu", 1.0, 1.0, clip=self.clip)
    return moe.mlp_or_experts(
      self.options, dense, x, real, False, self.use_bias
    )


@functools.cache
def golden(name):
  """Returns (arrays, weights, state, gradients)."""
  with np.load(GOLDEN) as file:
    names = [n for n in file if n.startswith(f"{name}/")]
    flat = {n.removeprefix(f"{name}/"): file[n] for n in names}
  tree = trees.from_flat(flat)
  weights = tree.pop("weights", {})
  state = {
    group: {"selection_bias": arrays.pop("selection_bias")}
    for group, arrays in weights.items()
    if "selection_bias" in arrays
  }
  return tree, weights, state, tree.pop("grads", None)


def run(name, mesh, x=None, real=None, **options):
  """Returns (output, gradients of weights and of the input, statistics)."""
  fn, x, real = function_of(name, mesh, x, real, **options)
  weights = golden(name)[1]
  (grads, x_grad), (y, stats) = jax.device_get(fn((weights, x)))
  return y, grads, x_grad, stats


def function_of(name, mesh, x=None, real=None, **options):
  """Returns (function of (weights, x), x, which tokens count)."""
  tree, _, state, _ = golden(name)
  x = tree["x"] if x is None else x
  options = dict(top_k=J, mlp_dim=F) | CASES[name] | options
  biased = name == "gpt_oss"
  layer = Layer(
    moe.Options(E, **options),
    CLIP if biased else None,
    ("experts", "router") if biased else (),
  )

  @jax.jit
  def gradients(weights, x, real):
    def loss(weights, x):
      variables = {"params": weights, moe.STATE: state}
      y, stats = layer.apply(variables, x, real)
      return jnp.sum(jnp.sin(y) * real[..., None]), (y, stats)

    return jax.grad(loss, (0, 1), has_aux=True)(weights, x)

  real = np.ones(x.shape[:2], bool) if real is None else real

  def on_mesh(inputs):
    weights, x = inputs
    with jax.set_mesh(mesh):
      args = jax.device_put((x, real), sharding.batch(mesh))
      weights = jax.device_put(weights, sharding.replicated(mesh))
      return gradients(weights, *args)

  return on_mesh, x, real


def check(name, mesh, **options):
  tree, weights, _, want = golden(name)
  fn, x, _ = function_of(name, mesh, **options)

  def outputs(inputs):
    (grads, x_grad), (y, stats) = fn(inputs)
    assert stats["dropped"] == 0
    return {"y": y, "grads": grads, "x_grad": x_grad}

  expected = {"y": tree["y"], "grads": want, "x_grad": tree["x_grad"]}
  rounding.assert_close(outputs, (weights, x), expected)


def one_device():
  return sharding.make_mesh(devices=jax.devices()[:1])


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name):
  check(name, one_device())


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_a_capacity_that_drops_nothing(name):
  check(name, one_device(), capacity_factor=float(E))


@pytest.mark.parametrize("axis, sizes", MESHES)
@pytest.mark.parametrize("factor", cases.quick([None, float(E)], float(E)))
def test_biases_and_clipped_gates_on_any_mesh(axis, sizes, factor):
  mesh = sharding.make_mesh(**sizes)
  check("gpt_oss", mesh, axis=axis, capacity_factor=factor)


@pytest.mark.slow
@pytest.mark.parametrize("axis, sizes", MESHES)
@pytest.mark.parametrize("name", [n for n in CASES if n != "gpt_oss"])
def test_families_on_any_mesh(name, axis, sizes):
  check(name, sharding.make_mesh(**sizes), axis=axis)


def test_other_groups_do_not_beat_negative_scores():
  tree, weights, state, _ = golden("glm4_moe")
  logits = tree["x"] @ weights["moe"]["router"]["kernel"]
  bias = state["moe"]["selection_bias"]
  scores = 1 / (1 + np.exp(-logits)) + bias
  of_groups = np.sort(scores.reshape(2, 12, 4, 2).sum(-1))[..., -2:]
  options = moe.Options(E, top_k=J, **CASES["glm4_moe"])
  routing, _ = moe.route(
    jnp.asarray(logits), np.ones((2, 12), bool), options, bias
  )
  chosen = np.asarray(routing.expert_BLJ)
  sums = scores.reshape(2, 12, 4, 2).sum(-1)
  groups = np.take_along_axis(sums, chosen // 2, -1)
  assert (groups >= of_groups[..., :1]).all()
  # These would lose against zeros in the place of other groups' scores.
  assert (np.take_along_axis(scores, chosen, -1) < 0).any()


def test_the_auxiliary_loss_over_all_layers():
  tree, *_ = golden("auxiliary")
  options = moe.Options(E, top_k=J)
  of_layers = [
    moe.route(x, tree["real"] > 0, options)[1] for x in tree["logits"]
  ]
  stats = jax.tree.map(lambda *x: sum(x) / len(x), *of_layers)
  stats["by_layer"] = {str(i): layer for i, layer in enumerate(of_layers)}
  losses = token_losses.ModelLosses(
    {"loss": (0.0, 1.0)}, *[jnp.zeros(())] * 2, stats, {}
  )
  loss = lambda over: losses.with_experts(1.0, 0.0, over)["loss"][0]
  # transformers adds up the loads of a token's choices.
  assert J * loss("all") == pytest.approx(tree["loss"], rel=1e-5)
  assert J * loss("layers") > 1.001 * tree["loss"]
  with pytest.raises(ConfigError, match="Did you mean 'layers'"):
    loss("layer")


@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss"])
def test_padding_has_no_part_in_statistics(name):
  x = golden(name)[0]["x"]
  real = np.arange(12) < np.asarray([[7], [12]])
  changed = np.where(real[..., None], x, 1e3)
  _, want, x_grad, stats = run(name, one_device(), real=real)
  _, got, _, same = run(name, one_device(), changed, real)
  jax.tree.map(np.testing.assert_array_equal, stats, same)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, want
  )
  assert not x_grad[~real].any()
