"""Loggers: dashboards that show the log entries of a run.

A logger is a metric writer: an object with the methods of clu's
`metric_writers.MetricWriter`, which T5X, Scenic and many other projects use. So
a user can plug in an existing writer by its dotted path:

  config.loggers = dict(mine=dict(type="my_project.Writer", verbose=True))

Only the methods matter, not the base class, because importing clu's package of
writers loads tensorflow and needs tensorboard. The program's own writers are in
tensorboard.py and trackers.py.

`from_config` finds and checks the loggers of a config. Each then gets a thread
(writers.py), in which a `Feed` opens the writer and passes log entries to it.
"""

import inspect
import json
import os
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, Protocol

from absl import logging

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_kwargs
from bigtrain.config.modules import find_attribute
from bigtrain.files import paths
from bigtrain.reports import media, trackers
from bigtrain.reports.log_entries import Entry
from bigtrain.reports.tensorboard import TensorBoard


class MetricWriter(Protocol):
  """The methods of clu's MetricWriter that this program calls.

  The others are write_summaries, write_audios and write_videos.
  """

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None: ...

  # [N, height, width, channels].
  def write_images(self, step: int, images: Mapping[str, Any]) -> None: ...

  def write_texts(self, step: int, texts: Mapping[str, Any]) -> None: ...

  def write_histograms(
    self,
    step: int,
    arrays: Mapping[str, Any],
    num_buckets: Mapping[str, int] | None = None,
  ) -> None: ...

  def write_hparams(self, hparams: Mapping[str, Any]) -> None: ...

  def flush(self) -> None: ...

  def close(self) -> None: ...


METHODS = (
  "write_scalars",
  "write_images",
  "write_texts",
  "write_histograms",
  "write_hparams",
  "flush",
  "close",
)
# Parameters of a user's writer that get the folder of the run.
_FOLDER_PARAMETERS = ("workdir", "logdir")


class Logger(NamedTuple):
  """A logger of the config. Its writer is opened for the first log entry."""

  name: str  # For messages.
  open: Callable[[str, int], MetricWriter]  # Of the workdir and first step.


def from_config(config: settings.Config) -> list[Logger]:
  """Finds and checks the loggers of a config; opens none of them."""
  loggers = []
  if config.get("tensorboard", True):
    loggers.append(Logger("TensorBoard", TensorBoard))
  for key, (name, tracker) in trackers.TRACKERS.items():
    given = config.get(key)
    if given is None or given is False:
      continue
    options = {} if given is True else config.kwargs(key)
    trackers.check(key, options)
    loggers.append(_logger(name, tracker, options))
  for name, entry in config.kwargs("loggers", {}).items():
    if entry is not None and entry is not False:
      loggers.append(_users_logger(name, entry))
  return loggers


def _logger(name: str, make: Any, options: Mapping[str, Any]) -> Logger:
  def open_writer(workdir: str, first_step: int) -> MetricWriter:
    return make(workdir, first_step, **options)

  return Logger(name, open_writer)


def _users_logger(name: str, entry: Any) -> Logger:
  path = f"config.loggers.{name}"
  if not isinstance(entry, Mapping):
    raise ConfigError(f"{path}: expected a dict with a type, got {entry!r}.")
  options = dict(entry)
  dotted = options.pop("type", None)
  if not isinstance(dotted, str):
    raise ConfigError(
      f"{path}.type: expected the dotted path of a metric writer, such as "
      f"'my_project.Writer', got {dotted!r}."
    )
  make = _import_writer(dotted, f"{path}.type")
  if isinstance(make, type):  # Of a function, the result is checked.
    _check_methods(make, dotted, path)
  parameters = inspect.signature(make).parameters
  folder_names = [
    parameter
    for parameter in _FOLDER_PARAMETERS
    if parameter in parameters and parameter not in options
  ]
  check_kwargs(make, options, path, given=folder_names)

  def open_writer(workdir: str, first_step: int) -> MetricWriter:
    folders = dict.fromkeys(folder_names, workdir)
    writer = make(**options, **folders)
    _check_methods(writer, dotted, path)
    return writer

  return Logger(name, open_writer)


def _import_writer(dotted: str, key: str) -> Callable[..., Any]:
  try:
    make = find_attribute(dotted, key)
  except ModuleNotFoundError as e:
    package = (e.name or "").partition(".")[0]
    raise ConfigError(
      f"{key}: {dotted} cannot be imported without {package} ({e}); pip "
      f"install {package}."
    ) from e
  if not callable(make):
    raise ConfigError(f"{key}: {dotted} is not a class but {make!r}.")
  return make


def _check_methods(writer: Any, dotted: str, path: str) -> None:
  """Refuses a writer without a method, as clu's abstract class does."""
  missing = [
    method for method in METHODS if not callable(getattr(writer, method, None))
  ]
  # Of a subclass of clu's MetricWriter, which has them all.
  missing += sorted(getattr(writer, "__abstractmethods__", ()))
  if missing:
    raise ConfigError(
      f"{path}.type: {dotted} has no {', '.join(missing)}. A logger needs the "
      "methods of clu.metric_writers.MetricWriter; one that does nothing will "
      "do."
    )


class Feed:
  """Passes the log entries of a run to one metric writer."""

  def __init__(self, logger: Logger, workdir: str, first_step: int):
    hparams, self._evaluations = _read_config(workdir)
    self._name = logger.name
    self._writer = logger.open(workdir, first_step)
    self._unsupported: set[str] = set()  # Methods that are not implemented.
    self._call("write_hparams", hparams)
    if table := _read_text(workdir, "parameters.txt"):
      # Dashboards show texts as Markdown, in which indented lines keep their
      # columns.
      shown = "".join(f"    {line}\n" for line in table.splitlines())
      text = media.MediaText.of(media.Text(table), shown, "parameters.txt")
      self._call("write_texts", first_step, {"parameters": text})

  def write(self, entry: Entry, shown: Mapping[str, Any]) -> None:
    """Writes a log entry and the media that it has paths of (`media.split`)."""
    step = entry["step"]
    scalars = {
      grouped(metric, self._evaluations): value
      for metric, value in entry.items()
      if metric != "step" and isinstance(value, int | float)
    }
    images: dict[str, media.MediaArray] = {}
    texts: dict[str, media.MediaText] = {}
    histograms: dict[str, media.MediaArray] = {}
    num_buckets: dict[str, int] = {}
    for metric, value in shown.items():
      name, path = grouped(metric, self._evaluations), entry[metric]
      if isinstance(value, media.Image):
        images[name] = media.image_array(value, path)
      elif isinstance(value, media.Text):
        texts[name] = media.MediaText.of(value, value.text, path)
      elif isinstance(value, media.Table):
        texts[name] = media.MediaText.of(value, value.markdown(), path)
      else:
        histograms[name], num_buckets[name] = media.histogram_array(value, path)
    if scalars:
      self._call("write_scalars", step, scalars)
    if images:
      self._call("write_images", step, images)
    if texts:
      self._call("write_texts", step, texts)
    if histograms:
      self._call("write_histograms", step, histograms, num_buckets=num_buckets)

  def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
    """Calls a method, unless an earlier call has shown that it does nothing.

    clu warns that not all writers can show images, texts or histograms.
    """
    if method in self._unsupported:
      return
    try:
      getattr(self._writer, method)(*args, **kwargs)
    except NotImplementedError:
      self._unsupported.add(method)
      logging.warning("%s does not implement %s.", self._name, method)

  def flush(self) -> None:
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


def _read_text(workdir: str, name: str) -> str:
  try:
    return paths.read_bytes(os.path.join(workdir, name)).decode()
  except FileNotFoundError:
    return ""


def _read_config(workdir: str) -> tuple[dict[str, Any], Container[str]]:
  """Hyperparameters, such as {"model.depth": 12}, and names of evaluations."""
  config = json.loads(_read_text(workdir, "config.json") or "{}")
  hparams = {
    key: json.dumps(value) if isinstance(value, list) else value
    for key, value in settings.flatten(config).items()
    if value not in (None, {})  # Dashboards have no type for these.
  }
  return hparams, config.get("evals") or {}


# Figures of speed that have no unit in their names.
_SPEED = ("account", "data_wait_fraction", "device_hours", "mfu")
# Figures of training of which there can be several: "lr/encoder", "epoch/web".
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
  if slash and first not in _OF_TRAINING:
    return name
  return f"train/{name}"
