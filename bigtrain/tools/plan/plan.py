"""What a config takes on many devices, before anybody asks for them.

  python -m bigtrain.tools.plan --config=configs/llama_8b.py \\
      --devices=8,64,512 --hardware=h100 --microbatch=1

Each mesh is compiled: bigtrain.main itself builds the update, in a process of
its own that simulates the devices, and nothing is allocated. What the compiled
program holds and sends is read from it; what that takes on the hardware is
reckoned from published figures (hardware.py, estimate.py). No data is needed:
where it is read from files, examples of the same shapes are made up.

  --devices       how many, with commas
  --fsdp          ways the state is split, with commas, -1 for all devices;
                  as the config says unless given
  --hardware      see below
  --microbatch    examples on a device at a time, or fewer where there are no
                  more: sets config.microbatches
  --features      what the data has, where that cannot be known without it:
                  "image: jpeg[375,500,3]; label: int64", see data/synthetic.py
  --num_examples  of an epoch of such data
  --compile_up_to beyond so many devices, figures are extrapolated
  --compiler      cpu; or tpu, which plans memory as the TPUs that are planned
                  for do: takes minutes and the package libtpu, but no TPU
  --efficiency    share of the peak that matrix products reach
  --json          prints JSON
  --config.KEY=VALUE as for bigtrain.main

Exit codes: 0; 2 for a mistake in the config or the arguments; 1 for the rest.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from bigtrain import settings
from bigtrain.cluster import process
from bigtrain.reports import record
from bigtrain.settings import ConfigError, did_you_mean
from bigtrain.tools.plan import (
  collectives,
  estimate,
  hardware,
  stand_ins,
  table,
)

# libtpu compiles for TPUs that are elsewhere if it does not look for any here.
_NO_TPU = {
  "JAX_PLATFORMS": "cpu",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
}
# What XLA calls the text that is wanted.
_PARTITIONED = re.compile(r"\.after_(\w+-)?spmd-partitioning\..*txt$")
# The CPU backend takes devices with larger numbers for another process's.
_MOST_SIMULATED = 2048


def plan(
  config: str,
  devices: Sequence[int],
  changes: Sequence[str] = (),
  *,
  fsdp: Sequence[int | None] = (None,),
  hardware_name: str = "h100",
  microbatch: int | None = None,
  features: Mapping[str, str] | None = None,
  num_examples: int = 1_000_000,
  compile_up_to: int = _MOST_SIMULATED,
  compiler: str = "cpu",
  efficiency: float = estimate.EFFICIENCY,
) -> list[dict[str, Any]]:
  """Compiles a config on simulated meshes, and reckons what it takes.

  Args:
    config: "FILE.py" or "FILE.py:arguments".
    devices: how many; one mesh for each, and for each of `fsdp`.
    changes: to the config, as "mesh.fsdp=8".
    fsdp: ways the state is split: -1 for all devices, None for what the
      config says.
    hardware_name: a key of hardware.TABLE.
    microbatch: examples on a device at a time, at most.
    features: of the data, as data/synthetic.py has them.
    num_examples: of an epoch.
    compile_up_to: beyond so many devices, figures are extrapolated.
    compiler: "cpu", or "tpu" for that of the TPUs that are planned for.
    efficiency: share of the peak that matrix products reach.

  Returns:
    A row for each mesh; see estimate.row.

  Raises:
    ConfigError: a mistake in the config or the arguments.
    RuntimeError: a program cannot be compiled.
  """
  target = hardware.find(hardware_name)
  plain = settings.load(config)
  for change in changes:
    settings.override(plain, change)
  common = [*changes, *stand_ins.stand_ins(plain, features, num_examples)]
  common += [f"{key}=None" for key in plain if key.startswith("expect_")]
  meshes = [
    [
      {**_mesh(plain, n, ways), **_batch(plain, n, microbatch)}
      for n in sorted(devices)
    ]
    for ways in fsdp
  ]
  bases = [
    _base(plain, some, ways, compile_up_to) for some, ways in zip(meshes, fsdp)
  ]

  def compiled(mesh: Mapping[str, int]) -> dict[str, Any]:
    sizes = [
      *(f"mesh.{axis}={mesh[axis]}" for axis in ("replica", "fsdp")),
      f"input.batch_size={mesh['batch_size']}",
      f"microbatches={mesh['microbatches']}",
    ]
    absent: int | str = mesh["devices"]
    if compiler == "tpu":
      absent = hardware.topology(hardware_name, mesh["devices"])
    return {**_compile(config, absent, [*common, *sizes]), **mesh}

  def row(facts: Mapping[str, Any]) -> dict[str, Any]:
    return estimate.row(facts, plain, target, efficiency)

  rows: list[dict[str, Any]] = []
  for some, base in zip(meshes, bases):
    known: list[dict[str, Any]] = []
    for mesh in some:
      near = estimate.alike(known, mesh)
      if mesh["devices"] <= compile_up_to:
        known.append(compiled(mesh))
        rows.append(row(known[-1]))
        if near:
          guess = row(estimate.extrapolate(near, mesh))
          rows[-1]["extrapolated"] = estimate.compare(guess, rows[-1])
        continue
      if near is None:
        near = compiled(base[mesh["devices"]])
        known.append(near)
      rows.append(row(estimate.extrapolate(near, mesh)))
  return rows


def _base(
  config: Mapping[str, Any],
  meshes: Sequence[dict[str, int]],
  fsdp: int | None,
  compile_up_to: int,
) -> dict[int, dict[str, int]]:
  """{devices: the mesh to extrapolate from} of those that are too large."""
  found = {}
  for mesh in meshes:
    devices = mesh["devices"]
    if devices <= compile_up_to:
      continue
    fitting = [m["devices"] for m in meshes if m["devices"] <= compile_up_to]
    number = max(fitting, default=compile_up_to)
    base = _mesh(config, number, fsdp)
    for axis in ("replica", "fsdp"):
      if (base[axis] > 1) != (mesh[axis] > 1):
        raise ConfigError(
          f"--devices={devices}: cannot be extrapolated from {number}, where "
          f"{axis} is {base[axis]}; add a number of devices, up to "
          f"{compile_up_to}, that has both axes."
        )
    found[devices] = {
      **base,
      "batch_size": mesh["batch_size"] // devices * number,
      "microbatches": mesh["microbatches"],
    }
  return found


def _mesh(
  config: Mapping[str, Any], devices: int, fsdp: int | None
) -> dict[str, int]:
  """{"devices": ..., "replica": ..., "fsdp": ...} of so many devices."""
  sizes = {"replica": 1, "fsdp": -1, **config.get("mesh", {})}
  if fsdp is not None:
    sizes = {"replica": 1 if fsdp == -1 else -1, "fsdp": fsdp}
  known = [size for size in sizes.values() if size != -1]
  if len(known) == 1:
    rest = max(1, devices // known[0])
    sizes = {axis: rest if n == -1 else n for axis, n in sizes.items()}
  if sizes["replica"] * sizes["fsdp"] != devices:
    raise ConfigError(
      f"--devices={devices}: replica={sizes['replica']} x fsdp="
      f"{sizes['fsdp']} are not {devices}; set --fsdp (-1: all of them)."
    )
  return {"devices": devices, **sizes}


def _batch(
  config: Mapping[str, Any], devices: int, microbatch: int | None
) -> dict[str, int]:
  """Batch and microbatches on so many devices; no device stays without."""
  size = config["input"]["batch_size"]
  if size % devices:  # Each device needs as many as the others.
    size = max(1, round(size / devices)) * devices
  if microbatch is None:
    return {
      "batch_size": size,
      "microbatches": config.get("microbatches", 1),
    }
  own = size // devices
  at_once = max(n for n in range(1, min(own, microbatch) + 1) if own % n == 0)
  return {"batch_size": size, "microbatches": own // at_once}


def _compile(
  config: str, devices: int | str, changes: Sequence[str]
) -> dict[str, Any]:
  """Facts about the update on devices that are not there.

  Args:
    config: as the user gave it.
    devices: how many the CPU simulates, or TPUs as libtpu calls them.
    changes: to the config.
  """
  simulated = devices if isinstance(devices, int) else 1
  with tempfile.TemporaryDirectory() as folder:
    texts = os.path.join(folder, "texts")
    flags = [
      f"--xla_force_host_platform_device_count={simulated}",
      f"--xla_dump_to={texts}",
      "--xla_dump_hlo_pass_re=spmd-partitioning",
      "--xla_dump_hlo_module_re=.*update_fn.*",
    ]
    command = [
      *(sys.executable, "-m", "bigtrain.main"),
      *(f"--config={config}", f"--workdir={folder}"),
      *(f"--config.{change}" for change in changes),
      # What comes from the cache leaves no text.
      "--config.compile_cache=False",
      f"--config.compile_only={devices if devices != simulated else True}",
    ]
    done = subprocess.run(
      command,
      env={**os.environ, **_NO_TPU, "XLA_FLAGS": " ".join(flags)},
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      check=False,
    )
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode == process.EXIT_CONFIG:
      raise ConfigError(last.removeprefix("error: "))
    if done.returncode:
      raise RuntimeError(f"on {devices}: {last.removeprefix('error: ')}")
    written = record.read_json(os.path.join(folder, "run.json")) or {}
    (text,) = [name for name in os.listdir(texts) if _PARTITIONED.search(name)]
    with open(os.path.join(texts, text)) as file:
      program = collectives.read(file.read())
  started = written["starts"][-1]
  return {
    **started["footprint"],
    "memory": started["programs"]["update"],
    "model_flops": started["model_flops_per_step"],
    "collectives": collectives.to_json(program.collectives),
    "unknown_loops": program.unknown_loops,
    "figures": "compiled",
    "compiler": "cpu" if devices == simulated else "tpu",
  }


class _Parser(argparse.ArgumentParser):
  """Tells mistakes in one line."""

  def error(self, message: str) -> NoReturn:
    raise ConfigError(message)


def _numbers(text: str) -> list[int]:
  numbers = [int(n) for n in text.split(",")]
  if not all(n > 0 for n in numbers):
    raise ValueError
  return numbers


def _number(text: str) -> int:
  (number,) = _numbers(text)
  return number


def _ways(text: str) -> list[int]:
  return [-1 if n == "-1" else _number(n) for n in text.split(",")]


def _features_of(text: str) -> dict[str, str]:
  pairs = [item.partition(":") for item in text.split(";") if item.strip()]
  if not all(colon for _, colon, _ in pairs):
    raise ValueError
  return {name.strip(): kind.strip() for name, _, kind in pairs}


def _parser() -> _Parser:
  parser = _Parser(
    prog="python -m bigtrain.tools.plan",
    description="Memory, traffic and time of a config on many devices.",
    allow_abbrev=False,
  )
  add = parser.add_argument
  add("--config", required=True, help="FILE.py[:arguments]")
  add("--devices", type=_numbers, default=[8, 64], help="8,64,512")
  add("--fsdp", type=_ways, help="ways the state is split: 8,64; -1: all")
  add(
    "--hardware",
    default="h100",
    help=f"one of {', '.join(hardware.TABLE)} (%(default)s)",
  )
  add("--microbatch", type=_number, help="examples on a device at a time")
  add(
    "--features", type=_features_of, help='"image: jpeg[9,9,3]; label: int64"'
  )
  add("--num_examples", type=int, default=1_000_000)
  add(
    "--compile_up_to",
    type=int,
    default=_MOST_SIMULATED,
    help="more devices than that are extrapolated (%(default)s)",
  )
  add(
    "--compiler",
    choices=("cpu", "tpu"),
    default="cpu",
    help="tpu: that of --hardware=tpu_..., from the package libtpu; slower, "
    "and its memory is the real one",
  )
  add(
    "--efficiency",
    type=float,
    default=estimate.EFFICIENCY,
    help="share of the peak that matrix products reach (%(default)s)",
  )
  add("--json", action="store_true", help="print JSON")
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  words = list(sys.argv[1:] if argv is None else argv)
  prefix = "--config."
  changes = [w.removeprefix(prefix) for w in words if w.startswith(prefix)]
  try:
    parser = _parser()
    args, left = parser.parse_known_args(
      [w for w in words if not w.startswith(prefix)]
    )
    if left:
      known = list(parser._option_string_actions)
      hint = did_you_mean(left[0].partition("=")[0], known)
      raise ConfigError(f"{left[0]!r}: unknown argument.{hint}")
    rows = plan(
      args.config,
      args.devices,
      changes,
      fsdp=args.fsdp or (None,),
      hardware_name=args.hardware,
      microbatch=args.microbatch,
      features=args.features,
      num_examples=args.num_examples,
      compile_up_to=args.compile_up_to,
      compiler=args.compiler,
      efficiency=args.efficiency,
    )
  except ConfigError as e:
    print(f"error: {e}", file=sys.stderr)
    return process.EXIT_CONFIG
  except (RuntimeError, OSError) as e:
    print(f"error: {e}", file=sys.stderr)
    return process.EXIT_ERROR
  if args.json:
    print(json.dumps(rows, indent=2))
  else:
    print(table.text(args.config, args.hardware, rows, args.efficiency))
  return process.EXIT_OK
