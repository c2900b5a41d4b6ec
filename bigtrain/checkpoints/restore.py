"""Restores checkpoints under any mesh, and decides what a run resumes from."""

import collections
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from bigtrain import trees
from bigtrain.checkpoints import folders, integrity
from bigtrain.checkpoints import manifest as manifest_lib
from bigtrain.checkpoints.manifest import (
  CheckpointError,
  DamagedError,
  Manifest,
)
from bigtrain.cluster import peers as peers_lib
from bigtrain.settings import ConfigError

# An array up to this size is read in one go and then cut up for the devices.
_WHOLE_BYTES = 2**30


class MismatchError(ConfigError):
  """A checkpoint of another model, optimizer or dtype than the config's."""


def resume(
  workdir: str, like: Any, *, fallback: bool = False
) -> tuple[Any, Manifest] | None:
  """The state to go on from, or None if the workdir has no checkpoint.

  Called on all processes, by the only job in the workdir. Remains of
  interrupted saves are removed first.

  Args:
    workdir: of the run.
    like: see `restore`.
    fallback: if the newest checkpoint is damaged, the one before it is used.

  Raises:
    CheckpointError: the newest checkpoint is damaged or unreadable, on
      whatever process; or all of them are damaged.
    MismatchError: see `restore`.
  """
  peers = peers_lib.Peers()
  cleaning = ""
  if peers.index == 0:
    try:
      folders.clean(workdir)
    except CheckpointError as e:
      cleaning = str(e)
  for message in peers.share(cleaning):
    if message:
      raise CheckpointError(message)
  there = folders.listing(workdir).checkpoints
  damaged = ""
  for step in sorted(there, reverse=True):
    found, failure = None, ("", "")
    try:
      found = restore(there[step], like)
    except (CheckpointError, MismatchError) as e:
      failure = (type(e).__name__, str(e))
    failures = [f for f in peers.share(failure) if f[0]]
    if not failures:
      return found
    kind, message = failures[0]
    if kind != DamagedError.__name__:
      mismatch = kind == MismatchError.__name__
      raise (MismatchError if mismatch else CheckpointError)(message)
    logging.error("%s", message)
    damaged = damaged or message
    if not fallback:
      break
  if not damaged:
    return None
  if fallback or len(there) == 1:
    advice = (
      "No other checkpoint here is whole, and training does not start over by "
      "itself: use another --workdir for that."
    )
  else:
    advice = (
      f"There are {len(there) - 1} older ones: config.ckpt_fallback=True "
      "resumes from the newest that is whole."
    )
  raise DamagedError(f"{damaged} {advice}")


def restore(
  path: str, like: Any, step: int | None = None
) -> tuple[Any, Manifest]:
  """Loads a checkpoint onto devices, however it lay on them when saved.

  Args:
    path: a checkpoint, or a workdir.
    like: tree of jax.ShapeDtypeStruct with a sharding each: exactly what the
      checkpoint must hold. Without a sharding: on this process's first device.
    step: which checkpoint of the workdir; the newest unless given.

  Returns:
    (tree of jax.Arrays, the manifest).

  Raises:
    MismatchError: names, shapes or dtypes differ; all differences are listed.
    DamagedError: a file is missing, cut or changed.
    CheckpointError: there is no such checkpoint, or it cannot be read.
  """
  directory = folders.find(path, step)
  manifest = folders.read_manifest(directory)
  wanted = dict(trees.flatten_with_names(like))
  check_fits(directory, manifest, wanted)
  arrays = load(directory, manifest, {name: name for name in wanted}, wanted)
  return trees.map_with_names(lambda name, _: arrays[name], like), manifest


def check_fits(
  directory: str, manifest: Manifest, wanted: Mapping[str, Any]
) -> None:
  """Raises MismatchError with every difference of names, shapes, dtypes."""
  have = manifest.arrays
  lines = []
  for name, spec in wanted.items():
    expected = manifest_lib.describe(spec.shape, spec.dtype)
    if name not in have:
      lines.append(f"missing: {name}: expected {expected}, found nothing")
    elif have[name].shape != expected.shape:
      lines.append(f"shape: {name}: expected {expected}, found {have[name]}")
    elif have[name].dtype != expected.dtype:
      lines.append(f"dtype: {name}: expected {expected}, found {have[name]}")
  for name in have:
    if name not in wanted:
      lines.append(f"extra: {name}: expected nothing, found {have[name]}")
  if lines:
    kinds = collections.Counter(line.split(":")[0] for line in lines)
    total = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    raise MismatchError(
      "\n".join(lines) + f"\n{directory}: of another model or optimizer than "
      f"the config's: {total} (listed above). Use another --workdir, or "
      "config.model_init for its parameters alone."
    )


def load(
  directory: str,
  manifest: Manifest,
  sources: Mapping[str, str],
  like: Mapping[str, Any],
) -> dict[str, jax.Array]:
  """Loads arrays of a checkpoint under new names.

  Each part is read once on this process, whatever number of its devices want
  it, and nothing else is read. (jax's own run_deserialization reads a part
  once for each device, and caches up to 10 GB.)

  Args:
    directory: of the checkpoint.
    manifest: its manifest.
    sources: new name -> name in the checkpoint.
    like: new name -> jax.ShapeDtypeStruct of the same shape and dtype.

  Raises:
    DamagedError: a file is missing, cut or changed.
    CheckpointError: a file cannot be read.
  """
  problems = integrity.inspect(directory, manifest, sources.values())
  if problems:
    more = f" (and {len(problems) - 1} more)" * (len(problems) > 1)
    raise DamagedError(f"{directory}: damaged: {problems[0]}{more}.")
  reads = [(name, read) for name in sources for read in _reads(like[name])]
  values = integrity.read(
    directory, manifest, [(sources[name], r.place) for name, r in reads]
  )
  shards: dict[str, list[jax.Array]] = {name: [] for name in sources}
  for (name, read), value in zip(reads, values):
    shards[name] += jax.device_put(
      [value[index] for index, _ in read.cuts],
      [device for _, device in read.cuts],
    )
  return {
    name: jax.make_array_from_single_device_arrays(
      tuple(like[name].shape),
      _sharding(like[name]),
      shards[name],
      dtype=like[name].dtype,
    )
    for name in sources
  }


class _Read(NamedTuple):
  """A part of an array to read, and what each device gets of it.

  Attributes:
    place: of the part.
    cuts: (index into the part, device) pairs.
  """

  place: tuple[slice, ...]
  cuts: list[tuple[tuple[slice, ...], Any]]


def _sharding(spec: Any) -> Any:
  sharding = getattr(spec, "sharding", None)
  if sharding is None:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return sharding


def _reads(spec: Any) -> list[_Read]:
  """What this process has to read of an array for its devices.

  All in one go if its devices' parts fill a box: the parts may have been
  saved into common files, each of which would otherwise be read many times.
  """
  shape = tuple(spec.shape)
  devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
  index_of = _sharding(spec).addressable_devices_indices_map(shape)
  for device, index in index_of.items():
    bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
    devices_of.setdefault(bounds, []).append(device)
  box = tuple(
    (min(lo for lo, _ in each), max(hi for _, hi in each))
    for each in zip(*devices_of)
  )
  volume = sum(map(_volume, devices_of))
  if _volume(box) == volume and volume * spec.dtype.itemsize <= _WHOLE_BYTES:
    corner = [lo for lo, _ in box]
    cuts = [
      (
        tuple(slice(lo - c, hi - c) for (lo, hi), c in zip(bounds, corner)),
        device,
      )
      for bounds, devices in devices_of.items()
      for device in devices
    ]
    return [_Read(tuple(slice(*b) for b in box), cuts)]
  return [
    _Read(tuple(slice(*b) for b in bounds), [((), d) for d in devices])
    for bounds, devices in devices_of.items()
  ]


def _volume(bounds: tuple[tuple[int, int], ...]) -> int:
  return math.prod(hi - lo for lo, hi in bounds)
