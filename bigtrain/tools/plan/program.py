"""Builds the update of a config for other devices, and measures it.

`compile_update` starts this module as a process, because the number of
simulated devices is fixed when jax starts. The process runs bigtrain.main as
far as the lowered update: it allocates no arrays and reads no data. It writes
facts.json, which `compile_update` returns.
"""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.cluster import process
from bigtrain.config import loading, settings
from bigtrain.config.errors import ConfigError
from bigtrain.main import train
from bigtrain.objective import (
  building,
  selection,
  task_functions,
  task_gradients,
  task_schedule,
  task_sum,
  teacher,
)
from bigtrain.reports import flops
from bigtrain.runtime import device_memory
from bigtrain.runtime.run import Run
from bigtrain.tools import exits
from bigtrain.tools.plan import collectives, cycles, hardware, hlo, products

# Folder for the texts that XLA dumps, and the names of the partitioner's.
_TEXTS = "texts"
_PARTITIONED = re.compile(r"\.after_(\w+-)?spmd-partitioning\..*txt$")
# libtpu's errors about a program that does not fit:
# "Used 40.5G of 15.75G hbm", "HLO temporaries (40.5G) exceeds".
_TOO_LARGE = re.compile(
  r"(?:Used |HLO temporaries \()([\d.]+)([KMGT])"
  r"(?: of [\d.]+[KMGT] hbm|\) exceeds)"
)

# Largest size of `tensor` to consider: devices with NVLink in a server.
_MAX_TENSOR = 8


class Sizes(NamedTuple):
  """Sizes of a config over all devices, which do not depend on the mesh."""

  parameters: int
  opt_bytes: int
  model_flops: int  # In a step, without recomputation.
  batch_bytes: int
  tokens_per_example: int | None
  tensor_sizes: Sequence[int]  # Sizes of `tensor` that the rules allow.
  has_remat_policy: bool


def sizes(config: str, changes: Sequence[str]) -> Sizes:
  """Measures a config on one simulated device, without compiling."""
  facts = _run({"config": config, "changes": [*changes]}, devices=1)
  facts["opt_bytes"] = facts["state_bytes"]["opt"] + facts["host_state_bytes"]
  return Sizes(**{name: facts[name] for name in Sizes._fields})


def compile_update(
  config: str,
  devices: int,
  changes: Sequence[str],
  hardware_name: str,
  compiler: str,
  timeout_secs: float | None = None,
) -> dict[str, Any]:
  """Compiles the update for absent devices; returns facts about it.

  Raises RuntimeError if the compiler fails, and subprocess.TimeoutExpired.
  """
  request = {
    "config": config,
    "changes": [*changes],
    "compiler": compiler,
    "hardware": hardware_name,
  }
  if compiler != "cpu":
    request["topology"] = hardware.topology(hardware_name, devices, compiler)
  return _run(request, devices, timeout_secs)


def _run(
  request: Mapping[str, Any], devices: int, timeout_secs: float | None = None
) -> dict[str, Any]:
  # A topology describes the devices to the compiler of the planned hardware.
  # Without one, the CPU's compiler needs simulated devices.
  simulated = 1 if "topology" in request else devices
  with tempfile.TemporaryDirectory() as folder:
    flags = [
      f"--xla_force_host_platform_device_count={simulated}",
      f"--xla_dump_to={os.path.join(folder, _TEXTS)}",
      "--xla_dump_hlo_pass_re=spmd-partitioning",
      "--xla_dump_hlo_module_re=.*update_fn.*",
    ]
    if "topology" not in request:
      # The program never runs, and its figures are known before LLVM begins.
      flags += [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
      ]
    finished = subprocess.run(
      [sys.executable, "-m", __name__, json.dumps(request), folder],
      env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)},
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      check=False,
      timeout=timeout_secs,
    )
    if finished.returncode:
      lines = finished.stderr.strip().splitlines() or ["no message"]
      message = lines[-1].removeprefix("error: ")
      if finished.returncode == process.EXIT_CONFIG:
        raise ConfigError(message)
      raise RuntimeError(f"--devices={devices}: compiling failed: {message}")
    with open(os.path.join(folder, "facts.json")) as file:
      return json.load(file)


@exits.in_one_line(RuntimeError)
def main(argv: Sequence[str]) -> int:
  request, folder = json.loads(argv[0]), argv[1]
  changes = [
    *request["changes"],
    "compile_cache=False",  # A program from the cache leaves no dump.
    "device_memory_bytes=None",  # A program that does not fit is a result.
    # These modes for debugging do not compile ahead of time.
    "eager=False",
    "debug_nans=False",
  ]
  with sharding.absent_devices(request.get("topology")):
    facts = train(
      loading.load(request["config"], changes),
      folder,
      on_update=functools.partial(_facts, request, folder),
    )
  with open(os.path.join(folder, "facts.json"), "w") as file:
    json.dump(facts, file)
  return process.EXIT_OK


def _facts(
  request: Mapping[str, Any],
  folder: str,
  run: Run,
  update_fn: Callable[..., Any],
  specs: tuple[Any, ...],
  compile: Callable[[], Any],
) -> dict[str, Any]:
  """Facts about the update, for main's `on_update`."""
  facts = measure(run, update_fn, specs)
  if "compiler" not in request:  # From `sizes`.
    return {**facts, **_model_facts(run.config, specs[0])}
  text = ""
  try:
    compiled = compile()
  except RuntimeError as e:
    needed_bytes = _needed_bytes(f"{e} {e.__cause__}")
    if needed_bytes is None:
      raise
    facts["memory"] = _memory_of_too_large(facts, needed_bytes)
    facts["figures"] = "too large"
  else:
    facts["memory"] = device_memory.memory_bytes(compiled)
    facts["figures"] = "compiled"
    text = compiled.as_text()
  sent, unknown_loops = collectives.sent(hlo.Module(_partitioned(folder)))
  estimated_cycles = compiled_products = None
  if request["compiler"] == "tpu":
    estimated_cycles = _cycles(text, hardware.find(request["hardware"]))
  elif request["compiler"] == "gpu":
    compiled_products = products.products(hlo.Module(text))._asdict()
  return {
    **facts,
    "collectives": [one._asdict() for one in sent],
    "unknown_loops": unknown_loops,
    "cycles": estimated_cycles,
    "products": compiled_products,
    "compiler": request["compiler"],
  }


def _cycles(text: str, target: hardware.Hardware) -> dict[str, Any] | None:
  result = cycles.cycles(
    hlo.Module(text),
    target.clock_hertz,
    target.flops_per_cycle,
    lambda collective: hardware.seconds(collective, target).secs,
  )
  return None if result is None else result._asdict()


def measure(
  run: Run, update_fn: Callable[..., Any], specs: tuple[Any, ...]
) -> dict[str, Any]:
  """Returns facts about an update that is not compiled.

  Bytes are those of each device. FLOPs are those of a step over all devices:
  model_flops without recomputation and padding, executed_flops with both.
  """
  # The arguments of main's update_fn.
  state_spec, _, batch_spec, hparams, frozen_spec = specs
  params = jax.tree.leaves(state_spec["params"])
  sharded = [x for x in params if not x.sharding.is_fully_replicated]
  return {
    "parameters": sum(x.size for x in params),
    "sharded_parameters": sum(x.size for x in sharded),
    "parameter_bytes": sum(x.size * x.dtype.itemsize for x in params),
    "state_bytes": {
      name: _bytes_per_device(part)
      for name, part in {**state_spec, **frozen_spec}.items()
    },
    "host_state_bytes": _bytes_per_device(state_spec, in_host=True),
    "batch_bytes": _bytes_per_device(batch_spec),
    "model_flops": _model_flops(
      run, {**state_spec, **hparams}, batch_spec, frozen_spec
    ),
    "executed_flops": flops.executed_flops(update_fn, *specs),
    "tokens_per_example": run.lengths.units.tokens_per_example,
  }


def _model_flops(
  run: Run, state: Any, batch_spec: Any, frozen_spec: Any
) -> float:
  """Model FLOPs of a step with all its tasks."""
  entries = task_sum.entries(building.task(run.config), run.config)
  _, model = building.model(run.config)
  teaching, taught = teacher.of_tasks(
    run.config, entries, batch_spec, run.mesh, run.seed
  )
  total = 0.0
  for entry in entries:
    if entry.name not in state.get(task_schedule.WEIGHTS, {"": 1.0}):
      continue
    chosen = selection.from_config(
      run.config, entry, [model], teaching, batch_spec, run.mesh
    )
    is_taught = entry in taught and chosen is None
    loss_fn = task_functions.loss_fn(
      entry.part,
      entry.module,
      model,
      teaching.model if is_taught else None,
      entry.input_key,
    )
    own_state = state.get(task_gradients.TASKS)
    if entry.name and own_state is not None:
      own_state = own_state.get(entry.name)
    args = task_gradients.loss_args(
      entry, is_taught, state, batch_spec, run.mesh, frozen_spec, own_state
    )
    if chosen is not None:
      seen = {**state, **frozen_spec}, entry.view(batch_spec)
      args = chosen.loss_args(args, *seen)
      total += chosen.flops(*seen, 0)
    total += flops.step_flops(loss_fn, *args)
  return total


def _bytes_per_device(spec: Any, in_host: bool = False) -> int:
  shardings = jax.tree.map(lambda x: x.sharding, spec)
  return sharding.bytes_per_device(spec, shardings, in_host=in_host)


def _model_facts(config: settings.Config, state_spec: Any) -> dict[str, Any]:
  module, model = building.model(config)
  named = trees.flatten_with_names(state_spec["params"])
  shapes = {name: tuple(x.shape) for name, x in named}

  def allows_tensor(size: int) -> bool:
    if not hasattr(module, "param_dims"):
      return size == 1
    try:
      sharding.place(module.param_dims(model), shapes, {"tensor": size})
    except ConfigError:
      return False
    return True

  return {
    "tensor_sizes": [n for n in range(1, _MAX_TENSOR + 1) if allows_tensor(n)],
    "has_remat_policy": hasattr(model, "remat_policy"),
  }


def _partitioned(folder: str) -> str:
  """The program after XLA's partitioner; "" for a single device."""
  for path in pathlib.Path(folder, _TEXTS).glob("*.txt"):
    if _PARTITIONED.search(path.name):
      return path.read_text()
  return ""


def _needed_bytes(message: str) -> float | None:
  """Memory that a program needs, from the compiler's error; None for others."""
  if match := _TOO_LARGE.search(message):
    return float(match[1]) * 1024 ** " KMGT".index(match[2])
  return None


def _memory_of_too_large(
  facts: Mapping[str, Any], needed_bytes: float
) -> dict[str, Any]:
  state_bytes = sum(facts["state_bytes"].values())
  argument_bytes = state_bytes + facts["batch_bytes"]
  return {
    "argument_bytes": argument_bytes,
    "output_bytes": state_bytes,
    "alias_bytes": state_bytes,
    "temporary_bytes": needed_bytes - argument_bytes,
    "peak_bytes": needed_bytes,
  }


if __name__ == "__main__":
  sys.exit(main())
