import errno
import glob
import json
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import settings
from bigtrain.reports import writers


def lines(workdir):
  with open(os.path.join(workdir, "metrics.jsonl")) as file:
    return file.read().splitlines()


def strict(line):
  """JSON as other languages' parsers read it."""

  def refuse(name):
    raise AssertionError(f"{name} is no JSON")

  def once(pairs):
    assert len(dict(pairs)) == len(pairs), f"a name is twice: {line}"
    return dict(pairs)

  return json.loads(line, parse_constant=refuse, object_pairs_hook=once)


def make(workdir, **kwargs):
  return writers.Writers(str(workdir), **{"tensorboard": False, **kwargs})


def write(workdir, *written, **kwargs):
  w = make(workdir, **kwargs)
  for row in written:
    w.write(row)
  w.close()


def test_one_line_a_step_with_its_evaluations(tmp_path):
  w = make(tmp_path)
  w.write({"step": 10, "loss": 0.5})
  w.write({"step": 20, "loss": 0.25})
  w.write({"step": 20, "val/acc": 0.9})
  w.write({"step": 20, "test/acc": 0.8, "test/loss": 1.0})
  w.write({"step": 25, "val/acc": 0.95})
  w.flush()
  assert [strict(line) for line in lines(tmp_path)] == [
    {"step": 10, "loss": 0.5},
    {
      "step": 20,
      "loss": 0.25,
      "val/acc": 0.9,
      "test/acc": 0.8,
      "test/loss": 1.0,
    },
    {"step": 25, "val/acc": 0.95},
  ]
  w.write({"step": 30})
  w.write({"step": 30})
  w.write({"step": 30, "loss": 0.1})
  w.close()
  assert lines(tmp_path)[-1] == '{"step": 30, "loss": 0.1}'
  assert writers.read_rows(str(tmp_path)) == [
    strict(line) for line in lines(tmp_path)
  ]


def test_a_late_result_finds_its_line(tmp_path):
  w = make(tmp_path)
  w.write({"step": 10, "loss": 0.5})
  w.write({"step": 20, "loss": 0.25})
  w.write({"step": 10, "val/acc": 0.5})
  w.write({"step": 15, "val/acc": 0.6})
  w.write({"step": 20, "loss": 0.125, "val/acc": 0.7})
  w.write({"step": 30, "loss": 0.0})
  w.close()
  assert [strict(line) for line in lines(tmp_path)] == [
    {"step": 10, "loss": 0.5, "val/acc": 0.5},
    {"step": 15, "val/acc": 0.6},
    {"step": 20, "loss": 0.125, "val/acc": 0.7},
    {"step": 30, "loss": 0.0},
  ]


def test_values_come_back_as_they_were(tmp_path):
  row = {
    "step": np.int64(1),
    "loss": np.float32(0.1),
    "half": jnp.asarray(0.1, jnp.bfloat16),
    "count": np.int32(7),
    "nan": math.nan,
    "up": np.float32(np.inf),
    "down": -math.inf,
    "note": 'two\nlines, "quoted" and ü',
    "good": np.True_,
    "nothing": None,
  }
  write(tmp_path, row)
  (line,) = lines(tmp_path)
  values = strict(line)
  assert values["nan"] == "NaN"
  assert (values["up"], values["down"]) == ("Infinity", "-Infinity")
  (back,) = writers.read_rows(str(tmp_path))
  assert math.isnan(back.pop("nan")) and math.isnan(row.pop("nan"))
  assert back == {
    k: getattr(v, "item", lambda v=v: v)() for k, v in row.items()
  }


@pytest.mark.parametrize("bad", [np.zeros(3), [1.0], {"a": 1}, object()])
def test_no_scalar_is_refused_at_once(tmp_path, bad):
  w = make(tmp_path)
  with pytest.raises(TypeError, match="metric 'loss': expected a number"):
    w.write({"step": 1, "loss": bad})
  with pytest.raises(TypeError, match="integer 'step'"):
    w.write({"loss": 1.0})
  w.close()


@pytest.mark.parametrize("restored", [None, 0, 10, 15, 20, 99])
def test_restart_makes_no_row_twice_and_loses_none(tmp_path, restored):
  first = [{"step": s, "loss": 1 / s, "val/acc": s / 99} for s in (10, 20, 30)]
  write(tmp_path, {"step": 0, "val/acc": 0.0}, *first)
  w = make(tmp_path, restored_step=restored)
  assert time.time() - w.last_alive < 60
  w.close()
  keep_to = -1 if restored is None else restored
  kept = writers.read_rows(str(tmp_path))
  assert kept == [
    r for r in [{"step": 0, "val/acc": 0.0}, *first] if r["step"] <= keep_to
  ]
  # The run goes on; a result of the restored step is added to its row.
  write(
    tmp_path,
    *([{"step": 20, "test/acc": 1.0}] if restored == 20 else []),
    *[r for r in first if r["step"] > keep_to],
    restored_step=restored,
  )
  steps = [r["step"] for r in writers.read_rows(str(tmp_path))]
  assert steps == ([] if restored is None else [0]) + [10, 20, 30]
  if restored == 20:
    row = writers.read_rows(str(tmp_path))[2]
    assert row == first[1] | {"test/acc": 1.0}


def test_a_line_cut_anywhere_costs_only_what_is_cut(tmp_path, caplog):
  write(tmp_path, {"step": 10, "loss": 0.5}, {"step": 20, "loss": 0.25})
  whole = (tmp_path / "metrics.jsonl").read_bytes()
  write(tmp_path, {"step": 20, 'a, "b/c': "x, y", "val/d": 3}, restored_step=20)
  merged = (tmp_path / "metrics.jsonl").read_bytes()
  assert merged.startswith(whole[:-2])
  for end in range(len(whole) - 1, len(merged)):
    # The one write of what is added begins over the brace and the newline.
    (tmp_path / "metrics.jsonl").write_bytes(merged[:end] + whole[end:])
    kept = writers.read_rows(str(tmp_path))
    assert kept[:1] == [{"step": 10, "loss": 0.5}]
    assert kept[1].items() >= {"step": 20, "loss": 0.25}.items()
    caplog.clear()
    make(tmp_path, restored_step=20).close()
    assert "the last line is incomplete" in caplog.text
    assert [strict(line) for line in lines(tmp_path)] == kept
  # A new line that is cut is a row that comes again.
  first_line = whole.index(b"\n") + 1
  for end in range(first_line + 1, len(whole)):
    (tmp_path / "metrics.jsonl").write_bytes(whole[:end])
    make(tmp_path, restored_step=10).close()
    assert writers.read_rows(str(tmp_path)) == [{"step": 10, "loss": 0.5}]


def test_a_damaged_line_is_named_by_the_reader(tmp_path, caplog):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
  assert writers.read_rows(str(tmp_path)) == [{"step": 1}, {"step": 3}]
  assert "metrics.jsonl line 2 is damaged" in caplog.text
  assert writers.read_rows(str(tmp_path / "nowhere")) == []


def test_kill_leaves_all_flushed_rows(tmp_path):
  code = f"""
    from bigtrain import writers
    w = writers.Writers({str(tmp_path)!r}, tensorboard=False)
    for step in range(1, 10**9):
      w.write({{"step": step, "loss": 1 / step}})
      w.write({{"step": step, "val/acc": 1 / step}})
      if step % 50 == 0:
        w.flush()
        print(step, flush=True)
  """
  process = subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE
  )
  for _ in range(3):
    flushed = int(process.stdout.readline())
  time.sleep(0.003)
  process.send_signal(signal.SIGKILL)
  rest = process.communicate()[0].split()
  flushed = int(rest[-1]) if rest else flushed
  make(tmp_path, restored_step=flushed).close()
  assert [strict(line) for line in lines(tmp_path)] == [
    {"step": s, "loss": 1 / s, "val/acc": 1 / s} for s in range(1, flushed + 1)
  ]


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


def test_a_full_disk_reaches_the_caller(tmp_path):
  w = make(tmp_path)
  w.write({"step": 1, "loss": 0.5})
  w.flush()
  fill_disk(w._file._file)
  w.write({"step": 2, "loss": 0.5})
  for call in (w.flush, w.check, lambda: w.write({"step": 3}), w.close):
    with pytest.raises(writers.WriteError) as e:
      call()
    assert str(e.value) == (
      f"cannot write {tmp_path}/metrics.jsonl: {os.strerror(errno.ENOSPC)}"
    )
  assert writers.read_rows(str(tmp_path)) == [{"step": 1, "loss": 0.5}]


def test_a_workdir_that_cannot_be_is_told_at_once(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(writers.WriteError, match=r"file/run/metrics.jsonl: Not"):
    make(tmp_path / "file" / "run")


# TensorBoard.


def events(workdir):
  """(step, tag, value) and purges (step, None, None) in all event files."""
  import tensorboardX.proto.event_pb2 as event_pb2

  found = []
  for path in sorted(glob.glob(f"{workdir}/tensorboard/*tfevents*")):
    with open(path, "rb") as file:
      content = file.read()
    while content:
      size = int.from_bytes(content[:8], "little")
      event = event_pb2.Event.FromString(content[12 : 12 + size])
      content = content[16 + size :]
      if event.HasField("session_log"):
        found.append((event.step, None, None))
      for value in event.summary.value:
        found.append((event.step, value.tag, value.simple_value))
  return found


def test_tensorboard_has_every_number(tmp_path):
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


def test_tensorboard_shows_rows_while_the_run_waits(tmp_path, monkeypatch):
  monkeypatch.setattr(writers, "_SYNC_SECS", 0.05)
  w = make(tmp_path, tensorboard=True)
  w.write({"step": 5, "loss": 0.5})
  deadline = time.monotonic() + 10
  while (5, "loss", 0.5) not in events(tmp_path):
    assert time.monotonic() < deadline
    time.sleep(0.02)
  w.close()


def test_nothing_heavy_is_loaded(tmp_path):
  code = f"""
    import sys
    from bigtrain import console, writers
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


def test_tensorboard_without_its_folder_is_told_once(tmp_path, caplog):
  (tmp_path / "tensorboard").write_text("a file where a folder should be")
  written = [{"step": s, "loss": 0.5} for s in range(5)]
  write(tmp_path, *written, tensorboard=True)
  assert writers.read_rows(str(tmp_path)) == written
  (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
  assert "TensorBoard cannot write and is left out" in error.getMessage()


def test_tensorboard_on_a_full_disk_is_told_once(tmp_path, caplog):
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


# W&B, of which the tests have a stand-in; see also the docs of the extra.


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


def test_wandb_gets_every_number_and_goes_on(tmp_path, monkeypatch):
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
  assert first.options["mode"] == "offline"  # No key, and nobody to ask.
  assert first.options["id"] == second.options["id"]
  with pytest.raises(settings.ConfigError, match=r"wandb\.projekt: unknown"):
    make(tmp_path, wandb={"projekt": "p"})


def test_wandb_that_fails_is_told_once(tmp_path, monkeypatch, caplog):
  fake = FakeWandb()
  fake.init = lambda id=None, dir=None, resume=None, mode=None: 1 / 0
  monkeypatch.setitem(sys.modules, "wandb", fake)
  write(tmp_path, {"step": 5}, {"step": 6}, wandb={})
  assert len(writers.read_rows(str(tmp_path))) == 2
  (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
  assert "W&B cannot write" in error.getMessage()


def test_wandb_that_is_missing_is_told_at_once(tmp_path, monkeypatch):
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


def test_a_console_that_fails_is_told_once(tmp_path, caplog):
  console = writers.Console(1200, bar=False)
  console.row = lambda row: 1 / 0
  write(tmp_path, {"step": 1}, {"step": 2}, console=console)
  assert len(writers.read_rows(str(tmp_path))) == 2
  (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
  assert "console cannot write" in error.getMessage()
