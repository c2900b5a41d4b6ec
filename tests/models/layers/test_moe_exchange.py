"""Whole experts on the devices of an axis, against one device."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder
from bigtrain.models.layers import layer_dims, mlp, moe
from bigtrain.tools.plan import collectives, hlo

B, L, D, F, E = 8, 8, 16, 24, 8
X = np.random.default_rng(0).normal(size=(B, L, D)).astype(np.float32)
REAL = np.random.default_rng(1).random((B, L)) < 0.8


def layer(**options):
  options = dict(top_k=2, router_init_std=1.0) | options
  return moe.Moe(
    moe.Options(E, **options),
    mlp.Options(F, "swiglu", init_std=0.25, out_init_std=0.2),
  )


@functools.cache
def params():
  init = jax.jit(lambda key: layer().init(key, jnp.asarray(X), None, False))
  return jax.device_get(init(jax.random.key(0)))


def program(mesh, train=False, **options):
  """Returns (the jitted gradient, its arguments on the mesh)."""
  experts = layer(**options)
  named = trees.flatten_with_names(params()["params"])
  shapes = {f"moe/{name}": x.shape for name, x in named}
  table = layer_dims.with_experts(layer_dims.LAYERS, experts.options)
  rules = sharding.Rules(
    [(".*", "fsdp(min_size=1)")], sharding.place(table, shapes, mesh.shape)
  )
  state = {"moe": params()["params"]}
  places, _ = sharding.state_shardings(state, mesh, rules)

  def fn(state, x, real):
    def loss(state, x):
      rngs = {"dropout": jax.random.key(1)}
      y, stats = experts.apply(
        {"params": state["moe"]}, x, real, train, rngs=rngs
      )
      total = jnp.sum(jnp.sin(y) * real[..., None])
      return total + stats["load_balance"], (y * real[..., None], stats)

    return jax.grad(loss, (0, 1), has_aux=True)(state, x)

  batch = sharding.batch(mesh)
  out = (places, batch), (batch, sharding.replicated(mesh))
  args = jax.device_put(state, places), *jax.device_put((X, REAL), batch)
  return jax.jit(fn, out_shardings=out), args


@functools.cache
def one_device(options):
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  with jax.set_mesh(mesh):
    fn, args = program(mesh, **dict(options))
    return jax.device_get(fn(*args))


def check(sizes, **options):
  mesh = sharding.make_mesh(**sizes)
  with jax.set_mesh(mesh):
    fn, args = program(mesh, **options)
    got = jax.device_get(fn(*args))
  options.pop("axis")
  want = one_device(tuple(options.items()))
  named = zip(trees.flatten_with_names(want), jax.tree.leaves(got))
  for (name, want_x), x in named:
    size = np.abs(want_x).max(initial=1e-3)
    np.testing.assert_allclose(x, want_x, 0, 1e-5 * size, err_msg=name)


CASES = [
  ("fsdp", dict(replica=2, fsdp=4)),
  ("fsdp", dict(fsdp=2, sequence=2, tensor=2)),
  ("replica", dict(replica=4, fsdp=2)),
  ("replica", dict(replica=2, fsdp=1, sequence=4)),
  ("sequence", dict(fsdp=2, sequence=4)),
  ("sequence", dict(fsdp=2, sequence=2, tensor=2)),
  ("tensor", dict(fsdp=2, tensor=4)),
  ("tensor", dict(replica=2, fsdp=1, sequence=2, tensor=2)),
]
FAST = [CASES[6]]


@pytest.mark.parametrize("factor", [None, 0.7])
@pytest.mark.parametrize(
  "axis, sizes",
  [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
    for case in CASES
  ],
)
def test_gradients_and_drops_equal_one_device(axis, sizes, factor):
  check(sizes, axis=axis, capacity_factor=factor)


@pytest.mark.parametrize(
  "axis, sizes",
  [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
    for case in [*CASES, (None, dict(fsdp=2, sequence=2, tensor=2))]
  ],
)
@pytest.mark.parametrize(
  "options",
  [
    dict(routing="expert_choice"),
    dict(serve="priority", capacity_factor=0.7),
  ],
)
def test_other_routings_equal_one_device(axis, sizes, options):
  check(sizes, axis=axis, **options)


@pytest.mark.slow
def test_dropout_of_experts_that_choose_equals_one_device():
  sizes = dict(replica=2, fsdp=2, sequence=2)
  options = dict(routing="expert_choice", dropout=0.5, train=True)
  check(sizes, axis="fsdp", **options)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [None, 0.7])
@pytest.mark.parametrize("axis", ["fsdp", "sequence"])
def test_dropout_equals_one_device(axis, factor):
  sizes = dict(replica=2, fsdp=2, sequence=2)
  check(sizes, axis=axis, capacity_factor=factor, dropout=0.5, train=True)


@pytest.mark.parametrize("factor", [None, 1.0])
def test_tokens_travel_once_each_way_and_weights_stay(factor):
  """docs/meshes.md, "Experts on an axis"."""
  n, ways = 4, dict(replica=2, fsdp=4)
  mesh = sharding.make_mesh(**ways)
  with jax.set_mesh(mesh):
    fn, args = program(mesh, axis="fsdp", capacity_factor=factor)
    text = fn.lower(*args).compile().as_text()
  sent = collections.Counter()
  runs = collections.Counter()
  for one in collectives.sent(hlo.Module(text))[0]:
    sent[one.kind] += one.sent_bytes
    runs[one.kind] += one.runs
  # Forward there and back, and the same for the gradients.
  assert runs["all-to-all"] == 4
  tokens = B * L / mesh.size
  # With a factor of 1, as many slots as choices; without, the safe bound.
  rows = 2 * tokens if factor else n * min(2, E // n) * tokens
  expected = 4 * 4 * rows * D * (n - 1) / n
  assert sent["all-to-all"] == pytest.approx(expected, rel=0.05)
  # The router's kernel, its gradient, and the rows for each expert.
  small = 4 * D * E + 4 * n * E
  assert sent["all-gather"] <= small and sent["reduce-scatter"] <= small
  # The gradients of the experts are summed over their replicas alone.
  own = 4 * 3 * D * F * E // n
  assert own <= sent["all-reduce"] < 1.2 * own + 3 * small


def test_experts_that_do_not_divide_are_an_error():
  options = moe.Options(6, axis="fsdp")
  shapes = {"blocks/moe/up/kernel": (2, 6, D, F)}
  table = layer_dims.with_experts(layer_dims.LAYERS, options)
  with pytest.raises(ConfigError) as e:
    sharding.place(table, shapes, {"replica": 2, "fsdp": 4})
  assert str(e.value) == (
    "config.mesh.fsdp=4 does not divide blocks/moe/up/kernel (dimension 1 of "
    f"(2, 6, {D}, {F}) is 6); the nearest sizes that work for all: 2 and 3."
  )


@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_state_and_moments_follow_the_experts(axis):
  model = decoder.Model(
    variant="mixtral_mu",
    vocab_size=64,
    moe=dict(num_experts=8, axis=axis),
    scan=True,
  )
  tokens = jnp.zeros((1, 2), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  named = trees.flatten_with_names(params)
  mesh = sharding.make_mesh(fsdp=4, tensor=2)
  rules = sharding.Rules(
    of_model=sharding.place(
      decoder.param_dims(model),
      {name: tuple(x.shape) for name, x in named},
      mesh.shape,
    )
  )
  state = dict(params=params, opt=dict(mu=params))
  places, _ = sharding.state_shardings(state, mesh, rules)
  specs = {n: x.spec for n, x in trees.flatten_with_names(places)}
  for part in ("params", "opt/mu"):
    spec = specs[f"{part}/blocks/moe/up/kernel"]
    assert spec[1] == axis
    rest = {"fsdp": (None, None, "tensor"), "tensor": (None, "fsdp")}
    assert (spec[0], *spec[2:]) == rest[axis]
