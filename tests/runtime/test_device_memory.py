"""Runs that do not fit into memory name the command that finds what fits."""

import json
import re
import shlex
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import tiny
from support import processes

from bigtrain import main
from bigtrain.config.errors import ConfigError
from bigtrain.runtime import device_memory
from bigtrain.tools.plan import plan

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
  """Memory of the update."""

  def on_update(run, update_fn, specs, compile):
    return device_memory.needed_bytes(device_memory.memory_bytes(compile()))

  return main.train(config, str(folder), on_update=on_update)


@pytest.mark.slow
def test_an_update_that_does_not_fit_is_refused(
  large_batch, tmp_path, monkeypatch
):
  total = needed(large_batch, tmp_path / "compiled")
  limited = large_batch | {"device_memory_bytes": total // 2}
  argv = ["--config", "x.py:a b", "--config.lr=1", "--workdir=y"]
  monkeypatch.setattr(sys, "argv", ["main", *argv])
  with pytest.raises(device_memory.OutOfMemory) as error:
    main.train(limited, str(tmp_path / "refused"))
  message = str(error.value)
  assert message.startswith(
    f"the update needs {device_memory.size(total)} on each device, which has "
    f"{device_memory.size(total // 2)} ("
  )
  for part in ("params", "opt", "batch", "temporary values"):
    assert re.search(rf"\b{part} [\d.]+ \w+[,)]", message), part
  assert message.endswith(
    ". This finds settings that fit: python -m bigtrain.tools.plan "
    "'--config=x.py:a b' --config.lr=1 "
    f"--config.device_memory_bytes={total // 2} "
    f"--devices={jax.device_count()} --choose"
  )
  assert "\n" not in message and error.value.__cause__ is None
  assert not tiny.checkpoint_steps(tmp_path / "refused")
  assert not (tmp_path / "refused" / "metrics.jsonl").read_text().strip()


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
    r"out of memory while training: .*\. The update needs [\d.e+]+ TB on each",
    message,
  ), message
  (limit,) = re.findall(r"device_memory_bytes=(\d+) --devices", message)
  (size,) = re.findall(r"The update needs ([\d.e+]+) TB", message)
  assert int(limit) == pytest.approx(0.9e12 * float(size), rel=0.01)


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
  with pytest.raises(ConfigError, match="memory_bytes: .* got '8GB'"):
    main.train(tiny_config({"device_memory_bytes": "8GB"}), str(tmp_path))


@pytest.mark.slow
def test_the_command_ends_with_code_1_and_one_line(
  large_batch, tmp_path, capsys
):
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
  assert "Traceback" not in ended.stderr
  # The command that the line names finds what fits, and such a run trains.
  command = shlex.split(last.partition(" fit: python -m ")[2])
  assert command.pop(0) == "bigtrain.tools.plan"
  assert plan.main([*command, "--json"]) == 0
  best = json.loads(capsys.readouterr().out)[0]
  assert best["fits"] and best["microbatches"] > 1
  flags = [
    "--config.device_memory_bytes=1000000",
    f"--config.microbatches={best['microbatches']}",
    f"--config.model.remat_policy={best['remat_policy']}",
  ]
  ended = processes.run(processes.main_command(file, tmp_path / "fits", *flags))
  assert ended.returncode == 0, ended.stderr
