"""Zero-shot classification against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import evaluating

from bigtrain import sharding
from bigtrain.settings import ConfigError, DataError

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


N, E = 37, 6
NAMES = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu"]
PROMPTS = ["a {}", "{}s", "the {}!"]
LETTERS = sphere(259, E)
PICTURES = sphere(N, E)
LABELS = RNG.integers(-1, len(NAMES), size=N)
PP_TEXT = "tokenize('bytes',max_len=9)"


def towers(variables, batch):
  """Embeds a text by its bytes; an image's embedding is in the data."""
  if "labels" in batch:
    z = jnp.asarray(LETTERS)[batch["labels"]] * jnp.linspace(1, 2, 9)[:, None]
    z = z.sum(1)
    return {"text": z / jnp.linalg.norm(z, axis=-1, keepdims=True)}
  return {"image": batch["image"] * variables["scale"]}


def build(**options):
  return evaluating.build(
    "zeroshot", towers, context(), **dict(pp_text=PP_TEXT) | options
  )


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


def test_the_embeddings_of_the_prompts_are_averaged(tmp_path):
  (tmp_path / "names.txt").write_text("\n".join(NAMES) + "\n")
  results = build(
    data=arrays(image=PICTURES, label=LABELS),
    class_names=str(tmp_path / "names.txt"),
    prompts=PROMPTS,
    top_k=(1, 3, 99),
  ).run(VARIABLES, 1)
  scores = PICTURES @ class_embeddings(NAMES, PROMPTS).T
  best = np.argsort(-scores, axis=1)[LABELS >= 0]
  labels = LABELS[LABELS >= 0]
  assert results == {
    "acc": pytest.approx((best[:, 0] == labels).mean()),
    "top3_acc": pytest.approx((best[:, :3] == labels[:, None]).any(1).mean()),
  }
  assert 0 < results["acc"] < 1


def test_several_right_classes():
  several = RNG.integers(0, 2, size=(N, len(NAMES)))
  several[:4] = 0
  results = build(
    data=arrays(image=PICTURES, label=several),
    class_names=NAMES,
  ).run(VARIABLES, 1)
  best = (PICTURES @ class_embeddings(NAMES, ["{}"]).T).argmax(1)
  hits = several[np.arange(N), best][several.any(axis=1)]
  assert results["acc"] == pytest.approx(hits.mean())


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(class_names="no/names.txt"), "val.class_names: no such file: /"),
    (dict(prompts=["a photo"]), "val.prompts: expected a prompt with one {}"),
    (dict(label_key="labl"), "no feature 'labl'.* mean 'label'"),
  ],
)
def test_mistakes(options, message):
  given = dict(data=arrays(image=PICTURES, label=LABELS), class_names=NAMES)
  with pytest.raises(ConfigError, match=message):
    build(**given | options).run(VARIABLES, 1)


def test_a_label_beyond_the_names_is_an_error():
  message = (
    r"'label' is \d, but config\.evals\.val\.class_names=4 allows 0 to 3"
  )
  with pytest.raises(DataError, match=message):
    build(data=arrays(image=PICTURES, label=LABELS), class_names=NAMES[:4]).run(
      VARIABLES, 1
    )


def test_embeddings_that_are_not_finite_are_wrong_and_counted():
  pictures, labels = PICTURES.copy(), np.zeros(N, int)
  options = dict(class_names=NAMES, prompts=PROMPTS, top_k=(1, 7))
  pictures[4:6] = np.nan
  data = arrays(image=pictures, label=labels)
  results = build(data=data, **options).run(VARIABLES, 1)
  assert results["nonfinite"] == 2
  assert results["top7_acc"] == pytest.approx((N - 2) / N)
