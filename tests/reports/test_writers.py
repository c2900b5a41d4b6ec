"""Writers: errors, threads and the console."""

import errno
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from support import cases

from bigtrain.config import settings
from bigtrain.reports import loggers, writers


def lines(workdir):
  with open(os.path.join(workdir, "metrics.jsonl")) as file:
    return file.read().splitlines()


def make(workdir, **kwargs):
  return writers.Writers(str(workdir), **kwargs)


def write(workdir, *entries, **kwargs):
  w = make(workdir, **kwargs)
  for entry in entries:
    w.write(entry)
  w.close()


@pytest.mark.parametrize("bad", [np.zeros(3), [1.0], {"a": 1}, object()])
def test_values_that_are_no_scalars_are_refused_at_once(tmp_path, bad):
  w = make(tmp_path)
  with pytest.raises(TypeError, match="metric 'loss': expected a number"):
    w.write({"step": 1, "loss": bad})
  with pytest.raises(TypeError, match="integer 'step'"):
    w.write({"loss": 1.0})
  w.close()


def test_flush_waits_for_the_disk(tmp_path, monkeypatch):
  synced = []

  def fsync(fd):
    path = os.readlink(f"/proc/self/fd/{fd}")
    if path.endswith("metrics.jsonl"):
      synced.append(lines(tmp_path))

  w = make(tmp_path)
  monkeypatch.setattr(os, "fsync", fsync)
  w.write({"step": 1})
  w.write({"step": 2})
  w.flush()
  assert synced == [['{"step": 1}', '{"step": 2}']]
  w.close()


def test_other_processes_write_nothing(tmp_path):
  default = loggers.from_config(settings.Config({}))
  w = make(tmp_path / "run", process_index=1, loggers=default)
  w.write({"step": 1, "loss": 0.5})
  w.flush()
  w.check()
  w.close()
  assert not (tmp_path / "run").exists()


def fill_disk(file):
  """Makes every write to an open file fail with "no space left"."""
  full = os.open("/dev/full", os.O_WRONLY)
  os.dup2(full, file.fileno())
  os.close(full)


def test_a_full_disk_raises_in_the_caller(tmp_path):
  w = make(tmp_path)
  w.write({"step": 1, "loss": 0.5})
  w.flush()
  fill_disk(w._file._file)
  w.write({"step": 2, "loss": 0.5})
  for call in (w.flush, w.check, lambda: w.write({"step": 3}), w.close):
    with pytest.raises(writers.WriteError) as e:
      call()
    reason = f"{os.strerror(errno.ENOSPC)} ({tmp_path} has "
    assert f"{tmp_path}/metrics.jsonl: {reason}" in str(e.value)
    assert str(e.value).endswith(" bytes free)")
  assert writers.read_rows(str(tmp_path)) == [{"step": 1, "loss": 0.5}]


def test_a_workdir_that_cannot_exist_is_refused_at_once(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(writers.WriteError, match=r"file/run/metrics.jsonl: Not"):
    make(tmp_path / "file" / "run")


def test_no_heavy_package_is_imported(tmp_path):
  code = f"""
    import sys
    from bigtrain.config import settings
    from bigtrain.reports import console, loggers, writers
    assert not {{"rich", "tensorboardX", "jax"}} & set(sys.modules)
    w = writers.Writers(
      {str(tmp_path)!r},
      console=console.Console(10),
      loggers=loggers.from_config(settings.Config({{}})),
    )
    w.write({{"step": 1, "loss": 0.5}})
    w.close()
    assert "tensorboardX" in sys.modules
    heavy = {{"tensorflow", "tensorboard", "torch", "jax", "matplotlib"}}
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
  """
  subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


# Loggers that fail or hang.


class Writer:
  """A metric writer that fails or hangs in its first calls of a method."""

  def __init__(self, fails="", hangs=""):
    self.fails, self.hangs, self.entries = fails, hangs, []
    self.released = threading.Event()

  def call(self, name):
    if name == self.fails:
      raise OSError("no route to host")
    if name == self.hangs:
      self.released.wait(30)

  def write_hparams(self, hparams):
    self.call("write_hparams")

  def write_scalars(self, step, scalars):
    self.call("write_scalars")
    self.entries.append((step, scalars))

  def flush(self):
    self.call("flush")

  def close(self):
    self.call("close")


@pytest.mark.parametrize(
  "method",
  cases.quick(
    ["open", "write_hparams", "write_scalars", "flush", "close"],
    "write_scalars",
    "close",
  ),
)
@pytest.mark.parametrize("problem", ["fails", "hangs"])
def test_a_logger_that_fails_or_hangs_is_reported_once(
  tmp_path, monkeypatch, caplog, problem, method
):
  """The run goes on, and the other loggers with it."""
  good, bad = Writer(), Writer(**{problem: method})

  def open_bad(workdir, first_step):
    bad.call("open")
    return bad

  monkeypatch.setattr(writers, "_MAX_CALL_SECS", 0.2)
  both = [
    loggers.Logger("bad", open_bad),
    loggers.Logger("good", lambda workdir, first_step: good),
  ]
  w = make(tmp_path, loggers=both)
  entries = [{"step": step, "loss": 0.5} for step in range(20)]
  for entry in entries:
    w.write(entry)
    w.flush()  # Never waits for a logger.
    time.sleep(0.02)
  w.close()
  assert writers.read_rows(str(tmp_path)) == entries
  assert good.entries == [(step, {"train/loss": 0.5}) for step in range(20)]
  (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
  verb = "failed" if problem == "fails" else "hangs"
  assert f"bad {verb} and is off" in error.getMessage()
  bad.released.set()


# The console as a writer.


def test_plain_lines_through_absl(tmp_path, caplog):
  console = writers.Console(1200, bar=False)
  with caplog.at_level("INFO"):
    w = make(tmp_path, console=console)
    console.status("compiling")
    console.status("training")
    w.write(
      {
        "step": 100,
        "loss": 1.23,
        "accuracy": 0.5,
        "lr": 1e-3,
        "grad_norm": 2.0,
        "examples_per_sec": 8123.4,
        "eta_secs": 80.0,
        "weights/rms": 1.0,
      }
    )
    console.status("evaluating val")
    console.evaluation_progress(1, 2)
    w.write({"step": 100, "val/acc": 0.9712})
    w.write({"step": 100, "account/eval_secs": 3.0})
    w.close()
  assert [r.getMessage() for r in caplog.records] == [
    "compiling",
    "step 100/1200 (8.3%) loss 1.23 accuracy 0.5 lr 1e-3 "
    "8,123 examples/s eta 1m20s",
    "evaluating val",
    "step 100/1200 (8.3%) val/acc 0.9712",
  ]


def test_a_failing_console_is_reported_once(tmp_path, caplog):
  console = writers.Console(1200, bar=False)
  console.entry = lambda entry: 1 / 0
  write(tmp_path, {"step": 1}, {"step": 2}, console=console)
  assert len(writers.read_rows(str(tmp_path))) == 2
  (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
  assert "The console failed" in error.getMessage()
