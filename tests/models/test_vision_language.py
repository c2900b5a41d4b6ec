"""Models that read pictures: texts that share a row, and masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import any_mesh

from bigtrain.arrays import dims, trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import vision_language
from bigtrain.models.layers import attention_blockwise, masks
from bigtrain.tasks import language_modeling

IMAGE, SIDE, LENGTH = 30, 8, 24
TOWER = dict(width=8, depth=1, num_heads=2, patch_size=2, pool_type="none")
TEXT = dict(
  variant="llama",
  vocab_size=40,
  width=16,
  depth=2,
  num_heads=2,
  mlp_dim=24,
  kinds={"local": dict(window=4), "global": {}},
  layers=("local", "global"),
)


def double():
  return any_mesh.precision(dict(model=dict(dtype="float64")))


def model_of(mask="causal", **changes):
  return vision_language.Model(
    **{
      **dict(image=TOWER, text=TEXT, image_token=IMAGE, mask=mask),
      "projector": dict(pool=2),
      **changes,
    }
  )


def text_of(rng, pictures, words):
  """(ids, pictures): words around each picture of four tokens."""
  ids = [rng.integers(1, 30, words)]
  for _ in range(pictures):
    ids += [np.full(4, IMAGE), rng.integers(1, 30, words)]
  return np.concatenate(ids), rng.normal(size=(pictures, SIDE, SIDE, 3))


def batch_of(texts, rows, num_pictures, prefix=None):
  """Texts in rows: `rows` has the numbers of the texts of each."""
  shape = len(rows), LENGTH
  batch = {
    name: np.zeros(shape, np.int32)
    for name in ("tokens", "targets", "segments", "positions")
  }
  batch["loss_mask"] = np.zeros(shape)
  batch["image"] = np.zeros((len(rows), num_pictures, SIDE, SIDE, 3))
  if prefix is not None:
    batch["prefix"] = np.zeros(shape, np.int32)
  for b, numbers in enumerate(rows):
    at, picture = 0, 0
    for segment, number in enumerate(numbers, start=1):
      ids, pictures = texts[number]
      there = slice(at, at + len(ids) - 1)
      batch["tokens"][b, there] = ids[:-1]
      batch["targets"][b, there] = ids[1:]
      batch["loss_mask"][b, there] = ids[1:] != IMAGE
      batch["segments"][b, there] = segment
      batch["positions"][b, there] = np.arange(len(ids) - 1)
      if prefix is not None:
        batch["prefix"][b, at : at + prefix] = 1
      batch["image"][b, picture : picture + len(pictures)] = pictures
      at, picture = at + len(ids) - 1, picture + len(pictures)
  return jax.tree.map(jnp.asarray, batch)


def loss_and_gradients(model, params, batch):
  def loss(params):
    metrics, _ = language_modeling.loss_fn(
      {"params": params}, batch, None, model=model, train=False
    )
    return metrics["loss"][0]

  return jax.jit(jax.value_and_grad(loss))(params)


def params_of(model, batch):
  inputs = language_modeling.inputs(batch)
  shapes = jax.eval_shape(lambda k: model.init(k, **inputs), jax.random.key(0))
  rng = np.random.default_rng(1)
  draw = lambda p: jnp.asarray(rng.normal(0, 0.3, p.shape), jnp.float64)
  return jax.tree.map(draw, shapes["params"])


@pytest.mark.parametrize(
  ("mask", "prefix"), [("causal", None), ("prefix", 6), ("image", None)]
)
def test_texts_that_share_a_row_are_as_alone(mask, prefix):
  rng = np.random.default_rng(0)
  texts = [text_of(rng, n, words) for n, words in [(1, 2), (2, 2), (1, 3)]]
  with double():
    model = model_of(mask, dtype="float64")
    alone = batch_of(texts, [[0], [1], [2]], 2, prefix)
    packed = batch_of(texts, [[2, 0], [1]], 2, prefix)
    params = params_of(model, alone)
    expected = loss_and_gradients(model, params, alone)
    actual = loss_and_gradients(model, params, packed)
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)
  jax.tree.map(close, actual, expected)
  norms = [np.abs(x).max() for x in jax.tree.leaves(expected[1]["img"])]
  assert max(norms) > 1e-3  # The pictures matter.


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("window_in_groups", [False, True])
def test_groups_see_each_other(window, window_in_groups):
  """Against the definition, for each pair of positions."""
  group = np.asarray([0, 1, 1, 1, 1, 0, 2, 2, 2, 2, 0, 0])
  mask = masks.Mask(
    causal=True,
    window=window,
    groups_BL=group[None],
    groups_BS=group[None],
    window_in_groups=window_in_groups,
  )
  actual = mask.matrix(len(group), len(group))[0]
  for i, j in np.ndindex(actual.shape):
    near = window is None or j > i - window
    together = group[i] == group[j] != 0
    if window_in_groups:
      seen = (j <= i or together) and near
    else:
      seen = (j <= i and near) or together
    assert actual[i, j] == seen, (i, j)


@pytest.mark.parametrize("mask", ["prefix", "image"])
def test_blocks_have_the_masks_of_whole_matrices(mask, monkeypatch):
  monkeypatch.setattr(attention_blockwise, "_BLOCK_ON_CPU", 5)
  rng = np.random.default_rng(0)
  texts = [text_of(rng, 2, 3) for _ in range(2)]
  with double():
    batch = batch_of(texts, [[0], [1]], 2, 9 if mask == "prefix" else None)
    results = []
    for backend in ("xla", "blockwise"):
      model = model_of(mask, attention=backend, dtype="float64")
      params = params_of(model, batch)
      results.append(loss_and_gradients(model, params, batch))
  close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)
  jax.tree.map(close, *results)


def test_pictures_of_several_sizes_of_batches_and_none():
  model = model_of(image=dict(TOWER, posemb="none"))
  tokens = jnp.asarray(np.full((2, 6), IMAGE))
  init = lambda **kw: jax.eval_shape(
    lambda k: model.init(k, tokens, **kw), jax.random.key(0)
  )
  one = init(image=jnp.zeros((2, 4, 12, 3)))
  assert one == init(image=jnp.zeros((2, 3, 4, 4, 3))) == init()
  assert model.tokens_per_image(4, 12) == 3
  with pytest.raises(ConfigError, match="projector.pool=2: .*got 3 x 3"):
    init(image=jnp.zeros((2, 6, 6, 3)))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(mask="pictures"), "config.model.mask: unknown 'pictures'"),
    (dict(image=dict(TOWER, depth=0)), "config.model.image.depth: .*got 0"),
    (dict(text=dict(TEXT, widht=4)), "config.model.text.widht.*width"),
    (dict(projector=dict(pools=2)), "config.model.projector.pools.*pool"),
    (dict(projector=dict(mlp="tanh")), "config.model.projector.mlp: unknown"),
    (dict(image_token=None), "config.model.image_token: expected a whole"),
    (dict(class_token=True), "class_token: expected False with projector.pool"),
  ],
)
def test_mistakes_are_named(changes, message):
  with pytest.raises(ConfigError, match=message):
    model_of(**changes)


def test_a_prefix_needs_its_mask():
  model = model_of("causal")
  batch = dict(tokens=jnp.zeros((1, 4), int), prefix=jnp.ones(1, int))
  with pytest.raises(ConfigError, match="mask='causal': expected 'prefix'"):
    jax.eval_shape(lambda: model.init(jax.random.key(0), **batch))


def test_parameters_have_dimensions():
  model = model_of(scan=True)
  tokens = jnp.zeros((1, 4), jnp.int32)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))
  table = vision_language.param_dims(model)
  for name, _ in trees.flatten_with_names(shapes["params"]):
    assert dims.find(table, name), name
