"""Reads from the text of a compiled program what it sends over the network.

XLA's partitioner turns the program of all devices into the program of one
device, and inserts the collectives. This module counts how often each of them
runs in a step: one in a scan over 32 layers counts 32 times.

The text is the partitioner's output (`--xla_dump_hlo_pass_re=
spmd-partitioning`). Later passes differ between backends: the CPU's send
float32 in place of bfloat16, and the TPU's may fuse parts of a gather into
products.

The partitioner emits no reduce-scatter. It emits an all-reduce and a slice,
which GPU and TPU compilers fuse into a reduce-scatter, so this module counts
that pair as a reduce-scatter.
"""

import collections
import itertools
import math
import re
from typing import Any, NamedTuple

import numpy as np

from bigtrain.tools.plan import hlo

KINDS = (
  "all-gather",
  "reduce-scatter",
  "all-reduce",
  "all-to-all",
  "collective-permute",
)
_OTHER_NAMES = {
  "ragged-all-to-all": "all-to-all",
  "collective-broadcast": "all-gather",
}

# Ops that keep the values of an array.
_UNCHANGED = {"bitcast", "convert", "copy", "reshape", "transpose"}


class Collective(NamedTuple):
  """All collectives of one kind and group in a step of a program.

  Attributes:
    kind: one of KINDS.
    group_size: number of devices in a group.
    stride: difference between the numbers of neighbouring devices in a group.
    runs: number of executions per step.
    nbytes: bytes per step of the whole arrays: the outputs of all-gathers, the
      inputs of reduce-scatters, either for the other kinds.
    inner: number of neighbours in a group at this stride, if the distance then
      changes, as in a group over two axes of the mesh; 0 if it does not.
    span: number of devices from the first to the last of such a group.
  """

  kind: str
  group_size: int
  stride: int
  runs: int
  nbytes: int
  inner: int = 0
  span: int = 0

  @property
  def sent_bytes(self) -> float:
    """Bytes that each device sends per step; see `sent_fraction`."""
    return self.nbytes * sent_fraction(self.kind, self.group_size)


def sent_fraction(kind: str, group_size: int) -> float:
  """Bytes that a device sends, and receives, per byte of the array.

  In a ring of n devices, each device passes on n - 1 of the n parts of a
  gather or scatter: (n - 1) / n of the array. An all-reduce is a scatter
  followed by a gather (Patarasuk and Yuan 2009,
  doi.org/10.1016/j.jpdc.2008.09.002).
  """
  if group_size < 2:
    return 0.0
  if kind == "collective-permute":
    return 1.0
  times = 2 if kind == "all-reduce" else 1
  return times * (group_size - 1) / group_size


class Program(NamedTuple):
  """Collectives of a program.

  Attributes:
    collectives: sorted by nbytes, largest first.
    unknown_loops: number of loops that contain collectives and whose trip count
      is not in the text; these collectives count once.
  """

  collectives: list[Collective]
  unknown_loops: int


def read(text: str) -> Program:
  """Returns the collectives of a program."""
  module = hlo.Module(text)
  nbytes: collections.Counter[Collective] = collections.Counter()
  runs: collections.Counter[Collective] = collections.Counter()
  unknown = 0
  for computation, times, guessed in module.walk():
    has_any = False
    for op in computation.values():
      one = of(op, computation, module.num_devices)
      if one is None:
        continue
      has_any = True
      key = one._replace(runs=0, nbytes=0)
      nbytes[key] += times * one.nbytes
      runs[key] += times
    unknown += has_any and guessed
  merged = [
    one._replace(runs=runs[one], nbytes=key_bytes)
    for one, key_bytes in nbytes.items()
  ]
  return Program(sorted(merged, key=lambda c: -c.nbytes), unknown)


def of(
  op: hlo.Op, computation: hlo.Computation, num_devices: int
) -> Collective | None:
  """Returns one run of an operation, or None if it sends nothing."""
  kind = _kind(op)
  if kind is None:
    return None
  size, stride, *gaps = _groups(op.attributes, num_devices)
  nbytes = _array_bytes(kind, op, computation, size)
  if size < 2 or not nbytes:
    return None
  if kind == "all-reduce" and _sliced(op.name, computation, size):
    kind = "reduce-scatter"
  return Collective(kind, size, stride, 1, nbytes, *gaps)


def to_json(collectives: list[Collective]) -> list[dict[str, Any]]:
  """Converts to a value of JSON, for `from_json`."""
  return [c._asdict() for c in collectives]


def from_json(values: list[dict[str, Any]]) -> list[Collective]:
  """Inverse of `to_json`."""
  return [Collective(**value) for value in values]


def _sliced(name: str, computation: hlo.Computation, size: int) -> bool:
  """Whether every use of a result takes only this device's part of it."""
  users = [op for op in computation.values() if name in op.operands]
  for op in users:
    if op.opcode == "dynamic-slice" and op.operands[0] == name:
      whole = hlo.type_bytes(computation[name].type)
      if hlo.type_bytes(op.type) * size > whole:
        return False
    elif op.opcode not in _UNCHANGED or not _sliced(op.name, computation, size):
      return False
  return bool(users)


def _kind(op: hlo.Op) -> str | None:
  if op.opcode.endswith("-done"):  # Counted at its start.
    return None
  name = op.opcode.removesuffix("-start")
  name = _OTHER_NAMES.get(name, name)
  return name if name in KINDS else None


def _array_bytes(
  kind: str, op: hlo.Op, computation: hlo.Computation, size: int
) -> int:
  """Bytes of the whole arrays of a collective."""
  operands = sum(
    hlo.type_bytes(computation[name].type)
    for name in op.operands
    if name in computation
  )
  return operands * size if kind == "all-gather" else operands


def _groups(attributes: str, num_devices: int) -> tuple[int, ...]:
  """(size, stride, inner, span) of the first group of devices of an op."""
  if match := _MESH.search(attributes):
    names = re.findall(r"'(\w+)'=", match["sizes"])
    sizes = [int(n) for n in re.findall(r"=(\d+)", match["sizes"])]
    ids = _iota(match["ids"] or f"[{math.prod(sizes)}]").reshape(sizes)
    group_axes = re.findall(r"'(\w+)'", match["axes"])
    index = tuple(slice(None) if name in group_axes else 0 for name in names)
    return distances(ids[index].ravel().tolist())
  if match := _IOTA.search(attributes):
    groups = _iota(match["ids"]).reshape(_ints(match["shape"]))
    return distances(groups[0].tolist())
  if match := _PAIRS.search(attributes):
    pairs = [_ints(pair) for pair in re.findall(r"\d+,\d+", match[1])]
    strides = [abs(a - b) for a, b in pairs if a != b]
    return (len(pairs), min(strides)) if strides else (1, 1)
  match = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
  return distances(_ints(match[1])) if match else (num_devices, 1)


# mesh['axis_0'=1,'axis_1'=8,'axis_2'=8], device_ids=([8,8]T(1,0)) {'axis_1'}
_MESH = re.compile(
  r"replica_groups=@?mesh\[(?P<sizes>[^\]]*)\]"
  r"(?:, device_ids=\((?P<ids>[^{]*)\))? \{(?P<axes>[^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
# [4,4]<=[2,8]T(1,0)
_IOTA = re.compile(
  r"replica_groups=\[(?P<shape>[\d,]+)\]<=(?P<ids>\[[\d,]+\](?:T\([\d,]+\))?)"
)


def _iota(text: str) -> np.ndarray:
  """Device numbers that "[8,8]T(1,0)" stands for: an iota, transposed."""
  dims, _, order = text.partition("T")
  sizes = _ints(dims.strip("[]"))
  ids = np.arange(math.prod(sizes)).reshape(sizes)
  return ids.transpose(_ints(order.strip("()"))) if order else ids


def _ints(text: str) -> list[int]:
  return [int(n) for n in text.split(",") if n]


def distances(ids: list[int]) -> tuple[int, ...]:
  """(group_size, stride) of devices; with inner and span if these differ."""
  if len(ids) < 2:
    return len(ids), 1
  steps = [abs(b - a) for a, b in itertools.pairwise(ids)]
  changed = [at for at, step in enumerate(steps) if step != steps[0]]
  if not changed:
    return len(ids), steps[0]
  return len(ids), steps[0], changed[0] + 1, max(ids) - min(ids) + 1
