"""The captioning task against plain numpy, microbatches and devices."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_losses
from jax.sharding import NamedSharding, PartitionSpec
from support import padding, processes

from bigtrain import sharding
from bigtrain.config import loading
from bigtrain.config.errors import ConfigError
from bigtrain.inputs.named_features import Features
from bigtrain.models import cappa
from bigtrain.objective import gradients
from bigtrain.reports import writers
from bigtrain.tasks import captioning as task
from configs import cap

B, L, V = 32, 8, 13
RNG = np.random.default_rng(0)
IMAGE = RNG.normal(size=(B, 4, 8, 1)).astype(np.float32)
# Captions have 0 to 8 tokens; the eos is 2.
LENGTHS = np.concatenate([[0, 8], RNG.integers(1, L + 1, B - 2)])
LABELS = np.where(
  np.arange(L) < LENGTHS[:, None], RNG.integers(2, V, (B, L)), 0
).astype(np.int32)


def make(**kw):
  model = cappa.Model(
    **{
      **dict(vocab_size=V, max_len=L, patch_size=4, width=8, depth=1),
      **dict(num_heads=2, mask_token=True, decoder_dropout=0.0),
      **kw,
    }
  )
  spec = jax.eval_shape(model.init, jax.random.key(0), IMAGE[:1], LABELS[:1])
  rng = np.random.default_rng(1)
  draw = lambda p: rng.normal(0, 0.5, p.shape).astype(np.float32)
  return model, jax.tree.map(draw, spec)


def batch(**changes):
  return {"image": IMAGE, "labels": LABELS, **changes}


@pytest.fixture(scope="module")
def model():
  return make()


@pytest.fixture(scope="module")
def log_probs(model):
  """Returns float64 [B, L, V] from the model's logits."""
  logits = jax.jit(model[0].apply)(model[1], IMAGE, LABELS)[0]
  logits = np.float64(logits)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def xent(log_probs, smoothing=0.0):
  picked = np.take_along_axis(log_probs, LABELS[..., None], -1)[..., 0]
  return -(1 - smoothing) * picked - smoothing * log_probs.mean(-1)


def run(model, data, **options):
  model, variables = model
  fn = functools.partial(task.loss_fn, model=model, train=False, **options)
  pairs, _ = jax.jit(fn)(variables, data, None)
  return {k: (float(s), float(w)) for k, (s, w) in pairs.items()}


def test_normalize_by_sentences_or_tokens(model, log_probs):
  weight = (LABELS != 0) * 1.0
  loss = (xent(log_probs) * weight).sum(1)
  actual = run(model, batch(), chunk=3)
  expected = (loss / np.maximum(LENGTHS, 1)).sum()
  assert actual["loss"] == pytest.approx((expected, B - 1), rel=1e-5)
  hits = ((log_probs.argmax(-1) == LABELS) * weight).sum()
  assert actual["token_accuracy"] == (hits, LENGTHS.sum())
  actual = run(model, batch(), normalize="tokens")
  assert actual["loss"] == pytest.approx((loss.sum(), LENGTHS.sum()), rel=1e-5)
  perplexity = jax.jit(task.predict_fns(model[0])["perplexity"])(
    model[1], batch()
  )
  assert actual["loss"] == pytest.approx(
    tuple(map(float, perplexity["loss"])), rel=1e-6
  )


def test_the_loss_of_the_recipe_is_that_of_big_vision(model, log_probs):
  """weighted_softmax_xent, with its targets of 1 - s and s / (V - 1)."""
  options = dict(cap.get_config("runlocal").loss, label_smoothing=0.2)
  V = log_probs.shape[-1]
  targets = np.where(np.eye(V)[LABELS] == 1, 0.8, 0.2 / (V - 1))
  weight = (LABELS != 0) * 1.0
  loss = (-(targets * log_probs).sum(-1) * weight).sum(1)
  captions = weight.sum(1) > 0
  expected = (loss[captions] / weight.sum(1)[captions]).mean()
  total, weight = run(model, batch(), **options)["loss"]
  assert total / weight == pytest.approx(expected, rel=1e-5)
  other = dict(options, label_smoothing_over="all")
  total, weight = run(model, batch(), **other)["loss"]
  assert total / weight != pytest.approx(expected, rel=1e-4)


def test_token_masks_and_example_masks(model, log_probs):
  masks = RNG.integers(0, 3, (B, L)).astype(np.float32)
  masks[5] = 0
  real = np.arange(B) % 3 != 1
  data = batch(label_masks=masks, _mask=real.astype(np.float32))
  weight = masks * (LABELS != 0) * real[:, None]
  loss = xent(log_probs, 0.2) * weight
  actual = run(model, data, normalize="tokens", label_smoothing=0.2)
  assert actual["loss"] == pytest.approx((loss.sum(), weight.sum()), rel=1e-5)
  actual = run(model, data, label_smoothing=0.2)
  total = weight.sum(1)
  expected = (loss.sum(1) / np.where(total, total, 1)).sum()
  assert actual["loss"] == pytest.approx(
    (expected, (total > 0).sum()), rel=1e-5
  )


def test_masked_tokens_and_images_change_nothing(model):
  """Tokens after the last one with a weight, and examples of weight 0."""
  used = np.minimum(LENGTHS, 5)
  masks = (np.arange(L) < used[:, None]).astype(np.float32)
  real = (np.arange(B) != 7).astype(np.float32)
  ids = RNG.integers(1, V, LABELS.shape)
  kept = (masks > 0) & (real > 0)[:, None]
  labels = np.where(kept | (LABELS == 0), LABELS, ids).astype(np.int32)
  image = np.where(real[:, None, None, None] > 0, IMAGE, -IMAGE)
  padding.assert_without_effect(
    functools.partial(task.loss_fn, model=model[0]),
    model[1],
    batch(label_masks=masks, _mask=real),
    dict(labels=labels, image=image),
  )


def test_non_finite_padding_has_no_effect(model):
  image = IMAGE.copy()
  image[3] = np.nan
  data = batch(image=image, _mask=(np.arange(B) != 3).astype(np.float32))
  for normalize in ("sentence", "tokens"):
    pairs = run(model, data, normalize=normalize)
    assert np.isfinite(pairs["loss"]).all()


def test_parallel_examples_depend_on_their_keys_only():
  keys = jax.random.split(jax.random.key(3), 2000)
  draw = jax.jit(lambda keys: task.parallel_examples(keys, 10, 0.75, 0.45))
  parallel, masked = map(np.asarray, draw(keys))
  assert parallel.mean() == pytest.approx(0.75, abs=0.04)
  assert set(masked.sum(1)) == {4}
  assert masked.mean(0) == pytest.approx(np.full(10, 0.4), abs=0.04)
  # An example's draw does not depend on its place in the batch.
  for actual, expected in zip(draw(jnp.roll(keys, 100)), (parallel, masked)):
    np.testing.assert_array_equal(actual, np.roll(expected, 100, axis=0))
  everything = task.parallel_examples(keys[:1], 10, 1.0, 1.0)
  assert everything[0].all() and everything[1] is None


def gradients_of(model, devices, microbatches, **options):
  """Returns (gradients, pairs) for a number of devices and microbatches."""
  mesh = sharding.make_mesh(1, devices, devices=jax.devices()[:devices])
  model, variables = model
  loss_fn = functools.partial(task.loss_fn, model=model, train=True, **options)
  with jax.set_mesh(mesh):
    by_example = NamedSharding(mesh, PartitionSpec(sharding.BATCH_AXES))

    def step(params, data):
      return gradients.make(
        loss_fn,
        trainable=jax.tree.map(lambda _: True, params),
        microbatches=microbatches,
        mesh=mesh,
      )({"params": params, "step": 0}, data)[:2]

    params = jax.device_put(
      variables["params"], NamedSharding(mesh, PartitionSpec())
    )
    grads, pairs = jax.jit(step)(params, jax.device_put(batch(), by_example))
    return jax.device_get((grads, pairs))


# In "parallel" some examples have half of their tokens masked. The draw must
# not depend on an example's microbatch.
CASES = {
  "parallel": dict(masked_pred_prob=0.6, masking_ratio=0.5, chunk=4),
  "in order": dict(normalize="tokens", chunk=3),
}
SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "cuts"),
  [
    ("parallel", [(1, 2), (8, 4)]),
    ("in order", [(1, 4), (8, 2)]),
  ],
)
def test_microbatches_and_devices_change_rounding_only(model, name, cuts):
  options = CASES[name]
  expected = gradients_of(model, 1, 1, **options)
  for devices, microbatches in cuts:
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5),
      gradients_of(model, devices, microbatches, **options),
      expected,
    )


@pytest.mark.slow
@pytest.mark.golden
def test_golden_losses(tmp_path):
  """Compares the first steps of digits_captions with recorded ones.

  After an intended change, run tests/golden/make_losses.py; see its docstring.
  """
  # One loop over the blocks compiles in half of the time, to the same losses.
  model = loading.load("configs/digits_captions.py:runlocal")["model"]
  actual = make_losses.make(
    str(tmp_path),
    "digits_captions",
    model={**model, "scan": True},
    mesh=dict(replica=2, fsdp=4),
    compile_cache=False,
  )
  file = make_losses.FILES["digits_captions"]
  golden = json.loads(file.read_text())
  np.testing.assert_allclose(actual["loss"], golden["loss"], rtol=1e-5)
  np.testing.assert_allclose(
    actual["grad_norm"], golden["grad_norm"], rtol=1e-3
  )


@pytest.mark.results
def test_digits_captions_reaches_its_result(tmp_path):
  command = processes.main_command("configs/digits_captions.py", tmp_path)
  ended = processes.run(command, timeout=1200)
  assert ended.returncode == 0, ended.stderr[-3000:]
  (row,) = [r for r in writers.read_rows(str(tmp_path)) if "val/acc" in r]
  assert row["val/acc"] >= 0.90
  assert row["captions/exact"] >= 0.90


def test_logits_of_all_positions_never_exist(model):
  model, variables = model
  fn = functools.partial(task.loss_fn, model=model, train=True, chunk=2)
  loss = lambda v, data: fn(v, data, jax.random.key(0))[0]["loss"][0]
  text = jax.jit(jax.grad(loss)).lower(variables, batch()).compile().as_text()
  assert f"f32[{B},2,{V}]" in text
  for shape in (f"[{B},{L},{V}]", f"[{B * L},{V}]", f"[{L},{B},{V}]"):
    assert shape not in text


CLASSES = np.where(
  np.arange(L) < RNG.integers(1, L + 1, (11, 1)),
  RNG.integers(2, V, (11, L)),
  0,
).astype(np.int32)


def test_score_is_the_log_likelihood_of_every_class(model):
  model, variables = model
  data = {"image": IMAGE[:8], "class_tokens": CLASSES}
  score = jax.jit(task.predict_fns(model)["score"])(variables, data)
  assert score.shape == (8, 11)

  def one(tokens):
    text = jnp.broadcast_to(tokens, (8, L))
    logits = model.apply(variables, IMAGE[:8], text)[0]
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, text[..., None], -1)[..., 0]
    return jnp.sum(picked * (text != 0), axis=1)

  expected = jax.jit(lambda tokens: jax.lax.map(one, tokens))(CLASSES).T
  np.testing.assert_allclose(score, expected, rtol=1e-5, atol=1e-5)
  mesh = sharding.make_mesh()
  with jax.set_mesh(mesh):
    layout = NamedSharding(mesh, PartitionSpec(sharding.BATCH_AXES))
    image = jax.device_put(IMAGE[:8], layout)
    fn = functools.partial(task.score, model=model, class_chunk=3, chunk=5)
    score = jax.jit(fn)(variables, {**data, "image": image})
  np.testing.assert_allclose(score, expected, rtol=1e-5, atol=1e-5)


def test_the_memory_of_score_does_not_grow_with_the_classes(model):
  model, variables = model
  image = jax.ShapeDtypeStruct((64, 4, 8, 1), jnp.float32)

  def temporary_bytes(num_classes):
    tokens = jax.ShapeDtypeStruct((num_classes, L), jnp.int32)
    data = {"image": image, "class_tokens": tokens}
    fn = jax.jit(task.predict_fns(model)["score"]).lower(variables, data)
    return fn.compile().memory_analysis().temp_size_in_bytes

  few, many = temporary_bytes(40), temporary_bytes(1000)
  results = 64 * 1000 * 4  # The scores, which XLA transposes once.
  assert many - few < 2.5 * results
  # Hidden states of one layer for all classes at once.
  assert many - few < 64 * 1000 * L * 8 * 4 / 20


def test_greedy_captions_match_decoding_without_a_cache(model):
  model, variables = model
  caption = functools.partial(
    task.predict_fns(model)["caption"], eos_id=2, pad_id=0
  )
  data = {"image": IMAGE, "_mask": (np.arange(B) != 4).astype(np.float32)}
  actual = jax.jit(caption)(variables, data)
  apply = jax.jit(lambda text: model.apply(variables, IMAGE, text)[0])
  text = np.zeros((B, L), np.int32)
  ended = np.zeros(B, bool)
  for i in range(L):
    best = np.asarray(apply(text))[:, i].argmax(-1)
    text[:, i] = np.where(ended, 0, best)
    ended |= best == 2
  assert 0 < ended.sum() < B  # Some captions end early, some do not.
  text[4] = 0
  np.testing.assert_array_equal(actual, text)


@pytest.mark.slow
def test_more_beams_find_likelier_captions(model):
  model, variables = model
  caption = functools.partial(
    task.predict_fns(model)["caption"], eos_id=2, max_len=5
  )
  data = {"image": IMAGE}
  wide = jax.jit(functools.partial(caption, method="beam", num_beams=4))
  captions = [jax.jit(caption)(variables, data), wide(variables, data)]
  likelihoods = []
  for text in captions:
    assert text.shape == (B, 5)
    log_probs = jax.nn.log_softmax(
      jax.jit(model.apply)(variables, IMAGE, text)[0]
    )
    picked = np.take_along_axis(
      np.asarray(log_probs), np.asarray(text)[..., None], -1
    )
    likelihoods.append((picked[..., 0] * (np.asarray(text) != 0)).sum(1))
  gain = likelihoods[1] - likelihoods[0]
  assert gain.mean() > 0 and (gain > -1e-4).mean() > 0.8


@pytest.mark.slow
def test_a_sample_depends_on_image_and_seed_only(model):
  model, variables = model
  caption = functools.partial(
    task.predict_fns(model)["caption"], eos_id=2, method="sample", top_k=8
  )
  sample = jax.jit(caption)
  samples = np.asarray(sample(variables, {"image": IMAGE}))
  flipped = np.asarray(sample(variables, {"image": IMAGE[::-1]}))
  np.testing.assert_array_equal(flipped[::-1], samples)
  assert len(np.unique(samples, axis=0)) > B / 2
  other = jax.jit(functools.partial(caption, seed=1))(
    variables, {"image": IMAGE}
  )
  assert (np.asarray(other) != samples).any(1).mean() > 0.5


def test_features_of_the_encoder(model):
  model, variables = model
  fn = task.predict_fns(model)["enc_rep"]
  both = lambda data: (
    fn(variables, data),
    fn(variables, data, layer="encoded"),
  )
  pooled, patches = jax.jit(both)({"image": IMAGE})
  assert patches.shape == (B, 2, 8)
  np.testing.assert_allclose(pooled, patches.mean(1), rtol=1e-5, atol=1e-5)
  with pytest.raises(ConfigError, match="Did you mean 'encoded'"):
    fn(variables, {"image": IMAGE}, layer="encodd")


@pytest.mark.slow
def test_dropout_is_on_in_training_only():
  model, variables = make(decoder_dropout=0.5)
  fn = functools.partial(task.loss_fn, model=model)

  def losses(variables, data):
    run = lambda seed, train: fn(
      variables, data, jax.random.key(seed), train=train
    )[0]["loss"][0]
    return run(0, True), run(1, True), run(0, False), run(1, False)

  one, other, *without = jax.jit(losses)(variables, batch())
  assert one != other
  assert without[0] == without[1]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(normalize="token"), "loss.normalize: .*Did you mean 'tokens'"),
    (
      dict(masked_pred_prob=1.2),
      "masked_pred_prob: .* at least 0 and at most 1, got",
    ),
    (
      dict(masked_pred_prob=0.5, masking_ratio=0.1),
      "1 to 8 positions, .*masks 0",
    ),
    (
      dict(masked_pred_prob=0.5, masking_ratio=1.2),
      "1 to 8 positions, .*masks 9",
    ),
  ],
)
def test_invalid_loss_options(model, options, message):
  with pytest.raises(ConfigError, match=message):
    task.loss_fn(
      model[1],
      batch(),
      jax.random.key(0),
      model=model[0],
      train=True,
      **options,
    )


def test_invalid_batches_and_predict_options(model):
  model, variables = model
  fns = task.predict_fns(model)
  with pytest.raises(ConfigError, match="no feature 'labels'"):
    data = {"image": IMAGE, "label": LABELS}
    task.inputs(Features(data, "config.input"))
  for kw, message in (
    (dict(method="bean"), "Did you mean 'beam'"),
    (dict(max_len=9), r"at most 8 \(config.model.max_len\), got 9"),
  ):
    with pytest.raises(ConfigError, match=message):
      fns["caption"](variables, {"image": IMAGE}, **kw)
  plain, plain_variables = make(mask_token=False)
  with pytest.raises(ConfigError, match="config.model.mask_token"):
    task.loss_fn(
      plain_variables,
      batch(),
      jax.random.key(0),
      model=plain,
      train=True,
      masked_pred_prob=0.5,
    )
  assert task.vocab_sizes(model) == {"labels": V}
