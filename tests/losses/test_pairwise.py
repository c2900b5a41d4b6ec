"""Losses over all pairs against formulas with a B x B matrix of logits."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.losses import pairwise

B, E = 24, 5
RNG = np.random.default_rng(0)
IMAGE, TEXT = RNG.normal(size=(2, B, E)).astype(np.float32)
IMAGE /= np.linalg.norm(IMAGE, axis=1, keepdims=True)
TEXT /= np.linalg.norm(TEXT, axis=1, keepdims=True)
SCALE, BIAS = np.float32(7.0), np.float32(-3.0)
# All rows of the first device are padding, and some of the others.
MASK = np.ones(B, np.float32)
MASK[[0, 1, 2, 7, B - 1]] = 0


def dense_sigmoid(image, text, scale, bias):
  logits = scale * image @ text.T + bias
  signs = 2 * jnp.eye(len(image)) - 1
  return -jnp.sum(jax.nn.log_sigmoid(signs * logits), axis=1)


def dense_softmax(image, text, scale, bias):
  logits = scale * image @ text.T
  rows = jax.nn.log_softmax(logits, axis=1)
  columns = jax.nn.log_softmax(logits, axis=0)
  return -(jnp.diag(rows) + jnp.diag(columns)) / 2


def chunked(kind, image, text, scale, bias, **options):
  if kind == "sigmoid":
    return pairwise.sigmoid(image, text, scale, bias, **options)
  return pairwise.softmax(image, text, scale, **options)


DENSE = {"sigmoid": dense_sigmoid, "softmax": dense_softmax}
PLACES = {"one": (1, 1), "eight": (2, 4), "none": None}


def ambient_mesh(place):
  """Returns a context with the mesh of PLACES[place]."""
  if not PLACES[place]:
    return contextlib.nullcontext()
  replica, fsdp = PLACES[place]
  devices = jax.devices()[: replica * fsdp]
  return jax.set_mesh(sharding.make_mesh(replica, fsdp, devices=devices))


def run(kind, place, chunk, mask):
  """Returns (gradients of the loss without padding, (loss_B, correct_B))."""
  weight_B = mask if mask is None else jnp.asarray(mask)

  def total(*args):
    loss_B, correct_B = chunked(kind, *args, weight_B=weight_B, chunk=chunk)
    return jnp.sum(loss_B * (1 if mask is None else mask)), (loss_B, correct_B)

  fn = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))
  with ambient_mesh(place):
    return jax.device_get(fn(IMAGE, TEXT, SCALE, BIAS))


@pytest.mark.parametrize(
  ("kind", "place", "chunk"),
  [("sigmoid", "eight", 7), ("softmax", "eight", 2), ("sigmoid", "none", 99)],
)
def test_losses_and_gradients_equal_the_dense_formulas(kind, place, chunk):
  args = (IMAGE, TEXT, SCALE, BIAS)
  grads, (loss_B, correct_B) = run(kind, place, chunk, None)
  np.testing.assert_allclose(loss_B, DENSE[kind](*args), rtol=1e-5)
  expected = jax.jit(
    jax.grad(lambda *a: jnp.sum(DENSE[kind](*a)), argnums=(0, 1, 2, 3))
  )(*args)
  for a, b in zip(grads, expected):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  right = (IMAGE @ TEXT.T).argmax(1) == np.arange(B)
  assert 0 < right.sum() < B
  np.testing.assert_array_equal(correct_B, right)


@pytest.mark.parametrize(
  ("kind", "place"), [("sigmoid", "one"), ("softmax", "eight")]
)
def test_padding_has_no_effect(kind, place):
  real = MASK > 0
  args = (IMAGE[real], TEXT[real], SCALE, BIAS)
  grads, (loss_B, _) = run(kind, place, 5, MASK)
  np.testing.assert_allclose(loss_B[real], DENSE[kind](*args), rtol=1e-5)
  expected = jax.jit(
    jax.grad(lambda *a: jnp.sum(DENSE[kind](*a)), argnums=(0, 1, 2, 3))
  )(*args)
  for a, b in zip(grads[:2], expected[:2]):
    np.testing.assert_allclose(a[real], b, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(a[~real], 0)
  np.testing.assert_allclose(grads[2:], expected[2:], rtol=1e-4, atol=1e-5)


def test_large_logits_do_not_overflow():
  fn = jax.jit(
    lambda image, text: pairwise.softmax(
      image, text, jnp.float32(1e4), chunk=3
    )[0]
  )
  image = np.eye(4, E, dtype=np.float32)
  np.testing.assert_allclose(fn(image, image), 0, atol=1e-6)
  loss_B = fn(image, -image)
  np.testing.assert_allclose(loss_B, 1e4 + np.log(3), rtol=1e-6)


@pytest.mark.parametrize(
  ("kind", "place"), [("sigmoid", "eight"), ("softmax", "one")]
)
def test_no_device_holds_the_logits_of_all_pairs(kind, place):
  batch, chunk = 2048, 64
  replica, fsdp = PLACES[place]
  rows = batch // (replica * fsdp)

  def total(image, text, scale):
    loss_B, _ = chunked(kind, image, text, scale, BIAS, chunk=chunk)
    return jnp.mean(loss_B)

  with ambient_mesh(place):
    mesh = jax.sharding.get_mesh()
    z = jax.ShapeDtypeStruct(
      (batch, 8), jnp.float32, sharding=sharding.batch(mesh)
    )
    fn = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))
    compiled = fn.lower(z, z, jnp.float32(1)).compile()
  arrays = re.findall(r"\w+\[(\d[\d,]*)\]", compiled.as_text())
  largest = max(np.prod([int(n) for n in a.split(",")]) for a in arrays)
  # A chunk of logits or the embeddings of all columns, far less than all pairs.
  assert largest <= max(rows * chunk, batch * 8)
  assert rows * chunk in {
    np.prod([int(n) for n in a.split(",")]) for a in arrays
  }, "the compiled text is not what this test expects"
  used = compiled.memory_analysis().temp_size_in_bytes
  assert used < rows * batch * 4


def test_invalid_chunks_are_errors():
  message = r"config.loss.chunk: expected a whole number at least 1, got 0"
  with pytest.raises(ConfigError, match=message):
    pairwise.sigmoid(IMAGE, TEXT, SCALE, BIAS, chunk=0)


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_logits_that_are_not_finite_are_wrong(kind):
  image = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], np.float32)
  for value in (np.nan, np.inf):
    broken = image.copy()
    broken[2, 0] = value
    _, correct = chunked(kind, broken, image, SCALE, BIAS)
    assert correct[2] == 0
    _, correct = chunked(kind, image + value, image, SCALE, BIAS)
    assert not correct.any()
  _, correct = chunked(kind, image, image, SCALE, BIAS)
  assert correct.all()


# Distances from a teacher, whose embeddings have another size.
TEACHER_IMAGE, TEACHER_TEXT = 2 * RNG.normal(size=(2, B, 3)).astype(np.float32)


def dense_distance(image, text, mask):
  """Equation 3 of arXiv 2411.18674, over the examples that are no padding."""
  real = np.flatnonzero(mask)
  student = SCALE * image[real] @ text[real].T
  teacher = TEACHER_IMAGE[real] @ TEACHER_TEXT[real].T
  total = 0.0
  for axis in (0, 1):
    target = jax.nn.softmax(teacher, axis=axis)
    total -= jnp.sum(target * jax.nn.log_softmax(student, axis=axis))
  return total / 2


@pytest.mark.parametrize(
  ("place", "chunk", "mask"),
  [("eight", 7, MASK), ("none", 5, np.ones(B, np.float32)), ("one", 99, MASK)],
)
def test_distances_and_gradients_equal_the_dense_formula(
  place, chunk, mask, float64
):
  def total(image, text):
    distance_B = pairwise.distance(
      SCALE * image,
      text,
      jnp.asarray(TEACHER_IMAGE),
      jnp.asarray(TEACHER_TEXT),
      weight_B=jnp.asarray(mask),
      chunk=chunk,
    )
    return jnp.sum(distance_B * mask)

  args = IMAGE.astype(np.float64), TEXT.astype(np.float64)
  with ambient_mesh(place):
    value, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(*args)
  expected, expected_grads = jax.value_and_grad(
    lambda *x: dense_distance(*x, mask), argnums=(0, 1)
  )(*args)
  assert float(value) == pytest.approx(float(expected), rel=1e-6)
  for x, y in zip(grads, expected_grads):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
