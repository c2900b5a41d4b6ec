"""Processes of a sweep on this machine."""

import contextlib
import io
import os
import sys

import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.tools.sweep import local, results
from bigtrain.tools.sweep.variants import Variant

# Each process waits until as many as `together` have started.
_SCRIPT = """
import os, sys, time
name, together, code = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
open(name + ".started", "w").close()
print("starting", flush=True)
deadline = time.monotonic() + 300
while len([f for f in os.listdir() if f.endswith(".started")]) < together:
  assert time.monotonic() < deadline
  time.sleep(0.01)
print("error: wrong", file=sys.stderr)
if code < 0:
  os.kill(os.getpid(), -code)
sys.exit(code)
"""


def run(folder, codes, jobs, together=1):
  variants = [
    Variant(f"v={i}", {"v": i}, [], str(i)) for i in range(len(codes))
  ]
  table = results.Results(str(folder), variants, None, None)
  by_name = {v.name: code for v, code in zip(variants, codes)}

  def command(entry):
    name = entry.variant.name
    words = [name, str(together), str(by_name[name])]
    return [sys.executable, "-S", "-c", _SCRIPT, *words]

  with contextlib.redirect_stdout(io.StringIO()) as output:
    interrupted = local.run(table, command, jobs, str(folder / "logs"))
  return table.entries, output.getvalue().splitlines(), interrupted


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_a_failure_does_not_end_the_others(tmp_path):
  entries, lines, interrupted = run(tmp_path, [0, 2, -9, 75, 0], jobs=1)
  assert [entry.state for entry in entries] == [
    results.FINISHED,
    results.FAILED,
    results.FAILED,
    results.INTERRUPTED,
    results.FINISHED,
  ]
  assert [entry.reason for entry in entries[1:3]] == [
    "error: wrong",
    "killed by SIGKILL",
  ]
  assert not interrupted and len(lines) == 10
  assert lines[3].startswith("[2/5] v=1: failed") and "error: wrong" in lines[3]
  assert (tmp_path / "logs" / "v=1.log").read_text().startswith("starting")


def test_as_many_run_at_a_time_as_there_are_jobs(tmp_path):
  entries, lines, _ = run(tmp_path, [0, 0], jobs=2, together=2)
  assert [entry.state for entry in entries] == 2 * [results.FINISHED]
  assert [": started" in line for line in lines] == [True, True, False, False]


def test_finished_variants_are_skipped(tmp_path):
  (tmp_path / "v=0").mkdir()
  (tmp_path / "v=0" / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n')
  _, lines, _ = run(tmp_path, [0, 1], jobs=1)
  assert len(lines) == 4 and "loss 2" in lines[1]
  _, lines, _ = run(tmp_path, [0, 1], jobs=1)
  assert len(lines) == 2 and lines[0].startswith("[2/2] v=1")


def test_gpus_are_shared(monkeypatch):
  monkeypatch.delenv("JAX_PLATFORMS")
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,5,7,GPU-x")
  assert local._devices(1) == [{}]
  assert [d["CUDA_VISIBLE_DEVICES"] for d in local._devices(2)] == [
    "0,1",
    "5,7",
  ]
  with pytest.raises(ConfigError, match="there are 5"):
    local._devices(6)
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
  assert local._devices(2) == [{}, {}]


def test_the_last_line_of_a_log(tmp_path):
  path = tmp_path / "log"
  assert local.last_line(str(path)) == ""
  path.write_bytes(b"old\n" + b"x" * 30_000 + b"\nerror: \xff end\n\n")
  assert local.last_line(str(path)).startswith("error: ")
  assert local.last_line(str(path), os.path.getsize(path)) == ""
