"""Copies device arrays to host memory, and plans who writes which part.

A save stalls the training loop only for the copy, which is needed because the
next step overwrites the state's buffers.

Many devices may hold the same shard of an array. The plan (`_make_plan`)
chooses one of them to write it, and balances the bytes over the devices. It
depends only on shapes and shardings, so it is made once for a run, and every
process makes the same one without talking to the others. `blocks` joins small
shards that share a file when they are written.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bigtrain.checkpoints import checksums, device_checksums, integrity
from bigtrain.checkpoints.manifest import Array, CheckpointError, check_names

# Shards below the first size share files of up to the second, if the same
# process writes them: to write a file takes as long as to write one or two
# megabytes.
_SMALL_SHARD_BYTES = 2 * 2**20
_SHARED_FILE_BYTES = 16 * 2**20

# Waits for the checksum of each of this process's pieces.
PartialSums = Callable[[], list[checksums.Sums]]


class Piece(NamedTuple):
  """A part of an array in host memory, and its index in the array."""

  name: str
  place: tuple[slice, ...]
  data: Any  # A numpy array, or a jax array in pinned host memory.
  is_copy: bool = False  # Another process writes this part to the workdir.


class _Plan(NamedTuple):
  """The part of a snapshot that depends only on the tree's specs."""

  key: Any  # The specs.
  arrays: dict[str, Array]  # Layout in files of all arrays.
  # (position in the tree, number of the addressable shard) of each part that
  # this process copies. A numpy array counts as one shard.
  sources: list[tuple[int, int]]
  pieces: list[Piece]  # The same parts, without data.


class Snapshots:
  """Takes snapshots of a train state, as often as asked."""

  def __init__(self, *, all_shards: bool = False) -> None:
    """With `all_shards`, snapshots have every shard of this process's devices.

    Those that another process writes to the workdir are marked as copies.
    """
    self._all_shards = all_shards
    self._plan = _Plan(None, {}, [], [])

  def take(
    self, named: Sequence[tuple[str, Any]]
  ) -> tuple[list[Piece], dict[str, Array], PartialSums]:
    """Copies the shards that this process writes; process 0 has numpy arrays.

    Returns: the shards, the layout in files of all arrays, and a function that
      waits for the devices' checksum of each shard.
    """
    attributes = ("shape", "dtype", "sharding")  # numpy has no sharding.
    key = [
      (name, [getattr(x, a, None) for a in attributes]) for name, x in named
    ]
    if key != self._plan.key:
      self._plan = _make_plan(key, named, self._all_shards)
    plan = self._plan
    shards = [_shard(named[i][1], number) for i, number in plan.sources]
    # Of all arrays on every process: a program runs on all devices of an array.
    wait_for_devices = device_checksums.start(named)
    pieces = [
      piece._replace(data=copy)
      for piece, copy in zip(plan.pieces, _copy_to_host(shards))
    ]
    # For each piece, the device that sums it, or the sums of a numpy array.
    devices_or_sums: list[Any] = []
    for x, piece in zip(shards, pieces):
      if isinstance(x, jax.Array):
        devices_or_sums.append(next(iter(x.devices())))
      else:
        sums = checksums.of_part(np.asarray(x), piece.place, x.shape)
        devices_or_sums.append(sums)

    def wait_for_sums() -> list[checksums.Sums]:
      by_device = wait_for_devices()
      return [
        by_device[piece.name][one] if isinstance(one, jax.Device) else one
        for piece, one in zip(plan.pieces, devices_or_sums)
      ]

    return pieces, plan.arrays, wait_for_sums


def sums_by_name(
  pieces: Sequence[Piece], sums: Sequence[checksums.Sums]
) -> dict[str, checksums.Sums]:
  """{name of an array: sums of the parts that this process writes}."""
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
  # Optimizer state that is in host memory is copied too, because the next
  # update overwrites it.
  copied = jax.device_put(arrays, places, may_alias=False)
  copies = iter(jax.block_until_ready(copied))
  return [
    next(copies) if isinstance(x, jax.Array) else np.array(x) for x in shards
  ]


def _shard(x: Any, number: int) -> Any:
  """The addressable shard with this number; of a numpy array, the array."""
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

  # Large arrays first: each goes to the replica whose busiest device has the
  # fewest bytes to write.
  load: dict[jax.Device, int] = {}
  chosen: dict[str, int] = {}  # The replica of each array that is written.
  layouts: dict[str, Array] = {}
  for name, x in sorted(named, key=lambda pair: -pair[1].nbytes):
    if not isinstance(x, jax.Array):
      layouts[name] = Array.describe(x.shape, x.dtype)
      continue
    replicas = _replicas(x)
    highest_loads = [
      max(load.get(holder.device, 0) for holder in replica)
      for replica in replicas
    ]
    chosen[name] = highest_loads.index(min(highest_loads))
    writers = replicas[chosen[name]]
    for writer in writers:
      load.setdefault(writer.device, 0)
      load[writer.device] += x.nbytes // len(writers)
    block = _block_shape(x, replicas, chosen[name])
    sharding = _sharding_json(x.sharding)
    layouts[name] = Array.describe(x.shape, x.dtype, block, sharding)

  # The parts that this process copies.
  sources: list[tuple[int, int]] = []
  pieces: list[Piece] = []
  for i, (name, x) in enumerate(named):
    if isinstance(x, jax.Array):
      for number, piece in _own_pieces(name, x, chosen[name], all_shards):
        sources.append((i, number))
        pieces.append(piece)
    elif jax.process_index() == 0 or all_shards:
      place = tuple(slice(0, n) for n in x.shape)
      is_copy = jax.process_index() != 0
      sources.append((i, 0))
      pieces.append(Piece(name, place, None, is_copy))
  arrays = {name: layouts[name] for name, _ in named}
  return _Plan(key, arrays, sources, pieces)


def _own_pieces(
  name: str, x: jax.Array, chosen: int, all_shards: bool
) -> list[tuple[int, Piece]]:
  """(number of the addressable shard, piece) pairs of this process.

  The shards of the chosen replica come first. With `all_shards` they are
  followed by one shard of every other part that this process's devices hold.
  """
  written = []
  written_places = set()
  copies: dict[Any, tuple[int, Piece]] = {}
  for number, shard in enumerate(x.addressable_shards):
    place = checksums.explicit(shard.index, x.shape)
    starts = tuple(s.start for s in place)
    if shard.replica_id == chosen:
      written.append((number, Piece(name, place, None)))
      written_places.add(starts)
    elif all_shards:
      copy = Piece(name, place, None, is_copy=True)
      copies.setdefault(starts, (number, copy))
  others = [
    copy for starts, copy in copies.items() if starts not in written_places
  ]
  return written + others


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


class _Holder(NamedTuple):
  """A device and the part of an array that it holds."""

  place: tuple[slice, ...]
  device: jax.Device


def _replicas(x: jax.Array) -> list[list[_Holder]]:
  """The replicas of an array: devices that together hold each part once.

  They are numbered like the `replica_id` of jax's shards.
  """
  num_seen: dict[Any, int] = {}  # By the start of a part.
  replicas: list[list[_Holder]] = []
  for device, index in x.sharding.devices_indices_map(x.shape).items():
    place = checksums.explicit(index, x.shape)
    starts = tuple(s.start for s in place)
    replica = num_seen.get(starts, 0)
    num_seen[starts] = replica + 1
    if replica == len(replicas):
      replicas.append([])
    replicas[replica].append(_Holder(place, device))
  return replicas


def _block_shape(
  x: jax.Array, replicas: list[list[_Holder]], chosen: int
) -> list[int]:
  """Shape of the blocks that become chunks: a shard, or several small ones.

  Adjacent small shards along the only split dimension form one block if, in
  every block, a single process writes them all, and no process holds only some
  of them.
  """
  shard_shape = list(x.sharding.shard_shape(x.shape))
  split = [d for d, n in enumerate(shard_shape) if n != x.shape[d]]
  shard_bytes = math.prod(shard_shape) * x.dtype.itemsize
  if len(split) != 1 or not 0 < shard_bytes < _SMALL_SHARD_BYTES:
    return shard_shape
  (dim,) = split
  # By the start of a shard: the process that writes it, and those that hold it.
  writer: dict[int, int] = {}
  holders: dict[int, set[int]] = {}
  for number, replica in enumerate(replicas):
    for place, device in replica:
      start = place[dim].start
      holders.setdefault(start, set()).add(device.process_index)
      if number == chosen:
        writer[start] = device.process_index
  owners = [(writer[start], holders[start]) for start in sorted(writer)]
  largest = min(len(owners), _SHARED_FILE_BYTES // shard_bytes)
  for size in range(largest, 1, -1):  # Number of shards in a block.
    firsts = [owners[i // size * size] for i in range(len(owners))]
    if len(owners) % size == 0 and owners == firsts:
      shard_shape[dim] *= size
      break
  return shard_shape


def _sharding_json(sharding: Any) -> dict[str, Any] | None:
  """For people who read the manifest."""
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return None
  return {"mesh": dict(sharding.mesh.shape), "spec": list(sharding.spec)}


def blocks(
  pieces: Sequence[Piece], arrays: Mapping[str, Array]
) -> Iterator[tuple[integrity.Part, np.ndarray]]:
  """Yields the parts to write; pieces that share a file are joined."""
  # By the corner of a file.
  groups: dict[Any, list[Piece]] = {}
  for piece in pieces:
    chunk = arrays[piece.name].chunk_shape
    corner = []
    for s, chunk_size in zip(piece.place, chunk):
      is_smaller = s.stop - s.start < chunk_size
      corner.append(
        s.start // chunk_size * chunk_size if is_smaller else s.start
      )
    groups.setdefault((piece.name, tuple(corner)), []).append(piece)
  for (name, _), group in groups.items():
    group.sort(key=lambda piece: [s.start for s in piece.place])
    # For pinned memory, np.asarray is a view.
    data = [np.asarray(piece.data) for piece in group]
    if len(group) == 1:
      yield (name, group[0].place), data[0]
      continue
    first, last = group[0].place, group[-1].place
    place = tuple(slice(a.start, b.stop) for a, b in zip(first, last))
    (dim,) = [d for d in range(len(first)) if first[d] != last[d]]
    yield (name, place), np.concatenate(data, axis=dim)
