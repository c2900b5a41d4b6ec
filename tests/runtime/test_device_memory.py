"""Runs that do not fit into memory end with settings that do fit."""

import json
import re
import subprocess

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import tiny
from support import processes

from bigtrain import main, settings
from bigtrain.runtime import device_memory

FEATURES = {"image": "float32[8,8,1]", "labels": "int32[]"}


@pytest.fixture(scope="module")
def large_batch(tiny_config):
  """A config whose activations need far more memory than its state."""
  return tiny_config(
    {
      "total_steps": 1,
      "input.data": dict(
        type="synthetic",
        features=FEATURES,
        num_examples=8192,
      ),
      "input.batch_size": 8192,
      "model": dict(num_classes=10, width=64),
      "evals": {},
    }
  )


def needed(config, folder):
  """Memory of the update, as compile_only reports it."""
  main.train(config | {"compile_only": True}, str(folder))
  (start,) = json.loads((folder / "run.json").read_text())["starts"]
  return device_memory.needed_bytes(start["programs"]["update"])


@pytest.mark.slow
def test_an_update_that_does_not_fit_is_refused(large_batch, tmp_path):
  total = needed(large_batch, tmp_path / "compiled")
  limited = large_batch | {"device_memory_bytes": total // 2}
  with pytest.raises(device_memory.OutOfMemory) as error:
    main.train(limited, str(tmp_path / "refused"))
  message = str(error.value)
  assert message.startswith(
    f"the update needs {device_memory.size(total)} on each device, which has "
    f"{device_memory.size(total // 2)} ("
  )
  assert "\n" not in message and error.value.__cause__ is None
  assert not tiny.checkpoint_steps(tmp_path / "refused")
  assert not (tmp_path / "refused" / "metrics.jsonl").read_text().strip()
  # What the message promises is true, and such a run trains.
  number, size = re.search(
    r"--config\.microbatches=(\d+) needs ([\d.]+ \w+)", message
  ).groups()
  changed = limited | {"microbatches": int(number)}
  assert device_memory.size(needed(changed, tmp_path / "split")) == size
  assert main.train(changed, str(tmp_path / "run"))["step"] == 1


def test_nothing_fits(large_batch, tmp_path, monkeypatch):
  monkeypatch.setattr(
    device_memory, "_compiling", lambda *_: lambda changes: LARGE
  )
  limited = large_batch | {"device_memory_bytes": 1000}
  with pytest.raises(device_memory.OutOfMemory) as error:
    main.train(limited, str(tmp_path))
  assert "None of the settings tried fits; --config." in str(error.value)
  assert "needs 5 GB." in str(error.value)


LARGE = dict(
  argument_bytes=3 * 10**9,
  output_bytes=2 * 10**9,
  alias_bytes=2 * 10**9,
  temporary_bytes=2 * 10**9,
  peak_bytes=10**9,
)


class Hungry(nn.Module):
  """Sorts 2^50 numbers for each example while it trains."""

  @nn.compact
  def __call__(self, image, *, train=False):
    x = nn.Dense(10)(image.reshape(len(image), -1))
    if train:
      wide = jnp.broadcast_to(x[:, :1], (len(x), 1 << 50))
      x += jax.lax.stop_gradient(jnp.sort(wide))[:, :1]
    return x, {}


def test_a_device_runs_out_of_memory_in_a_step(
  tiny_config, tmp_path, monkeypatch
):
  monkeypatch.setattr("tiny.net.Model", Hungry)
  config = tiny_config({"model": {}})
  with pytest.raises(device_memory.OutOfMemory) as error:
    main.train(config, str(tmp_path))
  message = str(error.value)
  assert "RESOURCE_EXHAUSTED" in str(error.value.__cause__)
  assert re.match(
    r"out of memory while training: .*\. The update needs [\d.e+]+ GB on each",
    message,
  ), message
  if jax.device_count() == 8:  # Two examples on each.
    assert "These settings fit: --config.microbatches=2 needs" in message


def test_an_evaluation_does_not_fit(tiny_config, tmp_path):
  total = needed(tiny_config({"evals": {}}), tmp_path / "compiled")
  config = tiny_config(
    {
      "evals.val.data": dict(
        type="synthetic",
        features=FEATURES,
        num_examples=8192,
      ),
      "evals.val.batch_size": 8192,
      "device_memory_bytes": 2 * total,
    }
  )
  with pytest.raises(device_memory.OutOfMemory) as error:
    main.train(config, str(tmp_path / "refused"))
  message = str(error.value)
  assert "the program 'val' needs" in message
  size = int(
    re.search(r"--config\.evals\.val\.batch_size=(\d+) it", message)[1]
  )
  config["evals"]["val"]["batch_size"] = size
  assert main.train(config, str(tmp_path / "run"))["step"] == 6


def test_the_limit_must_be_a_positive_number(tiny_config, tmp_path):
  with pytest.raises(settings.ConfigError, match="memory_bytes: .* got '8GB'"):
    main.train(tiny_config({"device_memory_bytes": "8GB"}), str(tmp_path))


@pytest.mark.slow
def test_the_command_ends_with_code_1_and_one_line(large_batch, tmp_path):
  vit = dict(
    num_classes=10, patch_size=1, width=16, depth=1, num_heads=1, mlp_dim=16
  )
  changes = {"model_name": "vit", "model": vit}
  changes["input"] = large_batch["input"] | {"batch_size": 64}
  file = tmp_path / "config.json"
  file.write_text(json.dumps(large_batch | changes))
  command = processes.main_command(
    file, tmp_path / "run", "--config.device_memory_bytes=1000000"
  )
  ended = processes.run(command)
  assert isinstance(ended, subprocess.CompletedProcess)
  last = ended.stderr.strip().splitlines()[-1]
  assert ended.returncode == 1, ended.stderr
  assert last.startswith("error: OutOfMemory: the update needs ")
  assert " --config.microbatches=" in last
  assert "--config.model.remat_policy=nothing_saveable" in last
  assert "Traceback" not in ended.stderr
