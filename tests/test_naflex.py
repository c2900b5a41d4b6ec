"""NaFlex: images of many shapes, in sequences whose length a step draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.datasets
import tensorflow as tf
import tiny
from support.array_inputs import assert_equal, fetch

from bigtrain import main, sharding
from bigtrain.arrays import picture_features
from bigtrain.config import settings
from bigtrain.inputs import pipeline
from bigtrain.models import cappa, coca, siglip2, vit
from bigtrain.tasks import captioning, locca

LENGTHS = (16, 32, 64)
_SIZES = dict(width=8, depth=1, mlp_dim=16, num_heads=2)
PP = (
  "decode|flip_lr|value_range(-1,1)|naflex(8,{length})"
  "|copy('label','labels')|keep('image','shapes','labels')"
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
  """A folder of two photographs, cut into pictures of many shapes."""
  folder = tmp_path_factory.mktemp("photos")
  rng = np.random.default_rng(0)
  for name in ("china.jpg", "flower.jpg"):
    image = sklearn.datasets.load_sample_image(name)
    (folder / name).mkdir()
    for i in range(24):
      height = rng.integers(24, 250)
      width = min(600, int(height * 2.0 ** rng.uniform(-2, 2)) + 8)
      top, left = (
        int(rng.integers(n + 1)) for n in (427 - height, 640 - width)
      )
      cut = image[top : top + height, left : left + width]
      encoded = tf.io.encode_jpeg(cut).numpy()
      (folder / name / f"{i}.jpg").write_bytes(encoded)
  return str(folder)


def input_of(folder, **options):
  data = dict(type="image_folder", path=folder)
  return dict(
    data=data,
    pp=PP,
    batch_size=16,
    flexi=dict(length=dict(values=LENGTHS)),
    **options,
  )


@pytest.mark.slow
def test_batches_of_photographs_waste_a_tenth_of_their_tokens_at_most(photos):
  make = lambda: pipeline.make_train(
    settings.Config({"input": input_of(photos)}).input,
    seed=0,
    mesh=sharding.make_mesh(),
  )
  batches = fetch(make().start(0, 15))
  real, lengths, shapes = 0, [], set()
  for batch in batches:
    counts = batch["shapes"].prod(axis=1)
    lengths.append(batch["image"].shape[1])
    shapes |= set(map(tuple, batch["shapes"]))
    real += counts.sum()
    assert batch["image"].shape == (16, lengths[-1], 192)
    for patches, count in zip(batch["image"], counts):
      assert count <= lengths[-1] and not patches[count:].any()
  assert set(lengths) == set(LENGTHS) and len(shapes) > 20
  assert 1 - real / (16 * sum(lengths)) <= 0.1
  for a, b in zip(fetch(make().start(9, 12)), batches[9:12], strict=True):
    assert_equal(a, b)


@pytest.mark.parametrize(
  "options",
  [
    dict(pool_type="map", registers=2),
    dict(pool_type="tok_gap", norm_pooled=True),
  ],
)
def test_an_image_has_the_same_features_in_a_batch_and_alone(options):
  model = vit.Model(
    5, **dict(width=16, depth=2, mlp_dim=32, num_heads=2, patch_size=4),
    posemb_grid=4, head_zeroinit=False, **options,
  )  # fmt: skip
  draw = np.random.default_rng(0)
  shapes = np.asarray([[2, 3], [4, 4], [1, 7], [5, 1]], np.int32)
  patches = draw.normal(size=(4, 20, 48)).astype(np.float32)
  variables = jax.jit(model.init)(
    jax.random.key(0), jnp.asarray(patches), shapes=shapes
  )
  apply = jax.jit(lambda x, s: model.apply(variables, x, shapes=s))
  logits, out = apply(patches, shapes)
  for i, (rows, columns) in enumerate(shapes):
    count = rows * columns
    alone, own = apply(patches[i : i + 1, :count], shapes[i : i + 1])
    np.testing.assert_allclose(logits[i], alone[0], atol=1e-5)
    for name in ("head_input", "pre_logits"):
      np.testing.assert_allclose(out[name][i], own[name][0], atol=1e-5)
    np.testing.assert_allclose(
      out["encoded"][i, :count], own["encoded"][0], atol=1e-5
    )


def writer(name):
  """A model that writes texts about images."""
  tower = dict(patch_size=2, posemb_grid=(3, 3), **_SIZES)
  if name == "cappa":
    return cappa.Model(vocab_size=9, max_len=6, **tower, mask_token=True)
  if name == "coca":
    return coca.Model(vocab_size=9, max_len=6, **tower, num_queries=3)
  return siglip2.Model(
    image=dict(pool_type="map", **tower),
    text=dict(vocab_size=9, **_SIZES),
    out_dim=(None, 8),
    max_len=6,
    num_locations=4,
  )


@pytest.mark.parametrize("name", ["cappa", "coca", "siglip2"])
def test_texts_about_an_image_are_the_same_in_a_batch_and_alone(name):
  """Losses, scores, captions and answers, with padding among the patches."""
  model = writer(name)
  task = locca if name == "siglip2" else captioning
  draw = np.random.default_rng(0)
  shapes = np.asarray([[2, 3], [1, 7]], np.int32)
  labels = draw.integers(1, 9, (2, 6)).astype(np.int32)
  batch = {
    # Padding is not zero, so that it would show.
    "image": draw.normal(size=(2, 10, 12)).astype(np.float32),
    "shapes": shapes,
    "labels": labels,
    "locca": labels[:, None],
    "locca_masks": np.ones((2, 1, 6), np.float32),
    "prompt": labels[:, :2],
  }
  inputs = task.inputs(batch)
  spec = jax.eval_shape(lambda: model.init(jax.random.key(0), **inputs))
  variables = jax.tree.map(
    lambda x: draw.normal(0, 0.5, x.shape).astype(np.float32), spec
  )
  fns = {**captioning.predict_fns(model), **task.predict_fns(model)}
  if name == "siglip2":  # Its captions are answers.
    fns["loss"] = fns.pop("locca_loss")
  else:
    fns["loss"] = fns.pop("perplexity")

  def step_logits(batch):
    pictures = picture_features.needed(batch)
    encoded = model.apply(variables, **pictures, method="encode")
    source, cache = model.apply(variables, encoded, 6, method="begin")
    result = []
    for i, token_B in enumerate(batch["labels"].T):
      logits, cache = model.apply(
        variables, source, cache, token_B, i, method="step"
      )
      result.append(logits)
    return jnp.stack(result, axis=1)

  def results(batch):
    names = {"class_tokens": jnp.asarray(labels[:, :4])}
    made = {
      "loss": fns["loss"](variables, batch)["loss"],
      "score": fns["score"](variables, {**batch, **names}),
      "logits": step_logits(batch),
      "caption": fns["caption"](variables, batch),
    }
    if "answer" in fns:
      made["answer"] = fns["answer"](variables, batch)
    return made

  results = jax.jit(results)
  whole = results(batch)
  each = []
  for i, count in enumerate(shapes.prod(axis=1)):
    one = {name: x[i : i + 1] for name, x in batch.items()}
    one["image"] = one["image"][:, :count]
    each.append(results(one))
  total = sum(np.asarray(one.pop("loss")) for one in each)
  np.testing.assert_allclose(whole.pop("loss"), total, rtol=1e-5)
  for key, rows in whole.items():
    alone = np.concatenate([one[key] for one in each])
    np.testing.assert_allclose(rows, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_run_has_a_program_for_each_length(photos, tiny_config, tmp_path):
  changes = {
    "model_name": "vit",
    "model": dict(
      **dict(num_classes=2, patch_size=8, posemb_grid=4, head_zeroinit=False),
      **dict(width=16, depth=1, mlp_dim=16, num_heads=2),
    ),
    "input": input_of(photos),
    "optimizer": dict(name="sgd"),
    "log_steps": 1,
    "evals": {},
    "total_steps": 8,
  }
  main.train(tiny_config(changes), tmp_path / "whole")
  cut = dict(mesh=dict(replica=2, fsdp=4), microbatches=2)
  main.train(
    tiny_config(changes | cut | dict(stop_at_steps=5)), tmp_path / "cut"
  )
  main.train(tiny_config(changes | cut), tmp_path / "cut")
  whole, parts = (
    [tiny.rows(tmp_path / name)[step]["loss"] for step in range(1, 9)]
    for name in ("whole", "cut")
  )
  np.testing.assert_allclose(parts, whole, rtol=1e-4)
