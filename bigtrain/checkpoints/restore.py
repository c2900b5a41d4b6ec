"""Restores checkpoints, under any mesh.

`resume` picks the newest valid checkpoint of a workdir. It calls `restore`,
which loads a whole checkpoint, and that calls `load`, which loads some arrays.
"""

import collections
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from bigtrain.arrays import trees
from bigtrain.checkpoints import checksums, folders, integrity
from bigtrain.checkpoints.manifest import (
  Array,
  CheckpointError,
  DamagedError,
  Manifest,
)
from bigtrain.cluster import process
from bigtrain.config.errors import ConfigError

# A process reads its part of an array of up to this size at once, and then cuts
# it up for its devices.
_WHOLE_BYTES = 2**30


class MismatchError(ConfigError):
  """A checkpoint that does not fit the config's model, optimizer or dtypes."""


def resume(
  workdir: str, like: Any, *, fallback: bool = False
) -> tuple[Any, Manifest] | None:
  """Restores the newest checkpoint of a workdir; None if it has none.

  All processes call it, and get the same result or error. With `fallback`, an
  older checkpoint replaces a damaged one.
  """
  clean(workdir)
  directories = folders.listing(workdir).checkpoints
  first_damage = ""
  for step in sorted(directories, reverse=True):
    restored = None
    kind = message = ""
    try:
      restored = restore(directories[step], like)
    except (CheckpointError, MismatchError) as e:
      kind, message = type(e).__name__, str(e)
    failures = [f for f in process.gather((kind, message)) if f[0]]
    if not failures:
      return restored
    kind, message = failures[0]
    if kind == MismatchError.__name__:
      raise MismatchError(message)
    if kind != DamagedError.__name__:
      raise CheckpointError(message)
    logging.error("%s", message)
    first_damage = first_damage or message
    if not fallback:
      break
  if not first_damage:
    return None
  if fallback or len(directories) == 1:
    advice = (
      "This workdir has no other valid checkpoint, and training never starts "
      "over by itself: use another --workdir for that."
    )
  else:
    older = "is 1 older checkpoint"
    if len(directories) > 2:
      older = f"are {len(directories) - 1} older checkpoints"
    advice = (
      f"There {older}: config.ckpt_fallback=True resumes from the newest valid "
      "one."
    )
  raise DamagedError(f"{first_damage.rstrip('.')}. {advice}")


def clean(workdir: str) -> None:
  """Removes the remains of interrupted saves; all processes call it."""
  error = ""
  if jax.process_index() == 0:
    try:
      folders.clean(workdir)
    except CheckpointError as e:
      error = str(e)
  raise_on_all(error)


def raise_on_all(error: str) -> None:
  """Raises the first error of any process on all of them; "" is none."""
  for message in process.gather(error):
    if message:
      raise CheckpointError(message)


def restore(
  path: str, like: Any, step: int | None = None
) -> tuple[Any, Manifest]:
  """Loads a checkpoint onto devices, from any sharding to any other.

  Args:
    path: a checkpoint, or a workdir.
    like: tree of ShapeDtypeStructs, one for each array of the checkpoint. An
      array without a sharding goes to this process's first device.
    step: which checkpoint of the workdir; by default the newest.

  Raises:
    MismatchError: with all differences between `like` and the checkpoint.
  """
  directory = folders.find(path, step)
  manifest = folders.read_manifest(directory)
  check_fits(directory, manifest, dict(trees.flatten_with_names(like)))
  if manifest.rounded:
    logging.warning(
      "config.ckpt_dtype: %s has rounded values, so the run does not continue "
      "bit for bit as without an interruption.",
      directory,
    )
  return read_tree(directory, manifest, like), manifest


def read_tree(
  directory: str, manifest: Manifest, like: Any, *, inspected: bool = False
) -> Any:
  """Loads the arrays of a tree; see `load`."""
  specs = dict(trees.flatten_with_names(like))
  names = {name: name for name in specs}
  arrays = load(directory, manifest, names, specs, inspected=inspected)
  return trees.map_with_names(lambda name, _: arrays[name], like)


def check_fits(
  directory: str, manifest: Manifest, specs: Mapping[str, Any]
) -> None:
  """Raises MismatchError unless a checkpoint has exactly the arrays `specs`."""
  saved = manifest.arrays
  lines = []
  for name, spec in specs.items():
    expected = Array.describe(spec.shape, spec.dtype)
    if name not in saved:
      lines.append(f"missing: {name}: expected {expected}, found nothing")
    elif saved[name].shape != expected.shape:
      lines.append(f"shape: {name}: expected {expected}, found {saved[name]}")
    elif saved[name].dtype != expected.dtype != manifest.state_dtype(name):
      lines.append(f"dtype: {name}: expected {expected}, found {saved[name]}")
  for name in saved:
    if name not in specs:
      lines.append(f"extra: {name}: expected nothing, found {saved[name]}")
  if lines:
    raise _mismatch(directory, lines)


def _mismatch(directory: str, lines: Sequence[str]) -> MismatchError:
  """The error that lists all differences, a line "KIND: ..." for each."""
  kinds = collections.Counter(line.split(":")[0] for line in lines)
  total = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
  hint = ""
  if any(re.match(r"shape: opt/.*/v_(row|col)/", line) for line in lines):
    hint = (
      " Adafactor now sees the matrices of layers (docs/optimizers.md). To go "
      "on as before, set config.optimizer.view='parameters' and "
      "config.allow_changes='optimizer.view'."
    )
  return MismatchError(
    "\n".join(lines) + f"\n{directory}: its model or optimizer is not the "
    f"config's: {total} (listed above). Use another --workdir, or "
    f"config.model_init to load the parameters only.{hint}"
  )


def load(
  directory: str,
  manifest: Manifest,
  sources: Mapping[str, str],
  like: Mapping[str, Any],
  *,
  inspected: bool = False,
) -> dict[str, jax.Array]:
  """Loads some arrays of a checkpoint, cast to the dtypes of `like`.

  Each part is read once, even if several devices of this process need it.
  (jax's run_deserialization reads it once per device, and caches up to 10 GB.)

  Args:
    directory, manifest: the checkpoint.
    sources: {name in the result: name in the checkpoint}.
    like: {name in the result: jax.ShapeDtypeStruct}.
    inspected: whether the files have been inspected already.
  """
  if not inspected:
    problems = integrity.inspect(directory, manifest, sources.values())
    if problems:
      more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
      raise DamagedError(f"{directory}: damaged: {problems[0]}{more}.")

  # What to read, and the values, which arrive in this order, one at a time.
  reads = [(name, read) for name in sources for read in _reads(like[name])]
  values = integrity.read(
    directory, manifest, [(sources[name], read.place) for name, read in reads]
  )

  # Each value is checked, cast, and cut into the shards of its devices.
  shards: dict[str, list[jax.Array]] = {name: [] for name in sources}
  sums: dict[str, list[checksums.Sums]] = {}
  for (name, read), value in zip(reads, values):
    spec = like[name]
    sharding = sharding_of(spec)
    if sharding.is_fully_addressable:  # This process reads the whole array.
      sums_of_value = checksums.of_part(value, read.place, spec.shape)
      sums.setdefault(name, []).append(sums_of_value)
    value = value.astype(spec.dtype, copy=False)
    pieces = [value[cut.part] for cut in read.cuts]
    shards[name] += jax.device_put(pieces, _placements(read, sharding))
  for name, parts in sums.items():
    integrity.check_sums(directory, manifest, sources[name], parts)

  arrays: dict[str, jax.Array] = {}
  for name in sources:
    spec = like[name]
    arrays[name] = jax.make_array_from_single_device_arrays(
      tuple(spec.shape), sharding_of(spec), shards[name], dtype=spec.dtype
    )
  return arrays


def _placements(read: "_Read", sharding: Any) -> list[jax.sharding.Sharding]:
  """For each cut of a read, its device in the memory that `sharding` names."""
  kind = sharding.memory_kind
  placements: list[jax.sharding.Sharding] = []
  for cut in read.cuts:
    one = jax.sharding.SingleDeviceSharding(cut.device, memory_kind=kind)
    placements.append(one)
  return placements


class _Cut(NamedTuple):
  """A device's share of what is read."""

  part: tuple[slice, ...]  # Its index in the values of the read.
  device: Any


class _Read(NamedTuple):
  """A part of an array that is read in one request."""

  place: tuple[slice, ...]  # Its index in the array.
  cuts: list[_Cut]


# (start, stop) in each dimension.
_Bounds = tuple[tuple[int, int], ...]


def sharding_of(spec: Any) -> Any:
  """A spec's sharding, by default this process's first device."""
  sharding = getattr(spec, "sharding", None)
  if sharding is not None:
    return sharding
  return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _reads(spec: Any) -> list[_Read]:
  """The parts of an array that this process reads for its devices.

  It is a single part if the devices' shards together fill a box. Several shards
  may be in the same file, which is then read only once.
  """
  shape = tuple(spec.shape)
  # The distinct shards, and the devices that hold each.
  devices_of: dict[_Bounds, list[Any]] = {}
  index_of = sharding_of(spec).addressable_devices_indices_map(shape)
  for device, index in index_of.items():
    shard = checksums.bounds(index, shape)
    devices_of.setdefault(shard, []).append(device)

  box = _smallest_box(devices_of)
  size = sum(_size(shard) for shard in devices_of)
  fills_box = _size(box) == size
  if not fills_box or size * spec.dtype.itemsize > _WHOLE_BYTES:
    reads = []
    for shard, devices in devices_of.items():
      cuts = [_Cut((), device) for device in devices]
      reads.append(_Read(_as_slices(shard), cuts))
    return reads

  cuts = []
  for shard, devices in devices_of.items():
    part = _relative_to(box, shard)
    cuts += [_Cut(part, device) for device in devices]
  return [_Read(_as_slices(box), cuts)]


def _smallest_box(shards: Iterable[_Bounds]) -> _Bounds:
  """The bounds of the smallest box that contains all shards."""
  box = []
  for bounds_in_dimension in zip(*shards):
    starts, stops = zip(*bounds_in_dimension)
    box.append((min(starts), max(stops)))
  return tuple(box)


def _relative_to(box: _Bounds, shard: _Bounds) -> tuple[slice, ...]:
  """The index of a shard within the values of a box."""
  index = []
  for (start, stop), (origin, _) in zip(shard, box):
    index.append(slice(start - origin, stop - origin))
  return tuple(index)


def _as_slices(bounds: _Bounds) -> tuple[slice, ...]:
  return tuple(slice(start, stop) for start, stop in bounds)


def _size(bounds: _Bounds) -> int:
  return math.prod(stop - start for start, stop in bounds)
