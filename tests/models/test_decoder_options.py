"""The decoder's options, drawn at random: laws that hold for all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import any_mesh, rounding

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.models import decoder
from bigtrain.models.published import blocks
from bigtrain.tasks import language_modeling

V, L, B, D = 32, 16, 2, 16
DRAWS = 14
# Rounding, as a share of the largest number.
ROUNDING = 3e-5


def draw(seed):
  """Options of a small model, with what its mesh divides."""
  rng = np.random.default_rng(seed)
  one_of = lambda *values: values[rng.integers(len(values))]
  some = lambda *values: tuple(x for x in values if rng.random() < 0.5)
  scalings = (
    None,
    dict(type="linear", factor=4.0),
    dict(type="proportional", fraction=0.5),
    dict(type="yarn", factor=4.0, original_len=8, truncate=one_of(True, False)),
    dict(
      type="longrope",
      short_factor=(1.0, 1.5),
      long_factor=(2.0, 3.0),
      original_len=9,
      factor=2.0,
    ),
  )
  # With rope_fraction 0.5 of head_dim 8, or 1.0 of 4, two pairs rotate.
  fraction, head_dim = one_of((0.5, 8), (1.0, 4))
  kv_heads = one_of(2, 4)
  parallel = rng.random() < 0.25
  experts = dict(
    num_experts=4,
    top_k=one_of(1, 2),
    score=one_of("softmax", "sigmoid", "softmax_of_top"),
    router_init_std=1.0,
    scaled_router=one_of(True, False),
    beside_mlp=one_of(True, False),
  )
  kinds = {
    "local": dict(window=one_of(1, 3, 5), rope_theta=100.0),
    "global": dict(
      posemb=one_of("rope", "none"),
      rope_scaling=one_of(*scalings),
      num_heads=one_of(4, 8),
      moe=one_of(None, experts),
      query_scale=one_of(None, dict(beta=0.3, original_len=4)),
      keys_as_values=one_of(True, False),
    ),
    "linear": dict(
      deltanet=dict(
        num_heads=4,
        num_key_heads=one_of(2, 4),
        key_dim=4,
        value_dim=3,
        conv_width=one_of(2, 4),
        negative_eigenvalues=one_of(True, False),
      )
    ),
    "first": dict(mlp_dim=24, moe=None),
  }
  patterns = (
    ("local", "global"),
    ("local", "local", "global"),
    ("global",),
    ("local",),
    ("linear", "global"),
    ("local", "linear"),
  )
  options = dict(
    vocab_size=V,
    width=D,
    depth=one_of(4, 5),
    num_heads=4,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    mlp_dim=32,
    max_len=24,
    init_std=0.3,
    variant="llama",
    posemb=one_of("rope", "rope", "learn"),
    norm=one_of("layernorm", "rmsnorm"),
    norm_offset=one_of(0.0, 1.0),
    norm_at="pre" if parallel else one_of("pre", "post", "sandwich"),
    parallel=parallel,
    use_bias=some("qkv", "out", "mlp", "norm", "experts", "router", "head"),
    qk_norm=one_of(None, "head", "projection", "l2"),
    qk_norm_after_rope=one_of(True, False),
    qkv_clip=one_of(None, 1.5),
    rope_fraction=fraction,
    rope_interleaved=one_of(True, False),
    rope_scaling=one_of(*scalings),
    attention_scale=one_of(None, 0.4),
    attention_softcap=one_of(None, 3.0),
    logits_softcap=one_of(None, 5.0),
    sinks=one_of(True, False),
    mlp=one_of("gelu", "gelu_erf", "geglu", "swiglu", "relu2"),
    embed_multiplier=one_of(1.0, "sqrt_width"),
    residual_multiplier=one_of(1.0, 0.6),
    logits_multiplier=one_of(1.0, 0.25),
    tied_head=one_of(True, False),
    kinds=kinds,
    layers=one_of(*patterns),
    first_layers=one_of((), ("first",)),
    v_norm=one_of(True, False),
    output_gate=one_of(True, False),
    layer_scalar=one_of(True, False),
  )
  return with_latents(options) if seed % 3 == 1 else options


def with_latents(options):
  """The options, with latent attention in the global layers."""
  kind, rope_dim = options["kinds"]["global"], options["head_dim"]
  q_rank = 6 if kind["num_heads"] == 4 else None
  kind["mla"] = dict(
    q_rank=q_rank, kv_rank=5, nope_dim=3, rope_dim=rope_dim, v_dim=6
  )
  kind |= dict(head_dim=3 + rope_dim, num_kv_heads=kind["num_heads"])
  return options | dict(qk_norm=None, qkv_clip=None)


def tokens(seed=0, length=L):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(0, V, (B, length)), jnp.int32)


@functools.cache
def made(seed):
  """Returns (model with a loop, random variables)."""
  model = decoder.Model(**draw(seed), scan=True)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens())
  rng = np.random.default_rng(seed)

  def value(name, leaf):
    middle = 1 - model.norm_offset if name.endswith("scale") else 0
    return jnp.asarray(rng.normal(middle, 0.3, leaf.shape), leaf.dtype)

  return model, trees.map_with_names(value, shapes)


def logits_of(model, variables, tokens, **kwargs):
  run = jax.jit(lambda v, t, kw: model.apply(v, t, **kw)[0])
  return np.asarray(run(variables, tokens, kwargs))


def assert_close(a, b, moved=0.0):
  """Compares arrays, of which rounding may move numbers by `moved`."""
  size = np.abs(b).max()
  assert moved <= 1e-2 * size, "rounding may change all digits"
  np.testing.assert_allclose(a, b, atol=max(ROUNDING * size, moved))


def moved_by_rounding(fn, inputs):
  """{name: how far rounding may move an array of fn(inputs)}.

  Some draws, such as those with norms of values, multiply the rounding of their
  inputs a hundredfold.
  """
  values = {n: np.asarray(x) for n, x in trees.flatten_with_names(fn(inputs))}
  moved = rounding.spread(fn, inputs, values)
  return {name: rounding.ROUNDINGS * x for name, x in moved.items()}


def each_seed(fast):
  """Draws; the first `fast` ones are not marked slow."""
  slow = [
    pytest.param(seed, marks=pytest.mark.slow) for seed in range(fast, DRAWS)
  ]
  return pytest.mark.parametrize("seed", [*range(fast), *slow])


@each_seed(1)
def test_a_loop_gives_the_logits_of_unrolled_layers(seed):
  model, variables = made(seed)
  unrolled = decoder.Model(**draw(seed))
  like = jax.eval_shape(unrolled.init, jax.random.key(0), tokens())
  flat = {n: np.asarray(x) for n, x in trees.flatten_with_names(variables)}
  names = [name for name, _ in trees.flatten_with_names(like)]
  separate = blocks.restack_blocks(flat, dict.fromkeys(names), block="blocks")
  assert separate.keys() == set(names)
  separate = trees.from_flat(separate)
  expected = logits_of(model, variables, tokens())
  assert_close(logits_of(unrolled, separate, tokens()), expected)
  assert np.std(expected) > 0.01


@each_seed(1)
def test_packed_documents_give_the_logits_of_single_ones(seed):
  model, variables = made(seed)
  text = tokens()
  # Documents shorter and longer than the windows and LongRoPE's length, the
  # longer one first or last.
  sizes = ((11, 4), (4, 11))
  segments = [[1] * a + [2] * b + [0] * (L - a - b) for a, b in sizes]
  packed = logits_of(model, variables, text, segments=jnp.asarray(segments))
  for size, starts in ((11, (0, 4)), (4, (11, 0))):
    places = [slice(start, start + size) for start in starts]
    own = jnp.stack([text[row, at] for row, at in enumerate(places)])
    alone = logits_of(model, variables, own)
    for row, at in enumerate(places):
      assert_close(packed[row, at], alone[row])


@each_seed(1)
def test_decoding_with_the_cache_gives_the_same_logits(seed):
  """Prompts of 4 and 9 tokens are read together, then token by token."""
  model, variables = made(seed)
  text, lengths = tokens(), jnp.asarray([4, 9])

  @jax.jit
  def run(variables, lengths=L):
    """Whole texts of these lengths, on which LongRoPE depends."""
    real = jnp.arange(L) < jnp.broadcast_to(lengths, B)[:, None]
    return {"logits": model.apply(variables, text, real=real)[0]}

  bound = moved_by_rounding(run, variables)["logits"]
  prompt = jnp.where(jnp.arange(10) < lengths[:, None], text[:, :10], 0)

  @jax.jit
  def read(prompt):
    cache, real = model.init_cache(B, L), jnp.arange(10) < lengths[:, None]
    return model.apply(variables, prompt, cache=cache, real=real)

  @jax.jit
  def step(token, cache, i):
    return language_modeling.step_fn(variables, model, cache, token, i)

  logits, out = read(prompt)
  cache = out["cache"]
  whole = run(variables, lengths)["logits"]
  for row, length in enumerate(lengths):
    assert_close(logits[row, :length], whole[row, :length], bound)
  for i in range(3, L):
    logits, cache = step(text[:, i], cache, i)
    whole = run(variables, i + 1)["logits"]
    for row in range(B):
      if i >= lengths[row] - 1:
        assert_close(logits[row], whole[row, i], bound)
  # A window's cache has no more positions than the window.
  windows = {kind.get("window") for kind in model.kinds.values()} - {None}
  sizes = {
    group.k_BNSGK.shape[2]
    for group in cache.groups
    if hasattr(group, "k_BNSGK")
  }
  assert sizes <= windows | {L}
  assert ("local" in model.layers) == bool(sizes & windows)


@pytest.mark.slow
def test_caches_of_layers_with_different_heads_are_split_over_tensor():
  """Two heads of keys on four devices have copies there, eight have none."""
  options = dict(
    variant="llama",
    vocab_size=V,
    width=D,
    depth=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=32,
    init_std=0.3,
    scan=True,
    kinds={
      "local": dict(window=3),
      "global": dict(num_heads=8, num_kv_heads=8, head_dim=2),
    },
    layers=("local", "global"),
  )
  model = decoder.Model(**options)
  variables = jax.jit(model.init)(jax.random.key(0), tokens())
  text = tokens()
  expected = logits_of(model, variables, text)[:, 9:]
  mesh = sharding.make_mesh(fsdp=2, tensor=4, devices=jax.devices()[:8])
  with jax.set_mesh(mesh):

    @jax.jit
    def read(text):
      cache = model.init_cache(B, L)
      return model.apply(variables, text, cache=cache, head=False)[1]["cache"]

    @jax.jit
    def decode(cache, text):
      logits = []
      for i in range(9, 12):
        token = text[:, i : i + 1]
        logits_B1V, out = model.apply(variables, token, cache=cache, start=i)
        cache = out["cache"]
        logits.append(logits_B1V)
      return jnp.concatenate(logits, axis=1)

    text = jax.device_put(text, sharding.batch(mesh))
    cache = read(text[:, :9])
    assert_close(decode(cache, text), expected[:, :3])
  shapes = {
    x.sharding.shard_shape(x.shape)
    for x in jax.tree.leaves(cache)
    if x.ndim > 1
  }
  # (rows, layers, positions, heads, head_dim) on each device.
  assert shapes == {(1, 2, 3, 1, 4), (1, 1, L, 2, 2)}


MESHES = (dict(fsdp=2, tensor=2, sequence=2), dict(fsdp=4, tensor=2))


@each_seed(0)
def test_a_mesh_gives_the_loss_and_gradients_of_one_device(seed):
  """With rematerialisation there, and without it here; in float64.

  Rounding of float32 changes gradients of some draws by a thousandth.
  """
  double = {"dtype": "float64"}
  with any_mesh.precision({"model": double}):
    options = draw(seed) | double
    _, variables = made(seed)
    variables = jax.tree.map(lambda x: np.asarray(x, np.float64), variables)
    model = decoder.Model(**options, scan=True)
    remat = decoder.Model(**options, scan=True, remat_policy="nothing_saveable")
    text = jnp.concatenate([tokens(i) for i in range(4)])

    def loss(params, text, model):
      logits, _ = model.apply({**variables, "params": params}, text)
      log_p = jax.nn.log_softmax(logits[:, :-1])
      picked = jnp.take_along_axis(log_p, text[:, 1:, None], axis=-1)
      return -jnp.mean(picked)

    def run(model, devices, **sizes):
      mesh = sharding.make_mesh(**sizes, devices=jax.devices()[:devices])
      with jax.set_mesh(mesh):
        rows = jax.device_put(text, sharding.batch(mesh))
        return jax.device_get(
          jax.jit(jax.value_and_grad(loss), static_argnums=2)(
            variables["params"], rows, model
          )
        )

    value, grads = run(model, 1, fsdp=1)
    other, other_grads = run(remat, 8, **MESHES[seed % 2])
  assert value.dtype == np.float64
  assert other == pytest.approx(value, rel=1e-7)
  largest = max(np.abs(x).max() for x in jax.tree.leaves(grads))
  named = trees.flatten_with_names(other_grads)
  for (name, new), old in zip(named, jax.tree.leaves(grads)):
    scale = max(np.abs(old).max(), 1e-2 * largest)
    np.testing.assert_allclose(new, old, atol=1e-6 * scale, err_msg=name)
