"""Experiment trackers: Weights & Biases, MLflow and trackio.

Each class has the methods of a metric writer (loggers.py) and passes what it
gets to the tracker's library. A restarted run continues the run of the tracker,
whose id is stored in the workdir.
"""

import hashlib
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging

from bigtrain.config.errors import check_kwargs, import_package
from bigtrain.files import paths
from bigtrain.reports import media
from bigtrain.reports.media import MediaArray, MediaText


class _Tracker:
  """A run of W&B or of trackio, whose libraries have the same interface.

  The run starts in `write_hparams`, because the libraries need the config then.
  """

  def __init__(self, library: Any, **options: Any):
    self._library = library
    self._options = {"resume": "allow", **options}
    self._run: Any = None

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    config = {**hparams, **self._options.get("config", {})}
    self._run = self._library.init(**{**self._options, "config": config})

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    self._run.log(dict(scalars), step=step)

  def write_images(self, step: int, images: Mapping[str, MediaArray]) -> None:
    shown = {}
    for name, array in images.items():
      pixels = np.asarray(array[0])
      if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
      caption = array.media.caption or None
      shown[name] = self._library.Image(pixels, caption=caption)
    self._run.log(shown, step=step)

  def write_texts(self, step: int, texts: Mapping[str, MediaText]) -> None:
    shown = {}
    for name, text in texts.items():
      table = text.media
      if isinstance(table, media.Table):
        shown[name] = self._library.Table(
          columns=table.columns, data=_cells(table)
        )
      else:
        shown[name] = self._text(text)
    self._run.log(shown, step=step)

  def write_histograms(
    self,
    step: int,
    arrays: Mapping[str, MediaArray],
    num_buckets: Mapping[str, int] | None = None,
  ) -> None:
    shown = {}
    for name, array in arrays.items():
      counts = np.asarray(array.media.counts, np.float64)
      histogram = (counts, array.media.edges)
      shown[name] = self._library.Histogram(np_histogram=histogram)
    self._run.log(shown, step=step)

  def flush(self) -> None:
    """Does nothing: the library decides when to write."""

  def close(self) -> None:
    self._run.finish()

  def _text(self, text: str) -> Any:
    raise NotImplementedError


class Wandb(_Tracker):
  """A W&B run, with the options of `wandb.init`."""

  def __init__(self, workdir: str, first_step: int, **options: Any):
    import wandb

    # W&B writes to local folders only. For a remote workdir it uses the current
    # folder.
    if not paths.is_remote(workdir):
      options = {"dir": workdir, **options}
    if "id" not in options:
      options["id"] = _run_id(workdir, "wandb", _new_id(workdir))
    has_key = wandb.api.api_key or os.environ.get("WANDB_MODE")
    if "mode" not in options and not has_key:
      # Otherwise W&B would prompt for a key and block a batch job.
      options["mode"] = "offline"
      logging.info(
        f"W&B: not logged in; writing to {workdir} for `wandb sync`."
      )
    super().__init__(wandb, **options)

  def write_texts(self, step: int, texts: Mapping[str, MediaText]) -> None:
    others = dict(texts)
    # The parameters belong to the run as a whole, and not to a step.
    table = others.pop("parameters", None)
    if table is not None and isinstance(table.media, media.Text):
      self._run.summary["parameters"] = table.media.text
    if others:
      super().write_texts(step, others)

  def _text(self, text: str) -> Any:
    return self._library.Table(columns=["text"], data=[[str(text)]])


class Trackio(_Tracker):
  """A trackio run, with the options of `trackio.init`."""

  def __init__(self, workdir: str, first_step: int, **options: Any):
    import trackio

    name = os.path.basename(workdir.rstrip("/")) or "run"
    name = _run_id(workdir, "trackio", f"{name}-{_new_id(workdir)[:6]}")
    super().__init__(
      trackio, **{"project": "bigtrain", "name": name, **options}
    )

  def _text(self, text: str) -> Any:
    return self._library.Markdown(str(text))


def _cells(table: media.Table) -> list[list[Any]]:
  """The values of a table. Lists become text, because a column has one type."""

  def cell(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, list) else value

  return [
    [cell(row.get(column)) for column in table.columns] for row in table.rows
  ]


# Limits of MLflow's stores and of its server's API.
_MAX_PARAM_NAME = 250
_MAX_PARAM_VALUE = 6000
_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 1000


class Mlflow:
  """An MLflow run; images, texts, tables and histograms are artifacts."""

  def __init__(
    self,
    workdir: str,
    first_step: int,
    *,
    tracking_uri: str | None = None,
    experiment: str = "Default",
    run_name: str | None = None,
  ):
    import mlflow
    from mlflow import entities

    self._entities = entities
    self._client = mlflow.MlflowClient(tracking_uri)
    self._run_id = _run_id(workdir, "mlflow")
    self._is_new = not self._run_id
    if self._run_id:
      self._client.update_run(self._run_id, status="RUNNING")
      return
    existing = self._client.get_experiment_by_name(experiment)
    experiment_id = existing.experiment_id if existing else None
    experiment_id = experiment_id or self._client.create_experiment(experiment)
    name = run_name or os.path.basename(workdir.rstrip("/"))
    run = self._client.create_run(experiment_id, run_name=name)
    self._run_id = _run_id(workdir, "mlflow", run.info.run_id)

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    if not self._is_new:  # MLflow refuses to change a parameter of a run.
      return
    params = [
      self._entities.Param(key[:_MAX_PARAM_NAME], str(value)[:_MAX_PARAM_VALUE])
      for key, value in hparams.items()
    ]
    for start in range(0, len(params), _PARAMS_PER_CALL):
      chunk = params[start : start + _PARAMS_PER_CALL]
      self._client.log_batch(self._run_id, params=chunk)

  def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
    now_ms = int(time.time() * 1000)
    values = [
      self._entities.Metric(name, float(value), now_ms, step)
      for name, value in scalars.items()
    ]
    for start in range(0, len(values), _METRICS_PER_CALL):
      chunk = values[start : start + _METRICS_PER_CALL]
      self._client.log_batch(self._run_id, metrics=chunk)

  def write_images(self, step: int, images: Mapping[str, MediaArray]) -> None:
    self._log_files(images)

  def write_texts(self, step: int, texts: Mapping[str, MediaText]) -> None:
    self._log_files(texts)

  def write_histograms(
    self,
    step: int,
    arrays: Mapping[str, MediaArray],
    num_buckets: Mapping[str, int] | None = None,
  ) -> None:
    self._log_files(arrays)

  def _log_files(self, values: Mapping[str, MediaArray | MediaText]) -> None:
    """Uploads the same files as in the workdir, under the same paths."""
    with tempfile.TemporaryDirectory(prefix="bigtrain-") as folder:
      for value in values.values():
        media.save_file(folder, value.path, value.media)
      self._client.log_artifacts(self._run_id, folder)

  def flush(self) -> None:
    """Does nothing: each call has reached the server."""

  def close(self) -> None:
    self._client.set_terminated(self._run_id)


# {key of the config: (name for messages, class)}.
TRACKERS: dict[str, tuple[str, Any]] = {
  "wandb": ("W&B", Wandb),
  "mlflow": ("MLflow", Mlflow),
  "trackio": ("trackio", Trackio),
}


def check(key: str, options: Mapping[str, Any]) -> None:
  """Raises ConfigError if a tracker's library or an option is missing."""
  install = f"'bigtrain[{key}]'"
  library = import_package(key, f"config.{key}:", install)
  if key == "mlflow":
    given = ["workdir", "first_step"]
    check_kwargs(Mlflow, options, "config.mlflow", given=given)
  else:
    check_kwargs(library.init, options, f"config.{key}")


def _new_id(workdir: str) -> str:
  start = f"{socket.gethostname()}:{os.path.abspath(workdir)}:{time.time()}"
  return hashlib.sha256(start.encode()).hexdigest()[:16]


def _run_id(workdir: str, tracker: str, new_id: str = "") -> str:
  """The id of a tracker's run, stored in the workdir.

  Without a stored one, stores and returns `new_id`.
  """
  path = os.path.join(workdir, tracker, "run_id")
  try:
    return paths.read_bytes(path).decode()
  except FileNotFoundError:
    if new_id:
      paths.make_folder(os.path.dirname(path))
      with paths.replacing(path) as file:
        file.write(new_id)
    return new_id
