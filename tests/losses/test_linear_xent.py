"""Cross-entropy from hidden states against the plain computation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import cases, float16

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.losses import cross_entropy, linear_xent


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


@pytest.mark.parametrize(
  "chunk", cases.quick([None, 0, 1, 4, 5, 10, 64], None, 1, 4)
)
def test_losses_and_gradients_for_any_chunk(chunk):
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
def test_sum_of_kernel_gradients_by_columns(columns, monkeypatch):
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


def test_softcap():
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


def test_bfloat16_operands_without_bias():
  hidden, kernel, _, targets, _ = chunked_case()
  # bfloat16 represents these operands exactly, so only the order of sums
  # differs.
  hidden, kernel = np.round(hidden * 4) / 4, np.round(kernel * 4) / 4
  losses = linear_xent.linear_softmax_xent(
    hidden, kernel, targets, chunk=4, dtype=jnp.bfloat16
  )
  want = cross_entropy.softmax_xent(jnp.asarray(hidden @ kernel), targets)
  assert losses.loss_BL.dtype == jnp.float32
  np.testing.assert_allclose(losses.loss_BL, want, rtol=1e-5, atol=1e-5)
  assert float(losses.total) == pytest.approx(float(want.sum()), rel=1e-5)


def test_invalid_chunks_are_errors():
  hidden, kernel, _, targets, _ = chunked_case()
  message = r"config.loss.chunk: expected a whole number at least 0"
  for chunk in (-1, "all", 2.0):
    with pytest.raises(ConfigError, match=message):
      linear_xent.linear_softmax_xent(hidden, kernel, targets, chunk=chunk)


@pytest.mark.parametrize("mesh", [False, True])
def test_tied_bfloat16_heads_train_on_one_cpu_device(mesh):
  """On CPUs with bfloat16 instructions XLA can fail with "DotThunk"."""
  hidden, kernel, bias, targets, weights = chunked_case()
  mesh = sharding.make_mesh(devices=jax.devices()[:1]) if mesh else None

  def objective(hidden, embedding, bias, targets, weights, dtype):
    return linear_xent.linear_softmax_xent(
      hidden,
      embedding.T,
      targets,
      weights,
      bias_V=bias,
      chunk=0,
      dtype=dtype,
      mesh=mesh,
    ).total, None

  args = (hidden, kernel.T, bias, targets, weights)
  _, want = value_and_grads(objective, args, dtype=jnp.float32)
  _, got = value_and_grads(objective, args, dtype=jnp.bfloat16)
  jax.tree.map(
    lambda w, g: np.testing.assert_allclose(g, w, rtol=0.1, atol=0.1), want, got
  )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_gradients_do_not_underflow(dtype):
  if dtype == "float16":
    float16.require()
  hidden, kernel, bias, targets, weights = chunked_case(vocabulary=300)
  bias = bias - 14 * (np.arange(300) % 2)  # Probabilities of about 1e-8.
  args = (hidden / 8, kernel / 8, bias, targets * 2 % 300, weights)
  _, (*_, want) = value_and_grads(plain_objective, args)
  _, (hidden_grad, kernel_grad, got) = value_and_grads(
    lambda hidden, *a, **kw: chunked_objective(
      hidden.astype(dtype), *a, chunk=4, **kw
    ),
    args,
  )
  assert 0 < np.abs(want).min() < 1e-5
  np.testing.assert_allclose(got, want, rtol=0.05)
  assert kernel_grad.dtype == hidden_grad.dtype == jnp.float32
  assert np.all(np.any(np.asarray(kernel_grad) != 0, axis=0))


def test_tokens_of_weight_0_have_no_effect():
  hidden, kernel, bias, targets, weights = chunked_case()
  weights[:, 7:] = 0
  args = (hidden, kernel, bias, targets, weights)
  want = value_and_grads(chunked_objective, args, chunk=4)
  targets = targets.copy()
  targets[:, 8:] = -1  # Their loss is NaN.
  got = value_and_grads(
    chunked_objective, (hidden, kernel, bias, targets, weights), chunk=4
  )
  jax.tree.map(np.testing.assert_array_equal, want[0][0], got[0][0])
  jax.tree.map(np.testing.assert_array_equal, want[1], got[1])


@pytest.mark.parametrize("number", [0, 3, 16, 40])
@pytest.mark.parametrize("over", [False, True], ids=["one", "eight"])
def test_skipping_tokens_of_weight_0_changes_nothing(number, over):
  mesh = None
  if over:
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("replica", "fsdp"))
  hidden, kernel, bias, targets, weights = chunked_case(vocabulary=32)
  # Anywhere in the batch, so devices have different numbers of them.
  skipped = np.random.default_rng(2).permutation(80)[number:]
  np.put(weights, skipped, 0)
  np.put(targets, skipped, -1)  # Their loss is NaN.
  args = (hidden, kernel, bias, targets, weights)
  kw = dict(chunk=2, z_loss=1e-3, mesh=mesh)
  want = value_and_grads(chunked_objective, args, **kw)
  got = value_and_grads(chunked_objective, args, only_weighted=True, **kw)
  (total, by_token), grads = want
  by_token = [np.where(weights == 0, 0, x) for x in by_token]
  jax.tree.map(
    lambda w, g: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5),
    ((total, tuple(by_token)), grads),
    got,
  )


def test_skipped_tokens_cost_no_chunks():
  hidden, kernel, bias, targets, weights = chunked_case()
  weights[:, 2:] = 0
  seen = []
  softmax_xent = cross_entropy.softmax_xent

  def counted(logits, *args, **kw):
    jax.debug.callback(lambda: seen.append(logits.shape))
    return softmax_xent(logits, *args, **kw)

  args = (hidden, kernel, bias, targets, weights)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cross_entropy, "softmax_xent", counted)
    jax.block_until_ready(
      value_and_grads(chunked_objective, args, chunk=2, only_weighted=True)
    )
    jax.effects_barrier()
  assert seen == [(1, 16, 31)]  # 16 of 80 tokens.


def test_the_first_of_equal_logits_is_the_largest():
  logits = jnp.asarray([[1.0, 2, 2, 0], [0, 0, 0, 0], [3, 5, 1, 5]])
  hidden = jnp.eye(3)[None]
  for target in range(4):
    targets = jnp.full((1, 3), target)
    losses = linear_xent.linear_softmax_xent(hidden, logits, targets)
    want = jnp.argmax(logits, axis=-1) == target
    np.testing.assert_array_equal(losses.correct_BL[0], want)
    bad = logits.at[:, 2].set(jnp.nan)
    losses = linear_xent.linear_softmax_xent(hidden, bad, targets)
    assert not losses.correct_BL.any()


def test_the_default_chunk_shrinks_with_the_vocabulary():
  most = 2**26
  for batch_size in (1, 8, 64):
    for length in (1, 64, 1000):
      for vocab_size in (259, 32_000, 262_144):
        chunk = linear_xent.default_chunk(batch_size, length, vocab_size)
        assert 1 <= chunk <= length
        logits = batch_size * vocab_size * chunk
        assert chunk == 1 or logits <= most
        # Fewer chunks would be too large, and chunks are of equal size.
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
def test_eight_devices_compute_what_one_does(given):
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
  # The losses stay split over the batch: each device keeps its examples.
  assert loss.sharding.spec[0] == ("replica", "fsdp")
  assert grad_hidden.sharding.spec[0] == ("replica", "fsdp")
  jax.tree.map(
    lambda w, g: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5),
    want,
    got,
  )


def test_temporary_memory_is_that_of_a_chunk():
  args = chunked_case(batch=2, length=64, width=8, vocabulary=1000)
  all_logits_bytes = 2 * 64 * 1000 * 4

  def temporary_bytes(objective, **kw):
    fn = jax.grad(lambda *a: objective(*a, **kw)[0], argnums=(0, 1, 2))
    compiled = jax.jit(fn).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporary_bytes(plain_objective) > all_logits_bytes
  assert temporary_bytes(chunked_objective, chunk=4) < all_logits_bytes / 4


def test_kernels_are_gathered_and_reduced_once():
  mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("replica", "fsdp"))
  args = chunked_case(vocabulary=32)
  by_batch = NamedSharding(mesh, PartitionSpec(("replica", "fsdp")))
  whole = NamedSharding(mesh, PartitionSpec())
  split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))

  def collectives(mesh):
    """Returns the number of (collectives in the main program, in loops)."""
    fn = jax.jit(
      jax.grad(lambda *a: chunked_objective(*a, chunk=2, mesh=mesh)[0], 1),
      in_shardings=(by_batch, split, whole, by_batch, by_batch),
      out_shardings=split,
    )
    counts = {True: 0, False: 0}
    in_main = False
    for line in fn.lower(*args).compile().as_text().splitlines():
      if line and not line[0].isspace():
        in_main = line.startswith("ENTRY")
      counts[in_main] += bool(
        re.search(r"(all-reduce|all-gather|reduce-scatter)\(", line)
      )
    return counts[True], counts[False]

  # A gather, and for the gradient a scatter over fsdp and a sum over replica.
  assert collectives(mesh) == (3, 0)
  with jax.set_mesh(mesh):
    assert collectives(None) == (3, 0)
  # Without a mesh XLA gathers in the loop, which shows that the count works.
  assert collectives(None)[1] > 3


@pytest.mark.parametrize(
  "vocabulary, length",
  [
    (32, 12),
    (31, 12),
    pytest.param(32, 10, marks=pytest.mark.slow),
    pytest.param(31, 10, marks=pytest.mark.slow),
  ],
  ids=["classes", "positions", "classes_odd", "neither"],
)
def test_a_vocabulary_over_tensor_gives_the_same_losses(vocabulary, length):
  args = chunked_case(vocabulary=vocabulary, length=length)
  kw = dict(
    label_smoothing=0.1,
    label_smoothing_over="others",
    z_loss=1e-3,
    softcap=3.0,
    chunk=5,
  )
  want = value_and_grads(chunked_objective, args, **kw)
  mesh = sharding.make_mesh(fsdp=2, tensor=4)
  by_batch = sharding.batch(mesh)
  of_kernel, of_bias = [sharding.replicated(mesh)] * 2
  if vocabulary == 32:
    of_kernel = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    of_bias = NamedSharding(mesh, PartitionSpec("tensor"))
  places = (by_batch, of_kernel, of_bias, by_batch, by_batch)
  placed = [jax.device_put(*pair) for pair in zip(args, places)]
  with jax.set_mesh(mesh):
    got = value_and_grads(chunked_objective, placed, **kw)
    total = lambda *a: chunked_objective(*a, **kw)[0]
    text = jax.jit(jax.grad(total)).lower(*placed).compile().as_text()
  jax.tree.map(
    lambda w, g: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5),
    want,
    got,
  )
  # Hidden states are gathered, and the kernel over fsdp, but no logits.
  if vocabulary == 32:
    gathers = re.findall(r"f32\[([\d,]+)\]\S* all-gather\(", text)
    assert gathers and not any(g.endswith(",32") for g in gathers)


def test_invalid_targets_give_nan_under_any_mesh():
  hidden, kernel, _, targets, _ = chunked_case(vocabulary=32)
  targets[0, 0], targets[1, 1] = -1, 32
  with jax.set_mesh(sharding.make_mesh(fsdp=1, tensor=8)):
    losses = jax.jit(linear_xent.linear_softmax_xent)(hidden, kernel, targets)
  bad = np.isnan(losses.loss_BL)
  assert bad[0, 0] and bad[1, 1] and bad.sum() == 2
