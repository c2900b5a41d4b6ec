"""Restores checkpoints under any mesh.

`resume` picks the newest valid checkpoint of a workdir, `restore` loads a whole
checkpoint, and `load` loads some of its arrays.
"""

import collections
import logging
import math
import re
from collections.abc import Mapping
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

# An array up to this size is read at once and then cut up for the devices.
_WHOLE_BYTES = 2**30


class MismatchError(ConfigError):
  """A checkpoint whose model, optimizer or dtype is not the config's."""


def resume(
  workdir: str, like: Any, *, fallback: bool = False
) -> tuple[Any, Manifest] | None:
  """Restores the newest checkpoint of a workdir, on all processes, or None.

  If `fallback`, an older checkpoint replaces a damaged one.
  """
  clean(workdir)
  directories = folders.listing(workdir).checkpoints
  first_damage = ""
  for step in sorted(directories, reverse=True):
    restored, failure = None, ("", "")
    try:
      restored = restore(directories[step], like)
    except (CheckpointError, MismatchError) as e:
      failure = (type(e).__name__, str(e))
    failures = [f for f in process.gather(failure) if f[0]]
    if not failures:
      return restored
    kind, message = failures[0]
    if kind != DamagedError.__name__:
      mismatch = kind == MismatchError.__name__
      raise (MismatchError if mismatch else CheckpointError)(message)
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
    advice = (
      f"There are {len(directories) - 1} older ones: "
      "config.ckpt_fallback=True resumes from the newest valid one."
    )
  raise DamagedError(f"{first_damage} {advice}")


def clean(workdir: str) -> None:
  error = ""
  if jax.process_index() == 0:
    try:
      folders.clean(workdir)
    except CheckpointError as e:
      error = str(e)
  raise_on_all(error)


def raise_on_all(error: str) -> None:
  for message in filter(None, process.gather(error)):
    raise CheckpointError(message)


def restore(
  path: str, like: Any, step: int | None = None
) -> tuple[Any, Manifest]:
  """Loads a checkpoint onto devices, whatever its sharding when saved.

  `like` is a tree of ShapeDtypeStructs: exactly the arrays that the checkpoint
  must hold, else all differences are listed in a MismatchError. Without a
  sharding, an array goes to this process's first device.
  """
  directory = folders.find(path, step)
  manifest = folders.read_manifest(directory)
  check_fits(directory, manifest, dict(trees.flatten_with_names(like)))
  if manifest.rounded:
    logging.warning(
      "config.ckpt_dtype: %s has rounded values, so the run does not go on bit "
      "for bit as without an interruption.",
      directory,
    )
  return read_tree(directory, manifest, like), manifest


def read_tree(
  directory: str, manifest: Manifest, like: Any, *, inspected: bool = False
) -> Any:
  specs = dict(trees.flatten_with_names(like))
  names = {name: name for name in specs}
  arrays = load(directory, manifest, names, specs, inspected=inspected)
  return trees.map_with_names(lambda name, _: arrays[name], like)


def check_fits(
  directory: str, manifest: Manifest, specs: Mapping[str, Any]
) -> None:
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
    kinds = collections.Counter(line.split(":")[0] for line in lines)
    total = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    hint = ""
    if any(re.match(r"shape: opt/.*/v_(row|col)/", line) for line in lines):
      hint = (
        " Adafactor now sees the matrices of layers (docs/optimizers.md). To "
        "go on as before, set config.optimizer.view='parameters' and "
        "config.allow_changes='optimizer.view'."
      )
    raise MismatchError(
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
  """Loads arrays under new names; `sources` is {new name: saved name}.

  Those of another dtype are cast.
  Each part is read once, even if several devices of this process need it.
  (jax's run_deserialization reads it for each, and caches up to 10 GB.)
  """
  problems: list[integrity.Problem] = []
  if not inspected:
    problems = integrity.inspect(directory, manifest, sources.values())
  if problems:
    more = f" (and {len(problems) - 1} more)" * (len(problems) > 1)
    raise DamagedError(f"{directory}: damaged: {problems[0]}{more}.")
  reads = [(name, read) for name in sources for read in _reads(like[name])]
  values = integrity.read(
    directory, manifest, [(sources[name], r.place) for name, r in reads]
  )
  shards: dict[str, list[jax.Array]] = {name: [] for name in sources}
  sums: dict[str, list[checksums.Sums]] = {}
  for (name, read), value in zip(reads, values):
    if sharding_of(like[name]).is_fully_addressable:
      one = checksums.of_part(value, read.place, like[name].shape)
      sums.setdefault(name, []).append(one)
    value = value.astype(like[name].dtype, copy=False)
    kind = sharding_of(like[name]).memory_kind
    shards[name] += jax.device_put(
      [value[index] for index, _ in read.cuts],
      [
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        for _, device in read.cuts
      ],
    )
  for name, parts in sums.items():
    integrity.check_sums(directory, manifest, sources[name], parts)
  return {
    name: jax.make_array_from_single_device_arrays(
      tuple(like[name].shape),
      sharding_of(like[name]),
      shards[name],
      dtype=like[name].dtype,
    )
    for name in sources
  }


class _Read(NamedTuple):
  place: tuple[slice, ...]
  cuts: list[tuple[tuple[slice, ...], Any]]


def sharding_of(spec: Any) -> Any:
  return getattr(spec, "sharding", None) or jax.sharding.SingleDeviceSharding(
    jax.local_devices()[0]
  )


def _reads(spec: Any) -> list[_Read]:
  """The parts of an array that this process reads for its devices.

  A single part if the devices' shares fill a box: shares that were saved into
  the same file would otherwise read that file several times.
  """
  shape = tuple(spec.shape)
  devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
  index_of = sharding_of(spec).addressable_devices_indices_map(shape)
  for device, index in index_of.items():
    devices_of.setdefault(checksums.bounds(index, shape), []).append(device)
  box = tuple(
    (min(lo for lo, _ in each), max(hi for _, hi in each))
    for each in zip(*devices_of)
  )
  volume = sum(map(_volume, devices_of))
  if _volume(box) == volume and volume * spec.dtype.itemsize <= _WHOLE_BYTES:
    cuts = []
    for bounds, devices in devices_of.items():
      cut = tuple(
        slice(lo - c, hi - c) for (lo, hi), (c, _) in zip(bounds, box)
      )
      cuts += [(cut, device) for device in devices]
    return [_Read(tuple(slice(*b) for b in box), cuts)]
  return [
    _Read(tuple(slice(*b) for b in bounds), [((), d) for d in devices])
    for bounds, devices in devices_of.items()
  ]


def _volume(bounds: tuple[tuple[int, int], ...]) -> int:
  return math.prod(hi - lo for lo, hi in bounds)
