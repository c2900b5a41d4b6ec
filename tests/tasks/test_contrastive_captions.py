"""Contrastive captioning: microbatches, devices, padding and evaluators."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import padding
from tiny import evaluating

from bigtrain import sharding
from bigtrain.config import errors
from bigtrain.config.errors import ConfigError
from bigtrain.models import coca
from bigtrain.objective import gradients
from bigtrain.tasks import contrastive as task

B, L, V = 16, 6, 13
RNG = np.random.default_rng(0)
LENGTHS = np.concatenate([[0, L], RNG.integers(1, L + 1, B - 2)])
BATCH = {
  "image": RNG.normal(size=(B, 4, 8, 1)).astype(np.float32),
  "labels": np.where(
    np.arange(L) < LENGTHS[:, None], RNG.integers(1, V, (B, L)), 0
  ).astype(np.int32),
  "_mask": (np.arange(B) != 5).astype(np.float32),
}


OPTIONS = dict(kind="softmax", caption_weight=2.0)


@pytest.fixture(scope="module")
def model():
  sizes = dict(patch_size=4, width=8, depth=1, mlp_dim=8, num_heads=2)
  model = coca.Model(V, L, num_queries=3, **sizes)
  spec = jax.eval_shape(model.init, jax.random.key(0), *task_inputs(1))
  rng = np.random.default_rng(1)
  draw = lambda p: rng.normal(0, 0.5, p.shape).astype(np.float32)
  return model, jax.tree.map(draw, spec)


def task_inputs(rows):
  return BATCH["image"][:rows], BATCH["labels"][:rows]


def test_the_loss_is_the_sum_of_both_terms_as_the_paper_defines_them(model):
  model, variables = model
  image, text, out = jax.jit(model.apply)(variables, *task_inputs(B))
  real = BATCH["_mask"] > 0
  logits = np.float64(out["states"].logits())
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  picked = np.take_along_axis(log_probs, BATCH["labels"][..., None], -1)[..., 0]
  tokens = (BATCH["labels"] != 0) & real[:, None]
  scores = np.float64(out["t"] * (image @ text.T))[real][:, real]
  normalisers = [np.log(np.exp(scores).sum(axis)) for axis in (0, 1)]
  pairs = np.mean(normalisers) - np.diag(scores).mean()
  for caption_weight in (2.0, 0.5):
    options = dict(kind="softmax", caption_weight=caption_weight)
    loss = functools.partial(task.loss_fn, model=model, train=False, **options)
    result, _ = jax.jit(loss)(variables, BATCH, None)
    expected = pairs - caption_weight * picked[tokens].mean()
    total, weight = result["loss"]
    assert weight == real.sum()
    assert total / weight == pytest.approx(expected, rel=1e-5)
  hits = (logits.argmax(-1) == BATCH["labels"])[tokens].sum()
  assert result["token_accuracy"] == (hits, tokens.sum())
  assert result["caption_loss"][0] == pytest.approx(
    -picked[tokens].sum(), rel=1e-5
  )


def test_padding_has_no_effect(model):
  model, variables = model
  other = np.where(BATCH["_mask"] > 0, 1, -1)
  padding.assert_without_effect(
    functools.partial(task.loss_fn, model=model, **OPTIONS),
    variables,
    BATCH,
    dict(
      image=BATCH["image"] * other[:, None, None, None],
      labels=np.where(other[:, None] > 0, BATCH["labels"], 3),
    ),
  )


def gradients_of(model, mesh_sizes, microbatches):
  """Returns (gradients, pairs) of a training step."""
  model, variables = model
  devices = jax.devices()[: np.prod(mesh_sizes)]
  mesh = sharding.make_mesh(*mesh_sizes, devices=devices)
  params, options = variables["params"], dict(chunk=6, **OPTIONS)
  loss_fn = functools.partial(task.loss_fn, model=model, train=True, **options)

  @jax.jit
  def fn(params, batch):
    return gradients.make(
      loss_fn,
      trainable=jax.tree.map(lambda _: True, params),
      microbatches=microbatches,
      mesh=mesh,
      two_pass=gradients.two_pass_loss(task, model, options),
    )({"params": params, "step": 0}, batch)[:2]

  with jax.set_mesh(mesh):
    batch = jax.device_put(BATCH, sharding.batch(mesh))
    params = jax.device_put(params, sharding.replicated(mesh))
    return jax.device_get(fn(params, batch))


@pytest.mark.slow
def test_microbatches_and_devices_change_rounding_only(model):
  expected = gradients_of(model, (1, 1), 1)
  for mesh_sizes, microbatches in (((1, 1), 4), ((2, 4), 2)):
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5),
      gradients_of(model, mesh_sizes, microbatches),
      expected,
    )


@pytest.mark.slow
def test_evaluators_of_images_and_texts_take_its_predictions(model):
  """Zero-shot classes, retrieval, likelihoods, captions and features."""
  model, variables = model
  fns = task.predict_fns(model)
  mesh = sharding.make_mesh(2, 4)
  context = evaluating.context(mesh=mesh, batch_size=8)
  columns = {k: BATCH[k] for k in ("image", "labels")}
  data = dict(type="arrays", arrays=columns | {"label": np.arange(B) % 3})
  build = lambda kind, fn, **options: evaluating.build(
    kind, fns[fn], context, data=data, **options
  ).run(variables, 1)
  # The bytes of these names are below the size of the vocabulary.
  classes = dict(
    class_names=["\x01", "\x02\x03", "\x04"],
    pp_text=f"tokenize('bytes',max_len={L})",
  )
  zero_shot = build("zeroshot", "embed", **classes)
  z = jax.jit(fns["image"])(variables, columns)
  ids = np.zeros((3, L), np.int32)
  for row, name in zip(ids, classes["class_names"]):
    row[: len(name) + 1] = [*(ord(c) + 3 for c in name), 2]
  text = jax.jit(fns["text"])(variables, dict(labels=ids))
  hits = (z @ text.T).argmax(1) == np.arange(B) % 3
  assert zero_shot["acc"] == pytest.approx(hits.mean())
  assert 0 <= build("scoring", "score", **classes)["acc"] <= 1
  assert 0 <= build("retrieval", "embed")["img2txt_recall@5"] <= 1
  assert build("perplexity", "perplexity")["perplexity"] > 1


def test_wrong_weights_of_captions_are_errors():
  key = "config.loss.caption_weight"
  with pytest.raises(ConfigError, match=f"{key}: expected a number at least 0"):
    errors.check_number(key, -1.0, **task.LIMITS["caption_weight"])
  z = dict(image=jnp.ones((B, 2)), text=jnp.ones((B, 2)))
  loss = functools.partial(task.embeddings_loss_fn, dict(t=jnp.ones(1)), z)
  message = f"{key}=2.0: expected a model that writes captions"
  with pytest.raises(ConfigError, match=message):
    loss(BATCH, kind="softmax", caption_weight=2.0)
