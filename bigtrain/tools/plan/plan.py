"""Estimates memory, traffic and time of a config on many devices, without them.

  python -m bigtrain.tools.plan --config=configs/llama_8b.py \\
      --devices=8,64,512 --hardware=h100 --microbatch=1

For each mesh, bigtrain.main compiles the update in a process with simulated
devices; no arrays are allocated. Memory and traffic are read from the compiled
program, times follow from published figures of the hardware. Data that is read
from files is replaced by made-up examples of the same shapes.

Exit codes: 0; 2 for a mistake in the config or the arguments; 1 otherwise.
"""

import argparse
import itertools
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.cluster import process
from bigtrain.config import loading
from bigtrain.config.errors import ConfigError
from bigtrain.tools import arguments, exits
from bigtrain.tools.plan import (
  estimate,
  hardware,
  meshes,
  program,
  search,
  table,
)

# The CPU backend assigns devices with larger numbers to another process.
_MAX_SIMULATED = 2048


class _Subject(NamedTuple):
  """The config to plan, and the hardware to plan for."""

  config: str  # As on the command line.
  loaded: dict[str, Any]
  changes: list[str]  # Of the command line, and those that replace the data.
  target: hardware.Hardware
  hardware_name: str
  compiler: str

  def compiled(
    self,
    mesh: meshes.Mesh,
    changes: Sequence[str],
    timeout_secs: float | None = None,
  ) -> dict[str, Any]:
    """Facts about the program for a mesh, see program.compile_update."""
    facts = program.compile_update(
      self.config,
      mesh["devices"],
      [*self.changes, *changes],
      self.hardware_name,
      self.compiler,
      timeout_secs,
    )
    return {**facts, **mesh}


def _subject(
  config: str,
  changes: Sequence[str],
  *,
  hardware_name: str = "h100",
  compiler: str = "cpu",
  features: Mapping[str, str] | None = None,
  num_examples: int = 1_000_000,
) -> _Subject:
  target = hardware.find(hardware_name)
  loaded = loading.load(config, changes)
  if limit := loaded.get("device_memory_bytes"):
    target = target._replace(memory_bytes=limit)
  made_up_data = meshes.without_data(loaded, features, num_examples)
  # What a config expects of its data, such as their number, does not hold.
  unset = [f"{key}=None" for key in loaded if key.startswith("expect_")]
  return _Subject(
    config,
    loaded,
    [*changes, *made_up_data, *unset],
    target,
    hardware_name,
    compiler,
  )


def plan(
  config: str,
  devices: Sequence[int],
  changes: Sequence[str] = (),
  *,
  fsdp: Sequence[int | None] = (None,),
  sequence: Sequence[int | None] = (None,),
  tensor: Sequence[int | None] = (None,),
  microbatch: int | None = None,
  compile_up_to: int = _MAX_SIMULATED,
  efficiency: float = estimate.EFFICIENCY,
  **options: Any,
) -> list[dict[str, Any]]:
  """Compiles a config on simulated meshes; returns the estimate of each.

  There is one mesh for each combination of `devices` with the sizes of the axes
  `fsdp`, `sequence` and `tensor`: -1 for all devices, None for the config's.
  `options` come from the command line.
  """
  subject = _subject(config, changes, **options)

  # All meshes first, because an impossible one is an error before anything
  # compiles.
  plans = []
  for sizes in itertools.product(fsdp, sequence, tensor):
    axes = dict(zip(("fsdp", "sequence", "tensor"), sizes))
    same_axes = []
    for number in sorted(devices):
      mesh = meshes.mesh(subject.loaded, number, axes)
      batch = meshes.batch(subject.loaded, mesh, microbatch)
      same_axes.append({**mesh, **batch})
    bases = meshes.bases(subject.loaded, same_axes, axes, compile_up_to)
    plans.append((same_axes, bases))

  estimates = []
  for same_axes, bases in plans:
    estimates += _estimates(subject, same_axes, bases, efficiency)
  return estimates


def _estimates(
  subject: _Subject,
  same_axes: Sequence[meshes.Mesh],
  bases: Mapping[int, meshes.Mesh],
  efficiency: float,
) -> list[dict[str, Any]]:
  """Estimates of meshes that differ in their number of devices, ascending.

  `bases` has the meshes to extrapolate from, for those that are too large.
  """

  def compiled(mesh: meshes.Mesh) -> dict[str, Any]:
    return subject.compiled(mesh, meshes.changes(subject.loaded, mesh))

  def estimated(facts: estimate.Facts) -> dict[str, Any]:
    return estimate.from_facts(
      facts, subject.loaded, subject.target, efficiency
    )

  result = []
  known: list[dict[str, Any]] = []  # Facts about the compiled programs.
  for mesh in same_axes:
    basis = estimate.basis(known, mesh)
    if mesh["devices"] not in bases:
      known.append(compiled(mesh))
      result.append(estimated(known[-1]))
      if basis:  # Shows how good an extrapolation would have been.
        guess = estimated(estimate.extrapolate(basis, mesh))
        result[-1]["extrapolated"] = estimate.compare(guess, result[-1])
    else:
      if basis is None:
        basis = compiled(bases[mesh["devices"]])
        known.append(basis)
      result.append(estimated(estimate.extrapolate(basis, mesh)))
  return result


def choose(
  config: str,
  devices: int,
  changes: Sequence[str] = (),
  *,
  efficiency: float = estimate.EFFICIENCY,
  minutes: float = 10,
  **options: Any,
) -> search.Choice:
  """Searches mesh, microbatches and remat, and compiles for up to `minutes`."""
  end = time.monotonic() + 60 * minutes
  subject = _subject(config, changes, **options)
  if subject.compiler != "cpu":
    # An impossible number of devices is an error before the search.
    hardware.topology(subject.hardware_name, devices, subject.compiler)
  one_device = meshes.mesh(subject.loaded, 1, {})
  one_device |= meshes.batch(subject.loaded, one_device, None)
  sizes = program.sizes(
    config, [*subject.changes, *meshes.changes(subject.loaded, one_device)]
  )

  def compile_one(
    candidate: search.Candidate, secs: float
  ) -> dict[str, Any] | None:
    try:
      changes = candidate.changes(subject.loaded)
      return subject.compiled(candidate.sizes, changes, secs)
    except subprocess.TimeoutExpired:
      return None

  can_compile = devices <= _MAX_SIMULATED or subject.compiler != "cpu"
  return search.choose(
    subject.loaded,
    search.candidates(subject.loaded, devices, sizes, subject.target),
    sizes,
    subject.target,
    compile_one if can_compile else None,
    end,
    efficiency,
  )


# The command line.


def _number(text: str) -> int:
  if not text.isdecimal() or not int(text):
    raise argparse.ArgumentTypeError(
      f"{text!r}: expected a positive whole number."
    )
  return int(text)


def _numbers(text: str) -> list[int]:
  return [_number(n) for n in text.split(",")]


def _fsdp_sizes(text: str) -> list[int]:
  return [-1 if n == "-1" else _number(n) for n in text.split(",")]


def _features(text: str) -> dict[str, str]:
  pairs = [item.partition(":") for item in text.split(";") if item.strip()]
  if not all(colon for _, colon, _ in pairs):
    raise argparse.ArgumentTypeError(
      f"{text!r}: expected NAME: KIND[SHAPE]; ..., such as 'image: "
      "jpeg[375,500,3]; label: int64'."
    )
  return {name.strip(): kind.strip() for name, _, kind in pairs}


def _parser() -> arguments.JaxParser:
  parser = arguments.JaxParser("plan", __doc__, changes_config=True)
  parser.add_argument(
    "--config", required=True, help="FILE.py or FILE.py:arguments"
  )
  _add_mesh_arguments(parser)
  parser.add_argument(
    "--features",
    type=_features,
    help="features of the data, if the config does not determine them, such as "
    "'image: jpeg[375,500,3]; label: int64'; see data/synthetic.py",
  )
  parser.add_argument(
    "--num_examples",
    type=int,
    default=1_000_000,
    help="examples per epoch of data from files (default: %(default)s)",
  )
  parser.add_argument(
    "--compile_up_to",
    type=int,
    default=_MAX_SIMULATED,
    help="largest number of devices to compile for; figures for more devices "
    "are extrapolated (default: %(default)s)",
  )
  parser.add_argument(
    "--compiler",
    default="cpu",
    choices=["cpu", "tpu", "gpu"],
    help="tpu, gpu: the compiler of --hardware, from the package libtpu or "
    "jax's CUDA plugin; it needs no devices, takes minutes, and gives the real "
    "memory (default: %(default)s)",
  )
  parser.add_argument(
    "--efficiency",
    type=float,
    default=estimate.EFFICIENCY,
    help="fraction of the peak FLOP/s that matrix products reach (default: "
    "%(default)s)",
  )
  parser.add_argument(
    "--choose",
    action="store_true",
    help="search mesh, microbatches and remat for one number of devices; print "
    "the best five and the lines of a config",
  )
  parser.add_argument(
    "--minutes",
    type=float,
    default=10.0,
    help="with --choose: time for compiling (default: %(default)s)",
  )
  parser.add_argument(
    "--json", action="store_true", help="print JSON in place of a table"
  )
  return parser


def _add_mesh_arguments(parser: arguments.Parser) -> None:
  parser.add_argument(
    "--devices",
    type=_numbers,
    default=[8, 64],
    help="numbers of devices, such as 8,64,512 (default: 8,64)",
  )
  parser.add_argument(
    "--fsdp",
    type=_fsdp_sizes,
    help="numbers of devices to shard the state over, such as 8,64; -1 for all "
    "devices (default: mesh of the config)",
  )
  parser.add_argument(
    "--sequence",
    type=_numbers,
    help="numbers of devices that share an example, such as 1,4 (default: mesh "
    "of the config)",
  )
  parser.add_argument(
    "--tensor",
    type=_numbers,
    help="numbers of devices that share a layer, such as 1,4 (default: mesh of "
    "the config)",
  )
  parser.add_argument(
    "--hardware",
    default="h100",
    help=f"one of {', '.join(hardware.TABLE)} (default: %(default)s)",
  )
  parser.add_argument(
    "--microbatch",
    type=_number,
    help="largest number of examples per device and microbatch; sets "
    "config.microbatches (default: microbatches of the config)",
  )


@exits.in_one_line(RuntimeError)
def main(argv: Sequence[str]) -> int:
  args, changes = _parser().parse(argv)
  args.hardware = hardware.known_name(args.hardware)
  common = dict(
    hardware_name=args.hardware,
    features=args.features,
    num_examples=args.num_examples,
    compiler=args.compiler,
    efficiency=args.efficiency,
  )
  reasons = ""
  if args.choose:
    chosen = (args.fsdp, args.sequence, args.tensor, args.microbatch)
    if len(args.devices) != 1 or any(chosen):
      raise ConfigError(
        "--choose: expected one number in --devices, and none of --fsdp, "
        "--sequence, --tensor and --microbatch, which it chooses."
      )
    choice = choose(
      args.config, args.devices[0], changes, minutes=args.minutes, **common
    )
    estimates = [*choice.best, *choice.too_large]
    reasons = f"\n\n{table.choice_text(choice, args.minutes)}"
  else:
    estimates = plan(
      args.config,
      args.devices,
      changes,
      fsdp=args.fsdp or (None,),
      sequence=args.sequence or (None,),
      tensor=args.tensor or (None,),
      microbatch=args.microbatch,
      compile_up_to=args.compile_up_to,
      **common,
    )
  if args.json:
    print(json.dumps(estimates, indent=2))
  else:
    text = table.text(args.config, args.hardware, estimates, args.efficiency)
    print(text + reasons)
  return process.EXIT_OK
