"""The layouts of parameters and optimizer state, on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError


def _shapes(**shapes):
  return {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}


def _specs(shapes, mesh, rules):
  shardings, notes = sharding.state_shardings(shapes, mesh, rules)
  return {n: s.spec for n, s in trees.flatten_with_names(shardings)}, notes


# Rules.


@pytest.mark.parametrize(
  "shape, spec",
  [
    ((16, 64), (None, "fsdp")),
    ((128, 64), ("fsdp",)),
    ((64, 64), (None, "fsdp")),  # A tie: the last dimension wins.
    ((12, 64, 64), (None, None, "fsdp")),
    ((999, 64), (None, "fsdp")),  # The largest dimension does not divide.
    ((4096,), ("fsdp",)),
    ((8, 8), ()),  # Smaller than min_size.
    ((), ()),
  ],
)
def test_fsdp_splits_the_largest_dimension_that_divides(shape, spec):
  mesh = sharding.make_mesh()
  specs, notes = _specs(_shapes(x=shape), mesh, [(".*", "fsdp")])
  assert specs == {"x": PartitionSpec(*spec)}
  assert notes == []


def test_fsdp_reports_arrays_that_it_replicates():
  specs, notes = _specs(
    {"a": _shapes(w=(99, 33), v=(3,))}, sharding.make_mesh(), [(".*", "fsdp")]
  )
  assert set(specs.values()) == {PartitionSpec()}
  assert notes == [
    "a/w: no dimension of (99, 33) divides by fsdp=8; it is replicated"
  ]


def test_fsdp_of_size_1_splits_nothing():
  mesh = sharding.make_mesh(replica=8, fsdp=1)
  specs, notes = _specs(_shapes(x=(99, 64)), mesh, [(".*", "fsdp")])
  assert specs == {"x": PartitionSpec()} and notes == []


def test_the_first_rule_that_matches_decides():
  shapes = {
    "params": _shapes(embedding=(64, 32), kernel=(64, 32), bias=(8,)),
    "step": jax.ShapeDtypeStruct((), jnp.int32),
  }
  rules = [
    ("params/embed", "shard_dim(0)"),  # Not a match of the whole name.
    ("params/embed.*", "replicated"),
    (".*/bias", "fsdp(min_size=1)"),
    (".*kernel", "shard_dim(-1)"),
    (".*kernel", "replicated"),
  ]
  specs, _ = _specs(shapes, sharding.make_mesh(), rules)
  assert specs == {
    "params/embedding": PartitionSpec(),
    "params/bias": PartitionSpec("fsdp"),
    "params/kernel": PartitionSpec(None, "fsdp"),
    "step": PartitionSpec(),  # Replicated, because no rule matches.
  }


def test_one_error_lists_all_arrays_that_a_rule_cannot_split():
  shapes = _shapes(good=(16, 3), bad=(12, 16), flat=())
  with pytest.raises(ConfigError) as e:
    sharding.state_shardings(
      shapes, sharding.make_mesh(), [(".*", "shard_dim(0)")], "config.sharding"
    )
  assert str(e.value) == (
    "config.sharding: bad: dimension 0 of shape (12, 16) is 12, which does not "
    "divide by fsdp=8; the nearest sizes that work: 6 and 12; flat: shape () "
    "has no dimension 0."
  )


@pytest.mark.parametrize(
  "rule, message",
  [
    (("(", "fsdp"), r"config\.sharding\[1\]: bad regex '\('"),
    ((".*",), r"config\.sharding\[1\]: expected \(regex, layout\)"),
    (".*", r"expected \(regex, layout\)"),
    ((".*", "fdsp"), r"unknown 'fdsp'\. Did you mean 'fsdp'"),
    ((".*", "fsdp(min=3)"), r"fsdp\.min: unknown key.*min_size"),
    ((".*", "fsdp('x')"), "dim: expected a whole number, got 'x'"),
    ((".*", "shard_dim"), r"shard_dim\.dim: missing"),
    ((".*", "shard_dim('x')"), "dim: expected a whole number, got 'x'"),
    ((".*", "shard_dim(0, 1)"), "too many positional arguments"),
    ((".*", "shard_dim(0, dim=1)"), "unknown key"),
    ((".*", "shard_dim(open('x'))"), "cannot read the layout"),
    ((".*", "fsdp("), r"cannot read the layout 'fsdp\('"),
    ((".*", 3), "cannot read the layout 3"),
  ],
)
def test_malformed_rules_are_errors(rule, message):
  rules = [("a", "fsdp"), rule]
  with pytest.raises(ConfigError, match=message):
    sharding.state_shardings(
      _shapes(x=(8, 8)), sharding.make_mesh(), rules, "config.sharding"
    )


@given(
  st.lists(st.integers(1, 48), max_size=3).map(tuple),
  st.sampled_from([1, 2, 4, 8]),
)
def test_every_shape_gets_a_sharding(shape, fsdp):
  mesh = sharding.make_mesh(replica=-1, fsdp=fsdp)
  rules = [(".*", "fsdp(min_size=1)")]
  shardings, notes = sharding.state_shardings(_shapes(x=shape), mesh, rules)
  local = shardings["x"].shard_shape(shape)
  divides = any(size % fsdp == 0 for size in shape)
  assert np.prod(local) * (fsdp if divides else 1) == np.prod(shape)
  assert bool(notes) == (fsdp > 1 and not divides)


# Bytes.


def _transformer(width=64, depth=4):
  block = {
    "norm": {"scale": (width,), "bias": (width,)},
    "mlp": {"up": (width, 4 * width), "down": (4 * width, width)},
    "attention": {"qkv": (width, 3, 4, width // 4), "out": (width, width)},
  }
  tree = {f"block_{i}": block for i in range(depth)}
  is_shape = lambda x: isinstance(x, tuple)
  return jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=is_shape
  )


def test_each_device_holds_its_share_of_the_state():
  params = _transformer()
  state = {
    "params": params,
    "opt": jax.eval_shape(optax.adam(1e-3).init, params),
    "step": jax.ShapeDtypeStruct((), jnp.int32),
  }
  total_bytes = trees.num_bytes(jax.tree.leaves(state))
  for replica, fsdp in [(1, 8), (2, 4), (8, 1)]:
    mesh = sharding.make_mesh(replica, fsdp)
    shardings, notes = sharding.state_shardings(state, mesh)
    assert notes == []
    device_bytes = sharding.bytes_per_device(state, shardings)
    assert total_bytes / fsdp <= device_bytes <= 1.05 * total_bytes / fsdp

  # bytes_per_device agrees with the memory of real arrays.
  mesh = sharding.make_mesh()
  shardings, _ = sharding.state_shardings(state, mesh)
  zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), state)
  placed = jax.device_put(zeros, shardings)
  for device in jax.devices():
    shard_bytes = sum(
      shard.data.nbytes
      for x in jax.tree.leaves(placed)
      for shard in x.addressable_shards
      if shard.device == device
    )
    assert shard_bytes == sharding.bytes_per_device(state, shardings)


@pytest.mark.parametrize("replica, fsdp", [(1, 8), (2, 4), (8, 1)])
def test_a_matrix_product_is_the_same_when_sharded(replica, fsdp):
  mesh = sharding.make_mesh(replica, fsdp)
  rng = np.random.default_rng(0)
  w = rng.normal(size=(64, 32)).astype(np.float32)
  x = rng.normal(size=(16, 64)).astype(np.float32)
  shardings, _ = sharding.state_shardings(_shapes(w=w.shape), mesh)
  step = jax.jit(
    lambda w, x: jnp.sum((x @ w) ** 2),
    in_shardings=(shardings["w"], sharding.batch(mesh)),
  )
  np.testing.assert_allclose(step(w, x), np.sum((x @ w) ** 2), rtol=1e-5)


def test_a_layout_of_one_shape_leaves_others_to_the_next_rules():
  layout = sharding.along(PartitionSpec(None, "fsdp"), (4, 8), ("a", "b"))
  rules = [("(.*/)?w", layout), (".*", "shard_dim(0)")]
  shapes = {"w": (4, 8), "opt": {"w": (8,)}}
  shapes = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )
  specs, _ = _specs(shapes, sharding.make_mesh(), rules)
  assert specs == {
    "opt/w": PartitionSpec("fsdp"),
    "w": PartitionSpec(None, "fsdp"),
  }
  shapes["w"] = jax.ShapeDtypeStruct((8,), jnp.float32)
  layout = sharding.along(PartitionSpec(None, "fsdp"), (8,), ("a", "b"))
  with pytest.raises(ConfigError, match=r"w: shape \(8,\) has fewer"):
    _specs(shapes, sharding.make_mesh(), [("w", layout)])


# Several axes.


@pytest.mark.parametrize(
  "layout, spec",
  [
    ("fsdp", ("fsdp", "tensor")),  # The free dimension, although it is smaller.
    ("fsdp(0)", ("fsdp", "tensor")),
    ("shard_dim(-1)", (None, ("tensor", "fsdp"))),
    ("tensor(0)", ("tensor",)),
    ("fsdp(1), tensor(0)", ("tensor", "fsdp")),
    ("fsdp, tensor(-2)", ("tensor", "fsdp")),
    ("tensor(-2), fsdp(min_size=64)", ("tensor", "fsdp")),
    ("fsdp(min_size=1000000)", (None, "tensor")),
    ("replicated", ()),
  ],
)
def test_a_layout_joins_the_axes_of_the_model(layout, spec):
  mesh = sharding.make_mesh(replica=2, fsdp=2, tensor=2)
  of_model = {"up/kernel": ((32, 64), {1: ("tensor",)})}
  rules = sharding.Rules([(".*", layout)], of_model)
  shapes = {
    "params": {"up": _shapes(kernel=(32, 64))},
    "opt": {"mu": {"up": _shapes(kernel=(32, 64))}},
    "ema": {"up": _shapes(kernel=(8, 8))},  # Another shape.
  }
  specs, notes = _specs(shapes, mesh, rules)
  want = PartitionSpec(*spec)
  assert specs["params/up/kernel"] == specs["opt/mu/up/kernel"] == want
  assert "tensor" not in str(specs["ema/up/kernel"]) or "tensor" in layout
  assert notes == []


@pytest.mark.parametrize(
  "layout, message",
  [
    (
      "fsdp(0), tensor(1)",
      r"is 6, which does not divide by tensor=4; .* 3",
    ),
    ("fsdp(0), tensor(0)", r"is 12, .* by fsdp=2 x tensor=4; .* 6 and 12"),
    ("fsdp(0), fsdp(1)", "names an axis twice"),
    ("replicated, fsdp", "or 'replicated' and an axis"),
    ("fsdp(0), tenser(1)", "unknown 'tenser'. Did you mean 'tensor'"),
    ("tensor", r"tensor\.dim: missing"),
  ],
)
def test_axes_that_cannot_be_placed_are_errors(layout, message):
  mesh = sharding.make_mesh(fsdp=2, tensor=4)
  with pytest.raises(ConfigError, match=message):
    _specs(_shapes(x=(12, 6)), mesh, [(".*", layout)])


def test_the_optimizer_can_be_split_over_replicas():
  mesh = sharding.make_mesh(replica=2, fsdp=2, tensor=2)
  of_model = {"up/kernel": ((32, 64), {1: ("tensor",)})}
  rules = sharding.Rules(of_model=of_model, split_opt=True)
  state = {
    "params": {"up": _shapes(kernel=(32, 64))},
    "opt": {
      "mu": {"up": _shapes(kernel=(32, 64), scale=(8,))},
      "nu": _shapes(odd=(62, 33), none=(63, 33)),
    },
  }
  specs, _ = _specs(state, mesh, rules)
  assert specs == {
    "params/up/kernel": PartitionSpec("fsdp", "tensor"),
    "opt/mu/up/kernel": PartitionSpec(("fsdp", "replica"), "tensor"),
    "opt/mu/up/scale": PartitionSpec(),
    "opt/nu/odd": PartitionSpec("fsdp"),
    "opt/nu/none": PartitionSpec(),
  }
