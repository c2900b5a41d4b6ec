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


def loss_and_gradients(model):
  """Compiled function of (params, batch)."""

  def loss(params, batch):
    metrics, _ = language_modeling.loss_fn(
      {"params": params}, batch, None, model=model, train=False
    )
    return metrics["loss"][0]

  return jax.jit(jax.value_and_grad(loss))


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
    # With an empty row, so that both batches are one program.
    packed = batch_of(texts, [[2, 0], [1], []], 2, prefix)
    params = params_of(model, alone)
    run = loss_and_gradients(model)
    expected, actual = run(params, alone), run(params, packed)
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
    models = [
      model_of(mask, attention=backend, dtype="float64")
      for backend in ("xla", "blockwise")
    ]
    params = params_of(models[0], batch)
    results = [loss_and_gradients(model)(params, batch) for model in models]
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


NATIVE = dict(
  width=16,
  depth=3,
  num_heads=2,
  patch_size=2,
  posemb_grid=(3, 3),
  window=4,
  whole_layers=(1,),
  taps=(0, 1),
)
AXES = dict(
  variant="llama",
  vocab_size=40,
  width=16,
  depth=3,
  num_heads=2,
  head_dim=16,
  mlp_dim=24,
  rope_axes=dict(sections=(4, 2, 2), interleaved=True),
)


def native_of(**changes):
  projector = dict(merge=2, norm="layernorm", norm_eps=1e-6, mlp="gelu_erf")
  return model_of(
    **{
      **dict(image_model="native_vit", image=NATIVE, text=AXES),
      "projector": projector | dict(norm_patches=True),
      **changes,
    }
  )


def native_batch(texts, rows, num_pictures, num_patches):
  """Texts in rows, whose pictures are (patches, rows and columns)."""
  batch = batch_of(
    [(ids, np.zeros((0, SIDE, SIDE, 3))) for ids, _ in texts], rows, 1
  )
  image = np.zeros((len(rows), num_pictures, num_patches, 24))
  shapes = np.zeros((len(rows), num_pictures, 2), np.int32)
  for b, numbers in enumerate(rows):
    own = [picture for number in numbers for picture in texts[number][1]]
    for n, (patches, shape) in enumerate(own):
      image[b, n, : len(patches)] = patches
      shapes[b, n] = shape
  return batch | dict(image=jnp.asarray(image), shapes=jnp.asarray(shapes))


def native_text(rng, shapes):
  """Two words, and a word after each picture."""
  ids, pictures = [rng.integers(1, 30, 2)], []
  for rows, columns in shapes:
    ids += [np.full(rows * columns // 4, IMAGE), rng.integers(1, 30, 1)]
    pictures.append((rng.normal(size=(rows * columns, 24)), (rows, columns)))
  return np.concatenate(ids), pictures


def close(x, y):
  np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scan", [False, True])
def test_pictures_of_any_shape_are_packed_as_alone(scan):
  rng = np.random.default_rng(0)
  shapes = [[(4, 6)], [(2, 2), (6, 2)], [], [(2, 8)]]
  texts = [native_text(rng, own) for own in shapes]
  with double():
    model = native_of(dtype="float64", scan=scan)
    alone = native_batch(texts, [[0], [1], [2], [3]], 3, 32)
    # With two empty rows, so that both batches are one program.
    packed = native_batch(texts, [[3, 2, 0], [1], [], []], 3, 32)
    params = params_of(model, alone)
    run = loss_and_gradients(model)
    expected, actual = run(params, alone), run(params, packed)
  jax.tree.map(close, actual, expected)
  for part in ("img", "deepstack"):
    largest = [np.abs(x).max() for x in jax.tree.leaves(expected[1][part])]
    assert max(largest) > 1e-3  # The pictures matter.


def test_patches_are_as_their_pictures():
  """Of one frame or of two, and in the order of squares."""
  rng = np.random.default_rng(0)
  image = rng.normal(size=(1, 2, 4, 8, 3))
  x = image.reshape(1, 2, 1, 2, 2, 2, 2, 2, 3)  # Squares, patches, pixels.
  one = x.transpose(0, 1, 2, 5, 3, 6, 8, 4, 7).reshape(1, 2, 8, 3, 1, 4)
  two = np.repeat(one, 2, axis=4)
  ids = np.concatenate([native_text(rng, [(2, 4), (2, 4)])[0], [3]])[None]
  shapes = np.full((1, 2, 3), (1, 2, 4))
  with double():
    model = native_of(dtype="float64")
    inputs = [dict(image=jnp.asarray(image))]
    for patches in (one, two):
      patches = jnp.asarray(patches.reshape(1, 2, 8, -1))
      inputs.append(dict(image=patches, shapes=jnp.asarray(shapes)))
    params = params_of(model, dict(tokens=jnp.asarray(ids), **inputs[0]))
    apply = jax.jit(model.apply)
    results = [
      apply({"params": params}, jnp.asarray(ids), **given)[0]
      for given in inputs
    ]
  close(results[1], results[0])
  close(results[2], results[0])


def test_patches_that_fill_no_square_are_seen_by_the_others_alone():
  """Pictures of 3 x 5 patches: 1 x 2 squares, a column and most of a row."""
  rng = np.random.default_rng(0)
  image = rng.normal(size=(1, 2, 6, 10, 3))
  cells = image.reshape(1, 2, 3, 2, 5, 2, 3).transpose(0, 1, 2, 4, 6, 3, 5)
  cells = cells.reshape(1, 2, 3, 5, 12)
  order = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
  order += [(0, 4), (1, 4), (2, 4), *((2, column) for column in range(4))]
  rows, columns = np.transpose(order)
  patches = cells[:, :, rows, columns]
  padding = np.full((1, 2, 1, 12), 7.0)  # Up to whole squares.
  patches = np.concatenate([patches, padding], axis=2)
  ids = np.concatenate([native_text(rng, [(2, 4), (2, 4)])[0], [3]])[None]
  shapes = jnp.full((1, 2, 2), jnp.asarray((3, 5)))
  edge = patches.copy()
  edge[:, :, 8] += 1
  with double():
    model = native_of(dtype="float64", image=NATIVE | {"partial_squares": True})
    inputs = [dict(image=jnp.asarray(image))]
    for given in (patches, edge):
      inputs.append(dict(image=jnp.asarray(given), shapes=shapes))
    params = params_of(model, dict(tokens=jnp.asarray(ids), **inputs[0]))
    apply = jax.jit(model.apply)
    results = [
      apply({"params": params}, jnp.asarray(ids), **given)[0]
      for given in inputs
    ]
  close(results[1], results[0])
  assert np.abs(results[2] - results[0]).max() > 1e-4


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(projector=dict(merge=1)), "projector.merge=1: expected 2, as config"),
    (dict(image=dict(NATIVE, taps=(3,))), "image.taps: .*below 3, got 3"),
    (dict(image=dict(NATIVE, window=3)), "image.window=3: .*multiple of merge"),
    (
      dict(text=dict(AXES, rope_axes=dict(sections=(1, 1, 1)))),
      r"text.rope_axes.sections=\[1, 1, 1\]: .*whose sum is 8",
    ),
    (
      dict(image=dict(NATIVE, remat_policy="nothing_saveable(every=2)")),
      "every=2: expected 1 for a model with taps",
    ),
  ],
)
def test_mistakes_of_towers_for_any_shape_are_named(changes, message):
  tokens = jnp.zeros((1, 4), jnp.int32)
  with pytest.raises(ConfigError, match=message):
    model = native_of(**changes)
    jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))


def test_patches_need_their_shapes():
  model = native_of()
  tokens = jnp.zeros((1, 4), jnp.int32)
  for given in (
    dict(image=jnp.zeros((1, 4, 24))),
    dict(image=jnp.zeros((1, 4, 25)), shapes=jnp.ones((1, 2), jnp.int32)),
    dict(image=jnp.zeros((1, 6, 24)), shapes=jnp.ones((1, 2), jnp.int32)),
  ):
    message = "need 'shapes'|25 values are not|a multiple of 4 patches.*got 6"
    with pytest.raises(ConfigError, match=message):
      jax.eval_shape(
        lambda given=given: model.init(jax.random.key(0), tokens, **given)
      )
