"""Decoders with short convolutions: packed, with a cache, and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import rounding

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder

B, L, V = 4, 21, 40
KINDS = {"conv": dict(short_conv=dict(width=4, bias=True)), "full": {}}


def model_of(**changes):
  fields = dict(
    variant="llama_mu",
    vocab_size=V,
    kinds=KINDS,
    layers=("conv", "full"),
    depth=3,
    qk_norm="head",
    init_std=0.2,
    scan=True,
  )
  return decoder.Model(**fields | changes)


def tokens(rows=B):
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.integers(1, V, (rows, L)), jnp.int32)


@functools.cache
def variables():
  drawn = jax.jit(model_of().init)(jax.random.key(0), tokens(1))
  rng = np.random.default_rng(1)
  # Biases are zero at first, which would hide errors.
  noisy = lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 0.1, x.dtype)
  return jax.device_get(jax.tree.map(noisy, drawn))


def documents():
  """Segments of three documents and padding in each row."""
  ends = [(6, 9, 19), (1, 3, 20), (8, 14, 18), (5, 12, 21)]
  rows = [np.searchsorted(x, np.arange(L), side="right") + 1 for x in ends]
  return np.where(np.asarray(rows) > 3, 0, rows).astype(np.int32)


def assert_close(actual, expected):
  atol = rounding.ROUNDINGS * 1e-5 * np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def test_packed_documents_give_the_logits_of_single_ones():
  apply = jax.jit(model_of().apply)
  segments = documents()
  packed = np.asarray(apply(variables(), tokens(), segments=segments)[0])
  rows = np.pad(tokens(), ((0, 0), (0, L)))
  for number in (1, 2, 3):
    sizes = np.sum(segments == number, axis=1)
    starts = np.argmax(segments == number, axis=1)
    # Each document at the start of a row, with padding after it.
    alone = np.stack([row[at:][:L] for row, at in zip(rows, starts)])
    real = np.arange(L) < sizes[:, None]
    logits = np.asarray(apply(variables(), alone, real=real)[0])
    for row in range(B):
      own = slice(starts[row], starts[row] + sizes[row])
      assert_close(packed[row, own], logits[row, : sizes[row]])


def test_generation_reads_each_token_once():
  """Prompts of different lengths, read together and then by steps."""
  model = model_of()
  text = tokens(3)
  whole, _ = jax.jit(model.apply)(variables(), text)
  lengths = np.asarray([11, 18, 1])
  real = np.arange(18) < lengths[:, None]
  read = jax.jit(lambda t, c: model.apply(variables(), t, cache=c, real=real))
  step = jax.jit(lambda t, c, i: model.apply(variables(), t, cache=c, start=i))
  cache = model.init_cache(3, L)
  logits, out = read(jnp.where(real, text[:, :18], 0), cache)
  for row, length in enumerate(lengths):
    assert_close(logits[row, :length], whole[row, :length])
  for i in range(L):
    logits, out = step(text[:, i : i + 1], out["cache"], i)
    for row in range(3):
      if i >= lengths[row] - 1:
        assert_close(logits[row, 0], whole[row, i])


def test_a_prompt_may_be_read_in_parts():
  model = model_of()
  text = tokens(2)
  whole, _ = jax.jit(model.apply)(variables(), text)
  out = {"cache": model.init_cache(2, L)}
  for start, end in ((0, 2), (2, 3), (3, L)):
    call = jax.jit(functools.partial(model.apply, start=start))
    logits, out = call(variables(), text[:, start:end], cache=out["cache"])
    assert_close(logits, whole[:, start:end])


def gradients(model, **mesh):
  """Gradients of packed documents on a mesh of these sizes."""

  def loss(params, tokens, segments):
    logits, _ = model.apply({"params": params}, tokens, segments=segments)
    log_p = jax.nn.log_softmax(logits[:, :-1])
    picked = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.mean(picked * (segments[:, 1:] > 0))

  size = int(np.prod(list(mesh.values())))
  devices = sharding.make_mesh(**mesh, devices=jax.devices()[:size])
  with jax.set_mesh(devices):
    batch = (tokens(), jnp.asarray(documents()))
    batch = jax.device_put(batch, sharding.batch(devices))
    return jax.device_get(
      jax.jit(jax.grad(loss))(variables()["params"], *batch)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh", [dict(fsdp=2, tensor=2, sequence=2), dict(fsdp=1, sequence=4)]
)
def test_any_mesh_has_the_gradients_of_one_device(mesh):
  actual, expected = (
    gradients(model_of(), **mesh),
    gradients(model_of(), fsdp=1),
  )
  largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
  jax.tree.map(
    lambda new, old: np.testing.assert_allclose(
      new, old, rtol=0, atol=1e-4 * max(np.abs(old).max(), 1e-2 * largest)
    ),
    actual,
    expected,
  )


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(short_conv=dict(width=1)), r"short_conv\.width.*at least 2"),
    (dict(short_conv=dict(taps=3)), r"short_conv\.taps.*"),
    (
      dict(short_conv={}, deltanet=dict(num_heads=4)),
      "short_conv: expected None with deltanet",
    ),
    (
      dict(mlp="xielu", moe=dict(num_experts=4)),
      r"config\.model\.mlp='xielu': not supported in experts",
    ),
  ],
)
def test_wrong_options_are_errors(changes, message):
  with pytest.raises(ConfigError, match=message):
    model_of(**dict(kinds={}, layers=()) | changes)
