"""Folders of images. Nothing is decoded, so any bytes serve as images."""

import logging

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import image_folder


@pytest.fixture
def folder(tmp_path):
  top = tmp_path / "train"
  for name, count in [("dog", 3), ("cat", 4), ("ähre", 2), ("empty", 0)]:
    (top / name / "more").mkdir(parents=True)
    for i in range(count):
      where = top / name / ("more" if i == 2 else ".")
      suffix = (".jpg", ".JPEG", ".png", ".webp")[i]
      (where / f"{i}{suffix}").write_bytes(f"{name} {i}".encode())
    (top / name / "notes.txt").write_text("no image")
  (top / "labels.csv").write_text("no folder")
  return top


def test_images_labels_and_names(folder, caplog):
  with caplog.at_level(logging.WARNING):
    source = image_folder.Source(folder)
  assert "1 of 4 classes" in caplog.text
  assert "empty" in caplog.text
  assert len(source) == 9
  assert source.classes == ["cat", "dog", "empty", "ähre"]
  batch = source.read(np.arange(9))
  assert batch["label"].tolist() == [0, 0, 0, 0, 1, 1, 1, 3, 3]
  assert batch["image"].tolist() == [
    *[f"cat {i}".encode() for i in (0, 1, 3, 2)],
    *[f"dog {i}".encode() for i in (0, 1, 2)],
    *[f"ähre {i}".encode() for i in (0, 1)],
  ]
  assert batch["label_name"][8] == "ähre".encode()
  assert set(source.spec) == set(batch)
  assert source.where(3) == str(folder / "cat" / "more" / "2.png")


def test_a_classes_file_determines_the_labels(folder, tmp_path):
  classes = tmp_path / "classes.txt"
  classes.write_text("dog\nempty\nähre\n\ncat\nunseen\n", encoding="utf-8")
  source = image_folder.Source(folder, classes=str(classes))
  assert source.read(np.asarray([0, 8]))["label"].tolist() == [0, 3]
  classes.write_text("dog\nempty\nähre\n", encoding="utf-8")
  with pytest.raises(ConfigError, match=r"folder 'cat' .* is not a class of"):
    image_folder.Source(folder, classes=str(classes))
  classes.write_text("dog\ndog\n")
  with pytest.raises(ConfigError, match="lists 'dog' twice"):
    image_folder.Source(folder, classes=str(classes))


def test_slices_are_disjoint_and_contain_all_classes(folder):
  for i in range(4, 200):
    (folder / "cat" / f"{i}.jpg").write_bytes(b"cat %d" % i)
    (folder / "dog" / f"{i}.jpg").write_bytes(b"dog %d" % i)
  parts = [image_folder.Source(folder, slice=s) for s in ("[:80%]", "[80%:]")]
  read = [part.read(np.arange(len(part))) for part in parts]
  images = [set(batch["image"]) for batch in read]
  assert not images[0] & images[1]
  assert len(images[0] | images[1]) == 401
  assert 0.3 < (read[1]["label"] == 0).mean() < 0.7
  assert parts[0].fingerprint() != parts[1].fingerprint()


def test_mistakes(folder, tmp_path):
  with pytest.raises(ConfigError, match="Did you mean 'train'"):
    image_folder.Source(tmp_path / "tain")
  with pytest.raises(DataError, match="no class folders with images"):
    image_folder.Source(folder / "empty")
  source = image_folder.Source(folder)
  (folder / "cat" / "0.jpg").unlink()
  with pytest.raises(DataError, match=r"cat/0\.jpg: No such file"):
    source.read(np.asarray([0]))
