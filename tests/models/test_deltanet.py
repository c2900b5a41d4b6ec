"""Decoders with Gated DeltaNet: on meshes, packed, and with a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder
from bigtrain.models.layers import delta_rule_kernel
from bigtrain.tasks import language_modeling

B, L, V = 8, 70, 40  # No chunk and no device divides L.
KINDS = {
  "linear": dict(
    deltanet=dict(
      num_heads=4,
      num_key_heads=2,
      key_dim=8,
      value_dim=6,
      negative_eigenvalues=True,
    )
  ),
  "full": {},
}
EXPERTS = dict(
  num_experts=4, top_k=2, mlp_dim=16, shared_dim=24, shared_gate=True
)


def model_of(**changes):
  return decoder.Model(
    **dict(
      variant="qwen3_5_mu",
      vocab_size=V,
      kinds=KINDS,
      layers=("linear", "full"),
      depth=4,
      init_std=0.2,
      scan=True,
    )
    | changes
  )


def tokens(rows=B, length=L):
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.integers(1, V, (rows, length)), jnp.int32)


@functools.cache
def variables(experts=False):
  model = model_of(moe=EXPERTS if experts else None)
  drawn = jax.jit(model.init)(jax.random.key(0), tokens(1, 8))
  rng = np.random.default_rng(1)
  # Scales and biases are equal at first, which would hide errors.
  noisy = lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 0.1, x.dtype)
  # Of no mesh.
  return jax.device_get(jax.tree.map(noisy, drawn))


def assert_close(actual, expected, share=3e-5):
  atol = share * np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def documents():
  """Segments of three documents and padding in each row."""
  rng = np.random.default_rng(2)
  rows = []
  for _ in range(B):
    ends = np.sort(rng.choice(np.arange(1, L), 3, replace=False))
    numbers = np.searchsorted(ends, np.arange(L), side="right") + 1
    rows.append(np.where(numbers > 3, 0, numbers))
  return np.asarray(rows, np.int32)


def loss_and_grads(model, packed, **mesh):
  size = int(np.prod(list(mesh.values())))
  segments = jnp.asarray(documents()) if packed else None

  def loss(params, tokens, segments):
    logits, _ = model.apply({"params": params}, tokens, segments=segments)
    log_p = jax.nn.log_softmax(logits[:, :-1])
    picked = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    weights = 1.0 if segments is None else segments[:, 1:] > 0
    return -jnp.mean(picked * weights)

  devices = sharding.make_mesh(**mesh, devices=jax.devices()[:size])
  with jax.set_mesh(devices):
    batch = jax.device_put((tokens(), segments), sharding.batch(devices))
    grad = jax.jit(jax.value_and_grad(loss))
    return jax.device_get(grad(variables()["params"], *batch))


@functools.cache
def on_one_device(packed):
  return loss_and_grads(model_of(), packed, fsdp=1)


MESHES = {
  "tensor, sequence": (dict(fsdp=2, tensor=2, sequence=2), True),
  "sequence": (dict(fsdp=2, sequence=4), False),
  "tensor that divides no heads": (dict(fsdp=2, tensor=4), True),
  "pipeline": (dict(fsdp=2, pipeline=2, sequence=2), True),
  "pipeline, tensor": (dict(fsdp=2, pipeline=2, tensor=2), False),
}


def assert_same(actual, expected, share):
  """Compares the loss and gradients of two runs."""
  assert actual[0] == pytest.approx(expected[0], rel=3e-5)
  largest = max(np.abs(x).max() for x in jax.tree.leaves(expected[1]))
  old = dict(trees.flatten_with_names(expected[1]))
  for name, new in trees.flatten_with_names(actual[1]):
    scale = max(np.abs(old[name]).max(), 1e-2 * largest)
    np.testing.assert_allclose(
      new, old[name], rtol=0, atol=share * scale, err_msg=name
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_has_the_gradients_of_one_device(name):
  """With rematerialisation there, and without it here."""
  mesh, packed = MESHES[name]
  remat = model_of(remat_policy="nothing_saveable")
  actual = loss_and_grads(remat, packed, **mesh)
  assert_same(actual, on_one_device(packed), 1e-4)


@pytest.fixture
def interpreted_kernel(monkeypatch):
  """As on a TPU, with chunks that are quick to interpret."""
  monkeypatch.setattr(delta_rule_kernel, "_INTERPRET", True)
  monkeypatch.setattr(delta_rule_kernel, "_CHUNK", 16)
  monkeypatch.setattr(sharding, "device", lambda: ("tpu", "TPU v5"))


def with_kernel(**changes):
  """The model, whose layers of attention have no kernel."""
  rule = KINDS["linear"]["deltanet"] | dict(backend="pallas")
  kinds = KINDS | {"linear": dict(deltanet=rule)}
  return model_of(**dict(kinds=kinds, attention="xla") | changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_the_kernel_on_any_mesh(name, interpreted_kernel):
  mesh, packed = MESHES[name]
  remat = with_kernel(remat_policy="nothing_saveable")
  actual = loss_and_grads(remat, packed, **mesh)
  assert_same(actual, on_one_device(packed), 1e-4)


@pytest.mark.slow
def test_the_kernel_reads_a_prompt(interpreted_kernel):
  model, text = with_kernel(), tokens(2)
  whole, _ = jax.jit(model_of().apply)(variables(), text)
  out = {"cache": model.init_cache(2, L)}
  for start, end in ((0, 40), (40, 69), (69, L)):
    call = jax.jit(functools.partial(model.apply, start=start))
    part = text[:, start:end]
    logits, out = call(variables(), part, cache=out["cache"])
    assert_close(logits, whole[:, start:end])


def test_packed_documents_give_the_logits_of_single_ones():
  apply = jax.jit(model_of().apply)
  segments = documents()
  packed = np.asarray(apply(variables(), tokens(), segments=segments)[0])
  rows = np.concatenate([tokens(), np.zeros((B, L), np.int32)], axis=1)
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


@pytest.mark.slow
def test_generation_reads_each_token_once():
  """Prompts of different lengths, read together and then by steps."""
  model = model_of(moe=EXPERTS)
  weights = variables(experts=True)
  text = tokens(3)
  whole, _ = jax.jit(model.apply)(weights, text)
  lengths = np.asarray([40, 66, 1])
  real = np.arange(66) < lengths[:, None]
  cache = model.init_cache(3, L)
  read = jax.jit(lambda t, c: model.apply(weights, t, cache=c, real=real))
  step = jax.jit(lambda t, c, i: model.apply(weights, t, cache=c, start=i))
  logits, out = read(jnp.where(real, text[:, :66], 0), cache)
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
  for start, end in ((0, 30), (30, 31), (31, L)):
    call = jax.jit(functools.partial(model.apply, start=start))
    part = text[:, start:end]
    logits, out = call(variables(), part, cache=out["cache"])
    assert_close(logits, whole[:, start:end])


def test_a_beam_search_copies_states():
  model = model_of()
  batch = {"tokens": np.asarray(tokens(2, 12))}
  generate = functools.partial(
    language_modeling.generate, variables(), batch, model=model, max_new=6
  )
  one, best = jax.jit(lambda: (generate(), generate(num_beams=3)))()
  text = lambda new: np.concatenate([batch["tokens"], new], axis=1)

  def log_likelihood(new):
    logits, _ = jax.jit(model.apply)(variables(), text(new))
    log_p = jax.nn.log_softmax(logits)[:, 11:-1]
    return jnp.sum(jnp.take_along_axis(log_p, new[..., None], -1), axis=(1, 2))

  assert np.all(log_likelihood(best) >= log_likelihood(one) - 1e-4)


def test_layers_of_bfloat16_are_close():
  expected, _ = jax.jit(model_of().apply)(variables(), tokens(2))
  half = model_of(dtype="bfloat16")
  actual, _ = jax.jit(half.apply)(variables(), tokens(2))
  assert actual.dtype == jnp.float32
  error = np.abs(actual - expected)
  assert error.max() < 0.15 * np.abs(expected).max()
  assert error.mean() < 0.02 * np.abs(expected).max()


WRONG = {
  "heads": (
    dict(deltanet=dict(num_heads=3, num_key_heads=2)),
    r"deltanet\.num_key_heads: 2 does not divide num_heads=3",
  ),
  "sizes": (
    dict(kinds={"a": dict(deltanet=dict(num_heads=0))}, layers=("a",)),
    r"config\.model\.kinds\.a\.deltanet\.num_heads.*at least 1",
  ),
  "names": (
    dict(deltanet=dict(num_heads=2, key_heads=1)),
    r"deltanet\.key_heads.*num_key_heads",
  ),
  "backend": (
    dict(deltanet=dict(num_heads=2, backend="palas")),
    r"deltanet\.backend: unknown 'palas'.*pallas",
  ),
  "norm": (
    dict(kinds={"a": dict(norm_at="before")}, layers=("a",)),
    r"config\.model\.kinds\.a\.norm_at: unknown 'before'.*pre",
  ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_errors(case):
  changes, message = WRONG[case]
  with pytest.raises(ConfigError, match=message):
    model_of(**dict(kinds={}, layers=()) | changes)


def test_a_prefix_is_refused():
  with pytest.raises(ConfigError, match="prefix: .* config.model.deltanet"):
    model_of().init(jax.random.key(0), tokens(1), prefix=jnp.ones(1))
