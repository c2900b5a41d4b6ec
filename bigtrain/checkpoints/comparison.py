"""Compares arrays on devices without gathering them.

The processes exchange only checksums (device_checksums.py). They all call
`results` or `replicas` together, and all get the same text, which names the
first array that differs and its devices and hosts. It is "" if nothing differs.
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
  """The part of an array on one device."""

  position: int  # Of the array in the tree.
  name: str  # Of the array.
  place: str  # Start and stop of the part in each dimension.
  device: str  # With its host.
  sums: str


def results(first: Any, second: Any) -> str:
  """Compares two trees with the same shardings, device by device."""
  # Both are started before either is waited for.
  wait_for_first = device_checksums.start(trees.flatten_with_names(first))
  wait_for_second = device_checksums.start(trees.flatten_with_names(second))
  first_sums, second_sums = wait_for_first(), wait_for_second()
  differing = []
  for i, (name, by_device) in enumerate(first_sums.items()):
    for device, sums in by_device.items():
      if sums != second_sums[name][device]:
        differing.append(_Shard(i, name, "", _where(device), ""))
  return _describe(_exchange(differing))


def replicas(tree: Any) -> str:
  """Compares the devices that hold the same part of an array.

  In the usual case that nothing differs, the processes exchange one digest for
  each group of processes that hold the same parts.
  """
  named = trees.flatten_with_names(tree)
  sums = device_checksums.start(named)()
  own = []
  # {processes that hold the same parts, as JSON: lines about these parts}.
  lines: dict[str, list[str]] = collections.defaultdict(list)
  for i, (name, x) in enumerate(named):
    places, holders = _places(x)
    listed = set()
    for device, one in sums[name].items():
      place = places[device]
      text = checksums.as_text(one)
      own.append(_Shard(i, name, place, _where(device), text))
      if place not in listed and len(holders[place]) > 1:
        listed.add(place)
        processes = json.dumps(sorted(holders[place]))
        lines[processes].append(f"{i} {place} {text}")
  digests = {}
  for processes, of_group in lines.items():
    text = "\n".join(sorted(of_group))
    digests[processes] = hashlib.sha256(text.encode()).hexdigest()

  differs_within_process = bool(_minorities(own))
  answers = process.gather([differs_within_process, digests])
  differs = any(within_process for within_process, _ in answers)
  digest_of: dict[str, str] = {}
  for _, digests in answers:
    for processes, digest in digests.items():
      differs |= digest_of.setdefault(processes, digest) != digest
  if not differs:
    return ""
  return _describe(_minorities(_exchange(own)))


def _places(x: jax.Array) -> tuple[dict[jax.Device, str], dict[str, set[int]]]:
  """{device: place of its part} and {place: processes that hold it}."""
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
  """Shards that differ from most copies of their part; all copies in a tie."""
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
