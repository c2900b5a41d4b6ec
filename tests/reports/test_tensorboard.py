"""TensorBoard's event files."""

import errno
import glob
import io
import logging
import math
import os
import time

import numpy as np
import pytest
from PIL import Image
from support import written_runs

from bigtrain.config import settings
from bigtrain.reports import loggers, tensorboard, writers


def events(workdir):
  """Returns the events of all files of a run, in order."""
  import tensorboardX.proto.event_pb2 as event_pb2

  result = []
  for path in sorted(glob.glob(f"{workdir}/tensorboard/*tfevents*")):
    with open(path, "rb") as file:
      content = file.read()
    while content:
      size = int.from_bytes(content[:8], "little")
      result.append(event_pb2.Event.FromString(content[12 : 12 + size]))
      content = content[16 + size :]
  return result


def scalars(workdir):
  """Returns (step, tag, value), and (step, None, None) of purges."""
  result = []
  for event in events(workdir):
    if event.HasField("session_log"):
      result.append((event.step, None, None))
    for value in event.summary.value:
      result.append((event.step, value.tag, value.simple_value))
  return result


def open_writers(workdir, **options):
  by_default = loggers.from_config(settings.Config({}))
  return writers.Writers(str(workdir), loggers=by_default, **options)


def write(workdir, *entries, **options):
  writer = open_writers(workdir, **options)
  for entry in entries:
    writer.write(entry)
  writer.close()


def test_tensorboard_receives_every_number(tmp_path):
  row = {"step": 5, "loss": 0.5, "n": 3, "note": "text", "val/acc": math.inf}
  write(tmp_path, row, {"step": 5, "test/acc": 0.25})
  assert scalars(tmp_path) == [
    (0, None, None),
    (5, "train/loss", 0.5),
    (5, "train/n", 3.0),
    (5, "val/acc", math.inf),
    (5, "test/acc", 0.25),
  ]
  write(tmp_path, {"step": 6, "n": 1}, restored_step=5)
  assert scalars(tmp_path)[-2:] == [(6, None, None), (6, "train/n", 1.0)]
  assert len(glob.glob(f"{tmp_path}/tensorboard/*")) == 2


def test_tensorboard_receives_every_kind_of_value(tmp_path):
  written_runs.write_media(tmp_path, 5)
  values = {
    value.tag: (event.step, value)
    for event in events(tmp_path)
    for value in event.summary.value
  }
  numbers = {
    t: v.simple_value for t, (_, v) in values.items() if v.simple_value
  }
  assert numbers == {
    "train/loss": 0.5,
    "speed/examples_per_sec": 3.0,
    "memory/device_peak_bytes": 7.0,
    "eval/val/acc": 0.25,
  }
  row = written_runs.media_row(5)
  step, value = values["eval/val/picture"]
  assert step == 5 and (value.image.height, value.image.width) == (2, 3)
  with Image.open(io.BytesIO(value.image.encoded_image_string)) as image:
    np.testing.assert_array_equal(image, row["val/picture"].pixels)
  text = lambda tag: values[f"{tag}/text_summary"][1].tensor.string_val[0]
  assert text("eval/val/note").decode() == row["val/note"].text
  assert text("eval/val/texts").decode().splitlines() == [
    "| number | text | references |",
    "|---|---|---|",
    r"| 0 | a\|b | x; y |",
  ]
  histogram = values["eval/val/sizes"][1].histo
  assert list(histogram.bucket) == [1, 2, 5]
  assert list(histogram.bucket_limit) == [1, 2, 3]
  assert histogram.num == 8 and histogram.sum == 0.5 + 2 * 1.5 + 5 * 2.5
  assert text("parameters") == b"    | kernel | 12 |\n"


def test_tensorboard_has_the_config_as_hyperparameters(tmp_path):
  from tensorboardX.proto import plugin_hparams_pb2

  written_runs.write_media(tmp_path, 5)
  (start,) = [
    value.metadata.plugin_data.content
    for event in events(tmp_path)
    for value in event.summary.value
    if value.tag == "_hparams_/session_start_info"
  ]
  data = plugin_hparams_pb2.HParamsPluginData.FromString(start)
  given = data.session_start_info.hparams
  assert {name: str(value).strip() for name, value in given.items()} == {
    "lr": "number_value: 0.5",
    "model.depth": "number_value: 3",
    "evals.val.type": 'string_value: "mean"',
  }


def test_tensorboard_is_flushed_while_the_run_waits(tmp_path, monkeypatch):
  monkeypatch.setattr(writers, "_FLUSH_SECS", 0.05)
  writer = open_writers(tmp_path)
  writer.write({"step": 5, "loss": 0.5})
  deadline = time.monotonic() + 60
  while (5, "train/loss", 0.5) not in scalars(tmp_path):
    assert time.monotonic() < deadline
    time.sleep(0.02)
  writer.close()


def test_tensorboard_without_its_folder_is_reported_once(tmp_path, caplog):
  (tmp_path / "tensorboard").write_text("a file where a folder should be")
  written = [{"step": s, "loss": 0.5} for s in range(5)]
  write(tmp_path, *written)
  assert writers.read_rows(str(tmp_path)) == written
  (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
  assert "TensorBoard failed and is off" in error.getMessage()


def test_tensorboard_on_a_full_disk_raises(tmp_path):
  """A writer that blocks instead would be taken for one that hangs."""
  logger = tensorboard.TensorBoard(str(tmp_path), 0)
  logger.write_scalars(0, {"loss": 0.5})
  logger.flush()
  file = logger._writer._py_recordio_writer._writer
  full = os.open("/dev/full", os.O_WRONLY)
  os.dup2(full, file.fileno())
  os.close(full)
  with pytest.raises(OSError) as e:
    for step in range(1, 50):
      logger.write_scalars(step, {"loss": 0.5})
      logger.flush()
  assert e.value.errno == errno.ENOSPC
