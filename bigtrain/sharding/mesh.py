"""The device mesh: replica x pipeline x fsdp x sequence x tensor.

  replica    copies of the training state
  pipeline   stages, groups of layers that each example passes in turn
  fsdp       parts of the training state; a layer's are gathered for its use
  sequence   parts of each example along its length
  tensor     parts of each layer: heads, hidden widths, vocabularies

The batch is split over `replica` and `fsdp`, and outside of the stages over
`pipeline` too. A slice is a set of devices with a
fast network among them: a slice of TPUs, or a server with GPUs. An axis that
sends little is spread over the slices, `replica` first, and one that sends much
stays inside of a slice, `tensor` above all.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_kwargs, check_number
from bigtrain.config.settings import Config
from bigtrain.sharding import absent

BATCH_AXES = ("replica", "fsdp")
AXES = ("replica", "pipeline", "fsdp", "sequence", "tensor")

# What an axis sends between slices, for the warning.
_TRAFFIC = settings.read_table(__file__, "traffic.toml")


class Schedule(NamedTuple):
  """How a pipeline runs: in rounds, on a number of microbatches at once."""

  stages: int
  rounds: int = 1
  microbatches: int = 0  # Those at once; by default as many as `split` finds.

  def split(self, examples: int) -> "Schedule | None":
    """The schedule for a number of examples; None if it does not divide.

    By default four microbatches for each stage, or fewer.
    """
    most = (self.microbatches or 4 * self.stages) // self.stages
    share, rest = divmod(examples, self.stages)
    if rest or not share:
      return None
    per_stage = max(n for n in range(1, most + 1) if share % n == 0)
    return self._replace(microbatches=per_stage * self.stages)

  def idle(self) -> float:
    """Idle time of a stage as a share of its work."""
    return (self.stages - 1) / (self.rounds * self.microbatches)


# Of the last mesh of these sizes: a mesh has no place for it.
_schedules: dict[tuple[tuple[str, int], ...], Schedule] = {}


def schedule_of(mesh: Any) -> Schedule:
  sizes = tuple(mesh.shape.items())
  return _schedules.get(sizes, Schedule(mesh.shape.get("pipeline", 1)))


def from_config(config: Config) -> Mesh:
  options = config.kwargs("mesh")
  check_kwargs(make_mesh, options, f"{config.path}.mesh", given=("devices",))
  if topology := absent.current_topology.get():
    options["devices"] = absent.devices(topology)
  return make_mesh(**options)


def make_mesh(
  replica: int = 1,
  fsdp: int = -1,
  sequence: int = 1,
  tensor: int = 1,
  pipeline: int = 1,
  *,
  pipeline_rounds: int = 1,
  pipeline_microbatches: int = 0,
  slices: int | None = None,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """A mesh of all devices with the axes `AXES`; one size may be -1.

  Args:
    replica: number of copies of the sharded state.
    pipeline_rounds: number of times that an example passes the stages, each
      time through other layers.
    pipeline_microbatches: number of microbatches in the stages at once, a
      multiple of their number; 0 for four times it, or less.
    slices: number of slices of TPUs or of servers with GPUs, which is checked;
      by default as many as the devices report.
    devices: all devices of the job unless given.
  """
  devices = jax.devices() if devices is None else list(devices)
  given = (replica, pipeline, fsdp, sequence, tensor)
  sizes = _filled(dict(zip(AXES, given)), devices)
  groups = grouped(devices, slices)
  mesh = Mesh(arranged(groups, tuple(sizes.values())), AXES)
  _warn_of_slow_axes(mesh.devices, groups)
  schedule = Schedule(sizes["pipeline"], pipeline_rounds, pipeline_microbatches)
  key = "config.mesh.pipeline_"
  check_number(f"{key}rounds", pipeline_rounds, least=1, whole=True)
  check_number(f"{key}microbatches", pipeline_microbatches, least=0, whole=True)
  if pipeline_microbatches % schedule.stages:
    raise ConfigError(
      f"{key}microbatches={pipeline_microbatches}: expected a multiple of "
      f"config.mesh.pipeline={schedule.stages}."
    )
  _schedules[tuple(mesh.shape.items())] = schedule
  return mesh


def _filled(sizes: dict[str, int], devices: Sequence[Any]) -> dict[str, int]:
  for axis, size in sizes.items():
    if not isinstance(size, int) or (size < 1 and size != -1):
      raise ConfigError(
        f"config.mesh.{axis}: expected a positive whole number or -1, got "
        f"{size!r}."
      )
  open_axes = [axis for axis, size in sizes.items() if size == -1]
  if len(open_axes) > 1:
    raise ConfigError(
      f"config.mesh: only one of {' and '.join(open_axes)} can be -1."
    )
  known = math.prod(size for size in sizes.values() if size != -1)
  rest = max(1, len(devices) // known)
  filled = {axis: rest if n == -1 else n for axis, n in sizes.items()}
  total = math.prod(filled.values())
  if total != len(devices):
    raise ConfigError(
      f"config.mesh: {in_words(filled)} = {total}, but the number "
      f"of devices is {len(devices)}{_nearest(sizes, len(devices))}."
    )
  return filled


def in_words(sizes: Mapping[str, int]) -> str:
  """Describes the sizes of a mesh, such as "replica=2 x fsdp=4"."""
  return " x ".join(
    f"{axis}={sizes[axis]}"
    for axis in AXES
    if axis in BATCH_AXES or sizes[axis] > 1
  )


def _nearest(sizes: Mapping[str, int], num_devices: int) -> str:
  """For the message: the nearest sizes of one axis that fit the devices."""
  exact = -1 not in sizes.values()
  fits = []
  for axis, size in sizes.items():
    if size == -1 or (size == 1 and axis not in BATCH_AXES):
      continue
    others = math.prod(
      n for name, n in sizes.items() if name != axis and n != -1
    )
    room, rest = divmod(num_devices, others)
    for n in range(room if exact else 1, room + 1):
      if not rest and room % n == 0:
        fits.append((abs(n - size), f"{axis}={n}"))
  words = [word for _, word in sorted(fits)[:2]]
  return f"; the nearest that work: {' or '.join(words)}" if words else ""


def _slice_of(device: Any) -> int:
  # jax numbers servers with GPUs as slices. Elsewhere a server is a process.
  number = getattr(device, "slice_index", None)
  if number is None and device.platform == "tpu":
    return 0  # One slice.
  return int(device.process_index if number is None else number)


def grouped(devices: Sequence[Any], slices: int | None) -> list[list[Any]]:
  """Returns the devices of each slice.

  Simulated devices of one process form `slices` slices, each of neighbours.
  """
  groups: dict[int, list[Any]] = {}
  for device in devices:
    groups.setdefault(_slice_of(device), []).append(device)
  result = [groups[number] for number in sorted(groups)]
  if slices is None:
    return result
  check_number("config.mesh.slices", slices, least=1, whole=True)
  simulated = len(result) == 1 and devices[0].platform == "cpu"
  if simulated and len(devices) % slices == 0:
    size = len(devices) // slices
    return [list(devices[i * size : (i + 1) * size]) for i in range(slices)]
  if len(result) != slices:
    raise ConfigError(
      f"config.mesh.slices={slices}: expected {len(result)}, the number of "
      f"slices or servers that the devices ({len(devices)}) are in."
    )
  return result


def arranged(groups: Sequence[Sequence[Any]], shape: Sequence[int]) -> Any:
  """Returns an array of devices with the shape of a mesh.

  The outer axes go over the slices, as far as their sizes have a factor in
  common with the number of slices.
  """
  outer, left = [], len(groups)
  for size in shape:
    outer.append(math.gcd(size, left))
    left //= outer[-1]
  if left > 1 or len({len(group) for group in groups}) > 1:
    devices = [device for group in groups for device in group]
    return _inside(devices, shape)
  inner = [size // factor for size, factor in zip(shape, outer)]
  grids = [_inside(group, inner) for group in groups]
  # One array [factors of all axes, sizes within a slice].
  grid = np.stack(grids).reshape(*outer, *inner)
  order = np.arange(2 * len(shape)).reshape(2, -1).T.ravel()
  return grid.transpose(order).reshape(tuple(shape))


def _inside(devices: Sequence[Any], shape: Sequence[int]) -> Any:
  """Returns an array of the devices of a slice; near in a TPU's torus."""
  # Devices of several slices are not in one torus.
  one_torus = len({_slice_of(device) for device in devices}) == 1
  if devices[0].platform == "tpu" and one_torus:
    from jax.experimental import mesh_utils

    # fsdp=8 in a 4x4x4 slice needs one axis and half of the next.
    return mesh_utils.create_device_mesh(
      tuple(shape), devices=list(devices), allow_split_physical_axes=True
    )
  grid = np.empty(len(devices), object)
  grid[:] = devices
  return grid.reshape(tuple(shape))


def crossing(grid: Any, groups: Sequence[Sequence[Any]]) -> dict[str, int]:
  """{axis: largest number of slices that a group of it is in, above 1}."""
  number_of = {d: i for i, group in enumerate(groups) for d in group}
  numbers = np.vectorize(number_of.get, otypes=[int])(grid)
  most = {}
  for at, axis in enumerate(AXES):
    rows = np.moveaxis(numbers, at, -1).reshape(-1, grid.shape[at])
    most[axis] = max(len(set(row)) for row in rows.tolist())
  return {axis: number for axis, number in most.items() if number > 1}


def _warn_of_slow_axes(grid: Any, groups: Sequence[Sequence[Any]]) -> None:
  sizes = dict(zip(AXES, grid.shape))
  parts = [
    f"config.mesh.{axis}={sizes[axis]} is in {number} slices or servers: "
    + _TRAFFIC[axis].format(part=(sizes[axis] - 1) / sizes[axis])
    for axis, number in crossing(grid, groups).items()
    if axis not in ("replica", "pipeline")
  ]
  if parts:
    size = min(len(group) for group in groups)
    logging.warning(
      f"{'; '.join(parts)}; all of it over the network between them. A slice "
      f"or server has {size} devices: axes whose product (without replica) "
      f"divides {size} stay inside."
    )
