"""Hooks decide the same on all processes of a job, also after a resume."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
import tiny

TESTS = pathlib.Path(__file__).parents[1]


def run(config, workdir, code=0):
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
  assert codes == [code] * 2, "\n".join(text[-2000:] for text in outputs)
  return outputs


def write_config(path, tiny_config, lines):
  """A config file that is tiny.config and what the lines do to it."""
  (folder,) = tiny_config.args
  body = "\n".join(f"  {line}" for line in lines)
  path.write_text(
    f"""
import pytest
import tiny


def get_config(arg=None):
  config = tiny.config({str(folder)!r})
{body}
  return config
"""
  )
  return path


@pytest.mark.slow
def test_both_stop_and_keep_the_best_at_the_same_step(tiny_config, tmp_path):
  told = tmp_path / "told"
  # Progress never gets smaller: the fourth row, that of step 6, is enough.
  config = write_config(
    tmp_path / "run.py",
    tiny_config,
    f"""config |= dict(total_steps=12, keep_ckpts=1, lr=0.1)
config["evals"]["val"]["log_steps"] = 2
config["hooks"] = dict(
  early=dict(type="early_stopping", metric="progress", patience=3),
  best=dict(type="checkpoint_best", metric="val/loss"),
  nan=dict(type="stop_on_nan", metrics=["loss", "val/loss"]),
  tell=dict(type="call", function="tiny.hooks.note", path={str(told)!r}),
  trace=dict(type="profile", start=2, steps=1),
)""".splitlines(),
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
  # One process is shown the rows, training's and evaluations', up to the end.
  assert told.read_text().split() == ["1", "2", "2", "4", "4", "6"]
  assert len(list((workdir / "profile").rglob("*.xplane.pb"))) >= 1
  # Started again, both know that it has ended, and why.
  for text in run(config, workdir):
    assert "'early': progress has not improved" in text
  assert tiny.checkpoint_steps(workdir) == [best, 6]
  assert max(tiny.rows(workdir)) == 6
  assert told.read_text().split() == ["1", "2", "2", "4", "4", "6"]


@pytest.mark.slow
def test_both_fail_at_a_result_that_is_not_finite(tiny_config, tmp_path):
  own = "dict(type='tiny.mine', pred='shifted', at=float('nan'), log_steps=4)"
  config = write_config(
    tmp_path / "run.py",
    tiny_config,
    f"""config |= dict(task="tiny.mine", model_name="tiny.mine", model={{}})
config["input"]["data"] = dict(type="tiny.mine", length=64)
config["evals"] = dict(own={own})
config["hooks"] = dict(nan=dict(type="stop_on_nan", metrics="own/out"))
""".splitlines(),
  )
  workdir = tmp_path / "run"
  # The second start goes on from step 3, and comes to the same end.
  for _ in range(2):
    for text in run(config, workdir, code=1):
      assert "'nan': own/out is nan at step 4" in text
    assert tiny.checkpoint_steps(workdir) == [3]
  assert max(tiny.rows(workdir)) == 4
