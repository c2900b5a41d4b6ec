"""Hooks decide the same on all processes of a job, also after a resume."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
import tiny

TESTS = pathlib.Path(__file__).parent


def run(config, workdir):
  """Runs two processes to their ends; returns what they said."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  processes = []
  for index in range(2):
    env = os.environ | {
      "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
      "JAX_NUM_PROCESSES": "2",
      "JAX_PROCESS_ID": str(index),
      "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
      "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    command = [sys.executable, "-m", "bigtrain.main"]
    command += [f"--config={config}", f"--workdir={workdir}"]
    processes.append(
      subprocess.Popen(command, env=env, stdout=-1, stderr=-2, text=True)
    )
  outputs = [process.communicate(timeout=240)[0] for process in processes]
  codes = [process.returncode for process in processes]
  assert codes == [0, 0], "\n".join(text[-2000:] for text in outputs)
  return outputs


@pytest.mark.slow
def test_both_stop_and_keep_the_best_at_the_same_step(tiny_config, tmp_path):
  (folder,) = tiny_config.args
  config = tmp_path / "run.py"
  # Progress never gets smaller: the fourth row, that of step 6, is enough.
  config.write_text(
    f"""
import pytest
import tiny


def get_config(arg=None):
  config = tiny.config({str(folder)!r})
  config["total_steps"] = 12
  config["keep_ckpts"] = 1
  config["lr"] = 0.1
  config["evals"]["val"]["log_steps"] = 2
  config["hooks"] = dict(
    early=dict(type="early_stopping", metric="progress", patience=3),
    best=dict(type="checkpoint_best", metric="val/loss"),
  )
  return config
"""
  )
  workdir = tmp_path / "run"
  run(config, workdir)
  rows = tiny.rows(workdir)
  assert max(rows) == 6
  losses = {s: row["val/loss"] for s, row in rows.items() if "val/loss" in row}
  best = min(losses, key=losses.get)
  assert best < 6  # A fast learning rate: it gets worse again.
  assert tiny.checkpoint_steps(workdir) == [best, 6]
  with open(workdir / "best_best.json") as file:
    assert json.load(file)["step"] == best
  # Started again, both know that it has ended, and why.
  for text in run(config, workdir):
    assert "'early': progress has not improved" in text
  assert tiny.checkpoint_steps(workdir) == [best, 6]
  assert max(tiny.rows(workdir)) == 6
