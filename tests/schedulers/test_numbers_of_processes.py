"""One, two and four processes with one to four devices train the same."""

import sys

import pytest
import tiny
from faults import program as program_lib
from faults import tiny_tokens
from support import processes

from bigtrain.reports import run_files

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
  """{name: config}: images with ids, and packed documents."""
  folder = tmp_path_factory.mktemp("data")
  program_lib.write_data(folder)
  tiny_tokens.write(folder)
  images = folder / "images.py"
  # 48 is divisible by all products of processes and devices.
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


def train(configs, folder, count, devices):
  """{name: {step: row}} of one run of each config."""
  command = [sys.executable, "-m", "faults.train_several"]
  for name, config in configs.items():
    command += [config, str(folder / name)]
  processes.run_job(command, folder, count, devices=devices)
  for name in configs:
    start = run_files.read_json(str(folder / name / "run.json"))["starts"][-1]
    assert start["processes"] == count
    assert start["devices"] == count * devices
  return {name: tiny.rows(folder / name) for name in configs}


@pytest.fixture(scope="module")
def alone(configs, tmp_path_factory):
  """The rows of a run of one process with one device."""
  return train(configs, tmp_path_factory.mktemp("alone"), 1, 1)


@pytest.mark.parametrize(
  "count, devices",
  [(p, d) for p in (1, 2, 4) for d in (1, 2, 3, 4) if p * d > 1],
)
def test_same_examples_and_losses(configs, alone, tmp_path, count, devices):
  results = train(configs, tmp_path, count, devices)
  for name, rows in alone.items():
    assert sorted(results[name]) == list(range(1, 7))
    # The last batch of an evaluation is not full.
    assert {step for step, row in rows.items() if "val/loss" in row} == {
      2,
      4,
      6,
    }
    program_lib.assert_same_numbers(results[name], rows)
  # Of the images, the first epoch has each of the 80 ids once.
  rows = results["images"].values()
  seen = [row[f"id_{i}"] for row in rows for i in range(48)]
  assert sorted(seen[:80]) == list(range(1000, 1080))
