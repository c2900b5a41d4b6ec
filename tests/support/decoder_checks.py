"""Checks of a decoder with any kinds of layers: meshes, packing, caches.

The models have the dtype float64, and tests the fixture `float64_models`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import sharding
from bigtrain.arrays import trees

ROWS, LENGTH, VOCAB = 8, 38, 40  # No device divides the length.


def tokens(rows=ROWS, length=LENGTH):
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.integers(1, VOCAB, (rows, length)), jnp.int32)


@functools.cache
def variables(model):
  """Variables with noise: initial scales and biases would hide errors."""
  drawn = jax.jit(model.init)(jax.random.key(0), tokens(1, 8))
  rng = np.random.default_rng(1)
  noisy = lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 0.1, x.dtype)
  return jax.device_get(jax.tree.map(noisy, drawn))


def assert_close(actual, expected, share=1e-9):
  atol = share * np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def documents():
  """Segments of three documents and padding in each row."""
  rng = np.random.default_rng(2)
  rows = []
  for _ in range(ROWS):
    ends = np.sort(rng.choice(np.arange(1, LENGTH), 3, replace=False))
    numbers = np.searchsorted(ends, np.arange(LENGTH), side="right") + 1
    rows.append(np.where(numbers > 3, 0, numbers))
  return np.asarray(rows, np.int32)


def loss_and_grads(model, weights, packed, **mesh):
  size = int(np.prod(list(mesh.values())))
  segments = jnp.asarray(documents()) if packed else None
  rest = {name: x for name, x in weights.items() if name != "params"}

  def loss(params, tokens, segments):
    logits, _ = model.apply(
      {"params": params, **rest}, tokens, segments=segments
    )
    log_p = jax.nn.log_softmax(logits[:, :-1])
    picked = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    weights = 1.0 if segments is None else segments[:, 1:] > 0
    return -jnp.mean(picked * weights)

  devices = sharding.make_mesh(**mesh, devices=jax.devices()[:size])
  with jax.set_mesh(devices):
    batch = jax.device_put((tokens(), segments), sharding.batch(devices))
    grad = jax.jit(jax.value_and_grad(loss))
    return jax.device_get(grad(weights["params"], *batch))


def check_gradients(result, expected):
  """Compares two results of loss_and_grads."""
  (loss, grads), (expected_loss, expected_grads) = result, expected
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-9)
  largest = max(np.abs(x).max() for x in jax.tree.leaves(expected_grads))
  old = dict(trees.flatten_with_names(expected_grads))
  for name, new in trees.flatten_with_names(grads):
    scale = max(np.abs(old[name]).max(), 1e-2 * largest)
    np.testing.assert_allclose(
      new, old[name], rtol=0, atol=1e-6 * scale, err_msg=name
    )


def check_packed(model, weights):
  """Packed documents have the logits that they have alone."""
  apply = jax.jit(model.apply)
  segments = documents()
  packed, _ = apply(weights, tokens(), segments=segments)
  rows = np.concatenate([tokens(), np.zeros((ROWS, LENGTH), np.int32)], axis=1)
  for number in (1, 2, 3):
    sizes = np.sum(segments == number, axis=1)
    starts = np.argmax(segments == number, axis=1)
    # Each document at the start of a row, with padding after it.
    alone = np.stack([row[at:][:LENGTH] for row, at in zip(rows, starts)])
    real = np.arange(LENGTH) < sizes[:, None]
    logits, _ = apply(weights, alone, real=real)
    for row in range(ROWS):
      own = slice(starts[row], starts[row] + sizes[row])
      assert_close(packed[row, own], logits[row, : sizes[row]])


def check_generation(model, weights):
  """Prompts of different lengths, read together and then by steps.

  Also one that is read in parts.
  """
  text = tokens(3)
  whole, _ = jax.jit(model.apply)(weights, text)
  longest = LENGTH - 4
  lengths = np.asarray([20, longest, 1])
  real = np.arange(longest) < lengths[:, None]
  empty = model.init_cache(3, LENGTH)
  read = jax.jit(lambda t, c: model.apply(weights, t, cache=c, real=real))
  step = jax.jit(lambda t, c, i: model.apply(weights, t, cache=c, start=i))
  logits, out = read(jnp.where(real, text[:, :longest], 0), empty)
  for row, length in enumerate(lengths):
    assert_close(logits[row, :length], whole[row, :length])
  for i in range(LENGTH):
    logits, out = step(text[:, i : i + 1], out["cache"], i)
    for row in range(3):
      if i >= lengths[row] - 1:
        assert_close(logits[row, 0], whole[row, i])

  cache = empty
  for start, end in ((0, 15), (15, LENGTH)):
    call = jax.jit(functools.partial(model.apply, start=start))
    logits, out = call(weights, text[:, start:end], cache=cache)
    assert_close(logits, whole[:, start:end])
    cache = out["cache"]
