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
from bigtrain.models.layers import layer_dims, mlp, moe, moe_exchange
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


# The router's weights of the first feature, which is 2 in `skewed`: how much
# each expert is preferred. A device of four has two experts.
SKEWS = {
  "even": np.zeros(E),
  "two": np.linspace(2, -2, E),
  "all": np.where(np.arange(E) < 2, 20, 0),
}


def skewed(skew):
  """(parameters, inputs) with which a router prefers some experts."""
  x = X.copy()
  x[..., 0] = 2
  kernel = params()["params"]["router"]["kernel"].copy()
  kernel[0] = SKEWS[skew]
  return params()["params"] | {"router": {"kernel": kernel}}, x


def program(mesh, train=False, skew=None, scan=False, **options):
  """Returns (the jitted gradient, its arguments on the mesh).

  Args:
    scan: whether the layer runs twice, in a loop with remat.
  """
  experts = layer(**options)
  named = trees.flatten_with_names(params()["params"])
  shapes = {f"moe/{name}": x.shape for name, x in named}
  table = layer_dims.with_experts(layer_dims.LAYERS, experts.options)
  rules = sharding.Rules(
    [(".*", "fsdp(min_size=1)")], sharding.place(table, shapes, mesh.shape)
  )
  values, inputs = skewed(skew) if skew else (params()["params"], X)
  state = {"moe": values}
  places, _ = sharding.state_shardings(state, mesh, rules)

  def fn(state, x, real):
    def apply(state, x):
      rngs = {"dropout": jax.random.key(1)}
      return experts.apply({"params": state["moe"]}, x, real, train, rngs=rngs)

    def loss(state, x):
      if scan:

        @jax.checkpoint
        def one(x, _):
          y, stats = apply(state, x)
          return jnp.tanh(y), stats

        y, stats = jax.lax.scan(one, x, length=2)
        stats = jax.tree.map(lambda x: x[0], stats)
      else:
        y, stats = apply(state, x)
      total = jnp.sum(jnp.sin(y) * real[..., None])
      return total + stats["load_balance"], (y * real[..., None], stats)

    return jax.grad(loss, (0, 1), has_aux=True)(state, x)

  batch = sharding.batch(mesh)
  out = (places, batch), (batch, sharding.replicated(mesh))
  args = jax.device_put(state, places), *jax.device_put((inputs, REAL), batch)
  return jax.jit(fn, out_shardings=out), args


@functools.cache
def one_device(options):
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  with jax.set_mesh(mesh):
    fn, args = program(mesh, **dict(options))
    return jax.device_get(fn(*args))


def check(sizes, **options):
  """Compares a mesh with one device; returns the number of rounds, if any."""
  mesh = sharding.make_mesh(**sizes)
  with jax.set_mesh(mesh):
    fn, args = program(mesh, **options)
    got = jax.device_get(fn(*args))
  _, (_, stats) = got
  rounds = stats.pop("rounds", None)
  options.pop("axis")
  options.pop("buffer_factor", None)
  want = one_device(tuple(options.items()))
  named = zip(trees.flatten_with_names(want), jax.tree.leaves(got))
  for (name, want_x), x in named:
    size = np.abs(want_x).max(initial=1e-3)
    np.testing.assert_allclose(x, want_x, 0, 1e-5 * size, err_msg=name)
  return rounds


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


@pytest.mark.parametrize(
  "skew, factor, rounds",
  [("even", 1.0, 1), ("two", 0.5, 2), ("two", 4.0, 1), ("all", 0.1, 3)],
)
def test_full_buffers_take_further_rounds(skew, factor, rounds):
  # A device has 16 choices, at most 64 rows of others, and blocks of 8 rows.
  sizes = dict(replica=2, fsdp=4)
  options = dict(axis="fsdp", buffer_factor=factor, skew=skew)
  assert check(sizes, **options) == rounds


def documented_exchange(x, out, begin, size, to, received, *, axis_name):
  """jax.lax.ragged_all_to_all, as its documentation describes it."""
  n, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  x, begin, size, to = jax.lax.all_gather((x, begin, size, to), axis_name)
  own = len(received) // n
  rows = jnp.arange(len(out))
  for i in range(len(received)):
    sender, slot = i // own, me * own + i % own
    offset = rows - to[sender, slot]
    inside = (offset >= 0) & (offset < received[i])
    inside &= received[i] == size[sender, slot]
    row = jnp.take(x[sender], begin[sender, slot] + offset, axis=0, mode="clip")
    out = jnp.where(inside[:, None], row, out)
  return out


def test_arguments_of_the_ragged_exchange(monkeypatch):
  one_device((("skew", "two"),))
  monkeypatch.setattr(moe_exchange, "_RAGGED", ("cpu",))
  monkeypatch.setattr(jax.lax, "ragged_all_to_all", documented_exchange)
  options = dict(axis="fsdp", buffer_factor=0.5, skew="two")
  assert check(dict(replica=2, fsdp=4), **options) == 2


@pytest.mark.slow
@pytest.mark.parametrize("skew", ["two", "all"])
def test_further_rounds_with_dropout_in_a_loop_with_remat(skew):
  sizes = dict(replica=1, fsdp=4, tensor=2)
  options = dict(axis="fsdp", buffer_factor=0.01, skew=skew)
  rounds = check(sizes, **options, dropout=0.5, train=True, scan=True)
  assert rounds > 1


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
