"""Turned pictures and other formats from every source, and in predictions."""

import io
import json
import logging

import numpy as np
import pytest
from PIL import Image, ImageOps, features
from support import saved_models, tar_shards

import bigtrain
from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.inputs import pipeline

pytest.importorskip("tensorflow")

# Turned by EXIF: all orientations, of one size as the camera means them.
SIDES = 20, 12


def picture(orientation, kind="JPEG"):
  """A file of the same scene, held in one of eight ways."""
  scene = Image.new("RGB", SIDES, "red")
  scene.paste("blue", (0, 0, 9, 12))
  scene.paste("green", (0, 0, 20, 4))
  undo = (None, None, 0, 3, 1, 5, 4, 6, 2)[orientation]  # Image.Transpose.
  if undo is not None:
    scene = scene.transpose(undo)
  tags = Image.Exif()
  tags[0x0112] = orientation
  out = io.BytesIO()
  options = dict(quality=95, subsampling=0) if kind == "JPEG" else {}
  scene.save(out, kind, exif=tags, **options)
  return out.getvalue()


PICTURES = [picture(i) for i in range(1, 9)]


def as_pillow(encoded, exif=True):
  image = Image.open(io.BytesIO(encoded))
  return np.asarray(ImageOps.exif_transpose(image) if exif else image)


def write_folder(folder):
  (folder / "a").mkdir(parents=True)
  for i, encoded in enumerate(PICTURES):
    (folder / "a" / f"{i}.jpg").write_bytes(encoded)
  return dict(type="image_folder", path=str(folder))


def write_jsonl(folder):
  write_folder(folder)
  rows = [json.dumps(dict(file=f"a/{i}.jpg", label=0)) for i in range(8)]
  (folder / "x.jsonl").write_text("\n".join(rows))
  path = str(folder / "x.jsonl")
  return dict(type="jsonl", path=path, image_key="file", fields=["label"])


def write_tar(folder):
  folder.mkdir()
  members = []
  for i, encoded in enumerate(PICTURES):
    members += [(f"{i}.jpg", encoded), (f"{i}.cls", b"0")]
  tar_shards.write(folder / "0.tar", members)
  return dict(type="webdataset", path=str(folder / "*.tar"))


SOURCES = dict(image_folder=write_folder, jsonl=write_jsonl, tar=write_tar)


def batch_of(data, decode):
  config = settings.Config(
    {
      "input": dict(
        data=data,
        # Of the pictures' own size, for those that lie as the scene does.
        pp=f"{decode}|resize((12, 20), 'nearest')|keep('image')",
        batch_size=8,
        shuffle=False,
      )
    }
  )
  mesh = sharding.make_mesh()
  train = pipeline.make_train(config.input, seed=0, mesh=mesh)
  batches = train.start(0, 1)
  try:
    return np.asarray(next(batches)["image"])
  finally:
    batches.close()


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_turns_pictures(name, tmp_path, caplog):
  data = SOURCES[name](tmp_path / "data")
  caplog.set_level(logging.WARNING)
  turned = batch_of(data, "decode(exif=True)")
  np.testing.assert_array_equal(turned, [as_pillow(x) for x in PICTURES])
  assert "EXIF" not in caplog.text
  stored = batch_of(data, "decode")
  expected = [as_pillow(x, exif=False) for x in PICTURES[:4]]
  np.testing.assert_array_equal(stored[:4], expected)
  (record,) = [x for x in caplog.records if "EXIF" in x.getMessage()]
  message = record.getMessage()
  assert "config.input: EXIF says that 7 of 8 pictures are turned" in message
  assert "exif=True" in message


def test_only_pictures_that_are_decoded_as_stored_are_counted(tmp_path, caplog):
  caplog.set_level(logging.WARNING)
  (tmp_path / "a").mkdir()
  for i in range(8):
    (tmp_path / "a" / f"{i}.jpg").write_bytes(PICTURES[0])
  batch_of(dict(type="image_folder", path=str(tmp_path)), "decode")
  assert "EXIF" not in caplog.text


@pytest.mark.parametrize("kind", ["TIFF", "AVIF"])
def test_folders_have_other_formats(kind, tmp_path):
  if kind == "AVIF" and not features.check("avif"):
    pytest.skip("Pillow without libavif")
  (tmp_path / "a").mkdir()
  encoded = picture(1, kind)
  for i in range(8):
    name = f"{i}.{kind.lower()}" if i % 2 else f"{i}.jpg"
    (tmp_path / "a" / name).write_bytes(encoded if i % 2 else PICTURES[0])
  data = dict(type="image_folder", path=str(tmp_path))
  result = batch_of(data, "decode")
  np.testing.assert_array_equal(result[1], as_pillow(encoded))
  np.testing.assert_array_equal(result[0], as_pillow(PICTURES[0]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Workdirs of runs on encoded pictures and on arrays."""
  folder = tmp_path_factory.mktemp("runs")
  result = {}
  for name, data in (
    ("encoded", dict(type="image_folder", path="x")),
    ("arrays", dict(type="arrays", path="x.npz")),
  ):
    decode = "decode(exif=True)|" if name == "encoded" else ""
    pp = f"{decode}resize((12, 20))|value_range(-1,1)"
    config = dict(
      task="classification",
      model_name="vit",
      model=dict(num_classes=3, patch_size=4, **saved_models.TOWER),
      input=dict(data=data, pp=pp, batch_size=4),
      evals=dict(val=dict(type="save", pred="logits", data=data, pp=pp)),
    )
    saved_models.saved(folder / name, config, image=((12, 20, 3), "float32"))
    result[name] = str(folder / name)
  return result


def test_predictions_read_files_as_in_training(runs, tmp_path, caplog):
  caplog.set_level(logging.WARNING)
  files = []
  for i, encoded in enumerate(PICTURES):
    files.append(tmp_path / f"{i}.jpg")
    files[-1].write_bytes(encoded)
  scale = lambda images: np.float32(images) / 127.5 - 1
  model = bigtrain.load(runs["encoded"])
  upright = scale([as_pillow(x) for x in PICTURES])
  np.testing.assert_allclose(model.pictures(files)["image"], upright, atol=1e-6)
  assert "EXIF" not in caplog.text
  # A run on arrays decodes files too, as Pillow does, without turning them.
  model = bigtrain.load(runs["arrays"])
  stored = scale([as_pillow(x, exif=False) for x in PICTURES[:4]])
  for _ in range(2):  # The warning comes once.
    result = model.pictures(files[:4])["image"]
    np.testing.assert_allclose(result, stored, atol=1e-6)
  messages = [x.getMessage() for x in caplog.records]
  (message,) = [x for x in messages if "EXIF" in x]
  assert "3 of 4 pictures are turned, such as" in message
  assert str(files[1]) in message
