"""Compares arrays on devices, without gathering them.

Processes exchange only checksums (device_checksums.py) and what differs. All
processes call the functions together and get the same text: the first array
that differs with its devices and hosts, or "" if nothing differs.
"""

import collections
import hashlib
import json
import socket
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from bigtrain.arrays import trees
from bigtrain.checkpoints import checksums, device_checksums
from bigtrain.cluster import process


class _Shard(NamedTuple):
  position: int  # Of its array in the tree.
  name: str
  place: str
  device: str  # With its host.
  sums: str


def results(first: Any, second: Any) -> str:
  trees_named = [trees.flatten_with_names(tree) for tree in (first, second)]
  # Both are started before either is waited for.
  waits = [device_checksums.start(named) for named in trees_named]
  sums, others = (wait() for wait in waits)
  differing = [
    _Shard(i, name, "", _where(device), "")
    for i, (name, each) in enumerate(sums.items())
    for device, one in each.items()
    if one != others[name][device]
  ]
  return _describe(_exchange(differing))


def replicas(tree: Any) -> str:
  """Compares the devices that hold the same part of an array."""
  named = trees.flatten_with_names(tree)
  sums = device_checksums.start(named)()
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
  digests = {
    processes: hashlib.sha256("\n".join(sorted(each)).encode()).hexdigest()
    for processes, each in lines.items()
  }
  answers = process.gather([bool(_minorities(own)), digests])
  distinct = {pair for _, each in answers for pair in each.items()}
  differs = any(each for each, _ in answers)
  if not differs and len(distinct) == len(dict(distinct)):
    return ""
  return _describe(_minorities(_exchange(own)))


def _places(x: jax.Array) -> tuple[dict[jax.Device, str], dict[str, set[int]]]:
  places: dict[jax.Device, str] = {
    device: str(checksums.bounds(index, x.shape))
    for device, index in x.sharding.devices_indices_map(x.shape).items()
  }
  holders: dict[str, set[int]] = collections.defaultdict(set)
  for device, place in places.items():
    holders[place].add(device.process_index)
  return places, holders


def _where(device: jax.Device) -> str:
  return f"{device} of host {socket.gethostname()}"


def _exchange(shards: Iterable[_Shard]) -> list[_Shard]:
  answers = process.gather(list(shards))
  return [_Shard(*shard) for answer in answers for shard in answer]


def _minorities(shards: Iterable[_Shard]) -> list[_Shard]:
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
