"""What a run is made of, written down: config.json and run.json."""

import collections
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

import bigtrain
from bigtrain import settings, trees
from bigtrain.files import paths

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


def write_json(path: str, content: Mapping[str, Any]) -> None:
  """Writes JSON so that a reader sees the old file or the new one."""
  with paths.replacing(path) as file:
    file.write(settings.to_json(content, indent=2) + "\n")


def as_json(config: Mapping[str, Any]) -> dict[str, Any]:
  """A config as a file has it; what JSON cannot say is its repr."""
  return json.loads(settings.to_json(config))


def read_json(path: str) -> dict[str, Any] | None:
  """The content of a JSON file; None if there is no such file."""
  try:
    return json.loads(paths.read_bytes(path))
  except FileNotFoundError:
    return None


def topology(mesh: Mesh) -> str:
  """One line about processes, their devices, and the mesh."""
  devices = list(mesh.devices.flat)
  each = set(collections.Counter(d.process_index for d in devices).values())
  kinds = collections.Counter(d.device_kind for d in devices)
  shares = " or ".join(map(str, sorted(each)))
  return (
    f"{jax.process_count()} process(es) with {shares} device(s) each, "
    f"{', '.join(f'{n} of kind {kind!r}' for kind, n in kinds.items())}, mesh "
    f"replica={mesh.shape['replica']} x fsdp={mesh.shape['fsdp']}"
  )


def parameters(workdir: str, params: Any, trainable: Any) -> str:
  """Writes parameters.txt, a table of all parameters; returns its totals.

  Args:
    workdir: folder of the run.
    params: tree of arrays or ShapeDtypeStructs.
    trainable: tree of bools like it.
  """
  from clu import parameter_overview

  sizes = [leaf.size for leaf in jax.tree.leaves(params)]
  flags = jax.tree.leaves(trainable)
  trained = sum(size for size, flag in zip(sizes, flags) if flag)
  total = f"{sum(sizes):,} parameters, {trained:,} of them trained"
  if jax.process_index() == 0:
    table = parameter_overview.get_parameter_overview(
      params, include_stats=False
    )
    with paths.replacing(os.path.join(workdir, "parameters.txt")) as file:
      file.write(f"{table}\n{total}\n")
  return total


def versions() -> dict[str, str]:
  """Versions of the packages that a result depends on."""
  found = {}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


def _git(*arguments: str) -> str:
  folder = os.path.dirname(os.path.abspath(__file__))
  try:
    done = subprocess.run(
      ["git", "-C", folder, *arguments],
      capture_output=True,
      text=True,
      timeout=5,
      check=True,
    )
  except (OSError, subprocess.SubprocessError):
    return ""  # Installed without git or outside of a checkout.
  return done.stdout.strip()


def run_info(mesh: Mesh) -> dict[str, Any]:
  """With what code, packages, devices and hosts this process runs."""
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
    "processes": jax.process_count(),
    "devices": mesh.size,
    "device_kind": device.device_kind,
    "platform": device.platform,
    "mesh": dict(mesh.shape),
    "xla_flags": os.environ.get("XLA_FLAGS", ""),
  }


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
  """What must be the same on all processes of a job, flat, by name.

  That is every value of the config, the package versions, and a digest of
  this package's code (a checkout may differ without a commit).
  """
  digest = hashlib.sha256()
  folder = pathlib.Path(bigtrain.__file__).parent
  for path in sorted(folder.rglob("*.py")):
    digest.update(f"{path.relative_to(folder)}\0".encode())
    digest.update(path.read_bytes())
  flat = dict(trees.flatten_with_names({"config": as_json(config)}))
  return {
    **{name.replace("/", "."): value for name, value in flat.items()},
    **{f"version of {name}": v for name, v in versions().items()},
    "version of python": platform.python_version(),
    "digest of the code": digest.hexdigest()[:12],
  }


def write(workdir: str, config: Mapping[str, Any], info: Any) -> None:
  """config.json, and a new entry in run.json, a list with one for each start.

  Only process 0 writes.
  """
  if jax.process_index():
    return
  write_json(os.path.join(workdir, "config.json"), config)
  path = os.path.join(workdir, "run.json")
  earlier = (read_json(path) or {}).get("starts", [])
  write_json(path, {"starts": [*earlier, info]})


def start(
  workdir: str,
  config: Mapping[str, Any],
  mesh: Mesh,
  params: Any,
  trainable: Any,
) -> None:
  """Writes what is known when a run starts; see `write` and `parameters`."""
  write(workdir, config, run_info(mesh))
  total = parameters(workdir, params, trainable)
  logging.info("%s; the table is in parameters.txt.", total)


def update(workdir: str, **facts: Any) -> None:
  """Adds facts, such as compile seconds, to the newest entry of run.json.

  A fact that is a dict is added to the one that is there.
  """
  if jax.process_index():
    return
  path = os.path.join(workdir, "run.json")
  content = read_json(path)
  newest = content["starts"][-1]
  for name, value in facts.items():
    if isinstance(value, Mapping):
      value = {**newest.get(name, {}), **value}
    newest[name] = value
  write_json(path, content)


def ending(results: Mapping[str, Any], workdir: str) -> str:
  """What a person wants to read last: the results, and where things are."""
  if results.keys() == {"step"}:  # Nothing was trained or evaluated.
    return f"Compiled; {os.path.join(workdir, 'run.json')} says what it takes."
  lines = [f"Finished at step {results['step']}."]
  shown = {k: v for k, v in results.items() if "/" in k}
  for name, value in {"loss": results.get("loss"), **shown}.items():
    hidden = name.startswith("account/") or name.endswith("/secs")
    if isinstance(value, float) and not hidden:
      lines.append(f"  {name:24} {value:.4g}")
  lines += [
    f"  metrics       {os.path.join(workdir, 'metrics.jsonl')}",
    f"  checkpoints   {os.path.join(workdir, 'checkpoints')}",
    f"  TensorBoard   {os.path.join(workdir, 'tensorboard')}",
  ]
  return "\n".join(lines)


def use_compile_cache(folder: str | bool) -> str:
  """Switches jax's persistent compilation cache on.

  Args:
    folder: where it is; True for the user's cache folder, False for none.

  Returns:
    The folder, or "".
  """
  if folder is False or folder is None:
    return ""
  if folder is True:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(home, "bigtrain", "xla")
  jax.config.update("jax_compilation_cache_dir", folder)
  # Small programs add up too: start-up has dozens of them.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  return folder
