"""A metric writer as users of T5X or Scenic have one: a subclass of clu's.

clu's abstract class is read from its file: importing its package loads
tensorflow and needs tensorboard, which these tests must not.
"""

import importlib.util
import os
import sys
import time
import types

import numpy as np

from bigtrain import metrics
from bigtrain.reports import media


def import_clu(module):
  """Imports clu.metric_writers.<module> without the package's own imports."""
  folder = os.path.join(
    importlib.util.find_spec("clu").submodule_search_locations[0],
    "metric_writers",
  )
  package = types.ModuleType("clu.metric_writers")
  package.__path__ = [folder]
  had = sys.modules.get("clu.metric_writers")
  sys.modules["clu.metric_writers"] = package
  try:
    return importlib.import_module(f"clu.metric_writers.{module}")
  finally:
    if had is None:
      del sys.modules["clu.metric_writers"]
    else:
      sys.modules["clu.metric_writers"] = had


interface = import_clu("interface")
# What the writers of this process were given: (folder, method, arguments).
calls = []


class Writer(interface.MetricWriter):
  """Keeps what it is given, and fails or hangs in a method if asked to."""

  def __init__(self, logdir, *, prefix="", fails="", hangs=""):
    self._logdir, self._prefix = logdir, prefix
    self._fails, self._hangs = fails, hangs

  def _note(self, method, *arguments):
    if method == self._fails:
      raise OSError("no route to host")
    if method == self._hangs:
      time.sleep(3600)
    calls.append((self._logdir, method, *arguments))

  def write_summaries(self, step, values, metadata=None):
    raise NotImplementedError

  def write_scalars(self, step, scalars):
    scalars = {f"{self._prefix}{k}": float(v) for k, v in scalars.items()}
    self._note("write_scalars", step, scalars)

  def write_images(self, step, images):
    self._note("write_images", step, images)

  def write_videos(self, step, videos):
    raise NotImplementedError

  def write_audios(self, step, audios, *, sample_rate):
    raise NotImplementedError

  def write_texts(self, step, texts):
    self._note("write_texts", step, texts)

  def write_histograms(self, step, arrays, num_buckets=None):
    # As clu's writers count the values themselves.
    counted = {
      name: np.histogram(array, bins=num_buckets[name])
      for name, array in arrays.items()
    }
    self._note("write_histograms", step, counted)

  def write_hparams(self, hparams):
    self._note("write_hparams", hparams)

  def flush(self):
    self._note("flush")

  def close(self):
    self._note("close")


class NotFinished(interface.MetricWriter):
  """Lacks all methods of its abstract class."""


class ScalarsOnly:
  def write_scalars(self, step, scalars):
    pass

  def flush(self):
    pass


def make_scalars_only():
  return ScalarsOnly()


class Evaluator:
  """Returns a number, and media of every kind."""

  def __init__(self, predict_fn, batches):
    pass

  def run(self, variables, step):
    return {
      "number": 0.25,
      "picture": media.Image(np.full((2, 3), 7, np.uint8), "a caption"),
      "note": media.Text("**bold**"),
      "table": media.Table([{"a": 1, "b": "x|y"}]),
      "sizes": metrics.Histogram(np.array([0.0, 2.0, 0.0, 5.0]), 0.0, 4.0),
    }
