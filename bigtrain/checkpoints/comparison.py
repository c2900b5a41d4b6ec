"""Compares arrays on devices, without gathering them.

Each device sums its shards (checksums.py), and processes exchange only sums and
what differs. The functions are called on all processes at the same point, and
return the same text on all of them: the first array that differs with its
devices and hosts, or "" if nothing differs.
"""

import collections
import hashlib
import json
import socket
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bigtrain import trees
from bigtrain.checkpoints import checksums
from bigtrain.checkpoints.peers import Peers


class _Shard(NamedTuple):
  """A shard on one device, as JSON for other processes.

  Attributes:
    position: position of its array in the tree.
    name: name of the array.
    place: index of the shard in the array, as text.
    device: name of the device, with its host.
    sums: its sums, as text.
  """

  position: int
  name: str
  place: str
  device: str
  sums: str


def results(
  first: Any, second: Any, peers: Peers, *, compiled: bool = False
) -> str:
  """Compares two results of the same computation.

  Args:
    compiled: whether to compare checksums on CPU devices too. Their memory is
      the host's, so there every bit is compared, in half the time.
  """
  pairs = [
    (name, x, y)
    for (name, x), (_, y) in zip(
      trees.flatten_with_names(first), trees.flatten_with_names(second)
    )
  ]
  in_host = not compiled and jax.default_backend() == "cpu"
  differing = [
    _Shard(i, name, "", _where(device), "")
    for i, (name, devices) in enumerate(
      (_by_bits if in_host else _by_sums)(pairs).items()
    )
    for device in devices
  ]
  return _describe(_exchange(peers, differing))


# (name, array, the same array computed again).
_Pairs = Iterable[tuple[str, jax.Array, jax.Array]]


def _by_bits(pairs: _Pairs) -> dict[str, list[Any]]:
  """{name: devices of this process whose shards differ}."""
  return {
    name: [
      shard.device
      for shard, other in zip(x.addressable_shards, y.addressable_shards)
      if not np.array_equal(_words(shard.data), _words(other.data))
    ]
    for name, x, y in pairs
  }


def _words(x: jax.Array) -> np.ndarray:
  """The bits of a shard in the host's memory, as long words if possible."""
  data = np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)
  return data if data.size % 8 else data.view(np.uint64)


def _by_sums(pairs: _Pairs) -> dict[str, list[Any]]:
  """The same by checksums, which the devices compute."""
  pairs = list(pairs)
  # Both are started before either is waited for.
  first = checksums.OnDevices(((n, x) for n, x, _ in pairs), compiled=True)
  second = checksums.OnDevices(((n, y) for n, _, y in pairs), compiled=True)
  sums, others = first.result(), second.result()
  return {
    name: [
      device for device, one in each.items() if one != others[name][device]
    ]
    for name, each in sums.items()
  }


def replicas(tree: Any, peers: Peers) -> str:
  """Compares the devices that hold the same part of an array."""
  named = trees.flatten_with_names(tree)
  sums = checksums.OnDevices(named).result()
  own = []
  lines: dict[str, list[str]] = collections.defaultdict(list)
  for i, (name, x) in enumerate(named):
    places, holders = _places(x)
    compared = set()
    for device, one in sums[name].items():
      place, text = places[device], checksums.as_text(one)
      own.append(_Shard(i, name, place, _where(device), text))
      if place not in compared and len(holders[place]) > 1:
        compared.add(place)
        processes = json.dumps(sorted(holders[place]))
        lines[processes].append(f"{i} {place} {text}")
  # Processes that hold the same parts compare one digest of all of them.
  texts = {
    processes: hashlib.sha256("\n".join(sorted(each)).encode()).hexdigest()
    for processes, each in lines.items()
  }
  answers = peers.share([bool(_minorities(own)), texts])
  by_key: dict[str, set[str]] = collections.defaultdict(set)
  for _, each in answers:
    for key, text in each.items():
      by_key[key].add(text)
  differs = any(each for each, _ in answers)
  if not differs and all(len(each) == 1 for each in by_key.values()):
    return ""
  return _describe(_minorities(_exchange(peers, own)))


def _places(x: jax.Array) -> tuple[dict[Any, str], dict[str, set[int]]]:
  """({device: place of its shard}, {place: processes that hold it})."""
  places: dict[Any, str] = {
    device: str([(s.start, s.stop) for s in checksums.explicit(index, x.shape)])
    for device, index in x.sharding.devices_indices_map(x.shape).items()
  }
  holders: dict[str, set[int]] = collections.defaultdict(set)
  for device, place in places.items():
    holders[place].add(device.process_index)
  return places, holders


def _where(device: Any) -> str:
  return f"{device} of host {socket.gethostname()}"


def _exchange(peers: Peers, shards: Iterable[_Shard]) -> list[_Shard]:
  """The shards of all processes."""
  answers = peers.share(list(shards))
  return [_Shard(*shard) for answer in answers for shard in answer]


def _minorities(shards: Iterable[_Shard]) -> list[_Shard]:
  """The shards whose sums most other holders of the same part do not have."""
  by_part = collections.defaultdict(list)
  for shard in shards:
    by_part[shard.position, shard.place].append(shard)
  odd = []
  for group in by_part.values():
    counts = collections.Counter(shard.sums for shard in group).most_common()
    if len(counts) == 1:
      continue
    tied = counts[0][1] == counts[1][1]
    odd += [s for s in group if tied or s.sums != counts[0][0]]
  return odd


def _describe(shards: Sequence[_Shard]) -> str:
  if not shards:
    return ""
  first = min(shards)
  devices = sorted({s.device for s in shards if s.position == first.position})
  number = len({shard.position for shard in shards})
  more = f" (the first of {number} arrays)" if number > 1 else ""
  return f"{first.name!r}{more} on {', '.join(devices)}"
