"""Reads from the text of a compiled program what it sends over the network.

XLA's partitioner turns the program of all devices into the program of one
device, and inserts the collectives. This module counts how often each of them
runs in a step: one in a scan over 32 layers counts 32 times.

The text is the partitioner's output (`--xla_dump_hlo_pass_re=
spmd-partitioning`). Later passes differ between backends: the CPU's send
float32 in place of bfloat16, and the TPU's split gathers into permutes that
overlap with matrix products.

The partitioner emits no reduce-scatter. It emits an all-reduce and a slice,
which GPU and TPU compilers fuse into a reduce-scatter, so this module counts
that pair as a reduce-scatter.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

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

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "tf32": 32}
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
  """

  kind: str
  group_size: int
  stride: int
  runs: int
  nbytes: int

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
  """Returns the collectives of a program.

  Args:
    text: HLO, as jax.stages.Compiled.as_text returns it.
  """
  module = _Module(text)
  nbytes: collections.Counter[tuple[Any, ...]] = collections.Counter()
  runs: collections.Counter[tuple[Any, ...]] = collections.Counter()
  unknown = 0
  for computation, times, guessed in module.walk():
    has_any = False
    for op in computation.values():
      kind = _kind(op)
      if kind is None:
        continue
      size, stride = _groups(op.attributes, module.num_devices)
      op_bytes = _array_bytes(kind, op, computation, size)
      if size < 2 or not op_bytes:
        continue
      has_any = True
      if kind == "all-reduce" and _sliced(op.name, computation, size):
        kind = "reduce-scatter"
      nbytes[kind, size, stride] += times * op_bytes
      runs[kind, size, stride] += times
    unknown += has_any and guessed
  merged = [
    Collective(kind, size, stride, runs[kind, size, stride], key_bytes)
    for (kind, size, stride), key_bytes in nbytes.items()
  ]
  return Program(sorted(merged, key=lambda c: -c.nbytes), unknown)


def to_json(collectives: list[Collective]) -> list[dict[str, Any]]:
  """Converts to a value of JSON, for `from_json`."""
  return [c._asdict() for c in collectives]


def from_json(values: list[dict[str, Any]]) -> list[Collective]:
  """Inverse of `to_json`."""
  return [Collective(**value) for value in values]


class _Op(NamedTuple):
  name: str
  type: str
  opcode: str
  operands: list[str]
  attributes: str


_Computation = dict[str, _Op]

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*->.*\{\s*$")
_RESULT = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<= ]*)\]")
_NAME = re.compile(r"%?([\w.\-]+)\s*$")


class _Module:
  """Parsed computations of a program, by name."""

  def __init__(self, text: str):
    self._computations: dict[str, _Computation] = {}
    self._entry = ""
    partitions = re.search(r"\bnum_partitions=(\d+)", text)
    replicas = re.search(r"\breplica_count=(\d+)", text)
    self.num_devices = math.prod(
      int(match[1]) for match in (partitions, replicas) if match
    )
    current: _Computation = {}
    for line in text.splitlines():
      if line and not line[0].isspace():
        header = _HEADER.match(line)
        if header:
          current = self._computations[header[2]] = {}
          self._entry = header[2] if header[1] else self._entry
      elif result := _RESULT.match(line):
        current[result[1]] = _parse(result[1], result[2])

  def walk(self) -> Iterator[tuple[_Computation, int, bool]]:
    """Yields (computation, number of runs, whether that is a guess)."""
    stack = [(self._entry, 1, False)]
    while stack:
      name, times, guessed = stack.pop()
      computation = self._computations.get(name, {})
      yield computation, times, guessed
      for op in computation.values():
        rounds = self._rounds(op) if op.opcode == "while" else 1
        for callee in _callees(op):
          stack.append(
            (callee, times * (rounds or 1), guessed or rounds is None)
          )

  def _rounds(self, op: _Op) -> int | None:
    """Trip count of a loop from its annotation or condition, or None."""
    match = re.search(
      r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', op.attributes
    )
    if match:
      return int(match[1])
    condition = self._computations.get(_called(op, "condition"), {})
    last = next(reversed(condition.values()), None)
    if last is None or "direction=LT" not in last.attributes:
      return None
    limit = condition.get(last.operands[1])
    # Counters of scans start at 0.
    if limit is None or limit.opcode != "constant":
      return None
    return int(limit.operands[0])


def _sliced(name: str, computation: _Computation, size: int) -> bool:
  """Whether every use of a result takes only this device's part of it."""
  users = [op for op in computation.values() if name in op.operands]
  for op in users:
    if op.opcode == "dynamic-slice" and op.operands[0] == name:
      whole = _type_bytes(computation[name].type)
      if _type_bytes(op.type) * size > whole:
        return False
    elif op.opcode not in _UNCHANGED or not _sliced(op.name, computation, size):
      return False
  return bool(users)


def _parse(name: str, text: str) -> _Op:
  """Parses "TYPE opcode(operands), attributes"."""
  if text.startswith("("):
    end = _closing(text, 0) + 1
  else:
    end = text.index(" ")
  kind, rest = text[:end], text[end:].lstrip()
  begin = rest.index("(")
  close = _closing(rest, begin)
  operands = []
  for part in _split(rest[begin + 1 : close]):
    match = _NAME.search(part)
    if match:
      operands.append(match[1])
  return _Op(name, kind, rest[:begin], operands, rest[close + 1 :])


def _closing(text: str, start: int) -> int:
  """Index of the parenthesis that closes the one at `start`."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if not depth:
      return i
  raise ValueError(f"no closing parenthesis in {text[:80]!r}")


def _split(text: str) -> list[str]:
  """Splits at commas outside of brackets."""
  parts, depth, begin = [], 0, 0
  for i, letter in enumerate(text):
    depth += (letter in "([{") - (letter in ")]}")
    if letter == "," and not depth:
      parts.append(text[begin:i])
      begin = i + 1
  return [*parts, text[begin:]]


def _called(op: _Op, attribute: str) -> str:
  match = re.search(rf"\b{attribute}=%?([\w.\-]+)", op.attributes)
  return match[1] if match else ""


def _callees(op: _Op) -> list[str]:
  """Names of the computations that an op calls."""
  if op.opcode == "conditional":
    match = re.search(r"branch_computations=\{([^}]*)\}", op.attributes)
    if match:
      return [n.strip().lstrip("%") for n in match[1].split(",")]
    names: tuple[str, ...] = ("true_computation", "false_computation")
  elif op.opcode == "while":
    names = ("body", "condition")
  elif op.opcode in ("call", "fusion") or op.opcode.startswith("async-start"):
    names = ("to_apply", "calls")
  else:
    names = ()
  return [name for name in (_called(op, n) for n in names) if name]


def _kind(op: _Op) -> str | None:
  if op.opcode.endswith("-done"):  # Counted at its start.
    return None
  name = op.opcode.removesuffix("-start")
  name = _OTHER_NAMES.get(name, name)
  return name if name in KINDS else None


def _array_bytes(
  kind: str, op: _Op, computation: _Computation, size: int
) -> int:
  """Bytes of the whole arrays of a collective."""
  operands = sum(
    _type_bytes(computation[name].type)
    for name in op.operands
    if name in computation
  )
  return operands * size if kind == "all-gather" else operands


def _type_bytes(text: str) -> int:
  total = 0
  for name, dims in _ARRAY.findall(text):
    digits = re.search(r"\d+", name)
    bits = _BITS.get(name, int(digits[0]) if digits else 0)
    sizes = [int(d.replace("<=", "")) for d in dims.split(",") if d.strip()]
    total += math.prod(sizes) * bits // 8
  return total


def _groups(attributes: str, num_devices: int) -> tuple[int, int]:
  """(size, stride) of the first group of devices of an op."""
  if match := _MESH.search(attributes):
    names = re.findall(r"'(\w+)'=", match["sizes"])
    sizes = [int(n) for n in re.findall(r"=(\d+)", match["sizes"])]
    ids = _iota(match["ids"] or f"[{math.prod(sizes)}]").reshape(sizes)
    group_axes = re.findall(r"'(\w+)'", match["axes"])
    index = tuple(slice(None) if name in group_axes else 0 for name in names)
    return _size_and_stride(ids[index].ravel().tolist())
  if match := _IOTA.search(attributes):
    groups = _iota(match["ids"]).reshape(_ints(match["shape"]))
    return _size_and_stride(groups[0].tolist())
  if match := _PAIRS.search(attributes):
    pairs = [_ints(pair) for pair in re.findall(r"\d+,\d+", match[1])]
    strides = [abs(a - b) for a, b in pairs if a != b]
    return (len(pairs), min(strides)) if strides else (1, 1)
  match = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
  return _size_and_stride(_ints(match[1])) if match else (num_devices, 1)


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


def _size_and_stride(ids: list[int]) -> tuple[int, int]:
  return len(ids), abs(ids[1] - ids[0]) if len(ids) > 1 else 1
