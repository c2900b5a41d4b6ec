"""Zero-shot classification against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import rounding
from tensorflow_datasets.datasets.oxford_iiit_pet import (
  oxford_iiit_pet_dataset_builder,
)
from tiny import evaluating

from bigtrain import sharding
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.inputs import labels

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
  assert all((rounding.leads(scores, k) > 1e-4).all() for k in (1, 3))
  best = np.argsort(-scores, axis=1)[LABELS >= 0]
  labels = LABELS[LABELS >= 0]
  assert results == {
    "acc": pytest.approx((best[:, 0] == labels).mean()),
    "top3_acc": pytest.approx((best[:, :3] == labels[:, None]).any(1).mean()),
  }
  assert 0 < results["acc"] < 1


def test_the_model_gets_the_shapes_of_images_as_patches():
  def with_shapes(variables, batch):
    if "labels" in batch:
      return towers(variables, batch)
    return {"image": batch["image"] * batch["shapes"][:, :1]}

  shapes = RNG.choice([-1, 1], size=(N, 2))
  results = evaluating.build(
    "zeroshot",
    with_shapes,
    context(),
    data=arrays(image=PICTURES, shapes=shapes, label=LABELS),
    class_names=NAMES,
    pp_text=PP_TEXT,
  ).run(VARIABLES, 1)
  expected = build(
    data=arrays(image=PICTURES * shapes[:, :1], label=LABELS), class_names=NAMES
  ).run(VARIABLES, 1)
  assert results == expected


def test_published_names_and_prompts_by_name():
  """Counts are of CLIP's paper; orders of the data sets' own files."""
  counts = {"imagenet": 1000, "cifar100": 100, "pets": 37}
  names = {name: labels.read(name, "key") for name in counts}
  assert {name: len(all) for name, all in names.items()} == counts
  assert names["cifar100"] == sorted(names["cifar100"])
  of_tfds = list(oxford_iiit_pet_dataset_builder._LABEL_CLASSES)
  labels.check_order(names["pets"], of_tfds, "key")
  assert [s.lower().replace(" ", "_") for s in names["pets"]] == [
    s.lower() for s in of_tfds
  ]
  known = {0: "tench", 1: "goldfish", 207: "Golden Retriever", 281: "tabby cat"}
  known |= {404: "airliner", 817: "sports car", 999: "toilet paper"}
  assert {i: names["imagenet"][i] for i in known} == known
  counts = dict(clip=80, clip_best=7, clip_cifar100=18, clip_pets=1)
  prompts = {name: labels.read(name, "key", "prompts") for name in counts}
  assert {name: len({*all}) for name, all in prompts.items()} == counts
  assert {*prompts["clip_best"]} < {*prompts["clip"]}
  assert all(
    labels.fill(p, ["x"], "k") for all in prompts.values() for p in all
  )


def test_names_in_an_order_that_is_not_the_datas_are_refused():
  pets = labels.read("pets", "key")
  cats_first = sorted(pets, key=lambda name: (name.islower(), name))
  own = [name.replace(" ", "_") for name in pets]
  message = "key: class 1 is 'Bengal' here and 'american_bulldog' in the data"
  with pytest.raises(ConfigError, match=message):
    labels.check_order(cats_first, own, "key")
  with pytest.raises(ConfigError, match="key: 36 names for 37 classes"):
    labels.check_order(pets[1:], own, "key")
  # Other words for the same classes, such as ImageNet's ids.
  labels.check_order(pets, [f"n{i:08}" for i in range(37)], "key")


def test_names_are_compared_with_the_classes_of_the_data(tmp_path):
  for name in ("ant", "bee"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "0.jpg").write_bytes(b"")
  with pytest.raises(ConfigError, match="class_names: 7 names for 2 classes"):
    build(data=dict(type="image_folder", path=str(tmp_path)), class_names=NAMES)


def test_several_right_classes():
  several = RNG.integers(0, 2, size=(N, len(NAMES)))
  several[:4] = 0
  results = build(
    data=arrays(image=PICTURES, label=several),
    class_names=NAMES,
  ).run(VARIABLES, 1)
  scores = PICTURES @ class_embeddings(NAMES, ["{}"]).T
  assert (rounding.leads(scores) > 1e-4).all()
  best = scores.argmax(1)
  hits = several[np.arange(N), best][several.any(axis=1)]
  assert results["acc"] == pytest.approx(hits.mean())


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(class_names="no/names.txt"), "val.class_names: no such file: /"),
    (dict(class_names="imagnet"), "no such file.* Did you mean 'imagenet'?"),
    (dict(prompts="clip_cifar"), "prompts: .*Did you mean 'clip_cifar100'?"),
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
