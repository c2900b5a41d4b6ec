"""The encoder: scan, rematerialisation, dropout, stochastic depth, dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, random_variables, rounding

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import encoder as encoder_lib

B, L, D, H, DEPTH = 4, 6, 16, 2, 2


def key(seed):
  # Random numbers of this kind compile far faster than threefry's.
  return jax.random.key(seed, impl="unsafe_rbg")


def encoder(**kw):
  of_blocks = {n: kw.pop(n) for n in encoder_lib.Options._fields if n in kw}
  options = encoder_lib.Options(**{"num_heads": H, **of_blocks})
  return encoder_lib.Encoder(options, **{"depth": DEPTH, **kw})


@pytest.fixture(scope="module")
def x_BLD():
  return jax.random.normal(key(7), (B, L, D))


def init(module, *args):
  variables = random_variables.of(module, *args)
  return jax.tree.map(jnp.asarray, variables["params"])


def stack(params):
  blocks = [params.pop(f"encoderblock_{i}") for i in range(DEPTH)]
  params["encoderblock"] = jax.tree.map(lambda *p: jnp.stack(p), *blocks)
  return params


def value_and_grad_fn(module, x, train=False):
  def loss(params):
    rngs = {"dropout": key(1)}
    y = module.apply({"params": params}, x, train=train, rngs=rngs)
    return jnp.sum(jnp.sin(3 * y))

  return jax.value_and_grad(loss)


def value_and_grad(module, params, x, train=False):
  return jax.jit(value_and_grad_fn(module, x, train))(params)


def assert_close(a, b, rtol=1e-5, atol=1e-5):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), a, b
  )


def test_scanned_and_unrolled_blocks_start_from_the_same_parameters(x_BLD):
  unrolled = jax.jit(encoder().init)(key(3), x_BLD)["params"]
  # Kernels of different blocks are different draws.
  kernels = [
    unrolled[f"encoderblock_{i}"]["MlpBlock_0"]["Dense_0"]["kernel"]
    for i in range(DEPTH)
  ]
  assert np.abs(kernels[0] - kernels[1]).max() > 0.1
  bound = (6 / (D + 4 * D)) ** 0.5  # Xavier, uniform.
  assert 0.95 * bound < np.abs(kernels).max() < bound
  scanned = jax.jit(encoder(scan=True).init)(key(3), x_BLD)["params"]
  jax.tree.map(np.testing.assert_array_equal, stack(unrolled), scanned)


def test_scanned_and_unrolled_blocks_compute_the_same(x_BLD):
  params = init(encoder(), x_BLD)
  value, grads = value_and_grad(encoder(), params, x_BLD)
  scanned = jax.jit(value_and_grad_fn(encoder(scan=True), x_BLD))
  rounding.assert_close(scanned, stack(params), (value, stack(grads)))


@pytest.mark.parametrize(
  ("scan", "policies"),
  [
    (False, ("none", "nothing_saveable")),
    pytest.param(
      True, ("none", "dots_with_no_batch_dims_saveable"), marks=pytest.mark.slow
    ),
  ],
)
def test_remat_does_not_change_values_or_gradients(x_BLD, scan, policies):
  kw = dict(scan=scan, depth=2 if scan else 1, dropout=0.2, drop_path=0.3)
  results = []
  for policy in policies:
    module = encoder(remat_policy=policy, **kw)
    params = init(module, x_BLD)
    results.append(value_and_grad(module, params, x_BLD, train=True))
  assert_close(*results, atol=1e-4)


@pytest.mark.parametrize(
  ("policy", "repeated_products"),
  [("none", 0), ("nothing_saveable", 8), ("dots_saveable", 0)],
)
def test_products_that_the_backward_pass_of_a_scan_repeats(
  x_BLD, policy, repeated_products
):
  module = encoder(scan=True, remat_policy=policy)
  params = init(module, x_BLD)
  grad = jax.make_jaxpr(value_and_grad_fn(module, x_BLD))(params)

  def count(jaxpr):
    total = 0
    for eqn in jaxpr.eqns:
      total += eqn.primitive.name == "dot_general"
      for param in jax.tree.leaves(
        eqn.params, is_leaf=lambda p: hasattr(p, "eqns")
      ):
        inner = getattr(param, "jaxpr", param)
        total += count(inner) if hasattr(inner, "eqns") else 0
    return total

  # A block has 4 projections, 2 products in attention and 2 in the MLP, and
  # the gradient of each is two more. The last product need not be repeated,
  # because its result is unused.
  expected = 24 + repeated_products
  assert count(grad.jaxpr) in (expected, expected - 1)


@pytest.mark.parametrize("scan", [False, True])
def test_every_kth_layer_may_have_a_policy(x_BLD, scan):
  """Modalities' selective checkpointing of layers: k, 2k, ... keep less."""

  def kept_values(policy):
    module = encoder(scan=scan, depth=6, remat_policy=policy)
    params = init(module, x_BLD)
    loss = lambda params: jnp.sum(module.apply({"params": params}, x_BLD))
    pull_back = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
    return sum(x.size for x in jax.tree.leaves(pull_back))

  names = ("none", *[f"nothing_saveable(every={k})" for k in (3, 1)])
  most, got, least = map(kept_values, names)
  assert most - got == pytest.approx((most - least) * 2 / 6, rel=0.15)


def test_every_kth_layer_of_a_scan_has_the_same_gradients(x_BLD):
  kw = dict(scan=True, depth=4, drop_path=0.5)
  params = init(encoder(**kw), x_BLD)
  policies = ("none", "nothing_saveable(every=2)")
  modules = [encoder(remat_policy=policy, **kw) for policy in policies]
  assert_close(*[value_and_grad(m, params, x_BLD) for m in modules], atol=1e-4)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(remat_policy="dots_savable"), "'dots_saveable'"),
    (dict(remat_policy="dots_saveable(every=0)"), "every: expected.*least 1"),
    (
      dict(remat_policy="dots_saveable(every=4)", depth=6, scan=True),
      "every=4: expected a divisor of the 6 layers",
    ),
  ],
)
def test_a_wrong_remat_policy_is_an_error(x_BLD, changes, message):
  with pytest.raises(ConfigError, match=message):
    jax.eval_shape(encoder(**changes).init, key(0), x_BLD)


def test_dropout_depends_only_on_its_key(x_BLD):
  module = encoder(dropout=0.5)
  params = {"params": init(module, x_BLD)}

  @jax.jit
  def run(seed):
    return module.apply(params, x_BLD, train=True, rngs={"dropout": key(seed)})

  np.testing.assert_array_equal(run(1), run(1))
  assert np.abs(run(1) - run(2)).max() > 0.1
  evaluated, no_dropout = (
    jax.jit(x.apply)(params, x_BLD) for x in (module, encoder())
  )
  np.testing.assert_array_equal(evaluated, no_dropout)


def test_drop_path_keeps_the_mean():
  x = jnp.full((4000, 2, 3), 2.0)
  y = np.asarray(encoder_lib.drop_path(x, 0.2, key(0)))
  kept = y[:, 0, 0] != 0
  assert 0.78 < kept.mean() < 0.82
  np.testing.assert_allclose(y[kept], 2.5, rtol=1e-6)
  np.testing.assert_array_equal(y[~kept], 0)  # The whole example.
  y = encoder_lib.drop_path(x.astype(jnp.bfloat16), 0.2, key(0))
  assert y.dtype == jnp.bfloat16


@pytest.mark.parametrize("scan", cases.quick([False, True], True))
def test_the_drop_path_rate_grows_from_zero_in_the_first_block(scan):
  """Two blocks without MLPs: only the second block's attention is dropped."""
  module = encoder(depth=2, scan=scan, drop_path=0.5)
  x_BLD = jax.random.normal(key(5), (64, L, D))

  apply = jax.jit(module.apply, static_argnames="train")

  def no_mlp(name, p):
    return p * (0 if "Dense_1" in name else 1)

  params = trees.map_with_names(no_mlp, init(module, x_BLD))

  def with_second_attention_scaled_by(scale):
    def scale_out(name, p):
      factor = jnp.array([1.0, scale]).reshape(2, *[1] * (p.ndim - 1))
      if "/out/" in name and scan:
        return p * factor
      return p * scale if "encoderblock_1/" in name and "/out/" in name else p

    changed = trees.map_with_names(scale_out, params)
    return apply({"params": changed}, x_BLD)

  dropped = with_second_attention_scaled_by(0.0)
  doubled = with_second_attention_scaled_by(2.0)
  y = apply({"params": params}, x_BLD, train=True, rngs={"dropout": key(0)})
  is_dropped = np.abs(y - dropped).max((1, 2)) < 1e-4
  is_doubled = np.abs(y - doubled).max((1, 2)) < 1e-4
  np.testing.assert_array_equal(is_dropped ^ is_doubled, True)
  assert 16 < is_dropped.sum() < 48


@pytest.mark.parametrize("scan", [False, True])
def test_bfloat16_computation_keeps_float32_parameters(x_BLD, scan):
  module = encoder(scan=scan, dtype="bfloat16")
  params = init(module, x_BLD)
  assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}
  x_BLD = x_BLD.astype(jnp.bfloat16)
  y = jax.jit(module.apply)({"params": params}, x_BLD)
  assert y.dtype == jnp.bfloat16
  expected = jax.jit(encoder(scan=scan).apply)({"params": params}, x_BLD)
  error = np.abs(y.astype(jnp.float32) - expected)
  assert 1e-4 < error.max() < 0.1
