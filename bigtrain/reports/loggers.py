"""Loggers, which show runs: what they have in common, and TensorBoard.

A logger receives the rows of metrics.jsonl in order, in a thread of its own
(writers.py), and may fail: write(row, shown), with the values whose paths are
in the row, flush() and close(). trackers.py has the others.
"""

import json
import os
import tempfile
import time
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import numpy as np

from bigtrain.config import settings
from bigtrain.files import paths
from bigtrain.reports import media
from bigtrain.reports.rows import Row

_SPEED = ("account", "data_wait_fraction", "device_hours", "mfu")
# First parts of names of training that have several.
_OF_TRAINING = ("epoch", "examples_seen", "lr")


def grouped(name: str, evaluations: Container[str]) -> str:
  """The name of a metric in a dashboard, such as eval/val/acc or train/loss.

  Statistics of single parameters, such as weight_rms/<name>, keep their names.
  """
  first, slash, _ = name.partition("/")
  if slash and first in evaluations:
    return f"eval/{name}"
  if first in _SPEED or name.endswith(("_per_sec", "_secs")):
    return f"speed/{name}"
  if name.endswith("_bytes"):
    return f"memory/{name}"
  return name if slash and first not in _OF_TRAINING else f"train/{name}"


class Setup(NamedTuple):
  """What a logger gets at the start of a run."""

  workdir: str
  config: dict[str, Any]  # {"model.depth": 12, ...}, without None.
  parameters: str  # Content of parameters.txt.
  evaluations: Container[str]

  @classmethod
  def read(cls, workdir: str) -> "Setup":
    def content(name: str) -> str:
      try:
        return paths.read_bytes(os.path.join(workdir, name)).decode()
      except FileNotFoundError:
        return ""

    config = json.loads(content("config.json") or "{}")
    flat = {
      key: json.dumps(value) if isinstance(value, list) else value
      for key, value in settings.flatten(config).items()
      if value not in (None, {})
    }
    text = content("parameters.txt")
    return cls(workdir, flat, text, config.get("evals") or {})

  def numbers(self, row: Row) -> dict[str, float]:
    return {
      grouped(name, self.evaluations): value
      for name, value in row.items()
      if name != "step" and isinstance(value, int | float)
    }

  def grouped(self, shown: Mapping[str, Any]) -> dict[str, Any]:
    return {grouped(name, self.evaluations): v for name, v in shown.items()}


def preformatted(text: str) -> str:
  return "".join(f"    {line}\n" for line in text.splitlines())


class TensorBoard:
  """Event files in workdir/tensorboard; they replace those from purge_step on.

  Uses the layer below tensorboardX's SummaryWriter, whose thread dies silently
  when the disk is full; its queue then blocks forever.
  """

  def __init__(self, setup: Setup, purge_step: int):
    from tensorboardX import event_file_writer, summary
    from tensorboardX.proto import event_pb2, summary_pb2

    self._event, self._summary = event_pb2.Event, summary_pb2
    self._make, self._setup = summary, setup
    folder = os.path.join(setup.workdir, "tensorboard")
    paths.make_folder(folder)
    self._local_folder: tempfile.TemporaryDirectory[str] | None = None
    self._mirror: paths.Mirror | None = None
    local = folder
    if paths.is_remote(folder):
      self._local_folder = tempfile.TemporaryDirectory(prefix="bigtrain-")
      local = self._local_folder.name
    # A restart within the same second must not overwrite the earlier file.
    suffix = f".{time.time_ns() % 10**9:09}.{os.getpid()}"
    path = os.path.join(local, "events")
    self._writer = event_file_writer.EventsWriter(path, suffix)
    if self._local_folder:
      (name,) = os.listdir(local)
      target, source = os.path.join(folder, name), os.path.join(local, name)
      self._mirror = paths.Mirror(target, source)
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(purge_step, session_log=start)
    if setup.config:
      for part in summary.hparams(setup.config, {"train/loss": 0}):
        self._add(purge_step, summary=part)
    if setup.parameters:
      text = preformatted(setup.parameters)
      self._add(purge_step, summary=summary.text("parameters", text))

  def _add(self, step: int, **content: Any) -> None:
    event = self._event(wall_time=time.time(), step=step, **content)
    self._writer.write_event(event)

  def write(self, row: Row, shown: Mapping[str, Any]) -> None:
    values = [
      self._summary.Summary.Value(tag=name, simple_value=value)
      for name, value in self._setup.numbers(row).items()
    ]
    self._add(row["step"], summary=self._summary.Summary(value=values))
    for name, value in self._setup.grouped(shown).items():
      self._add(row["step"], summary=self._media(name, value))

  def _media(self, name: str, value: Any) -> Any:
    if isinstance(value, media.Text):
      return self._make.text(name, value.text)
    if isinstance(value, media.Table):
      return self._make.text(name, value.markdown())
    if isinstance(value, media.Image):
      height, width = value.pixels.shape[:2]
      image = self._summary.Summary.Image(
        height=height, width=width, encoded_image_string=value.png()
      )
      entry = self._summary.Summary.Value(tag=name, image=image)
    else:
      counts, middles = bins(value)
      histogram = self._summary.HistogramProto(
        min=value.low,
        max=value.high,
        num=counts.sum(),
        sum=counts @ middles,
        sum_squares=counts @ middles**2,
        bucket_limit=value.edges[1:],
        bucket=counts,
      )
      entry = self._summary.Summary.Value(tag=name, histo=histogram)
    return self._summary.Summary(value=[entry])

  def flush(self) -> None:
    self._writer.flush()
    if self._mirror is not None:
      self._mirror.push(soon=True)

  def close(self) -> None:
    self._writer.close()
    if self._mirror and self._local_folder:
      self._mirror.push()
      self._local_folder.cleanup()


def bins(value: Any) -> tuple[np.ndarray, np.ndarray]:
  """(counts, middles of the bins), float64."""
  edges = value.edges
  return np.asarray(value.counts, np.float64), (edges[1:] + edges[:-1]) / 2
