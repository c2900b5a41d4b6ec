"""One, two and four processes of one to four devices train the same."""

import os
import subprocess
import sys

import pytest
import tiny
from faults import program as program_lib
from faults import tiny_tokens

from bigtrain.reports import record

LIMIT_SECS = 300.0

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
  """{name: config}: images with ids, and packed documents."""
  folder = tmp_path_factory.mktemp("data")
  program_lib.write_data(folder)
  tiny_tokens.write(folder)
  images = folder / "images.py"
  # 48 is divided by all products of processes and devices.
  images.write_text(
    "from faults import tiny_config\n\n\n"
    "def get_config(arg=None):\n"
    f"  config = tiny_config.get_config('data={folder}')\n"
    "  config.total_steps = 6\n"
    "  config.log_steps = 1\n"
    "  config.ckpt_steps = 100\n"
    "  config.input.batch_size = 48\n"
    "  config.evals.val.log_steps = 2\n"
    "  config.evals.val.batch_size = 48\n"
    "  return config\n"
  )
  tokens = program_lib.HERE / "tiny_tokens.py"
  return {"images": str(images), "tokens": f"{tokens}:data={folder}"}


def train(configs, folder, processes, devices):
  """{name: {step: row}} of one run of each config."""
  command = [sys.executable, "-m", "faults.train_several"]
  for name, config in configs.items():
    command += [config, str(folder / name)]
  root = program_lib.ROOT
  env = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    "PYTHONPATH": os.pathsep.join(map(str, (root, root / "tests"))),
    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{program_lib.free_port()}",
    "JAX_NUM_PROCESSES": str(processes),
  }
  job = [
    subprocess.Popen(
      command,
      env=env | {"JAX_PROCESS_ID": str(index)},
      stdout=-1,
      stderr=-2,
      text=True,
    )
    for index in range(processes)
  ]
  try:
    said = [process.communicate(timeout=LIMIT_SECS)[0] for process in job]
  finally:
    for process in job:
      process.kill()
  codes = [process.returncode for process in job]
  assert codes == [0] * processes, "\n".join(text[-3000:] for text in said)
  for name in configs:
    told = record.read_json(str(folder / name / "run.json"))["starts"][-1]
    assert told["processes"] == processes
    assert told["devices"] == processes * devices
  return {name: tiny.rows(folder / name) for name in configs}


@pytest.fixture(scope="module")
def alone(configs, tmp_path_factory):
  """The rows of one process with one device."""
  return train(configs, tmp_path_factory.mktemp("alone"), 1, 1)


@pytest.mark.parametrize(
  "processes, devices",
  [(p, d) for p in (1, 2, 4) for d in (1, 2, 3, 4) if p * d > 1],
)
def test_same_examples_and_losses(configs, alone, tmp_path, processes, devices):
  found = train(configs, tmp_path, processes, devices)
  for name, rows in alone.items():
    assert sorted(found[name]) == list(range(1, 7))
    # The last batch of an evaluation is not full.
    assert {step for step, row in rows.items() if "val/loss" in row} == {
      2,
      4,
      6,
    }
    program_lib.assert_same_numbers(found[name], rows)
  # The images' ids are themselves: an epoch is 80 of them.
  rows = found["images"].values()
  seen = [row[f"id_{i}"] for row in rows for i in range(48)]
  assert sorted(seen[:80]) == list(range(1000, 1080))
