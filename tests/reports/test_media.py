"""Images, texts, tables and histograms: their files."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from support import written_runs

from bigtrain.reports import media, writers


def test_rows_point_to_the_files(tmp_path):
  written_runs.write_media(tmp_path, 5, tensorboard=False)
  (row,) = writers.read_rows(str(tmp_path))
  wanted = written_runs.media_row(5)
  assert row["val/acc"] == 0.25
  assert row["val/picture"] == "media/val/picture/00000005.png"
  assert row["val/texts"] == "texts/5.jsonl"
  note = (tmp_path / row["val/note"]).read_text()
  assert note == wanted["val/note"].text
  lines = (tmp_path / row["val/texts"]).read_text().splitlines()
  assert [json.loads(line) for line in lines] == wanted["val/texts"].rows
  sizes = json.loads((tmp_path / row["val/sizes"]).read_text())
  assert sizes == {"edges": [0, 1, 2, 3], "counts": [1, 2, 5]}
  # What is read back, for a report.
  assert media.read(str(tmp_path), row["val/note"]).text == note
  assert media.read(str(tmp_path), row["val/texts"]).columns[1] == "text"
  assert media.read(str(tmp_path), row["val/sizes"]) == sizes
  image = media.read(str(tmp_path), row["val/picture"])
  assert image.caption == "two rows"
  assert image.content == (tmp_path / row["val/picture"]).read_bytes()
  assert media.read(str(tmp_path), "media/gone.png") is None


@pytest.mark.parametrize("channels", [0, 1, 3, 4])
def test_png_files_hold_the_pixels(channels):
  shape = (5, 7, channels) if channels else (5, 7)
  pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
  for array in (pixels, pixels / 255.0):
    content = media.Image(array, "ein Füllwort").png()
    with Image.open(io.BytesIO(content)) as image:
      image.verify()  # Also the checksums.
    with Image.open(io.BytesIO(content)) as image:
      np.testing.assert_array_equal(np.asarray(image), pixels.squeeze())
      assert image.text == {"Description": "ein Füllwort"}
    assert media.png_caption(content) == "ein Füllwort"


def test_values_of_floats_are_clipped():
  pixels = np.array([[-1.0, 2.0, np.nan]])
  assert media.Image(pixels).uint8().ravel().tolist() == [0, 255, 0]


def test_an_image_of_another_shape_fails_the_run(tmp_path):
  """As a full disk does: metrics.jsonl must not point to nothing."""
  row = {"step": 1, "val/x": media.Image(np.zeros((2, 2, 2)))}
  writer = writers.Writers(str(tmp_path))
  writer.write(*media.split(row))
  with pytest.raises(writers.WriteError, match=r"got shape \(2, 2, 2\)"):
    writer.close()
  assert writers.read_rows(str(tmp_path)) == []
