"""TensorBoard's event files, written without tensorflow."""

import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from bigtrain.files import paths
from bigtrain.reports.media import MediaArray


class TensorBoard:
  """Writes event files to workdir/tensorboard.

  TensorBoard hides entries of earlier files from `first_step` on, because a
  resumed run writes those steps again.

  This uses the layer below tensorboardX's SummaryWriter. The SummaryWriter's
  own thread dies silently when the disk is full, and its queue then blocks
  forever.
  """

  def __init__(self, workdir: str, first_step: int):
    from tensorboardX import event_file_writer, summary
    from tensorboardX.proto import event_pb2, summary_pb2

    self._event = event_pb2.Event
    self._protos = summary_pb2
    self._summary = summary
    self._first_step = first_step
    folder = os.path.join(workdir, "tensorboard")
    paths.make_folder(folder)
    # Files in an object store cannot be appended to: they are written to a
    # local folder and uploaded from there.
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
      self._mirror = paths.Mirror(
        os.path.join(folder, name), os.path.join(local, name)
      )
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(first_step, session_log=start)

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    values = [
      self._protos.Summary.Value(tag=name, simple_value=value)
      for name, value in scalars.items()
    ]
    self._add(step, summary=self._protos.Summary(value=values))

  def write_images(self, step: int, images: Mapping[str, MediaArray]) -> None:
    for name, array in images.items():
      _, height, width, _ = array.shape
      image = self._protos.Summary.Image(
        height=height,
        width=width,
        encoded_image_string=array.media.png(),
      )
      self._add_value(step, tag=name, image=image)

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
      self._add(step, summary=self._summary.text(name, text))

  def write_histograms(
    self,
    step: int,
    arrays: Mapping[str, MediaArray],
    num_buckets: Mapping[str, int] | None = None,
  ) -> None:
    for name, array in arrays.items():
      counts = np.asarray(array.media.counts, np.float64)
      edges = array.media.edges
      middles = (edges[1:] + edges[:-1]) / 2
      histogram = self._protos.HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=counts.sum(),
        sum=counts @ middles,
        sum_squares=counts @ middles**2,
        bucket_limit=edges[1:],
        bucket=counts,
      )
      self._add_value(step, tag=name, histo=histogram)

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    if hparams:
      # The second argument names the metrics in TensorBoard's table of runs.
      for part in self._summary.hparams(dict(hparams), {"train/loss": 0}):
        self._add(self._first_step, summary=part)

  def flush(self) -> None:
    self._writer.flush()
    if self._mirror is not None:
      self._mirror.push(soon=True)

  def close(self) -> None:
    self._writer.close()
    if self._mirror and self._local_folder:
      self._mirror.push()
      self._local_folder.cleanup()

  def _add_value(self, step: int, **fields: Any) -> None:
    value = self._protos.Summary.Value(**fields)
    self._add(step, summary=self._protos.Summary(value=[value]))

  def _add(self, step: int, **content: Any) -> None:
    event = self._event(wall_time=time.time(), step=step, **content)
    self._writer.write_event(event)
