"""W&B, MLflow and trackio: fakes, and the real ones where installed."""

import glob
import json
import logging
import sys
import time
import types

import pytest
from support import written_runs

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.reports import loggers, writers


class FakeWandb(types.ModuleType):
  api = types.SimpleNamespace(api_key=None)

  def __init__(self):
    super().__init__("wandb")
    self.runs = []

  def init(
    self,
    project=None,
    id=None,
    dir=None,
    resume=None,
    mode=None,
    config=None,
  ):
    run = types.SimpleNamespace(
      options=dict(project=project, id=id, dir=dir, resume=resume, mode=mode),
      config=config,
      summary={},
      logged=[],
      finished=False,
    )
    run.log = lambda row, step: run.logged.append((step, row))
    run.finish = lambda: setattr(run, "finished", True)
    self.runs.append(run)
    return run


def write(workdir, *entries, restored_step=None, **config):
  config = settings.Config({"tensorboard": False, **config})
  writer = writers.Writers(
    str(workdir), restored_step, loggers=loggers.from_config(config)
  )
  for entry in entries:
    writer.write(entry)
  writer.close()


def test_wandb_receives_every_number_and_resumes(tmp_path, monkeypatch):
  fake = FakeWandb()
  monkeypatch.setitem(sys.modules, "wandb", fake)
  monkeypatch.delenv("WANDB_MODE", raising=False)
  (tmp_path / "config.json").write_text('{"lr": 0.5, "evals": {"val": {}}}')
  (tmp_path / "parameters.txt").write_text("table")
  row = {"step": 5, "loss": 0.5, "note": "text", "val/acc": 1.0}
  write(tmp_path, row, wandb={"project": "p"})
  write(tmp_path, {"step": 6, "loss": 0.25}, restored_step=5, wandb={})
  first, second = fake.runs
  assert first.logged == [(5, {"train/loss": 0.5, "eval/val/acc": 1.0})]
  assert second.logged == [(6, {"train/loss": 0.25})]
  assert first.finished and second.finished
  assert first.config == {"lr": 0.5} and first.summary["parameters"] == "table"
  assert first.options["project"] == "p"
  assert first.options["dir"] == str(tmp_path)
  assert first.options["mode"] == "offline"  # There is no key.
  assert first.options["id"] == second.options["id"]
  with pytest.raises(ConfigError, match=r"wandb\.projekt: unknown"):
    write(tmp_path, wandb={"projekt": "p"})


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_library_is_refused_at_once(tmp_path, monkeypatch, name):
  monkeypatch.setitem(sys.modules, name, None)
  message = rf"config.{name}: .* pip install 'bigtrain\[{name}\]'"
  with pytest.raises(ConfigError, match=message):
    write(tmp_path, **{name: {}})


def errors(caplog):
  return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


def test_real_wandb_offline(tmp_path, monkeypatch, caplog):
  pytest.importorskip("wandb", reason="needs bigtrain[wandb]")
  monkeypatch.setenv("WANDB_SILENT", "true")
  written_runs.write_media(tmp_path, 5, wandb={"mode": "offline"})
  assert not errors(caplog)
  assert glob.glob(f"{tmp_path}/wandb/offline-run-*/*.wandb")
  shown = f"{tmp_path}/wandb/offline-run-*/files/media"
  assert glob.glob(f"{shown}/images/eval/val/picture_*_*.png")
  (table,) = glob.glob(f"{shown}/table/eval/val/texts_*_*.json")
  with open(table) as file:
    assert json.load(file)["data"] == [[0, "a|b", "x; y"]]


def test_real_mlflow_in_files(tmp_path, monkeypatch, caplog):
  mlflow = pytest.importorskip("mlflow", reason="needs bigtrain[mlflow]")
  monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
  uri = f"file:{tmp_path}/store"
  options = dict(tracking_uri=uri, experiment="e", run_name="r")
  written_runs.write_media(tmp_path, 5, mlflow=options)
  written_runs.write_media(tmp_path, 6, restored_step=5, mlflow=options)
  assert not errors(caplog)
  client = mlflow.MlflowClient(uri)
  experiment = client.get_experiment_by_name("e").experiment_id
  (run,) = client.search_runs([experiment])
  assert run.info.run_name == "r" and run.info.status == "FINISHED"
  assert run.data.params == {
    "lr": "0.5",
    "model.depth": "3",
    "evals.val.type": "mean",
  }
  assert run.data.metrics["memory/device_peak_bytes"] == 7
  history = client.get_metric_history(run.info.run_id, "eval/val/acc")
  assert [(m.step, m.value) for m in history] == [(5, 0.25), (6, 0.25)]
  files = {f.path for f in client.list_artifacts(run.info.run_id, "texts")}
  assert files == {"texts/5.jsonl", "texts/6.jsonl"}
  assert client.list_artifacts(run.info.run_id, "media/val/picture")


def test_real_trackio(tmp_path, monkeypatch, caplog):
  monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio_files"))
  trackio = pytest.importorskip("trackio", reason="needs bigtrain[trackio]")
  project = f"p{time.time_ns()}"
  written_runs.write_media(tmp_path, 5, trackio=dict(project=project))
  written_runs.write_media(
    tmp_path, 6, restored_step=5, trackio=dict(project=project)
  )
  assert not errors(caplog)
  (run,) = trackio.Api().runs(project)
  assert run.config["model.depth"] == 3
  from trackio import sqlite_storage

  rows = sqlite_storage.SQLiteStorage.get_logs(project, run.name)
  # The numbers and each kind of media are rows of their own.
  values = {(row["step"], name): v for row in rows for name, v in row.items()}
  assert [values[step, "eval/val/acc"] for step in (5, 6)] == [0.25, 0.25]
  assert values[5, "eval/val/picture"]["caption"] == "two rows"
