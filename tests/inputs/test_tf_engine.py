"""The tf.data engine: images from folders and lines, some of them damaged."""

import base64
import json
import os
import threading

import jax
import numpy as np
import pytest
from support.array_inputs import assert_equal, fetch

from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import arrays, image_folder
from bigtrain.inputs import eval_input, pipeline
from bigtrain.inputs.engine import NumpyEngine
from bigtrain.inputs.tf_engine import TfEngine
from bigtrain.pp import registry

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
PP = (
  "decode|inception_crop(16)|flip_lr|value_range(-1, 1)|keep('image', 'label')"
)


@registry.register("test_in_graph")
def in_graph():
  """Returns features unchanged, but needs tensorflow."""
  return registry.Op(lambda features, u: features, tensorflow=True)


@registry.register("test_pad")
def pad(key: str, size: int):
  """Zero-pads a list of any length."""

  def fn(features, u):
    import tensorflow as tf

    value = features[key]
    value = tf.pad(value, [[0, size - tf.shape(value)[0]]])
    return {**features, key: tf.ensure_shape(value, [size])}

  return registry.Op(fn, tensorflow=True, reads=(key,))


@registry.register("test_join")
def join(key: str, key_result: str):
  """Adds the number of strings in a list, and of characters in all."""

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
  """Folder with three classes of images of varying size and colour."""
  top = tmp_path_factory.mktemp("images")
  for i in range(30):
    (top / f"class{i % 3}").mkdir(exist_ok=True)
    image = np.full((24 + i % 5, 20 + i % 7, 3), 8 * i, np.uint8)
    image[:, : 5 + i % 4] = 255 - 8 * i  # Makes flips and crops visible.
    (top / f"class{i % 3}" / f"{i:02}.jpg").write_bytes(jpeg(image))
  return str(top)


@pytest.fixture
def damaged(folder, tmp_path):
  """The same folder with one truncated image, class1/10.jpg."""
  for path in sorted(image_folder.Source(folder).where(i) for i in range(30)):
    new = tmp_path / "images" / os.path.relpath(path, folder)
    new.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "rb") as f:
      raw = f.read()
    new.write_bytes(raw[:50] if path.endswith("class1/10.jpg") else raw)
  return str(tmp_path / "images")


def config(path=None, pp=PP, batch_size=8, **kwargs):
  options = {"pp": pp, "batch_size": batch_size, **kwargs}
  if path:
    options["data"] = {"type": "image_folder", "path": path}
  return settings.Config({"input": options}).input


def make(*args, seed=0, **kwargs):
  mesh = sharding.make_mesh()
  return pipeline.make_train(config(*args, **kwargs), seed=seed, mesh=mesh)


def test_batches_hold_the_images_of_the_order(folder):
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
    # The main colour of an image identifies it.
    number = [int(source.where(i)[-6:-4]) for i in index]
    colours = np.asarray(number) * 8 / 127.5 - 1
    near = abs(batch["image"] - colours[:, None, None, None]) < 0.1
    opposite = abs(batch["image"] + colours[:, None, None, None]) < 0.1
    assert ((near | opposite).mean(axis=(1, 2, 3)) > 0.6).all()


def test_batches_depend_only_on_config_and_step(folder):
  expected = fetch(make(folder, num_threads=1).start(0, 8))
  for options in ({"num_threads": 4}, {"prefetch": 1, "cache": "raw"}):
    train = make(folder, **options)
    batches = fetch(train.start(0, 3)) + fetch(train.start(3, 8))
    for a, b in zip(batches, expected, strict=True):
      assert_equal(a, b)
  # The rows of any host, and any example alone.
  for rows in (np.arange(2, 4), np.arange(8)[::-1]):
    engine, schedule = pipeline.train_engine(config(folder), seed=0, rows=rows)
    assert isinstance(engine, TfEngine)
    for local, whole in zip(engine.batches(5, 8), expected[5:], strict=True):
      assert_equal(local, {k: v[rows] for k, v in whole.items()})
    last = schedule.batch(7, 8)
    for r in (0, 7):
      example = engine.example(0, int(last.index[r]), int(last.epoch[r]))
      # A single example is made in another graph, which rounds differently.
      for name, value in example.items():
        np.testing.assert_allclose(value, expected[7][name][r], atol=1e-6)


def test_batches_of_several_reads(folder, monkeypatch):
  expected = fetch(make(folder, batch_size=24).start(1, 3))
  monkeypatch.setattr("bigtrain.inputs.tf_engine._ROWS_PER_READ", 7)
  batches = fetch(make(folder, batch_size=24).start(1, 3))
  for a, b in zip(batches, expected, strict=True):
    assert_equal(a, b)


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
  for a, b in zip(*batches, strict=True):
    assert_equal(a, b)


def test_a_stop_ends_a_batch_in_the_middle(monkeypatch):
  cfg = config(
    pp="value_range(-1, 1, 0, 16)|test_in_graph",
    data={"type": "arrays", "name": "digits"},
    batch_size=512,
  )
  engine, _ = pipeline.train_engine(cfg, seed=0, rows=np.arange(512))
  monkeypatch.setattr("bigtrain.inputs.tf_engine._ROWS_PER_READ", 4)
  stopping, reads, read = threading.Event(), [], arrays.Source.read

  def stop_at_third_read(self, indices):
    reads.append(1)
    if len(reads) >= 3:
      stopping.set()
    return read(self, indices)

  monkeypatch.setattr(arrays.Source, "read", stop_at_third_read)
  assert list(engine.batches(0, 2, stopping)) == []
  assert len(reads) < 40, "of 128 in a batch"


def test_cached_evaluation_of_images(folder):
  data = eval_input.make_eval(
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


def test_mixture_with_a_rare_source(folder, tmp_path):
  """Many reads have no row of the rare source."""
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
    rows = train.order(step)
    is_rare = rows.source == 1
    rare += is_rare.sum()
    assert (batch["label"][is_rare] == 100 + rows.index[is_rare]).all()
    assert (batch["label"][~is_rare] < 3).all()
  assert 0 < rare < 24
  for a, b in zip(fetch(train.start(40, 44)), batches[40:44], strict=True):
    assert_equal(a, b)


def test_features_of_varying_length(tmp_path):
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
def test_errors_are_raised_before_data_flows(folder, pp, message):
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
  message = str(error.value)
  assert message.startswith(
    f"{damaged}/class1/10.jpg: op 'decode|inception_crop(16)': "
  )
  assert "\n" not in message
  assert "node" not in message


def test_only_the_damaged_image_is_replaced(folder, damaged):
  expected = fetch(make(folder).start(0, 8))
  train = make(damaged, skip_errors=1)
  bad = [train.where(0, i).endswith("class1/10.jpg") for i in range(30)]
  batches = fetch(train.start(0, 8))
  assert train.skipped == 1
  num_replaced = 0
  for step, (a, b) in enumerate(zip(batches, expected, strict=True)):
    replaced = np.asarray(bad)[train.order(step).index]
    num_replaced += replaced.sum()
    for name in a:
      np.testing.assert_array_equal(a[name][~replaced], b[name][~replaced])
  assert num_replaced == 2  # 64 rows, 30 examples: once per complete epoch.
  again = fetch(make(damaged, skip_errors=1).start(4, 8))
  for a, b in zip(again, batches[4:], strict=True):
    assert_equal(a, b)


def test_a_missing_file_is_named(damaged):
  train = make(damaged)
  os.remove(train.where(0, 4))
  with pytest.raises(DataError, match=r"class0/12\.jpg: No such file"):
    fetch(train.start(0, 4))


def test_iterators_can_be_closed_midway(folder):
  train = make(folder)
  for _ in range(5):
    iterator = train.start(0, 10**9)
    next(iterator)
    iterator.close()
