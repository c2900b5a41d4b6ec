"""Compiles the update of a config for absent devices, and reads the program."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.cluster import process
from bigtrain.reports import record
from bigtrain.settings import ConfigError
from bigtrain.tools.plan import collectives, cycles, hardware, products

# Name of XLA's dump of the partitioned program.
_PARTITIONED = re.compile(r"\.after_(\w+-)?spmd-partitioning\..*txt$")
# Errors of libtpu about a program that does not fit.
_TOO_LARGE = re.compile(
  r"(?:Used |HLO temporaries \()([\d.]+)([KMGT])"
  r"(?: of [\d.]+[KMGT] hbm|\) exceeds)"
)


def compile_update(
  config: str,
  mesh: Mapping[str, int],
  changes: Sequence[str],
  target: hardware.Hardware,
  topology: str | None,
  timeout_secs: float | None = None,
) -> dict[str, Any]:
  """Compiles the update for absent devices; returns facts about it.

  Args:
    config: "FILE.py" or "FILE.py:arguments".
    topology: their name, see hardware.topology; None for simulated CPUs.
    timeout_secs: time for the compiler, unless unlimited.

  Raises:
    ConfigError: a mistake in the config.
    RuntimeError: the program cannot be compiled.
    subprocess.TimeoutExpired: it took longer.
  """
  devices = mesh["devices"]
  with tempfile.TemporaryDirectory() as folder:
    texts = os.path.join(folder, "texts")
    flags = [
      f"--xla_force_host_platform_device_count={1 if topology else devices}",
      f"--xla_dump_to={texts}",
      "--xla_dump_hlo_pass_re=spmd-partitioning",
      "--xla_dump_hlo_module_re=.*update_fn.*",
    ]
    command = [
      *(sys.executable, "-m", "bigtrain.main"),
      *(f"--config={config}", f"--workdir={folder}"),
      *(f"--config.{change}" for change in changes),
      # A program from the cache leaves no dump.
      "--config.compile_cache=False",
      f"--config.compile_only={topology or True}",
    ]
    finished = subprocess.run(
      command,
      env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)},
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      check=False,
      timeout=timeout_secs,
    )
    last = (finished.stderr.strip().splitlines() or ["no message"])[-1]
    last = last.removeprefix("error: ")
    if finished.returncode == process.EXIT_CONFIG:
      raise ConfigError(last)
    needed = _needed_bytes(finished.stderr)
    if finished.returncode and needed is None:
      raise RuntimeError(f"--devices={devices}: compiling failed: {last}")
    written = record.read_json(os.path.join(folder, "run.json")) or {}
    program = collectives.read(_partitioned(texts))
    text = ""
    if needed is None:
      with open(os.path.join(folder, "update.hlo.txt")) as file:
        text = file.read()
  started = written["starts"][-1]
  compiler = ("tpu" if target.chips else "gpu") if topology else "cpu"
  by_products = compiler == "gpu" and products.read(text)
  return {
    **started["footprint"],
    "memory": _memory(started, needed),
    "model_flops": started["model_flops_per_step"],
    "collectives": collectives.to_json(program.collectives),
    "unknown_loops": program.unknown_loops,
    "cycles": _cycles(text, target) if compiler == "tpu" else None,
    "products": by_products._asdict() if by_products else None,
    "figures": "compiled" if needed is None else "too large",
    "compiler": compiler,
  }


def _partitioned(folder: str) -> str:
  """The program after XLA's partitioner; "" for a single device."""
  names = os.listdir(folder) if os.path.isdir(folder) else []
  for name in filter(_PARTITIONED.search, names):
    with open(os.path.join(folder, name)) as file:
      return file.read()
  return ""


def _needed_bytes(message: str) -> float | None:
  """The memory that a program needs, from the error that it does not fit."""
  match = _TOO_LARGE.search(message)
  return (
    float(match[1]) * 2 ** (10 * " KMGT".index(match[2])) if match else None
  )


def _memory(started: Mapping[str, Any], needed: float | None) -> dict[str, Any]:
  """Memory of the program; of one that is too large, as far as it is known."""
  if needed is None:
    return started["programs"]["update"]
  state = sum(started["footprint"]["state_bytes"].values())
  arguments = state + started["footprint"]["batch_bytes"]
  return {
    "argument_bytes": arguments,
    "output_bytes": state,
    "alias_bytes": state,
    "temporary_bytes": needed - arguments,
    "peak_bytes": needed,
  }


def _cycles(text: str, target: hardware.Hardware) -> dict[str, Any] | None:
  """The estimate of cycles.py, as a value of JSON."""
  totals = cycles.read(
    text,
    target.clock_hertz,
    target.flops_per_cycle,
    lambda collective: hardware.seconds(collective, target).secs,
  )
  return totals._asdict() if totals else None
