"""Copies device arrays to host memory, and plans who writes which part.

A save stalls the training loop only for this copy, which is needed because the
next step overwrites the state's buffers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bigtrain.checkpoints import checksums, device_checksums, integrity
from bigtrain.checkpoints.manifest import Array, CheckpointError, check_names

# Shards smaller than the first size share a file of up to the second if the
# same process writes them: a file costs as much as one or two megabytes.
_SMALL_SHARD_BYTES = 2 * 2**20
_SHARED_FILE_BYTES = 16 * 2**20

# Waits for the sums of each of this process's pieces.
PartialSums = Callable[[], list[checksums.Sums]]


class Piece(NamedTuple):
  """A part of an array in host memory, and its index in the array."""

  name: str
  place: tuple[slice, ...]
  data: Any  # A numpy array, or a jax array in pinned host memory.
  is_copy: bool = False  # Another process writes this part to the workdir.


class _Plan(NamedTuple):
  """The part of a snapshot that depends only on the tree's specs."""

  key: Any
  arrays: dict[str, Array]
  # (position in the tree, number of the addressable shard) of each part that
  # this process copies, a numpy array being one shard.
  sources: list[tuple[int, int]]
  pieces: list[Piece]  # The same parts without data.


class Snapshots:
  """Copies the arrays of a tree, again and again.

  If `all_shards`, it copies also the shards of this process's devices that
  another process writes to the workdir, each once.
  """

  def __init__(self, *, all_shards: bool = False) -> None:
    self._all_shards = all_shards
    self._plan = _Plan(None, {}, [], [])

  def take(
    self, named: Sequence[tuple[str, Any]]
  ) -> tuple[list[Piece], dict[str, Array], PartialSums]:
    """Copies the shards that this process writes; process 0 has numpy arrays.

    Returns the shards, the layout in files of all arrays, and a function that
    returns the devices' checksum of each shard.
    """
    kind = ("shape", "dtype", "sharding")
    key = [(n, [getattr(x, a, None) for a in kind]) for n, x in named]
    if key != self._plan.key:
      self._plan = _make_plan(key, named, self._all_shards)
    plan = self._plan
    shards = [_shard(named[i][1], number) for i, number in plan.sources]
    # All arrays on every process, because some devices need the same programs.
    wait_for_devices = device_checksums.start(named)
    pieces = [
      piece._replace(data=copy)
      for piece, copy in zip(plan.pieces, _copy_to_host(shards))
    ]
    # The device of a shard, or the sums of a numpy array.
    summed: list[Any] = [
      next(iter(x.devices()))
      if isinstance(x, jax.Array)
      else checksums.of_part(np.asarray(x), piece.place, x.shape)
      for x, piece in zip(shards, pieces)
    ]

    def wait_for_sums() -> list[checksums.Sums]:
      sums = wait_for_devices()
      return [
        sums[piece.name][one] if isinstance(one, jax.Device) else one
        for piece, one in zip(plan.pieces, summed)
      ]

    return pieces, plan.arrays, wait_for_sums


def sums_by_name(
  pieces: Sequence[Piece], sums: Sequence[checksums.Sums]
) -> dict[str, checksums.Sums]:
  parts: dict[str, list[checksums.Sums]] = {}
  for piece, one in zip(pieces, sums):
    if not piece.is_copy:
      parts.setdefault(piece.name, []).append(one)
  return {name: checksums.add(each) for name, each in parts.items()}


def _copy_to_host(shards: Sequence[Any]) -> list[Any]:
  """Copies with the devices' DMA engines, to pinned memory if there is any."""
  arrays = [x for x in shards if isinstance(x, jax.Array)]
  devices = [next(iter(x.devices())) for x in arrays]
  kinds = {m.kind for d in devices for m in d.addressable_memories()}
  if "pinned_host" not in kinds:
    for x in arrays:
      x.copy_to_host_async()
    return [np.array(x) for x in shards]
  places = [
    jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    for device in devices
  ]
  # Also what is in this memory already: the next update overwrites it.
  copied = jax.device_put(arrays, places, may_alias=False)
  copies = iter(jax.block_until_ready(copied))
  return [
    next(copies) if isinstance(x, jax.Array) else np.array(x) for x in shards
  ]


def _shard(x: Any, number: int) -> Any:
  if not isinstance(x, jax.Array):
    return x
  if number and x.is_fully_replicated:  # addressable_data returns shard 0.
    return x.addressable_shards[number].data
  return x.addressable_data(number)


def _make_plan(
  key: Any, named: Sequence[tuple[str, Any]], all_shards: bool
) -> _Plan:
  """Decides which process writes which shard, and the layout in files.

  The load is balanced over the devices. Every process computes the same plan.
  """
  _check(named)
  load: dict[Any, int] = {}
  chosen, arrays = {}, {}  # Name -> replica to save; name -> layout.
  for name, x in sorted(named, key=lambda pair: -pair[1].nbytes):
    if not isinstance(x, jax.Array):
      arrays[name] = Array.describe(x.shape, x.dtype)
      continue
    choices = _replicas(x)
    busiest = [max(load.get(d, 0) for _, d in choice) for choice in choices]
    chosen[name] = busiest.index(min(busiest))
    holders = choices[chosen[name]]
    for _, device in holders:
      load[device] = load.get(device, 0) + x.nbytes // len(holders)
    block = _block_shape(x, choices, chosen[name])
    layout = _sharding_json(x.sharding)
    arrays[name] = Array.describe(x.shape, x.dtype, block, layout)
  sources, pieces = [], []
  for i, (name, x) in enumerate(named):
    if isinstance(x, jax.Array):
      copies: dict[Any, Any] = {}
      for number, shard in enumerate(x.addressable_shards):
        place = checksums.explicit(shard.index, x.shape)
        starts = tuple(s.start for s in place)
        if shard.replica_id == chosen[name]:
          sources.append((i, number))
          pieces.append(Piece(name, place, None))
          copies[starts] = None
        elif all_shards:
          copies.setdefault(starts, (number, Piece(name, place, None, True)))
      for copy in filter(None, copies.values()):
        sources.append((i, copy[0]))
        pieces.append(copy[1])
    elif jax.process_index() == 0 or all_shards:
      sources.append((i, 0))
      place = tuple(slice(0, n) for n in x.shape)
      pieces.append(Piece(name, place, None, jax.process_index() != 0))
  arrays = {name: arrays[name] for name, _ in named}
  return _Plan(key, arrays, sources, pieces)


def _check(named: Sequence[tuple[str, Any]]) -> None:
  check_names(name for name, _ in named)
  for name, x in named:
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
      raise CheckpointError(f"array name {name!r}: {type(x)} is not an array.")
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
      raise CheckpointError(
        f"array name {name!r}: dtype {x.dtype} cannot be saved; make random "
        "keys from the seed and the step instead."
      )


def _replicas(x: jax.Array) -> list[list[tuple[tuple[slice, ...], Any]]]:
  last_replica: dict[Any, int] = {}
  replicas: list[list[tuple[tuple[slice, ...], Any]]] = []
  for device, index in x.sharding.devices_indices_map(x.shape).items():
    index = checksums.explicit(index, x.shape)
    place = tuple(s.start for s in index)
    replica = last_replica[place] = last_replica.get(place, -1) + 1
    if replica == len(replicas):
      replicas.append([])
    replicas[replica].append((index, device))
  return replicas


def _block_shape(
  x: jax.Array, replicas: list[list[tuple[tuple[slice, ...], Any]]], chosen: int
) -> list[int]:
  """Returns the shape of the blocks to chunk: a shard, or several small ones.

  Adjacent small shards along the only split dimension form one block if in
  every block a single process writes them, and no process holds only some.
  """
  shard_shape = list(x.sharding.shard_shape(x.shape))
  split = [d for d, n in enumerate(shard_shape) if n != x.shape[d]]
  shard_bytes = math.prod(shard_shape) * x.dtype.itemsize
  if len(split) != 1 or not 0 < shard_bytes < _SMALL_SHARD_BYTES:
    return shard_shape
  (dim,) = split
  writers: dict[int, int] = {}  # Start of a shard -> process.
  holders: dict[int, set[int]] = {}
  for number, replica in enumerate(replicas):
    for index, device in replica:
      holders.setdefault(index[dim].start, set()).add(device.process_index)
      if number == chosen:
        writers[index[dim].start] = device.process_index
  owners = [(writers[start], holders[start]) for start in sorted(writers)]
  most = min(len(owners), _SHARED_FILE_BYTES // shard_bytes)
  for size in range(most, 1, -1):
    if len(owners) % size == 0 and all(
      owner == owners[i // size * size] for i, owner in enumerate(owners)
    ):
      shard_shape[dim] *= size
      break
  return shard_shape


def _sharding_json(sharding: Any) -> dict[str, Any] | None:
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return None
  return {"mesh": dict(sharding.mesh.shape), "spec": list(sharding.spec)}


def blocks(
  pieces: Sequence[Piece], arrays: Mapping[str, Array]
) -> Iterator[tuple[integrity.Part, np.ndarray]]:
  """Yields the parts to write, with the pieces of a shared file joined."""
  groups: dict[Any, list[Piece]] = {}
  for piece in pieces:
    chunk = arrays[piece.name].chunk_shape
    # Pieces larger than a chunk are not joined.
    corner = tuple(
      s.start if s.stop - s.start >= c else s.start // c * c
      for s, c in zip(piece.place, chunk)
    )
    groups.setdefault((piece.name, corner), []).append(piece)
  for (name, _), group in groups.items():
    group.sort(key=lambda piece: [s.start for s in piece.place])
    lo, hi = group[0].place, group[-1].place
    place = tuple(slice(a.start, b.stop) for a, b in zip(lo, hi))
    # For pinned memory, np.asarray is a view.
    data = [np.asarray(piece.data) for piece in group]
    if len(group) > 1:
      (dim,) = [d for d in range(len(lo)) if lo[d] != hi[d]]
      data = [np.concatenate(data, axis=dim)]
    yield (name, place), data[0]
