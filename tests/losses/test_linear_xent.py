import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bigtrain.losses import cross_entropy, linear_xent
from bigtrain.settings import ConfigError

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 4, 7)).astype(np.float32) * 5
CLASSES = RNG.integers(0, 7, size=(3, 4))
ONE_HOT = np.eye(7, dtype=np.float32)[CLASSES]


def numpy_softmax_xent(logits, probs):
  logits = logits.astype(np.float64)
  top = logits.max(-1, keepdims=True)
  logz = np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top
  return -(probs * (logits - logz)).sum(-1), logz[..., 0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_softmax_xent(smoothing, z_loss):
  smooth = (1 - smoothing) * ONE_HOT + smoothing / 7
  plain, logz = numpy_softmax_xent(LOGITS, smooth)
  for labels in (CLASSES, ONE_HOT):
    got = cross_entropy.softmax_xent(
      jnp.asarray(LOGITS),
      jnp.asarray(labels),
      label_smoothing=smoothing,
      z_loss=z_loss,
    )
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, plain + z_loss * logz**2, rtol=1e-5)


def test_softmax_xent_mixed_and_unnormalised_labels():
  labels = RNG.uniform(size=LOGITS.shape).astype(np.float32)
  want, _ = numpy_softmax_xent(LOGITS, labels)
  got = cross_entropy.softmax_xent(jnp.asarray(LOGITS), jnp.asarray(labels))
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_softmax_xent_gradient_is_softmax_minus_labels():
  for labels in (CLASSES, ONE_HOT):
    grad = jax.grad(lambda x, y: cross_entropy.softmax_xent(x, y).sum())(
      jnp.asarray(LOGITS), jnp.asarray(labels)
    )
    np.testing.assert_allclose(
      grad, jax.nn.softmax(LOGITS) - ONE_HOT, atol=1e-6
    )


def test_softmax_xent_keeps_digits_of_large_bfloat16_logits():
  logits = jnp.asarray(LOGITS, jnp.bfloat16)
  got = cross_entropy.softmax_xent(logits.astype(jnp.float32) + 2e4, CLASSES)
  want, _ = numpy_softmax_xent(
    np.asarray(logits.astype(jnp.float32) + 2e4), ONE_HOT
  )
  np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-6)
  assert cross_entropy.softmax_xent(logits, CLASSES).dtype == jnp.float32


def test_sigmoid_xent_sums_over_classes():
  labels = (RNG.uniform(size=LOGITS.shape) > 0.5).astype(np.float32)
  prob = 1 / (1 + np.exp(-LOGITS.astype(np.float64)))

  def want(y):
    return -(y * np.log(prob) + (1 - y) * np.log1p(-prob)).sum(-1)

  logits = jnp.asarray(LOGITS)
  got = cross_entropy.sigmoid_xent(logits, jnp.asarray(labels))
  np.testing.assert_allclose(got, want(labels), rtol=1e-5)
  got = cross_entropy.sigmoid_xent(
    logits, jnp.asarray(CLASSES), label_smoothing=0.1
  )
  np.testing.assert_allclose(got, want(0.9 * ONE_HOT + 0.1 / 7), rtol=1e-5)
  grad = jax.grad(lambda x: cross_entropy.sigmoid_xent(x, labels).sum())(logits)
  np.testing.assert_allclose(grad, prob - labels, atol=1e-6)
  # At 0, where |x| has a corner, and far out, where the naive form is inf.
  odd = jnp.asarray([0.0, 500.0, -500.0])
  y = jnp.asarray([1.0, 1.0, 0.0])
  value, grad = jax.value_and_grad(cross_entropy.sigmoid_xent)(odd, y)
  assert float(value) == pytest.approx(np.log(2))
  np.testing.assert_allclose(grad, [-0.5, 0, 0], atol=1e-6)


@pytest.mark.parametrize("bad", [-1, 7, -100])
def test_invalid_classes_are_nan_alone(bad):
  classes = jnp.asarray(CLASSES).at[1, 2].set(bad)
  for loss in (cross_entropy.softmax_xent, cross_entropy.sigmoid_xent):
    nan = np.isnan(loss(jnp.asarray(LOGITS), classes))
    assert nan[1, 2] and nan.sum() == 1


def test_labels_of_another_shape():
  with pytest.raises(ValueError, match=r"labels float32\[3, 4\] are neither"):
    cross_entropy.softmax_xent(LOGITS, ONE_HOT[..., 0])
  with pytest.raises(ValueError, match="neither"):
    cross_entropy.sigmoid_xent(LOGITS, CLASSES[:2])


def chunked_case(batch=8, length=10, width=6, vocabulary=31):
  rng = np.random.default_rng(1)
  hidden = rng.normal(size=(batch, length, width)).astype(np.float32)
  kernel = rng.normal(size=(width, vocabulary)).astype(np.float32)
  bias = rng.normal(size=vocabulary).astype(np.float32)
  targets = rng.integers(0, vocabulary, size=(batch, length))
  weights = rng.uniform(size=(batch, length)).astype(np.float32)
  return hidden, kernel, bias, targets, weights


def plain_objective(hidden, kernel, bias, targets, weights, **kw):
  logits = hidden @ kernel + bias
  loss = cross_entropy.softmax_xent(logits, targets, **kw)
  correct = (jnp.argmax(logits, -1) == targets).astype(jnp.float32)
  return (loss * weights).sum(), (loss, correct)


def chunked_objective(hidden, kernel, bias, targets, weights, **kw):
  total, *rest = linear_xent.linear_softmax_xent(
    hidden, kernel, targets, weights, bias_V=bias, **kw
  )
  return total, tuple(rest)


def value_and_grads(objective, args, **kw):
  fn = jax.value_and_grad(
    lambda *a: objective(*a, **kw), argnums=(0, 1, 2), has_aux=True
  )
  return jax.jit(fn)(*args)


@pytest.mark.parametrize("chunk", [None, 0, 1, 4, 5, 10, 64])
def test_linear_softmax_xent(chunk):
  kw = dict(label_smoothing=0.1, z_loss=1e-3)
  args = chunked_case()
  want = value_and_grads(plain_objective, args, **kw)
  got = value_and_grads(chunked_objective, args, chunk=chunk, **kw)
  jax.tree.map(
    lambda w, g: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5),
    want,
    got,
  )


@pytest.mark.parametrize("columns", [4, 31, 30, 16])
def test_gradients_of_large_kernels_are_summed_by_columns(columns, monkeypatch):
  args = chunked_case()
  want = value_and_grads(chunked_objective, args, chunk=4)
  monkeypatch.setattr(linear_xent, "_PRODUCT_AT_A_TIME", 6 * columns)
  jax.clear_caches()
  got = value_and_grads(chunked_objective, args, chunk=4)
  jax.tree.map(
    lambda w, g: np.testing.assert_allclose(g, w, rtol=2e-6, atol=2e-6),
    want,
    got,
  )


def test_linear_softmax_xent_caps_logits_softly():
  hidden, kernel, _, targets, weights = chunked_case()

  def plain(hidden, kernel):
    logits = 3 * jnp.tanh(hidden @ kernel / 3)
    return (cross_entropy.softmax_xent(logits, targets) * weights).sum()

  def capped(hidden, kernel):
    return linear_xent.linear_softmax_xent(
      hidden, kernel, targets, weights, chunk=4, softcap=3.0
    ).total

  for objective in (plain, capped):
    value, grads = jax.value_and_grad(objective, (0, 1))(hidden, kernel)
    if objective is plain:
      want = value, grads
  jax.tree.map(
    lambda w, g: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5),
    want,
    (value, grads),
  )


def test_linear_softmax_xent_without_bias_in_bfloat16():
  hidden, kernel, _, targets, _ = chunked_case()
  # Operands that bfloat16 can say: then only the order of sums differs.
  hidden, kernel = np.round(hidden * 4) / 4, np.round(kernel * 4) / 4
  found = linear_xent.linear_softmax_xent(
    hidden, kernel, targets, chunk=4, dtype=jnp.bfloat16
  )
  want = cross_entropy.softmax_xent(jnp.asarray(hidden @ kernel), targets)
  assert found.loss_BL.dtype == jnp.float32
  np.testing.assert_allclose(found.loss_BL, want, rtol=1e-5, atol=1e-5)
  assert float(found.total) == pytest.approx(float(want.sum()), rel=1e-5)
  for chunk in (-1, "all", 2.0):
    with pytest.raises(ConfigError, match=r"config.loss.chunk: .*positions"):
      linear_xent.linear_softmax_xent(hidden, kernel, targets, chunk=chunk)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_gradients_survive_a_low_precision(dtype):
  hidden, kernel, bias, targets, weights = chunked_case(vocabulary=300)
  bias = bias - 14 * (np.arange(300) % 2)  # Shares of some 1e-8.
  args = (hidden / 8, kernel / 8, bias, targets * 2 % 300, weights)
  _, (*_, want) = value_and_grads(plain_objective, args)
  _, (to_hidden, to_kernel, got) = value_and_grads(
    lambda hidden, *a, **kw: chunked_objective(
      hidden.astype(dtype), *a, chunk=4, **kw
    ),
    args,
  )
  assert 0 < np.abs(want).min() < 1e-5
  np.testing.assert_allclose(got, want, rtol=0.05)
  assert to_kernel.dtype == to_hidden.dtype == jnp.float32
  assert np.all(np.any(np.asarray(to_kernel) != 0, axis=0))


def test_what_has_no_weight_has_no_part():
  hidden, kernel, bias, targets, weights = chunked_case()
  weights[:, 7:] = 0
  args = (hidden, kernel, bias, targets, weights)
  want = value_and_grads(chunked_objective, args, chunk=4)
  targets = targets.copy()
  targets[:, 8:] = -1  # The loss there is NaN.
  got = value_and_grads(
    chunked_objective, (hidden, kernel, bias, targets, weights), chunk=4
  )
  jax.tree.map(np.testing.assert_array_equal, want[0][0], got[0][0])
  jax.tree.map(np.testing.assert_array_equal, want[1], got[1])


def test_of_equal_logits_the_first_is_the_largest():
  logits = jnp.asarray([[1.0, 2, 2, 0], [0, 0, 0, 0], [3, 5, 1, 5]])
  hidden = jnp.eye(3)[None]
  for target in range(4):
    targets = jnp.full((1, 3), target)
    found = linear_xent.linear_softmax_xent(hidden, logits, targets)
    want = jnp.argmax(logits, axis=-1) == target
    np.testing.assert_array_equal(found.correct_BL[0], want)
    bad = logits.at[:, 2].set(jnp.nan)
    found = linear_xent.linear_softmax_xent(hidden, bad, targets)
    assert not found.correct_BL.any()


def test_the_default_chunk_shrinks_with_the_vocabulary():
  most = 2**26
  for batch_size in (1, 8, 64):
    for length in (1, 64, 1000):
      for vocab_size in (259, 32_000, 262_144):
        chunk = linear_xent.default_chunk(batch_size, length, vocab_size)
        assert 1 <= chunk <= length
        logits = batch_size * vocab_size * chunk
        assert chunk == 1 or logits <= most
        # No other number of chunks would do, and they are of equal size.
        chunks = -(-length // chunk)
        if chunks > 1 and chunk > 1:
          fewer = -(-length // (chunks - 1))
          assert batch_size * vocab_size * fewer > most
          assert chunks * chunk - length < chunks


def test_no_product_is_computed_twice():
  hidden, kernel, _, targets, weights = chunked_case()

  def total(hidden, kernel):
    return linear_xent.linear_softmax_xent(
      hidden, kernel, targets, weights, chunk=4
    ).total

  text = str(jax.make_jaxpr(jax.grad(total, (0, 1)))(hidden, kernel))
  assert text.count("dot_general[") == 3


@pytest.mark.parametrize("given", [False, True], ids=["gspmd", "mesh"])
def test_linear_softmax_xent_on_eight_devices(given):
  mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("replica", "fsdp"))
  args = chunked_case()
  want = value_and_grads(chunked_objective, args, chunk=4)
  by_batch = PartitionSpec(("replica", "fsdp"))
  specs = (by_batch, PartitionSpec(), PartitionSpec(), by_batch, by_batch)
  placed = [
    jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs)
  ]
  got = value_and_grads(
    chunked_objective, placed, chunk=4, mesh=mesh if given else None
  )
  (_, (loss, _)), (grad_hidden, *_) = got
  # Every device works on its own examples: nothing was gathered for it.
  assert loss.sharding.spec[0] == ("replica", "fsdp")
  assert grad_hidden.sharding.spec[0] == ("replica", "fsdp")
  jax.tree.map(
    lambda w, g: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5),
    want,
    got,
  )


def test_linear_softmax_xent_needs_a_fraction_of_the_memory():
  args = chunked_case(batch=2, length=64, width=8, vocabulary=1000)
  all_logits_bytes = 2 * 64 * 1000 * 4

  def temporary_bytes(objective, **kw):
    fn = jax.grad(lambda *a: objective(*a, **kw)[0], argnums=(0, 1, 2))
    compiled = jax.jit(fn).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporary_bytes(plain_objective) > all_logits_bytes
  assert temporary_bytes(chunked_objective, chunk=4) < all_logits_bytes / 4


def test_linear_softmax_xent_gathers_and_reduces_once():
  mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("replica", "fsdp"))
  args = chunked_case(vocabulary=32)
  by_batch = NamedSharding(mesh, PartitionSpec(("replica", "fsdp")))
  whole = NamedSharding(mesh, PartitionSpec())
  split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))

  def collectives(mesh):
    """(in the main program, in loops)."""
    fn = jax.jit(
      jax.grad(lambda *a: chunked_objective(*a, chunk=2, mesh=mesh)[0], 1),
      in_shardings=(by_batch, split, whole, by_batch, by_batch),
      out_shardings=split,
    )
    where = {True: 0, False: 0}
    in_main = False
    for line in fn.lower(*args).compile().as_text().splitlines():
      if line and not line[0].isspace():
        in_main = line.startswith("ENTRY")
      where[in_main] += bool(re.search(r"(all-reduce|all-gather)\(", line))
    return where[True], where[False]

  assert collectives(mesh) == (2, 0)
  with jax.set_mesh(mesh):
    assert collectives(None) == (2, 0)
  # What it saves, so that this test is known to see it.
  assert collectives(None)[1] > 2
