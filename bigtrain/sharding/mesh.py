"""The device mesh, which config.mesh describes by the sizes of its five axes.

  replica    copies of the training state
  pipeline   stages: groups of layers that each example passes in turn
  fsdp       parts of the training state; a layer is gathered when it is used
  sequence   parts of each example along its length
  tensor     parts of each layer: heads, hidden widths, vocabularies

The batch is split over `replica` and `fsdp`, and outside the stages also over
`pipeline`.

`make_mesh` has three steps: it fills in the size that is -1, groups the devices
by slice, and arranges them in an array. A slice is a set of devices connected
by a fast network: a slice of TPUs, or one server with GPUs. The axes are listed
in order of how much they send, least first, and are spread over the slices in
this order: `replica` first, `tensor` last.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from bigtrain.config.errors import ConfigError, check_kwargs, check_number
from bigtrain.config.settings import Config
from bigtrain.sharding import absent

BATCH_AXES = ("replica", "fsdp")
AXES = ("replica", "pipeline", "fsdp", "sequence", "tensor")

# What an axis sends over the network between slices, for the warning. `part` is
# (n - 1) / n for an axis of size n: the part of an array that a device lacks.
_TRAFFIC = {
  "fsdp": (
    "in each microbatch, a device sends 3 x {part:.2f} x the bytes of the "
    "parameters of its tensor group"
  ),
  "sequence": (
    "every attention sends 2 x {part:.2f} x its keys and values, and every "
    "step 2 x {part:.2f} x the gradients of a device"
  ),
  "tensor": (
    "every block sends 8 x {part:.2f} x its activations (tokens x width), 4 "
    "forward and 4 backward"
  ),
}

# Microbatches for each stage of a pipeline, unless the config gives a number. A
# stage is then idle for at most a quarter of the time that it works. More
# microbatches idle less, but are smaller, and their products are slower.
_MICROBATCHES_PER_STAGE = 4


class Schedule(NamedTuple):
  """The schedule of a pipeline.

  In each of `rounds`, every microbatch passes through all stages; each round
  applies different layers (a circular pipeline).
  """

  stages: int
  rounds: int = 1
  # Number of microbatches that are in the pipeline together. 0 means that
  # `split` chooses it.
  microbatches: int = 0

  def split(self, examples: int) -> "Schedule | None":
    """The schedule, with a number of microbatches that suits the examples.

    This is the largest number that divides the examples, up to `microbatches`
    or, by default, up to four per stage. None if the examples do not divide
    among the stages.
    """
    limit = self.microbatches or _MICROBATCHES_PER_STAGE * self.stages
    limit_per_stage = limit // self.stages
    examples_per_stage, rest = divmod(examples, self.stages)
    if rest or not examples_per_stage:
      return None
    per_stage = max(
      n for n in range(1, limit_per_stage + 1) if examples_per_stage % n == 0
    )
    return self._replace(microbatches=per_stage * self.stages)

  def idle(self) -> float:
    """Idle time of a stage as a fraction of the time that it works."""
    return (self.stages - 1) / (self.rounds * self.microbatches)


# A jax Mesh has no room for the pipeline's options, and models see only the
# ambient mesh. So the schedule of the last mesh of each shape is kept here.
_schedules: dict[tuple[tuple[str, int], ...], Schedule] = {}


def schedule_of(mesh: Any) -> Schedule:
  sizes = tuple(mesh.shape.items())
  return _schedules.get(sizes, Schedule(mesh.shape.get("pipeline", 1)))


def from_config(config: Config) -> Mesh:
  """Makes the mesh of config.mesh, inside `absent_devices` of absent ones."""
  options = config.kwargs("mesh")
  check_kwargs(make_mesh, options, f"{config.path}.mesh", given=("devices",))
  topology = absent.current_topology.get()
  if topology:
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
  """Makes a mesh of all devices with the axes `AXES`; one size may be -1.

  Args:
    replica: number of copies of the sharded state.
    fsdp, sequence, tensor, pipeline: see the module.
    pipeline_rounds: number of times that an example passes through the stages,
      each time through different layers.
    pipeline_microbatches: number of microbatches that are in the pipeline
      together, a multiple of the number of stages; 0 for four times the number
      of stages, or less if the batch is small.
    slices: expected number of TPU slices or GPU servers; by default the number
      that the devices report. Simulated devices are grouped into this many
      slices.
    devices: by default all devices of the job.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = dict(
    replica=replica,
    pipeline=pipeline,
    fsdp=fsdp,
    sequence=sequence,
    tensor=tensor,
  )
  sizes = _filled(sizes, devices)
  groups = grouped(devices, slices)
  grid = arranged(groups, [sizes[axis] for axis in AXES])
  mesh = Mesh(grid, AXES)
  _warn_of_slow_axes(grid, groups)
  schedule = Schedule(sizes["pipeline"], pipeline_rounds, pipeline_microbatches)
  _check_schedule(schedule)
  _schedules[tuple(mesh.shape.items())] = schedule
  return mesh


def _check_schedule(schedule: Schedule) -> None:
  key = "config.mesh.pipeline_"
  check_number(f"{key}rounds", schedule.rounds, least=1, whole=True)
  microbatches = schedule.microbatches
  check_number(f"{key}microbatches", microbatches, least=0, whole=True)
  if microbatches % schedule.stages:
    raise ConfigError(
      f"{key}microbatches={microbatches}: expected a multiple of "
      f"config.mesh.pipeline={schedule.stages}."
    )


def _filled(sizes: dict[str, int], devices: Sequence[Any]) -> dict[str, int]:
  """Replaces -1 by the size that uses all devices."""
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
  remaining = max(1, len(devices) // known)
  filled = {
    axis: remaining if size == -1 else size for axis, size in sizes.items()
  }
  total = math.prod(filled.values())
  if total != len(devices):
    raise ConfigError(
      f"config.mesh: {in_words(filled)} = {total}, but the number "
      f"of devices is {len(devices)}{_suggestion(sizes, len(devices))}."
    )
  return filled


def in_words(sizes: Mapping[str, int]) -> str:
  """The sizes of a mesh as a text, such as "replica=2 x fsdp=4"."""
  return " x ".join(
    f"{axis}={sizes[axis]}"
    for axis in AXES
    if axis in BATCH_AXES or sizes[axis] > 1
  )


def _suggestion(sizes: Mapping[str, int], num_devices: int) -> str:
  """The two smallest changes of one axis that would fit, as a text."""
  one_is_open = -1 in sizes.values()
  fits = []  # (distance from the size in the config, text) pairs.
  for axis, size in sizes.items():
    if size == -1 or (size == 1 and axis not in BATCH_AXES):
      continue
    others = math.prod(
      n for name, n in sizes.items() if name != axis and n != -1
    )
    available, rest = divmod(num_devices, others)
    if rest:
      continue
    # Without an open axis, this axis has to use all that the others leave.
    candidates = range(1, available + 1) if one_is_open else [available]
    for n in candidates:
      if n and available % n == 0:
        fits.append((abs(n - size), f"{axis}={n}"))
  texts = [text for _, text in sorted(fits)[:2]]
  return f"; the nearest that work: {' or '.join(texts)}" if texts else ""


def _slice_of(device: Any) -> int:
  """The number of the TPU slice or server that a device is in."""
  # On GPUs, slice_index is the number of the server.
  number = getattr(device, "slice_index", None)
  if number is not None:
    return int(number)
  if device.platform == "tpu":
    return 0  # A single slice does not number itself.
  return int(device.process_index)  # One process runs on each server.


def grouped(devices: Sequence[Any], slices: int | None) -> list[list[Any]]:
  """Groups the devices by slice, and checks the number of slices.

  Devices that XLA simulates on one CPU form `slices` slices of neighbours.
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
  """Arranges the devices of all slices in an array with the mesh's shape.

  Each axis is a product of an outer factor, over the slices, and an inner one,
  within a slice. The first axes are spread over the slices, as far as their
  sizes and the number of slices have common factors.
  """
  outer = []
  remaining = len(groups)
  for size in shape:
    factor = math.gcd(size, remaining)
    outer.append(factor)
    remaining //= factor
  if remaining > 1 or len({len(group) for group in groups}) > 1:
    # The slices do not divide this way. Some axis crosses them anyhow.
    devices = [device for group in groups for device in group]
    return _within_slice(devices, shape)
  inner = [size // factor for size, factor in zip(shape, outer)]
  grids = [_within_slice(group, inner) for group in groups]
  # [outer of all axes, inner of all axes] -> [outer, inner of each axis].
  grid = np.stack(grids).reshape(*outer, *inner)
  rank = len(shape)
  order = [dim for axis in range(rank) for dim in (axis, rank + axis)]
  return grid.transpose(order).reshape(tuple(shape))


def _within_slice(devices: Sequence[Any], shape: Sequence[int]) -> Any:
  """An array of devices; on TPUs, neighbours in it are near in the torus."""
  # Devices of several slices are not in one torus.
  one_torus = len({_slice_of(device) for device in devices}) == 1
  if devices[0].platform == "tpu" and one_torus:
    from jax.experimental import mesh_utils

    # fsdp=8 in a 4x4x4 slice needs one axis and half of the next.
    return mesh_utils.create_device_mesh(
      tuple(shape), devices=list(devices), allow_split_physical_axes=True
    )
  grid = np.empty(len(devices), object)  # np.array could look into devices.
  grid[:] = devices
  return grid.reshape(tuple(shape))


def crossing(grid: Any, groups: Sequence[Sequence[Any]]) -> dict[str, int]:
  """The axes that cross slices, and how many.

  Returns: {axis: largest number of slices that one group of the axis spans},
    for the axes where it is more than 1.
  """
  slice_of = {}
  for number, group in enumerate(groups):
    slice_of.update(dict.fromkeys(group, number))
  slice_numbers = np.vectorize(slice_of.get, otypes=[int])(grid)
  result = {}
  for dim, axis in enumerate(AXES):
    # A line per group: the devices that differ only in this axis.
    lines = np.moveaxis(slice_numbers, dim, -1).reshape(-1, grid.shape[dim])
    num_slices = max(len(set(line)) for line in lines.tolist())
    if num_slices > 1:
      result[axis] = num_slices
  return result


def _warn_of_slow_axes(grid: Any, groups: Sequence[Sequence[Any]]) -> None:
  sizes = dict(zip(AXES, grid.shape))
  crossings = []
  for axis, num_slices in crossing(grid, groups).items():
    if axis not in _TRAFFIC:  # `replica` and `pipeline` send little.
      continue
    size = sizes[axis]
    traffic = _TRAFFIC[axis].format(part=(size - 1) / size)
    crossings.append(
      f"config.mesh.{axis}={size} is in {num_slices} slices or servers: "
      f"{traffic}"
    )
  if crossings:
    slice_size = min(len(group) for group in groups)
    logging.warning(
      "%s; all of it over the network between them. A slice or server has %d "
      "devices: axes whose product (without replica) divides %d stay inside.",
      "; ".join(crossings),
      slice_size,
      slice_size,
    )
