"""Loggers: a user's metric writer, and the names of metrics in dashboards."""

import logging
import re

import numpy as np
import pytest
import tiny
from reports import clu_writer

from bigtrain import main, metrics
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.reports import loggers, media, writers

WRITER = "reports.clu_writer.Writer"


@pytest.fixture
def calls(monkeypatch):
  monkeypatch.setattr(clu_writer, "calls", [])
  return clu_writer.calls


def train(folder, **entries):
  """Trains a tiny model with loggers; returns its folder as a string."""
  tiny.write_data(folder)
  changes = {
    "loggers": entries,
    "evals.own": dict(
      type="reports.clu_writer", pred="logits", data={}, log_steps=3
    ),
  }
  config = tiny.config(folder, changes)
  config["evals"]["own"]["data"] = config["evals"]["val"]["data"]
  main.train(config, str(folder / "run"))
  return str(folder / "run")


def test_a_users_clu_writer_gets_everything_of_a_run(tmp_path, calls):
  workdir = train(tmp_path, mine=dict(type=WRITER, prefix="my/"))
  assert {folder for folder, *_ in calls} == {workdir}
  calls = [call for _, *call in calls]
  # First the config and the table of parameters.
  name, hparams = calls[0]
  assert name == "write_hparams"
  assert hparams["optimizer.name"] == "adam" and hparams["total_steps"] == 6
  name, step, texts = calls[1]
  assert (name, step) == ("write_texts", 0)
  assert "    |" in texts["parameters"] or "    +" in texts["parameters"]
  assert [name for name, *_ in calls][-2:] == ["flush", "close"]

  scalars = {}
  for name, *arguments in calls:
    if name == "write_scalars":
      step, values = arguments
      scalars.setdefault(step, {}).update(values)
  entries = {entry["step"]: entry for entry in writers.read_rows(workdir)}
  assert set(scalars) == set(entries)
  for step, entry in entries.items():
    assert scalars[step].get("my/train/loss") == entry.get("loss")
  assert scalars[3]["my/eval/val/acc"] == entries[3]["val/acc"]
  assert scalars[6]["my/eval/own/number"] == 0.25

  (images,) = [c[2] for c in calls if c[:2] == ["write_images", 3]]
  assert images["eval/own/picture"].shape == (1, 2, 3, 1)
  assert images["eval/own/picture"].dtype == np.uint8
  assert (images["eval/own/picture"] == 7).all()
  assert images["eval/own/picture"].media.caption == "a caption"
  (texts,) = [c[2] for c in calls if c[:2] == ["write_texts", 3]]
  assert texts == {
    "eval/own/note": "**bold**",
    "eval/own/table": "| a | b |\n|---|---|\n| 1 | x\\|y |",
  }
  (histograms,) = [c[2] for c in calls if c[:2] == ["write_histograms", 3]]
  assert histograms["eval/own/sizes"][0].tolist() == [2, 0, 5]


@pytest.mark.parametrize("problem", ["fails", "hangs"])
def test_a_users_writer_ends_only_itself(
  tmp_path, calls, monkeypatch, caplog, problem
):
  monkeypatch.setattr(writers, "_MAX_CALL_SECS", 0.5)
  bad = {"type": WRITER, "logdir": "elsewhere", problem: "write_scalars"}
  workdir = train(tmp_path, bad=bad, good=dict(type=WRITER))
  steps = [entry["step"] for entry in writers.read_rows(workdir)]
  assert steps == [1, 2, 3, 4, 6]
  good = [call for folder, *call in calls if folder == workdir]
  written = [c[1] for c in good if c[0] == "write_scalars"]
  assert sorted({*written}) == steps
  assert good[-1] == ["close"]
  (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
  verb = "failed" if problem == "fails" else "hangs"
  assert error.getMessage().startswith(f"bad {verb} and is off from now on;")


def test_clus_own_writer_logs(tmp_path, caplog):
  logging_writer = clu_writer.import_clu("logging_writer")
  config = settings.Config(
    dict(
      tensorboard=False,
      loggers=dict(
        log=dict(
          type=f"{logging_writer.__name__}.LoggingWriter", collection="c"
        )
      ),
    )
  )
  entry = {
    "step": 3,
    "loss": 0.5,
    "image": media.Image(np.zeros((2, 2, 3))),
    "sizes": metrics.Histogram(np.array([1.0, 2.0]), 0.0, 2.0),
  }
  with caplog.at_level("INFO"):
    writer = writers.Writers(str(tmp_path), loggers=loggers.from_config(config))
    writer.write(*media.split(entry))
    writer.close()
  lines = [r.getMessage() for r in caplog.records]
  assert "[3] collection=c train/loss=0.5" in lines
  assert "[3] collection=c Got images: {'train/image': (1, 2, 2, 3)}." in lines
  assert any("Histogram for 'train/sizes'" in line for line in lines)


@pytest.mark.parametrize(
  "entry, message",
  [
    ("x", "config.loggers.mine: expected a dict with a type, got 'x'."),
    ({}, "config.loggers.mine.type: expected the dotted path of a metric"),
    (dict(type="Writer"), "expected package.module.name, got 'Writer'"),
    (dict(type="no_such.Writer"), "cannot import 'no_such'"),
    (
      dict(type="reports.clu_writer.Wirter"),
      "reports.clu_writer has no 'Wirter'. Did you mean 'Writer'?",
    ),
    (dict(type="reports.clu_writer.calls"), "is not a class but [].\n"),
    (
      dict(type=WRITER, prefx="a"),
      "config.loggers.mine.prefx: unknown key. Did you mean 'prefix'?",
    ),
    (
      dict(type="reports.clu_writer.ScalarsOnly"),
      "config.loggers.mine.type: reports.clu_writer.ScalarsOnly has no "
      "write_images, write_texts, write_histograms, write_hparams, close.",
    ),
    (
      dict(type="reports.clu_writer.NotFinished"),
      "has no close, flush, write_audios, write_histograms",
    ),
  ],
)
def test_mistakes_are_refused_before_the_run(calls, entry, message):
  config = settings.Config({"loggers": {"mine": entry}})
  with pytest.raises(ConfigError) as e:
    loggers.from_config(config)
  assert message in f"{e.value}\n" and "\n" not in str(e.value)


def test_a_package_that_a_writer_needs_is_named(monkeypatch):
  clu = dict(type="clu.metric_writers.LoggingWriter")
  config = settings.Config({"loggers": {"clu": clu}})
  monkeypatch.setitem(__import__("sys").modules, "tensorboard", None)
  with pytest.raises(ConfigError) as e:
    loggers.from_config(config)
  assert re.fullmatch(
    r"config\.loggers\.clu\.type: clu\.metric_writers\.LoggingWriter cannot be "
    r"imported without tensorboard \(.*\); pip install tensorboard\.",
    str(e.value),
  )


def test_the_result_of_a_function_is_checked_too(tmp_path, caplog):
  made = dict(type="reports.clu_writer.make_scalars_only")
  config = settings.Config({"tensorboard": False, "loggers": {"made": made}})
  writer = writers.Writers(str(tmp_path), loggers=loggers.from_config(config))
  writer.write({"step": 1})
  writer.close()
  assert "made failed and is off" in caplog.text
  assert "make_scalars_only has no write_images" in caplog.text


def test_methods_that_are_not_implemented_are_called_once(tmp_path, caplog):
  scalars, texts = [], []

  class Partial:
    def write_hparams(self, hparams):
      raise NotImplementedError

    def write_scalars(self, step, values):
      scalars.append(step)

    def write_texts(self, step, values):
      texts.append(step)
      raise NotImplementedError("only numbers")

    def flush(self):
      pass

    def close(self):
      scalars.append("closed")

  logger = loggers.Logger("partial", lambda workdir, first_step: Partial())
  writer = writers.Writers(str(tmp_path), loggers=[logger])
  for step in (1, 2):
    entry = {"step": step, "loss": 0.5, "note": media.Text("x")}
    writer.write(*media.split(entry))
  writer.close()
  assert (scalars, texts) == ([1, 2, "closed"], [1])
  messages = [r.getMessage() for r in caplog.records]
  assert messages == [
    "partial does not implement write_hparams.",
    "partial does not implement write_texts.",
  ]


def test_which_loggers_a_config_has(monkeypatch):
  monkeypatch.setattr(loggers.trackers, "check", lambda key, options: None)
  names = lambda **config: [
    logger.name for logger in loggers.from_config(settings.Config(config))
  ]
  assert names() == names(wandb=None, mlflow=False) == ["TensorBoard"]
  assert names(tensorboard=False, loggers=dict(a=None)) == []
  found = names(mlflow=dict(experiment="e"), trackio={}, wandb=True)
  assert found == ["TensorBoard", "W&B", "MLflow", "trackio"]


@pytest.mark.parametrize(
  "name, grouped",
  [
    ("loss", "train/loss"),
    ("lr", "train/lr"),
    ("lr/encoder", "train/lr/encoder"),
    ("epoch/web", "train/epoch/web"),
    ("val/acc", "eval/val/acc"),
    ("val/secs", "eval/val/secs"),
    ("mfu", "speed/mfu"),
    ("tokens_per_sec", "speed/tokens_per_sec"),
    ("ckpt_stall_secs", "speed/ckpt_stall_secs"),
    ("account/eval_secs", "speed/account/eval_secs"),
    ("host_rss_bytes", "memory/host_rss_bytes"),
    ("weight_rms/a/kernel", "weight_rms/a/kernel"),
    ("my_hook/x", "my_hook/x"),
  ],
)
def test_groups(name, grouped):
  assert loggers.grouped(name, {"val"}) == grouped
