"""Batches through tf.data: images from folders and lines, damaged ones too."""

import base64
import json
import os

import jax
import numpy as np
import pytest

from bigtrain import settings, sharding
from bigtrain.data import image_folder
from bigtrain.inputs import pipeline
from bigtrain.inputs.numpy_engine import NumpyEngine
from bigtrain.inputs.tf_engine import TfEngine
from bigtrain.pp import host_tensorflow, registry
from bigtrain.settings import ConfigError, DataError

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
PP = (
  "decode|inception_crop(16)|flip_lr|value_range(-1, 1)|keep('image', 'label')"
)


@registry.register("test_in_graph")
def in_graph():
  """Changes nothing, but needs tensorflow."""
  return registry.Op(lambda features, u: features, tensorflow=True)


@registry.register("test_pad")
def pad(key: str, size: int):
  """Zeros at the end of a list of any length."""

  def fn(features, u):
    import tensorflow as tf

    value = features[key]
    value = tf.pad(value, [[0, size - tf.shape(value)[0]]])
    return {**features, key: tf.ensure_shape(value, [size])}

  return registry.Op(fn, tensorflow=True, reads=(key,))


@registry.register("test_join")
def join(key: str, key_result: str):
  """Number of characters of a list of strings, and of the strings."""

  def fn(features, u):
    import tensorflow as tf

    value = features[key]
    sizes = [tf.size(value), tf.strings.length(tf.strings.reduce_join(value))]
    return {**features, key_result: tf.stack(sizes)}

  return registry.Op(fn, tensorflow=True, reads=(key,))


def jpeg(image):
  import tensorflow as tf

  return tf.io.encode_jpeg(image, quality=95).numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Three classes of images of different sizes and of one colour each."""
  top = tmp_path_factory.mktemp("images")
  for i in range(30):
    (top / f"class{i % 3}").mkdir(exist_ok=True)
    image = np.full((24 + i % 5, 20 + i % 7, 3), 8 * i, np.uint8)
    image[:, : 5 + i % 4] = 255 - 8 * i  # So that flips and crops show.
    (top / f"class{i % 3}" / f"{i:02}.jpg").write_bytes(jpeg(image))
  return str(top)


@pytest.fixture
def damaged(folder, tmp_path):
  """The same images, of which number 13 (class1/10.jpg) is cut short."""
  for path in sorted(image_folder.Source(folder).where(i) for i in range(30)):
    new = tmp_path / "images" / os.path.relpath(path, folder)
    new.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "rb") as f:
      raw = f.read()
    new.write_bytes(raw[:50] if path.endswith("class1/10.jpg") else raw)
  return str(tmp_path / "images")


def config(path=None, pp=PP, batch_size=8, **kwargs):
  given = {"pp": pp, "batch_size": batch_size, **kwargs}
  if path:
    given["data"] = {"type": "image_folder", "path": path}
  return settings.Config({"input": given}).input


def make(*args, seed=0, **kwargs):
  mesh = sharding.make_mesh()
  return pipeline.make_train(config(*args, **kwargs), seed=seed, mesh=mesh)


def fetch(iterator):
  return [jax.device_get(batch) for batch in iterator]


def assert_equal(got, want):
  assert got.keys() == want.keys()
  for name in want:
    np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_batches_of_images(folder):
  train = make(folder)
  assert train.spec == {
    "image": jax.ShapeDtypeStruct((8, 16, 16, 3), np.float32),
    "label": jax.ShapeDtypeStruct((8,), np.int32),
  }
  source = image_folder.Source(folder)
  for step, batch in enumerate(fetch(train.start(0, 8))):
    index = train.order(step).index
    raw = source.read(index)
    np.testing.assert_array_equal(batch["label"], raw["label"])
    # The image's main colour says which one it is.
    number = [int(source.where(i)[-6:-4]) for i in index]
    colours = np.asarray(number) * 8 / 127.5 - 1
    near = abs(batch["image"] - colours[:, None, None, None]) < 0.1
    opposite = abs(batch["image"] + colours[:, None, None, None]) < 0.1
    assert ((near | opposite).mean(axis=(1, 2, 3)) > 0.6).all()


def test_nothing_but_config_and_step_matters(folder):
  want = fetch(make(folder, num_threads=1).start(0, 8))
  for options in ({"num_threads": 4}, {"prefetch": 1, "cache": "raw"}):
    train = make(folder, **options)
    got = fetch(train.start(0, 3)) + fetch(train.start(3, 8))
    for a, b in zip(got, want, strict=True):
      assert_equal(a, b)
  # Any host's rows, and any example alone.
  for rows in (np.arange(2, 4), np.arange(8)[::-1]):
    engine, schedule = pipeline.train_engine(config(folder), seed=0, rows=rows)
    assert isinstance(engine, TfEngine)
    for batch, expected in zip(engine.batches(5, 8), want[5:], strict=True):
      assert_equal(batch, {k: v[rows] for k, v in expected.items()})
    found = schedule.batch(7, 8)
    for r in (0, 7):
      one = engine.example(
        engine.parts[0], int(found.index[r]), int(found.epoch[r])
      )
      # Alone it is made in another graph, whose floats are rounded elsewhere.
      for name, value in one.items():
        np.testing.assert_allclose(value, want[7][name][r], atol=1e-6)


def test_local_batches_of_several_reads(folder, monkeypatch):
  want = fetch(make(folder, batch_size=24).start(1, 3))
  monkeypatch.setattr("bigtrain.inputs.tf_engine._ROWS_PER_READ", 7)
  for got, expected in zip(
    fetch(make(folder, batch_size=24).start(1, 3)), want, strict=True
  ):
    assert_equal(got, expected)


def test_both_engines_give_the_same():
  pp = "random_crop(8, pad=1)|flip_lr|value_range(-1, 1, 0, 16)"
  data = {"type": "arrays", "name": "digits"}
  batches = []
  for spec, kind in ((pp, NumpyEngine), (f"{pp}|test_in_graph", TfEngine)):
    engine, _ = pipeline.train_engine(
      config(pp=spec, data=data), seed=0, rows=np.arange(8)
    )
    assert isinstance(engine, kind)
    batches.append(list(engine.batches(0, 4)))
  for got, want in zip(*batches, strict=True):
    assert_equal(got, want)


def test_evaluation_images(folder):
  data = pipeline.make_eval(
    data={"type": "image_folder", "path": folder},
    pp="decode|resize(8)|value_range(-1, 1)|keep('image', 'label')",
    batch_size=16,
    mesh=sharding.make_mesh(),
    cache=True,
  )
  for _ in range(2):
    batches = fetch(data.batches())
    mask = np.concatenate([b["_mask"] for b in batches])
    labels = np.concatenate([b["label"] for b in batches])[mask == 1]
    assert labels.tolist() == [0] * 10 + [1] * 10 + [2] * 10


def test_mixture_with_few_rows_of_one(folder, tmp_path):
  """Reads of 64 rows without any of the rare source, and after it again."""
  lines = [
    {"raw": base64.b64encode(jpeg(np.full((9, 9, 3), 200, np.uint8))).decode(),
     "label": 100 + i}
    for i in range(3)
  ]  # fmt: skip
  (tmp_path / "x.jsonl").write_text(
    "".join(json.dumps(x) + "\n" for x in lines)
  )
  mixture = {
    "folder": {"data": {"type": "image_folder", "path": folder}, "weight": 63},
    "lines": {
      "data": {
        "type": "jsonl", "path": str(tmp_path / "x.jsonl"),
        "image_key": "raw", "image_is": "base64",
      },
      "pp": "decode|resize(16)|value_range(-1, 1)|keep('image', 'label')",
      "weight": 1,
    },
  }  # fmt: skip
  train = make(mixture=mixture)
  batches = fetch(train.start(0, 64))
  rare = 0
  for step, batch in enumerate(batches):
    found = train.order(step)
    is_rare = found.source == 1
    rare += is_rare.sum()
    assert (batch["label"][is_rare] == 100 + found.index[is_rare]).all()
    assert (batch["label"][~is_rare] < 3).all()
  assert 0 < rare < 24
  for got, want in zip(fetch(train.start(40, 44)), batches[40:44], strict=True):
    assert_equal(got, want)


def test_features_of_any_length(tmp_path):
  rows = [
    {"ids": list(range(i % 4)), "words": ["ab"] * (i % 3) + ["ü"], "x": i,
     "box": [[i, 1], [2, 3]][: i % 2 + 1], "none": []}
    for i in range(12)
  ]  # fmt: skip
  path = tmp_path / "x.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  fields = ("ids", "words", "x", "box")
  train = make(
    pp="test_pad('ids', 5)|test_join('words', 'joined')|drop('words', 'box')",
    data={"type": "jsonl", "path": str(path), "fields": fields},
  )
  for batch in fetch(train.start(0, 3)):
    for x, ids, joined in zip(batch["x"], batch["ids"], batch["joined"]):
      assert ids.tolist() == [*range(x % 4)] + [0] * (5 - x % 4)
      assert joined.tolist() == [x % 3 + 1, 2 * (x % 3) + 2]


@pytest.mark.parametrize(
  "pp, message",
  [
    ("decode|value_range(-1, 1)|keep('image')",
     r"pp: feature 'image' has no fixed shape \(it is \(None, None, 3\)\);.*"
     r"resize\(224\)"),
    ("decode|resize(8)", r"feature 'label_name' holds strings.*keep\("),
    ("decode|resize(8)|keep('image', 'lable')", "input.pp: .*'lable'"),
    ("resize(8)", "config.input.pp: .*decode"),
  ],
)  # fmt: skip
def test_mistakes_are_told_before_data_flows(folder, pp, message):
  with pytest.raises(ConfigError, match=message):
    make(folder, pp=pp)


def test_a_damaged_image_is_named_with_the_op(damaged):
  train = make(damaged)
  (bad,) = [i for i in range(30) if train.where(0, i).endswith("class1/10.jpg")]
  (step,) = [s for s in range(3) if bad in train.order(s).index]
  iterator = train.start(0, 4)
  for _ in range(step):
    next(iterator)
  with pytest.raises(DataError) as error:
    next(iterator)
  told = str(error.value)
  assert told.startswith(
    f"{damaged}/class1/10.jpg: op 'decode|inception_crop(16)': "
  )
  assert "\n" not in told
  assert "node" not in told


def test_a_damaged_image_is_replaced_alone(folder, damaged):
  want = fetch(make(folder).start(0, 8))
  train = make(damaged, skip_errors=1)
  bad = [train.where(0, i).endswith("class1/10.jpg") for i in range(30)]
  got = fetch(train.start(0, 8))
  assert train.skipped == 1
  replaced = 0
  for step, (batch, expected) in enumerate(zip(got, want, strict=True)):
    other = np.asarray(bad)[train.order(step).index]
    replaced += other.sum()
    for name in batch:
      np.testing.assert_array_equal(batch[name][~other], expected[name][~other])
  assert replaced == 2  # 64 rows of 30 examples: once in each whole epoch.
  again = fetch(make(damaged, skip_errors=1).start(4, 8))
  for batch, expected in zip(again, got[4:], strict=True):
    assert_equal(batch, expected)


def test_a_vanished_file_is_named(damaged):
  train = make(damaged)
  os.remove(train.where(0, 4))
  with pytest.raises(DataError, match=r"class0/12\.jpg: No such file"):
    fetch(train.start(0, 4))


def test_tensorflow_is_kept_from_accelerators(monkeypatch):
  import tensorflow as tf

  hidden, taken = [], []

  def hide(devices, kind):
    hidden.append((devices, kind))
    if taken:
      raise RuntimeError("cannot be modified after being initialized")

  monkeypatch.setattr(tf.config, "set_visible_devices", hide)
  monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: taken)
  load = host_tensorflow.load.__wrapped__  # Without its cache.
  assert load() is tf
  assert hidden == [([], "GPU"), ([], "TPU")]
  taken.append("a GPU")
  with pytest.raises(ConfigError, match="used before and took the GPUs"):
    load()


def test_close_midway(folder):
  train = make(folder)
  for _ in range(5):
    iterator = train.start(0, 10**9)
    next(iterator)
    iterator.close()
