"""Muon by matrix: equal to optax's, for layers, experts, heads and meshes.

A float64 reference in numpy makes each matrix orthogonal alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.config import lengths, settings
from bigtrain.models import decoder
from bigtrain.optim import chain, muon, views

MODEL = dict(variant="deepseek_mu", vocab_size=31, width=24, mtp=1, depth=4)


def shapes_of(model):
  tokens = jnp.zeros((1, 4), int)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
  return shapes["params"]


def gradients(shapes, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32)
  return jax.tree.map(draw, shapes)


def make(model, shapes, **options):
  config = dict(
    optimizer=dict(name="muon", **options),
    lr=1.0,
    schedule=dict(decay_type="constant"),
  )
  return chain.make(
    settings.Config(config),
    shapes,
    lengths.Units(10, 8, None, None),
    views.of_model(decoder, model, shapes),
  )


def updates_of(model, shapes, grads, **options):
  """{name: update} of the first step, and the first state."""
  optimizer = make(model, shapes, **options)
  params = jax.tree.map(jnp.zeros_like, grads)
  state = optimizer.tx.init(params)
  updates, _ = optimizer.tx.update(grads, state, params, step=0)
  return dict(trees.flatten_with_names(updates)), state


def orthogonal(x):
  """Five iterations of a matrix in float64."""
  x = np.asarray(x, np.float64)
  transposed = x.shape[0] > x.shape[1]
  x = x.T if transposed else x
  x = x / (np.linalg.norm(x) + 1e-8)
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
  return x.T if transposed else x


def expected(x):
  """The first update of one matrix (inputs, outputs)."""
  return -0.2 * np.sqrt(max(x.shape)) * orthogonal(x)


def close(got, want):
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_each_layer_expert_and_part_of_latent_attention_alone():
  model = decoder.Model(**MODEL, scan=True)
  shapes = shapes_of(model)
  grads = gradients(shapes)
  updates, state = updates_of(model, shapes, grads, consistent_rms=0.2)
  flat = {n: np.asarray(x) for n, x in trees.flatten_with_names(grads)}

  def matrix(name, inputs, *index):
    """An array's matrix, whose first `inputs` dimensions are its inputs."""
    shape = flat[name][index].shape
    rows = int(np.prod(shape[:inputs]))
    close(
      np.asarray(updates[name])[index].reshape(rows, -1),
      expected(flat[name][index].reshape(rows, -1)),
    )

  assert flat["blocks/moe/up/kernel"].shape == (3, 8, 24, 16)
  for layer in range(3):
    for expert in range(8):
      matrix("blocks/moe/up/kernel", 1, layer, expert)
      matrix("blocks/moe/down/kernel", 1, layer, expert)
    for name in ("query_down", "query_up", "kv_down", "kv_up"):
      matrix(f"blocks/attention/{name}/kernel", 1, layer)
    matrix("blocks/attention/out/kernel", 2, layer)
  matrix("blocks_0/attention/kv_up/kernel", 1)  # Before the loop.
  matrix("mtp/blocks_0/projection/kernel", 1)

  # Adam updates the rest.
  names = {n.rpartition("/mu/")[2] for n in trees.names(state) if "/mu/" in n}
  assert names == set(flat)
  of_adam = {
    n.rpartition("/mu/")[2] for n in trees.names(state) if "/adam/" in n
  }
  assert "token_embedding" in of_adam and "head/kernel" in of_adam
  for name in of_adam - {"count"}:
    if "kernel" in name and "/nu/" not in name:
      assert "router" in name or "head" in name, name


def test_each_head_alone():
  options = dict(variant="llama_mu", vocab_size=31, num_kv_heads=2)
  model = decoder.Model(**options, num_heads=4, head_dim=8, scan=True)
  shapes = shapes_of(model)
  grads = gradients(shapes)
  updates, _ = updates_of(
    model, shapes, grads, consistent_rms=0.2, view="heads"
  )
  flat = {n: np.asarray(x) for n, x in trees.flatten_with_names(grads)}
  for name, heads in (("query", 4), ("key", 2), ("value", 2)):
    name = f"blocks/attention/{name}/kernel"
    for h in range(heads):
      x = flat[name][1, :, h]
      close(np.asarray(updates[name])[1, :, h], expected(x))
  name = "blocks/attention/out/kernel"
  close(np.asarray(updates[name])[0, 3], expected(flat[name][0, 3]))
  name = "blocks/mlp/up/kernel"
  close(np.asarray(updates[name])[0], expected(flat[name][0]))


OPTIONS = {
  "default": {},
  "rms": dict(consistent_rms=0.2, nesterov=False),
  "dion": dict(ns_coeffs="dion", eps=1e-6),
  "aol": dict(preconditioning="aol", ns_steps=4),
  "schatten": dict(preconditioning="schatten", mu_dtype=jnp.bfloat16),
  "adam": dict(adam_b1=0.8, adam_b2=0.9, beta=0.9),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_three_steps_equal_those_of_optax(name):
  dims = optax.contrib.MuonDimensionNumbers
  params = {
    "wide": jnp.zeros((3, 8, 12)),
    "tall": jnp.zeros((3, 12, 8)),
    "heads": jnp.zeros((12, 2, 4)),
    "vector": jnp.zeros(5),
  }
  matrices = {
    "wide": dims(1, 2),
    "tall": dims(1, 2),
    "heads": dims((0,), (1, 2)),
  }
  by_name = lambda tree: trees.map_with_names(
    lambda name, _: matrices.get(name), tree
  )
  key = "muon_weight_dimension_numbers"
  ours = muon.muon(0.1, **OPTIONS[name], **{key: matrices})
  theirs = optax.contrib.muon(0.1, **OPTIONS[name], **{key: by_name})
  state, their_state = ours.init(params), theirs.init(params)
  for seed in range(3):
    grads = gradients(params, seed)
    updates, state = ours.update(grads, state, params)
    want, their_state = theirs.update(grads, their_state, params)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
      updates,
      want,
    )
  # A checkpoint of one continues with the other.
  named = trees.flatten_with_names(state)
  their_named = trees.flatten_with_names(their_state)
  assert [n for n, _ in named] == [n for n, _ in their_named]
  for (_, x), (_, y) in zip(named, their_named):
    np.testing.assert_allclose(
      np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-4
    )


def test_adaptive_scales_each_matrix():
  options = dict(adaptive=True, consistent_rms=0.2)
  dims = {"w": optax.contrib.MuonDimensionNumbers(1, 2)}
  params = {"w": jnp.zeros((3, 4, 6))}
  grads = gradients(params)
  tx = muon.muon(1.0, muon_weight_dimension_numbers=dims, **options)
  updates, _ = tx.update(grads, tx.init(params), params)
  for x, u in zip(np.asarray(grads["w"]), np.asarray(updates["w"])):
    # Nesterov's momentum of a first step is its gradient, up to a factor.
    direction = -expected(x) / (0.2 * np.sqrt(6))
    scale = np.vdot(u, -direction) / np.vdot(direction, direction)
    close(u, -scale * direction)
    ratio = scale / (0.2 * np.sqrt(6)) / np.vdot(x, direction)
    assert ratio == pytest.approx(0.95 * (0.05 / 0.0975) + 1, rel=1e-3)


def mesh_of(**sizes):
  return sharding.make_mesh(**sizes, devices=jax.devices()[:8])


@pytest.mark.parametrize(
  "sizes",
  [
    dict(fsdp=8),
    pytest.param(dict(replica=2, fsdp=2, tensor=2), marks=pytest.mark.slow),
  ],
)
def test_devices_compute_whole_matrices(sizes, monkeypatch):
  monkeypatch.setattr(muon, "_MAX_ELEMENTS", 600)  # Several rounds.
  dims = optax.contrib.MuonDimensionNumbers
  shapes = {
    "up": ((5, 16, 32), dims(1, 2), PartitionSpec(None, None, "fsdp")),
    "down": ((5, 32, 16), dims(1, 2), PartitionSpec(None, "fsdp")),
    "experts": ((3, 8, 16, 16), dims(2, 3), PartitionSpec(None, None, "fsdp")),
    "query": ((5, 16, 8, 2), dims(1, (2, 3)), PartitionSpec(None, "fsdp")),
  }
  matrices = {name: dim for name, (_, dim, _) in shapes.items()}
  grads = gradients({n: jnp.zeros(shape) for n, (shape, *_) in shapes.items()})
  tx = muon.muon(1.0, muon_weight_dimension_numbers=matrices)

  def update(grads):
    return tx.update(grads, tx.init(grads), grads)[0]

  want = jax.jit(update)(grads)
  mesh = mesh_of(**sizes)
  with jax.set_mesh(mesh):
    places = {n: NamedSharding(mesh, spec) for n, (*_, spec) in shapes.items()}
    compiled = (
      jax.jit(update, in_shardings=(places,), out_shardings=places)
      .lower(grads)
      .compile()
    )
    got = compiled(jax.device_put(grads, places))
  jax.tree.map(close, got, want)
  # Matrices travel, but nothing is summed over the devices.
  text = compiled.as_text()
  assert ("all-to-all" in text) == (sizes == dict(fsdp=8))
  assert "all-reduce" not in text and "reduce-scatter" not in text


@pytest.mark.parametrize(
  ("number", "sizes", "ways"),
  [
    (96, dict(replica=2, fsdp=4), 8),
    (4, dict(replica=2, fsdp=4), 4),
    (3, dict(replica=4, fsdp=2), 4),
    (1, dict(fsdp=8), 1),
    (5, dict(replica=2, fsdp=4), 8),
  ],
)
def test_the_fewest_matrices_for_the_busiest_device(number, sizes, ways):
  with jax.set_mesh(mesh_of(**sizes)):
    assert muon._split(number)[0] == ways
