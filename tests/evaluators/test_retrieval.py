"""Retrieval against a ranking in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import evaluating

from bigtrain import sharding
from bigtrain.config.errors import ConfigError

pytestmark = pytest.mark.golden

RNG = np.random.default_rng(0)
VARIABLES = {"scale": jnp.float32(1.0)}


def context(**changes):
  values = dict(mesh=sharding.make_mesh(2, 4), batch_size=16)
  return evaluating.context(**values | changes)


def arrays(**columns):
  return dict(type="arrays", arrays=columns)


def sphere(*shape):
  x = RNG.normal(size=shape).astype(np.float32)
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def embed(variables, batch):
  embeddings = {"image": batch["z_image"], "text": batch["z_text"]}
  return {k: v * variables["scale"] for k, v in embeddings.items()}


def build(data, of=None, **options):
  of = of or context()
  return evaluating.build("retrieval", embed, of, data=data, **options)


def recall(image, image_id, text, text_id, k):
  """Returns {metric: recall}, from one query after the other."""
  hits = {"img2txt": [], "txt2img": []}
  directions = {
    "img2txt": (image, image_id, text, text_id),
    "txt2img": (text, text_id, image, image_id),
  }
  for name, (queries, query_ids, answers, answer_ids) in directions.items():
    for query, query_id in zip(queries, query_ids):
      scores, right = answers @ query, answer_ids == query_id
      best = scores[right].max(initial=-np.inf)
      last = np.sort(scores[~right])[-k]
      assert abs(best - last) > 1e-4  # A thousand times float32's epsilon.
      hits[name].append(best > last)
  return {f"{name}_recall@{k}": np.mean(v) for name, v in hits.items()}


N, n, E = 37, 3, 6
IMAGES = sphere(N, E)
TEXTS = sphere(N, n, E) + 0.8 * IMAGES[:, None]
TOKENS = RNG.integers(1, 9, size=(N, n, 4)).astype(np.int32)
TOKENS[5:20, 2] = TOKENS[7, 1:] = 0  # These images have fewer texts.


@pytest.mark.parametrize("mesh", [(1, 8), (4, 2)])
def test_recall_with_several_texts_for_an_image(mesh):
  data = arrays(z_image=IMAGES, z_text=TEXTS, labels=TOKENS)
  evaluator = build(data, context(mesh=sharding.make_mesh(*mesh)), at=(1, 5))
  results = evaluator.run(VARIABLES, 1)
  written = TOKENS.any(-1)
  text_id = np.repeat(np.arange(N), n).reshape(N, n)[written]
  args = (IMAGES, np.arange(N), TEXTS[written], text_id)
  expected = recall(*args, 1) | recall(*args, 5)
  assert results == pytest.approx(expected)
  assert all(0.1 < value < 0.95 for value in expected.values())


def test_recall_where_rows_repeat_images():
  numbers = np.repeat(np.arange(N), n) - 3
  shuffled = RNG.permutation(N * n)
  columns = dict(
    z_image=np.repeat(IMAGES, n, 0), z_text=TEXTS.reshape(-1, E), id=numbers
  )
  data = arrays(
    **{k: v[shuffled] for k, v in columns.items()},
    labels=np.ones((N * n, 4), np.int32),
  )
  results = build(data, id_key="id").run(VARIABLES, 1)
  args = (IMAGES, np.arange(N), TEXTS.reshape(-1, E), numbers + 3)
  assert results == pytest.approx(
    recall(*args, 1) | recall(*args, 5) | recall(*args, 10)
  )


def test_equal_or_nan_embeddings_have_recall_0():
  data = arrays(
    z_image=np.ones((N, E), np.float32),
    z_text=np.ones((N, E), np.float32),
    labels=np.ones((N, 4), np.int32),
  )
  evaluator = build(data)
  assert set(evaluator.run(VARIABLES, 1).values()) == {0.0}
  results = evaluator.run({"scale": jnp.float32(jnp.nan)}, 1)
  assert results.pop("nonfinite") == 2 * N
  assert set(results.values()) == {0.0}


def test_embeddings_that_are_not_finite_are_never_found():
  image, text = sphere(2, 6, E)
  image[1], text[4, 2] = np.inf, np.nan
  data = arrays(z_image=image, z_text=text, labels=np.ones((6, 4), np.int32))
  # The right answer is among the best 99 of six, if it has a score.
  results = build(data, at=(99,)).run(VARIABLES, 1)
  assert results.pop("nonfinite") == 2
  assert list(results.values()) == pytest.approx([4 / 6, 4 / 6])


def test_mistakes():
  data = arrays(z_image=IMAGES, z_text=TEXTS, labels=TOKENS)
  with pytest.raises(ConfigError, match="val.at: expected a whole number"):
    build(data, at=(0, 1))
  with pytest.raises(ConfigError, match="no feature 'label_id'.* 'labels'"):
    build(data, id_key="label_id").run(VARIABLES, 1)
