"""Two processes on loopback are one job: same losses, one set of files."""

import os
import socket
import subprocess
import sys

import pytest

from bigtrain import main
from bigtrain.checkpoints import checkpointer
from bigtrain.reports import writers
from configs import digits

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  workdir = str(tmp_path / "two")
  processes = []
  for index in range(2):
    env = {
      **os.environ,
      "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
      "JAX_NUM_PROCESSES": "2",
      "JAX_PROCESS_ID": str(index),
      "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, "-m", "bigtrain.main"]
    command += [f"--config={ROOT}/configs/digits.py:runlocal"]
    command += [f"--workdir={workdir}", "--config.compile_cache=False"]
    processes.append(
      subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=-1, stderr=-2, text=True
      )
    )
  for process in processes:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-3000:]
  config = digits.get_config("runlocal")
  config.compile_cache = False
  main.train(config, str(tmp_path / "one"))
  two, one = (
    writers.read_rows(str(tmp_path / name)) for name in ("two", "one")
  )
  assert [row["step"] for row in two] == [row["step"] for row in one]
  for a, b in zip(two, one):
    for name in ("loss", "grad_norm", "param_norm", "val/loss", "val/acc"):
      if name in b:
        assert a[name] == pytest.approx(b[name], rel=1e-4), name
  assert checkpointer.steps(workdir) == [2, 4]
