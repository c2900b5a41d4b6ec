"""Writers: errors, threads, TensorBoard, W&B and the console."""

import errno
import glob
import logging
import math
import os
import subprocess
import sys
import textwrap
import time
import types

import numpy as np
import pytest

from bigtrain import settings
from bigtrain.reports import writers


def lines(workdir):
  with open(os.path.join(workdir, "metrics.jsonl")) as file:
    return file.read().splitlines()


def make(workdir, **kwargs):
  return writers.Writers(str(workdir), **{"tensorboard": False, **kwargs})


def write(workdir, *written, **kwargs):
  w = make(workdir, **kwargs)
  for row in written:
    w.write(row)
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
  w = make(tmp_path / "run", process_index=1, tensorboard=True, wandb={})
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


# TensorBoard.


def events(workdir):
  """Returns (step, tag, value) and purges (step, None, None) of all files."""
  import tensorboardX.proto.event_pb2 as event_pb2

  result = []
  for path in sorted(glob.glob(f"{workdir}/tensorboard/*tfevents*")):
    with open(path, "rb") as file:
      content = file.read()
    while content:
      size = int.from_bytes(content[:8], "little")
      event = event_pb2.Event.FromString(content[12 : 12 + size])
      content = content[16 + size :]
      if event.HasField("session_log"):
        result.append((event.step, None, None))
      for value in event.summary.value:
        result.append((event.step, value.tag, value.simple_value))
  return result


def test_tensorboard_receives_every_number(tmp_path):
  row = {"step": 5, "loss": 0.5, "n": 3, "note": "text", "val/acc": math.inf}
  write(tmp_path, row, {"step": 5, "test/acc": 0.25}, tensorboard=True)
  assert events(tmp_path) == [
    (0, None, None),
    (5, "loss", 0.5),
    (5, "n", 3.0),
    (5, "val/acc", math.inf),
    (5, "test/acc", 0.25),
  ]
  write(tmp_path, {"step": 6, "n": 1}, restored_step=5, tensorboard=True)
  assert events(tmp_path)[-2:] == [(6, None, None), (6, "n", 1.0)]
  assert len(glob.glob(f"{tmp_path}/tensorboard/*")) == 2


def test_tensorboard_is_flushed_while_the_run_waits(tmp_path, monkeypatch):
  monkeypatch.setattr(writers, "_SYNC_SECS", 0.05)
  w = make(tmp_path, tensorboard=True)
  w.write({"step": 5, "loss": 0.5})
  deadline = time.monotonic() + 10
  while (5, "loss", 0.5) not in events(tmp_path):
    assert time.monotonic() < deadline
    time.sleep(0.02)
  w.close()


def test_no_heavy_package_is_imported(tmp_path):
  code = f"""
    import sys
    from bigtrain.reports import console, writers
    assert not {{"rich", "tensorboardX", "jax"}} & set(sys.modules)
    w = writers.Writers(
      {str(tmp_path)!r}, console=console.Console(10), wandb=None
    )
    w.write({{"step": 1, "loss": 0.5}})
    w.close()
    assert "tensorboardX" in sys.modules
    heavy = {{"tensorflow", "tensorboard", "torch", "jax", "matplotlib"}}
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
  """
  subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_tensorboard_without_its_folder_is_reported_once(tmp_path, caplog):
  (tmp_path / "tensorboard").write_text("a file where a folder should be")
  written = [{"step": s, "loss": 0.5} for s in range(5)]
  write(tmp_path, *written, tensorboard=True)
  assert writers.read_rows(str(tmp_path)) == written
  (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
  assert "TensorBoard failed and is off" in error.getMessage()


def test_tensorboard_on_a_full_disk_is_reported_once(tmp_path, caplog):
  w = make(tmp_path, tensorboard=True)
  w.write({"step": 0, "loss": 0.5})
  w.flush()
  sink = w._sinks["TensorBoard"]._made
  fill_disk(sink._writer._py_recordio_writer._writer)
  for step in range(1, 50):
    w.write({"step": step, "loss": 0.5})
    w.flush()
  w.close()
  assert len(writers.read_rows(str(tmp_path))) == 50
  (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
  assert os.strerror(errno.ENOSPC) in error.getMessage()


# W&B, replaced by a fake.


class FakeWandb(types.ModuleType):
  api = types.SimpleNamespace(api_key=None)

  def __init__(self):
    super().__init__("wandb")
    self.runs = []

  def init(self, project=None, id=None, dir=None, resume=None, mode=None):
    run = types.SimpleNamespace(
      options=dict(project=project, id=id, dir=dir, resume=resume, mode=mode),
      logged=[],
      finished=False,
    )
    run.log = lambda row, step: run.logged.append((step, row))
    run.finish = lambda: setattr(run, "finished", True)
    self.runs.append(run)
    return run


def test_wandb_receives_every_number_and_resumes(tmp_path, monkeypatch):
  fake = FakeWandb()
  monkeypatch.setitem(sys.modules, "wandb", fake)
  monkeypatch.delenv("WANDB_MODE", raising=False)
  row = {"step": 5, "loss": 0.5, "note": "text"}
  write(tmp_path, row, wandb={"project": "p"})
  write(tmp_path, {"step": 6, "loss": 0.25}, restored_step=5, wandb={})
  first, second = fake.runs
  assert first.logged == [(5, {"loss": 0.5})]
  assert second.logged == [(6, {"loss": 0.25})]
  assert first.finished and second.finished
  assert first.options["project"] == "p"
  assert first.options["dir"] == str(tmp_path)
  assert first.options["mode"] == "offline"  # There is no key.
  assert first.options["id"] == second.options["id"]
  with pytest.raises(settings.ConfigError, match=r"wandb\.projekt: unknown"):
    make(tmp_path, wandb={"projekt": "p"})


def test_a_failing_wandb_is_reported_once(tmp_path, monkeypatch, caplog):
  fake = FakeWandb()
  fake.init = lambda id=None, dir=None, resume=None, mode=None: 1 / 0
  monkeypatch.setitem(sys.modules, "wandb", fake)
  write(tmp_path, {"step": 5}, {"step": 6}, wandb={})
  assert len(writers.read_rows(str(tmp_path))) == 2
  (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
  assert "W&B failed" in error.getMessage()


def test_a_missing_wandb_is_refused_at_once(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  with pytest.raises(settings.ConfigError, match="pip install"):
    make(tmp_path, wandb={})


def test_real_wandb_offline(tmp_path, monkeypatch):
  pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_SILENT", "true")
  write(tmp_path, {"step": 5, "loss": 0.5}, wandb={"mode": "offline"})
  assert glob.glob(f"{tmp_path}/wandb/offline-run-*/*.wandb")


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
  console.row = lambda row: 1 / 0
  write(tmp_path, {"step": 1}, {"step": 2}, console=console)
  assert len(writers.read_rows(str(tmp_path))) == 2
  (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
  assert "console failed" in error.getMessage()
