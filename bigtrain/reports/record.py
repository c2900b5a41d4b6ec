"""Records the setup of a run: config.json, run.json and parameters.txt.

config.json is the config of the newest start. run.json has an entry for every
start, with the command, the code, the packages and the devices; facts that are
known later, such as the memory of a program, are merged into the newest entry.
"""

import collections
import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import dims, trees
from bigtrain.config import choices, modules
from bigtrain.config.lengths import Units
from bigtrain.files import paths
from bigtrain.reports import parameter_table, run_files

# Packages whose versions run.json has, and that are the same on all processes.
_PACKAGES = (
  "bigtrain",
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "numpy",
  "tensorstore",
  "tensorflow-cpu",
  "tensorflow",
)


def topology(mesh: Mesh) -> str:
  devices = list(mesh.devices.flat)
  per_process = collections.Counter(d.process_index for d in devices)
  kinds = collections.Counter(d.device_kind for d in devices)
  counts = " or ".join(map(str, sorted(set(per_process.values()))))
  processes = ""
  if jax.process_count() > 1:
    processes = f" in {jax.process_count()} processes with {counts} each"
  return (
    f"Devices: {', '.join(f'{n} x {kind}' for kind, n in kinds.items())}"
    f"{processes}, mesh {sharding.in_words(mesh.shape)}"
  )


def summary(config: Mapping[str, Any], units: Units) -> list[str]:
  """A summary of a config in three lines: model, data and training."""
  data = config["input"].get("data") or config["input"].get("mixture", {})
  examples = units.examples_per_epoch
  size = f"; {examples:,} examples" if examples else ""
  rates = {name: config[name] for name in ("lr", "wd") if name in config}
  optimizer = {**(config.get("optimizer") or {}), **rates}
  return [
    f"{modules.task_names(config['task'])} with {config['model_name']}: "
    f"{_words(config.get('model') or {})}",
    f"Data: {_words(data)}{size}, {units.batch_size:,} a step",
    f"{units.total_steps:,} steps: {_words(optimizer)}; "
    f"seed {config.get('seed', 0)}",
  ]


def log_summary(config: Mapping[str, Any], units: Units) -> None:
  for line in summary(config, units):
    logging.info("%s", line)


def _words(options: Mapping[str, Any]) -> str:
  """Options as "a=1, b=2", cut to the length of a line."""
  words = [f"{k}={v}" for k, v in options.items() if v is not None]
  return textwrap.shorten(", ".join(words), 100, placeholder=" ...")


def versions() -> dict[str, str]:
  installed = {}
  for name in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      installed[name] = importlib.metadata.version(name)
  return installed


def _git(*arguments: str) -> str:
  folder = os.path.dirname(os.path.abspath(__file__))
  try:
    output = subprocess.check_output(
      ["git", "-C", folder, *arguments], stderr=subprocess.DEVNULL, timeout=5
    )
    return output.decode().strip()
  except (OSError, subprocess.SubprocessError):
    return ""  # No git, or not a checkout.


def run_info(mesh: Mesh) -> dict[str, Any]:
  device = mesh.devices.flat[0]
  return {
    "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    "command": sys.argv,
    "code": {
      "commit": _git("rev-parse", "HEAD"),
      "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
    },
    "python": platform.python_version(),
    "packages": versions(),
    "host": socket.gethostname(),
    "pid": os.getpid(),
    "processes": jax.process_count(),
    "devices": mesh.size,
    "device_kind": device.device_kind,
    "platform": device.platform,
    "mesh": dict(mesh.shape),
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
  """Values that must be equal on all processes of a job, by name."""
  # Of all files, as a checkout can have uncommitted changes.
  digest = hashlib.sha256()
  package = pathlib.Path(__file__).parents[1]
  for path in sorted(p for p in package.rglob("*.*") if p.suffix != ".pyc"):
    digest.update(f"{path.relative_to(package)}\0".encode())
    digest.update(path.read_bytes())
  flat = dict(trees.flatten_with_names({"config": run_files.as_json(config)}))
  return {
    **{name.replace("/", "."): value for name, value in flat.items()},
    **{f"version of {name}": v for name, v in versions().items()},
    "version of python": platform.python_version(),
    "digest of the code": digest.hexdigest()[:12],
  }


def write(workdir: str, config: Mapping[str, Any], info: Any) -> None:
  if jax.process_index():
    return
  run_files.write_json(os.path.join(workdir, "config.json"), config)
  path = os.path.join(workdir, "run.json")
  earlier = (run_files.read_json(path) or {}).get("starts", [])
  run_files.write_json(path, {"starts": [*earlier, info]})


def start(
  workdir: str,
  config: Mapping[str, Any],
  mesh: Mesh,
  trainable: Any,
  state: Mapping[str, Any],
  origin: str = "",
  log_table: bool = False,
  first_example: Sequence[tuple[str, bool]] = (),
  param_dims: dims.Table | None = None,
) -> Callable[[], None]:
  """Returns a function that writes the files of a run's start.

  The function can run in any thread, even after the state has been donated.

  Args:
    origin: where the state comes from, such as "from scratch".
    first_example: a text in pieces, each with whether it has a loss.
  """
  params = state["params"]
  moments = parameter_table.moments(params, mesh)
  specs = sharding.with_shardings(params)
  task_specs = sharding.with_shardings(state.get("tasks", {}))

  def write_files() -> None:
    facts: dict[str, Any] = {**parameter_table.facts(specs, trainable)}
    if first_example:
      facts["first_example"] = first_example
      logging.info(
        "The first example; only what is in [[ ]] has a loss:\n%s",
        "".join(f"[[{x}]]" if loss else x for x, loss in first_example),
      )
    write(workdir, config, run_info(mesh) | facts)
    table = parameter_table.write(
      workdir, specs, trainable, moments, origin, param_dims, task_specs
    )
    logging.info("%s", table if log_table else table.rpartition("\n")[2])

  return write_files


def update(workdir: str, **facts: Any) -> None:
  """Merges facts, and choices for "auto", into the newest entry of run.json."""
  if jax.process_index():
    return
  path = os.path.join(workdir, "run.json")
  content = json.loads(paths.read_bytes(path))
  newest = content["starts"][-1]
  if chosen := choices.choices():
    facts["auto"] = chosen
  for name, value in facts.items():
    if isinstance(value, Mapping):
      value = {**newest.get(name, {}), **value}
    newest[name] = value
  run_files.write_json(path, content)


def note_failure(workdir: str, message: str) -> None:
  path = os.path.join(workdir, "run.json")
  with contextlib.suppress(OSError, ValueError):
    newest = (run_files.read_json(path) or {}).get("starts", [{}])[-1]
    process = newest.get("host"), newest.get("pid")
    if process == (socket.gethostname(), os.getpid()):
      update(workdir, error=message)
