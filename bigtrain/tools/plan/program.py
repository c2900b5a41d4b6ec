"""Builds the update of a config for other devices, and measures it.

A process of its own runs bigtrain.main as far as the lowered update. It
allocates no arrays and reads no data.
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
from bigtrain.objective import building, gradients, task_functions, teacher
from bigtrain.reports import flops
from bigtrain.runtime import device_memory
from bigtrain.runtime.run import Run
from bigtrain.tools import exits
from bigtrain.tools.plan import hardware, hlo

# Folder of XLA's dumps, and the name of the partitioned program's.
_TEXTS = "texts"
_PARTITIONED = re.compile(r"\.after_(\w+-)?spmd-partitioning\..*txt$")
# Errors of libtpu about a program that does not fit.
_TOO_LARGE = re.compile(
  r"(?:Used |HLO temporaries \()([\d.]+)([KMGT])"
  r"(?: of [\d.]+[KMGT] hbm|\) exceeds)"
)

# Largest size of `tensor` that is considered.
_MOST_TENSOR = 8


class Sizes(NamedTuple):
  """Sizes of a config over all devices, which do not depend on the mesh."""

  parameters: int
  opt_bytes: int
  model_flops: int  # Of a step, without recomputation.
  batch_bytes: int
  tokens_per_example: int | None
  tensor_sizes: Sequence[int]  # Of the axis `tensor`; what the rules allow.
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

  Raises RuntimeError, and subprocess.TimeoutExpired if it takes longer.
  """
  request = {"config": config, "changes": [*changes], "compiler": compiler}
  request["hardware"] = hardware_name
  if compiler != "cpu":
    request["topology"] = hardware.topology(hardware_name, devices, compiler)
  return _run(request, devices, timeout_secs)


def _run(
  request: Mapping[str, Any], devices: int, timeout_secs: float | None = None
) -> dict[str, Any]:
  simulated = 1 if "topology" in request else devices
  with tempfile.TemporaryDirectory() as folder:
    flags = [
      f"--xla_force_host_platform_device_count={simulated}",
      f"--xla_dump_to={os.path.join(folder, _TEXTS)}",
      "--xla_dump_hlo_pass_re=spmd-partitioning",
      "--xla_dump_hlo_module_re=.*update_fn.*",
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
      last = (finished.stderr.strip().splitlines() or ["no message"])[-1]
      last = last.removeprefix("error: ")
      if finished.returncode == process.EXIT_CONFIG:
        raise ConfigError(last)
      raise RuntimeError(f"--devices={devices}: compiling failed: {last}")
    with open(os.path.join(folder, "facts.json")) as file:
      return json.load(file)


@exits.in_one_line(RuntimeError)
def main(argv: Sequence[str]) -> int:
  request, folder = json.loads(argv[0]), argv[1]
  changes = [
    *request["changes"],
    # A program from the cache leaves no dump, no real device limits it, and
    # neither of the modes for debugging compiles it ahead of time.
    "compile_cache=False",
    "device_memory_bytes=None",
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
  facts = measure(run, update_fn, specs)
  if "compiler" not in request:
    return {**facts, **_of_model(run.config, specs[0])}
  text, needed = "", None
  try:
    compiled = compile()
  except RuntimeError as e:
    needed = _needed_bytes(f"{e} {e.__cause__}")
    if needed is None:
      raise
    facts["memory"] = _memory(facts, needed)
  else:
    facts["memory"] = device_memory.memory_bytes(compiled)
    text = compiled.as_text()
  collectives, unknown_loops = hlo.sent(hlo.Module(_partitioned(folder)))
  cycles = products = None
  if request["compiler"] == "tpu":
    target = hardware.find(request["hardware"])
    totals = hlo.cycles(
      hlo.Module(text),
      target.clock_hertz,
      target.flops_per_cycle,
      lambda collective: hardware.seconds(collective, target).secs,
    )
    cycles = totals and totals._asdict()
  elif request["compiler"] == "gpu":
    products = hlo.products(hlo.Module(text))._asdict()
  return {
    **facts,
    "collectives": [one._asdict() for one in collectives],
    "unknown_loops": unknown_loops,
    "cycles": cycles,
    "products": products,
    "figures": "compiled" if needed is None else "too large",
    "compiler": request["compiler"],
  }


def measure(
  run: Run, update_fn: Callable[..., Any], specs: tuple[Any, ...]
) -> dict[str, Any]:
  """Returns facts about an update that is not compiled.

  Bytes are of each device; model_flops and executed_flops of a step over all
  devices, without and with recomputation and padding.
  """
  state_spec, _, batch_spec, _, frozen_spec = specs
  params = jax.tree.leaves(state_spec["params"])
  sharded = [x for x in params if not x.sharding.is_fully_replicated]
  task, (_, model) = building.task(run.config), building.model(run.config)
  of_teacher = teacher.from_config(
    run.config, task, batch_spec, run.mesh, run.seed
  )
  loss_fn = task_functions.loss_fn(run.config, task, model, of_teacher.model)
  loss_args = gradients.loss_args(state_spec, batch_spec, run.mesh, frozen_spec)
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
    "model_flops": flops.step_flops(loss_fn, *loss_args),
    "executed_flops": flops.executed_flops(update_fn, *specs),
    "tokens_per_example": run.lengths.units.tokens_per_example,
  }


def _bytes_per_device(spec: Any, in_host: bool = False) -> int:
  shardings = jax.tree.map(lambda x: x.sharding, spec)
  return sharding.bytes_per_device(spec, shardings, in_host=in_host)


def _of_model(config: settings.Config, state_spec: Any) -> dict[str, Any]:
  module, model = building.model(config)
  named = trees.flatten_with_names(state_spec["params"])
  shapes = {name: tuple(x.shape) for name, x in named}

  def allowed(ways: int) -> bool:
    if not hasattr(module, "param_dims"):
      return ways == 1
    try:
      sharding.place(module.param_dims(model), shapes, {"tensor": ways})
    except ConfigError:
      return False
    return True

  return {
    "tensor_sizes": [n for n in range(1, _MOST_TENSOR + 1) if allowed(n)],
    "has_remat_policy": hasattr(model, "remat_policy"),
  }


def _partitioned(folder: str) -> str:
  """The program after XLA's partitioner; "" for a single device."""
  for path in pathlib.Path(folder, _TEXTS).glob("*.txt"):
    if _PARTITIONED.search(path.name):
      return path.read_text()
  return ""


def _needed_bytes(message: str) -> float | None:
  if match := _TOO_LARGE.search(message):
    return float(match[1]) * 2 ** (10 * " KMGT".index(match[2]))
  return None


def _memory(facts: Mapping[str, Any], needed: float) -> dict[str, Any]:
  """Memory of a program that is too large, as far as it is known."""
  state = sum(facts["state_bytes"].values())
  return {
    "argument_bytes": state + facts["batch_bytes"],
    "output_bytes": state,
    "alias_bytes": state,
    "temporary_bytes": needed - state - facts["batch_bytes"],
    "peak_bytes": needed,
  }


if __name__ == "__main__":
  sys.exit(main())
