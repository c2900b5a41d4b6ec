"""Rows of metrics.jsonl: content, restarts, and recovery after a kill."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.reports import writers


def lines(workdir):
  with open(os.path.join(workdir, "metrics.jsonl")) as file:
    return file.read().splitlines()


def strict(line):
  """Parses JSON without Python's extensions."""

  def refuse(name):
    raise AssertionError(f"{name} is not JSON")

  def once(pairs):
    assert len(dict(pairs)) == len(pairs), f"a duplicate name: {line}"
    return dict(pairs)

  return json.loads(line, parse_constant=refuse, object_pairs_hook=once)


def make(workdir, **kwargs):
  return writers.Writers(str(workdir), **kwargs)


def write(workdir, *written, **kwargs):
  w = make(workdir, **kwargs)
  for row in written:
    w.write(row)
  w.close()


def test_one_line_per_step_with_its_evaluations(tmp_path):
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


def test_a_late_result_is_added_to_its_line(tmp_path):
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


def test_values_are_read_as_written(tmp_path):
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


@pytest.mark.parametrize("restored", [None, 0, 10, 15, 20, 99])
def test_a_restart_repeats_no_row_and_loses_none(tmp_path, restored):
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
  # The run continues; a result of the restored step is added to its row.
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


def test_a_cut_line_loses_only_its_cut_values(tmp_path, caplog):
  write(tmp_path, {"step": 10, "loss": 0.5}, {"step": 20, "loss": 0.25})
  whole = (tmp_path / "metrics.jsonl").read_bytes()
  write(tmp_path, {"step": 20, 'a, "b/c': "x, y", "val/d": 3}, restored_step=20)
  merged = (tmp_path / "metrics.jsonl").read_bytes()
  assert merged.startswith(whole[:-2])
  for end in range(len(whole) - 1, len(merged)):
    # The write of an addition begins over the brace and the newline.
    (tmp_path / "metrics.jsonl").write_bytes(merged[:end] + whole[end:])
    kept = writers.read_rows(str(tmp_path))
    assert kept[:1] == [{"step": 10, "loss": 0.5}]
    assert kept[1].items() >= {"step": 20, "loss": 0.25}.items()
    caplog.clear()
    make(tmp_path, restored_step=20).close()
    assert "the last line is incomplete" in caplog.text
    assert [strict(line) for line in lines(tmp_path)] == kept
  # A new line that is cut is removed; the run will write its row again.
  first_line = whole.index(b"\n") + 1
  for end in range(first_line + 1, len(whole)):
    (tmp_path / "metrics.jsonl").write_bytes(whole[:end])
    make(tmp_path, restored_step=10).close()
    assert writers.read_rows(str(tmp_path)) == [{"step": 10, "loss": 0.5}]


def test_the_reader_reports_a_damaged_line(tmp_path, caplog):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
  assert writers.read_rows(str(tmp_path)) == [{"step": 1}, {"step": 3}]
  assert "metrics.jsonl: line 2 is damaged" in caplog.text
  assert writers.read_rows(str(tmp_path / "nowhere")) == []


def test_a_kill_leaves_all_flushed_rows(tmp_path):
  code = f"""
    from bigtrain.reports import writers
    w = writers.Writers({str(tmp_path)!r})
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
