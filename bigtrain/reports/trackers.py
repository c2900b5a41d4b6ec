"""Loggers of experiment trackers: Weights & Biases, MLflow and trackio."""

import hashlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from absl import logging

from bigtrain.config.errors import check_kwargs, import_package
from bigtrain.files import paths
from bigtrain.reports import loggers, media


def check(name: str, options: Mapping[str, Any]) -> None:
  install = f"'bigtrain[{name}]'"
  module = import_package(name, f"config.{name}:", install)
  target = Mlflow if name == "mlflow" else module.init
  given = ["setup"] if name == "mlflow" else []
  check_kwargs(target, options, f"config.{name}", given=given)


class _Tracker:
  """A run of W&B or trackio, which a restart in the same workdir continues."""

  _text: Callable[[str], Any]

  def __init__(self, setup: loggers.Setup, library: Any, **options: Any):
    options["config"] = {**setup.config, **options.get("config", {})}
    self._setup, self._library = setup, library
    self._run = library.init(**{"resume": "allow", **options})

  def write(self, row: loggers.Row, shown: Mapping[str, Any]) -> None:
    values = {k: self._media(v) for k, v in self._setup.grouped(shown).items()}
    self._run.log({**self._setup.numbers(row), **values}, step=row["step"])

  def _media(self, value: Any) -> Any:
    library = self._library
    if isinstance(value, media.Text):
      return self._text(value.text)
    if isinstance(value, media.Table):
      return library.Table(columns=value.columns, data=_cells(value))
    if isinstance(value, media.Image):
      pixels = value.uint8()
      if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, -1)
      return library.Image(pixels, caption=value.caption or None)
    counts, _ = loggers.bins(value)
    return library.Histogram(np_histogram=(counts, value.edges))

  def flush(self) -> None:
    """Does nothing: the library decides when to write."""

  def close(self) -> None:
    self._run.finish()


class Wandb(_Tracker):
  """A W&B run; takes the options of `wandb.init`."""

  def __init__(self, setup: loggers.Setup, **options: Any):
    import wandb

    workdir = setup.workdir
    # W&B needs a local folder; for a remote workdir it takes the current one.
    folder = {} if paths.is_remote(workdir) else {"dir": workdir}
    options = {**folder, **options}
    if "id" not in options:
      options["id"] = _run_id(workdir, "wandb", _new_id(workdir))
    has_key = wandb.api.api_key or os.environ.get("WANDB_MODE")
    if "mode" not in options and not has_key:
      # Otherwise W&B would prompt for a key and block a batch job.
      options["mode"] = "offline"
      logging.info(
        f"W&B: not logged in; writing to {workdir} for `wandb sync`."
      )
    super().__init__(setup, wandb, **options)
    if setup.parameters:
      self._run.summary["parameters"] = setup.parameters

  def _text(self, text: str) -> Any:
    return self._library.Table(columns=["text"], data=[[text]])


class Trackio(_Tracker):
  """A trackio run; takes the options of `trackio.init`."""

  def __init__(self, setup: loggers.Setup, **options: Any):
    import trackio

    workdir = setup.workdir
    name = os.path.basename(workdir.rstrip("/")) or "run"
    name = _run_id(workdir, "trackio", f"{name}-{_new_id(workdir)[:6]}")
    options = {"project": "bigtrain", "name": name, **options}
    super().__init__(setup, trackio, **options)
    if setup.parameters:
      text = self._text(loggers.preformatted(setup.parameters))
      self._run.log({"parameters": text}, step=0)

  def _text(self, text: str) -> Any:
    return self._library.Markdown(text)


def _cells(table: media.Table) -> list[list[Any]]:
  """A table's values; lists become text, since columns have one type."""

  def cell(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, list) else value

  return [[cell(row.get(c)) for c in table.columns] for row in table.rows]


class Mlflow:
  """An MLflow run, with media values as artifacts."""

  def __init__(
    self,
    setup: loggers.Setup,
    *,
    tracking_uri: str | None = None,
    experiment: str = "Default",
    run_name: str | None = None,
  ):
    import mlflow
    from mlflow import entities

    self._setup, self._entities = setup, entities
    self._client = mlflow.MlflowClient(tracking_uri)
    self._run_id = _run_id(setup.workdir, "mlflow")
    if self._run_id:
      self._client.update_run(self._run_id, status="RUNNING")
    else:
      existing = self._client.get_experiment_by_name(experiment)
      id_ = existing.experiment_id if existing else None
      id_ = id_ or self._client.create_experiment(experiment)
      name = run_name or os.path.basename(setup.workdir.rstrip("/"))
      run = self._client.create_run(id_, run_name=name)
      self._run_id = _run_id(setup.workdir, "mlflow", run.info.run_id)
      self._start()

  def _start(self) -> None:
    params = [  # With the largest sizes of MLflow's stores.
      self._entities.Param(key[:250], str(value)[:6000])
      for key, value in self._setup.config.items()
    ]
    for at in range(0, len(params), 100):  # The largest number in a call.
      self._client.log_batch(self._run_id, params=params[at : at + 100])
    if text := self._setup.parameters:
      self._client.log_text(self._run_id, text, "parameters.txt")

  def write(self, row: loggers.Row, shown: Mapping[str, Any]) -> None:
    now = int(time.time() * 1000)
    values = [
      self._entities.Metric(name, float(value), now, row["step"])
      for name, value in self._setup.numbers(row).items()
    ]
    for at in range(0, len(values), 1000):  # The largest number in a call.
      self._client.log_batch(self._run_id, metrics=values[at : at + 1000])
    if shown:
      with tempfile.TemporaryDirectory(prefix="bigtrain-") as folder:
        media.save(folder, row["step"], shown)
        self._client.log_artifacts(self._run_id, folder)

  def flush(self) -> None:
    """Does nothing: each call has reached the server."""

  def close(self) -> None:
    self._client.set_terminated(self._run_id)


def make(
  name: str, setup: Callable[[], loggers.Setup], options: Mapping[str, Any]
) -> Any:
  kinds = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}
  return kinds[name](setup(), **options)


def _new_id(workdir: str) -> str:
  start = f"{socket.gethostname()}:{os.path.abspath(workdir)}:{time.time()}"
  return hashlib.sha256(start.encode()).hexdigest()[:16]


def _run_id(workdir: str, logger: str, new_id: str = "") -> str:
  """The id of a logger's run, stored in the workdir; `new_id` if it is new."""
  path = os.path.join(workdir, logger, "run_id")
  try:
    return paths.read_bytes(path).decode()
  except FileNotFoundError:
    if new_id:
      paths.make_folder(os.path.dirname(path))
      with paths.replacing(path) as file:
        file.write(new_id)
    return new_id
