"""Few-shot probes, retrieval and zero-shot against plain numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.evaluation import evaluations
from bigtrain.evaluators import fewshot, retrieval, zeroshot
from bigtrain.settings import ConfigError, DataError

RNG = np.random.default_rng(0)
VARIABLES = {"scale": jnp.float32(1.0)}


def context(**changes):
  values = dict(
    name="val",
    workdir="",
    mesh=sharding.make_mesh(2, 4),
    batch_size=16,
    pp_modules=(),
    progress=lambda done, batches: None,
  )
  return evaluations.Context(**values | changes)


def arrays(**columns):
  return dict(type="arrays", arrays=columns)


def sphere(*shape):
  x = RNG.normal(size=shape).astype(np.float32)
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


# Few-shot.

C, D = 3, 12
CENTRES = RNG.normal(size=(C, D)) * 0.7


def examples(n):
  y = RNG.integers(0, C, size=n)
  x = CENTRES[y] + RNG.normal(size=(n, D)) * RNG.uniform(0.1, 5, size=D)
  return x.astype(np.float32), y


TRAIN, TEST = examples(61), examples(43)
FEW = dict(
  data=arrays(x=TRAIN[0], label=TRAIN[1]),
  test_data=arrays(x=TEST[0], label=TEST[1]),
)


def features(variables, batch):
  return variables["scale"] * batch["x"]


def ridge_accuracy(x, y, test_x, test_y, l2):
  """The textbook formula, in float64, with a bias without a penalty."""
  mean, std = x.mean(0), x.std(0) + 1e-5
  x, test_x = (x - mean) / std, (test_x - mean) / std
  targets = 2.0 * np.eye(C)[y] - 1
  x = np.concatenate([x, np.ones((len(x), 1))], 1).astype(np.float64)
  test_x = np.concatenate([test_x, np.ones((len(test_x), 1))], 1)
  penalty = l2 * np.diag([1.0] * D + [0.0])
  weights = np.linalg.solve(x.T @ x + penalty, x.T @ targets)
  return (np.argmax(test_x @ weights, 1) == test_y).mean()


# More examples than features (11 shots), and fewer (2).
@pytest.mark.parametrize("shots", [2, 11])
def test_fewshot_is_ridge_regression(shots):
  found = fewshot.Evaluator(
    features, context(), **FEW, shots=(shots,), l2=(3.0,), seeds=2
  ).run(VARIABLES, 1)
  expected = []
  for seed in range(2):
    chosen, _ = fewshot._draw(TRAIN[1], shots, seed)
    x, y = TRAIN[0][chosen], TRAIN[1][chosen]
    assert np.array_equal(np.bincount(y), [shots] * C)
    expected.append(ridge_accuracy(x, y, *TEST, 3.0))
  assert found[f"{shots}shot"] == pytest.approx(np.mean(expected))
  assert found[f"{shots}shot_std"] == pytest.approx(np.std(expected))
  assert np.mean(expected) > 1 / C


def test_fewshot_draws_what_the_seed_says():
  first, others = fewshot._draw(TRAIN[1], 4, seed=0)
  assert sorted([*first, *others]) == list(range(61))
  np.testing.assert_array_equal(first, fewshot._draw(TRAIN[1], 4, seed=0)[0])
  assert set(first) != set(fewshot._draw(TRAIN[1], 4, seed=1)[0])
  more, _ = fewshot._draw(TRAIN[1], 6, seed=0)
  assert set(first) < set(more)
  everything, none = fewshot._draw(TRAIN[1], 99, seed=0)
  assert len(everything) == 61 and not len(none)


def test_fewshot_chooses_the_penalty_on_training_examples_only():
  l2 = (1e-3, 30.0, 1e6)
  found = fewshot.Evaluator(
    features, context(), **FEW, shots=(5,), l2=l2, seeds=1
  ).run(VARIABLES, 1)
  chosen, others = fewshot._draw(TRAIN[1], 5, seed=0)
  shots = TRAIN[0][chosen], TRAIN[1][chosen]
  tuning = TRAIN[0][others], TRAIN[1][others]
  best = max(l2, key=lambda p: ridge_accuracy(*shots, *tuning, p))
  assert found == {
    "5shot": pytest.approx(ridge_accuracy(*shots, *TEST, best)),
    "5shot_l2": pytest.approx(best),
  }


def test_fewshot_leaves_out_what_has_no_label():
  x = np.concatenate([TEST[0], 100 + TEST[0]])
  y = np.concatenate([TEST[1], np.full(len(TEST[1]), -1)])
  found, expected = (
    fewshot.Evaluator(
      features, context(), **FEW | extra, shots=(5,), seeds=1
    ).run(VARIABLES, 1)
    for extra in ({"test_data": arrays(x=x, label=y)}, {})
  )
  assert found == expected
  with pytest.raises(DataError, match="no example has a label"):
    none = arrays(x=x, label=np.full(len(x), -1))
    fewshot.Evaluator(features, context(), **FEW | {"data": none}).run(
      VARIABLES, 1
    )


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(shots=(0,)), "val.shots: expected positive"),
    (dict(l2=()), "val.l2: expected positive"),
    (dict(label_key="lable"), "no 'lable'.* mean 'label'"),
    (dict(shots=(99,), l2=(1, 2)), "99 shots leave no training examples"),
  ],
)
def test_fewshot_mistakes(options, message):
  with pytest.raises(ConfigError, match=message):
    fewshot.Evaluator(features, context(), **FEW | options).run(VARIABLES, 1)


# Retrieval.


def embed(variables, batch):
  found = {"image": batch["z_image"], "text": batch["z_text"]}
  return {k: v * variables["scale"] for k, v in found.items()}


def recall(image, image_id, text, text_id, k):
  """{way: recall}, one query after the other."""
  hits = {"img2txt": [], "txt2img": []}
  ways = {
    "img2txt": (image, image_id, text, text_id),
    "txt2img": (text, text_id, image, image_id),
  }
  for way, (queries, q_id, answers, a_id) in ways.items():
    for query, its_id in zip(queries, q_id):
      ranking = np.argsort(-(answers @ query), kind="stable")
      hits[way].append(any(a_id[i] == its_id for i in ranking[:k]))
  return {f"{way}_recall@{k}": np.mean(v) for way, v in hits.items()}


N, n, E = 37, 3, 6
IMAGES = sphere(N, E)
TEXTS = sphere(N, n, E) + 0.8 * IMAGES[:, None]
TOKENS = RNG.integers(1, 9, size=(N, n, 4)).astype(np.int32)
TOKENS[5:20, 2] = TOKENS[7, 1:] = 0  # These images have fewer texts.


@pytest.mark.parametrize("mesh", [(1, 8), (4, 2)])
def test_recall_with_several_texts_for_an_image(mesh):
  data = arrays(z_image=IMAGES, z_text=TEXTS, labels=TOKENS)
  found = retrieval.Evaluator(
    embed, context(mesh=sharding.make_mesh(*mesh)), data=data, at=(1, 5)
  ).run(VARIABLES, 1)
  written = TOKENS.any(-1)
  text_id = np.repeat(np.arange(N), n).reshape(N, n)[written]
  args = (IMAGES, np.arange(N), TEXTS[written], text_id)
  expected = recall(*args, 1) | recall(*args, 5)
  assert found == pytest.approx(expected)
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
  found = retrieval.Evaluator(embed, context(), data=data, id_key="id").run(
    VARIABLES, 1
  )
  args = (IMAGES, np.arange(N), TEXTS.reshape(-1, E), numbers + 3)
  assert found == pytest.approx(
    recall(*args, 1) | recall(*args, 5) | recall(*args, 10)
  )


def test_who_embeds_everything_alike_finds_nothing():
  data = arrays(
    z_image=np.ones((N, E), np.float32),
    z_text=np.ones((N, E), np.float32),
    labels=np.ones((N, 4), np.int32),
  )
  found = retrieval.Evaluator(embed, context(), data=data).run(VARIABLES, 1)
  assert set(found.values()) == {0.0}
  found = retrieval.Evaluator(embed, context(), data=data).run(
    {"scale": jnp.float32(jnp.nan)}, 1
  )
  assert set(found.values()) == {0.0}


def test_retrieval_mistakes():
  data = arrays(z_image=IMAGES, z_text=TEXTS, labels=TOKENS)
  with pytest.raises(ConfigError, match="val.at: expected positive"):
    retrieval.Evaluator(embed, context(), data=data, at=(0, 1))
  with pytest.raises(ConfigError, match="no 'lables'.*|no 'label_id'"):
    retrieval.Evaluator(embed, context(), data=data, id_key="label_id").run(
      VARIABLES, 1
    )


# Zero-shot.

NAMES = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"]
PROMPTS = ["a {}", "{}s", "the {}!"]
LETTERS = sphere(259, E)
PICTURES = sphere(N, E)
LABELS = RNG.integers(-1, len(NAMES), size=N)
PP_TEXT = "tokenize('bytes',max_len=9)"


def towers(variables, batch):
  """A text's embedding is that of its bytes; an image's is in the data."""
  if "labels" in batch:
    z = jnp.asarray(LETTERS)[batch["labels"]] * jnp.linspace(1, 2, 9)[:, None]
    z = z.sum(1)
    return {"text": z / jnp.linalg.norm(z, axis=-1, keepdims=True)}
  return {"image": batch["image"] * variables["scale"]}


def class_embeddings(names, prompts):
  result = []
  for name in names:
    total = np.zeros(E)
    for prompt in prompts:
      ids = [b + 3 for b in prompt.replace("{}", name).encode()] + [2]
      ids += [0] * (9 - len(ids))
      z = (LETTERS[ids] * np.linspace(1, 2, 9)[:, None]).sum(0)
      total += z / np.linalg.norm(z)
    result.append(total / np.linalg.norm(total))
  return np.stack(result)


def test_zeroshot_averages_the_embeddings_of_the_prompts(tmp_path):
  (tmp_path / "names.txt").write_text("\n".join(NAMES) + "\n")
  found = zeroshot.Evaluator(
    towers,
    context(),
    data=arrays(image=PICTURES, label=LABELS),
    class_names=str(tmp_path / "names.txt"),
    pp_text=PP_TEXT,
    prompts=PROMPTS,
    top_k=(1, 3, 99),
  ).run(VARIABLES, 1)
  scores = PICTURES @ class_embeddings(NAMES, PROMPTS).T
  best = np.argsort(-scores, axis=1)[LABELS >= 0]
  labels = LABELS[LABELS >= 0]
  assert found == {
    "acc": pytest.approx((best[:, 0] == labels).mean()),
    "top3_acc": pytest.approx((best[:, :3] == labels[:, None]).any(1).mean()),
  }
  assert 0 < found["acc"] < 1


def test_zeroshot_with_several_right_classes():
  several = RNG.integers(0, 2, size=(N, len(NAMES)))
  several[:4] = 0
  found = zeroshot.Evaluator(
    towers,
    context(),
    data=arrays(image=PICTURES, label=several),
    class_names=NAMES,
    pp_text=PP_TEXT,
  ).run(VARIABLES, 1)
  best = (PICTURES @ class_embeddings(NAMES, ["{}"]).T).argmax(1)
  assert found["acc"] == pytest.approx(several[np.arange(N), best][4:].mean())


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(class_names="no/names.txt"), "val.class_names: no such file"),
    (dict(prompts=["a photo"]), "val.prompts: expected one {}"),
    (dict(label_key="labl"), "no 'labl'.* mean 'label'"),
  ],
)
def test_zeroshot_mistakes(options, message):
  given = dict(
    data=arrays(image=PICTURES, label=LABELS),
    class_names=NAMES,
    pp_text=PP_TEXT,
  )
  with pytest.raises(ConfigError, match=message):
    zeroshot.Evaluator(towers, context(), **given | options).run(VARIABLES, 1)


def test_zeroshot_with_too_few_names_is_no_number():
  found = zeroshot.Evaluator(
    towers,
    context(),
    data=arrays(image=PICTURES, label=LABELS),
    class_names=NAMES[:4],
    pp_text=PP_TEXT,
  ).run(VARIABLES, 1)
  assert np.isnan(found["acc"])
