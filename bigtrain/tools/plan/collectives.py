"""What a program sends over the network, read from its text.

XLA's partitioner turns the program of all devices into that of one of them,
and decides there which collectives it needs. Here they are counted as often as
they run: one inside of a scan over 32 layers 32 times.

The text is that which the partitioner leaves (`--xla_dump_hlo_pass_re=
spmd-partitioning`). What a backend makes of it later differs: the CPU's sends
float32 in place of bfloat16, the TPU's cuts gathers into permutes that run
beside the product they are for. The bytes to be sent are those of the text.

The partitioner has no reduce-scatter. It adds up whole arrays and keeps a
slice, which GPU and TPU compilers turn into one; so that is how it is counted.
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
# What an array passes through on its way without being changed.
_PASSES = {"bitcast", "convert", "copy", "reshape", "transpose"}


class Collective(NamedTuple):
  """Like collectives of a program, all that run in one step.

  Attributes:
    kind: one of KINDS.
    group_size: devices that take part in each of them.
    stride: from one of these devices to the next, by number.
    runs: how often one of them runs.
    nbytes: of the whole arrays, all of them together: what an all-gather
      returns, a reduce-scatter takes, and the others take and return.
  """

  kind: str
  group_size: int
  stride: int
  runs: int
  nbytes: int

  @property
  def sent_bytes(self) -> float:
    """Bytes that each device sends; see `sent_fraction`."""
    return self.nbytes * sent_fraction(self.kind, self.group_size)


def sent_fraction(kind: str, group_size: int) -> float:
  """Bytes that a device sends, and receives, for each byte of the array.

  In a ring of n devices, a gather or a scatter passes each of the n parts but
  one's own, so (n - 1) / n of the array; an all-reduce does one and then the
  other (Patarasuk and Yuan 2009, doi.org/10.1016/j.jpdc.2008.09.002).
  """
  if group_size < 2:
    return 0.0
  if kind == "collective-permute":
    return 1.0
  times = 2 if kind == "all-reduce" else 1
  return times * (group_size - 1) / group_size


class Program(NamedTuple):
  """What is found in a program's text.

  Attributes:
    collectives: sorted, most bytes first.
    unknown_loops: loops with collectives in them whose number of rounds is
      not in the text; they are counted as one round.
  """

  collectives: list[Collective]
  unknown_loops: int


def read(text: str) -> Program:
  """The collectives of a program.

  Args:
    text: as jax.stages.Compiled.as_text returns it.
  """
  module = _Module(text)
  found: collections.Counter[tuple[Any, ...]] = collections.Counter()
  runs: collections.Counter[tuple[Any, ...]] = collections.Counter()
  unknown = 0
  for computation, times, loops in module.walk():
    has_any = False
    for op in computation.values():
      kind = _kind(op)
      if kind is None:
        continue
      size, stride = _groups(op.attributes, module.num_devices)
      nbytes = _array_bytes(kind, op, computation, size)
      if size < 2 or not nbytes:
        continue
      has_any = True
      if kind == "all-reduce" and _sliced(op.name, computation, size):
        kind = "reduce-scatter"
      found[kind, size, stride] += times * nbytes
      runs[kind, size, stride] += times
    unknown += has_any and loops
  collected = [
    Collective(kind, size, stride, runs[kind, size, stride], nbytes)
    for (kind, size, stride), nbytes in found.items()
  ]
  return Program(sorted(collected, key=lambda c: -c.nbytes), unknown)


def to_json(found: list[Collective]) -> list[dict[str, Any]]:
  """As JSON has it; `from_json` reads it."""
  return [c._asdict() for c in found]


def from_json(found: list[dict[str, Any]]) -> list[Collective]:
  """What `to_json` wrote."""
  return [Collective(**c) for c in found]


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
  """A program's computations, by name."""

  def __init__(self, text: str):
    self._computations: dict[str, _Computation] = {}
    self._entry = ""
    partitions = re.search(r"\bnum_partitions=(\d+)", text)
    replicas = re.search(r"\breplica_count=(\d+)", text)
    self.num_devices = math.prod(
      int(found[1]) for found in (partitions, replicas) if found
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
    """(computation, how often it runs, whether that is a guess) of all."""
    waiting = [(self._entry, 1, False)]
    while waiting:
      name, times, guessed = waiting.pop()
      computation = self._computations.get(name, {})
      yield computation, times, guessed
      for op in computation.values():
        rounds = self._rounds(op) if op.opcode == "while" else 1
        for callee in _callees(op):
          waiting.append(
            (callee, times * (rounds or 1), guessed or rounds is None)
          )

  def _rounds(self, op: _Op) -> int | None:
    """How often a loop runs: as it is told, or from a scan's condition."""
    told = re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', op.attributes)
    if told:
      return int(told[1])
    condition = self._computations.get(_called(op, "condition"), {})
    last = next(reversed(condition.values()), None)
    if last is None or "direction=LT" not in last.attributes:
      return None
    limit = condition.get(last.operands[1])
    # Counters of scans begin at 0.
    if limit is None or limit.opcode != "constant":
      return None
    return int(limit.operands[0])


def _sliced(name: str, computation: _Computation, size: int) -> bool:
  """Whether all that is used of a result is this device's part of it."""
  users = [op for op in computation.values() if name in op.operands]
  for op in users:
    if op.opcode == "dynamic-slice" and op.operands[0] == name:
      whole = _type_bytes(computation[name].type)
      if _type_bytes(op.type) * size > whole:
        return False
    elif op.opcode not in _PASSES or not _sliced(op.name, computation, size):
      return False
  return bool(users)


def _parse(name: str, text: str) -> _Op:
  """The op of `text`: TYPE opcode(operands), attributes."""
  if text.startswith("("):
    end = _closing(text, 0) + 1
  else:
    end = text.index(" ")
  kind, rest = text[:end], text[end:].lstrip()
  begin = rest.index("(")
  close = _closing(rest, begin)
  operands = []
  for part in _split(rest[begin + 1 : close]):
    found = _NAME.search(part)
    if found:
      operands.append(found[1])
  return _Op(name, kind, rest[:begin], operands, rest[close + 1 :])


def _closing(text: str, start: int) -> int:
  """Where the parenthesis that opens at `start` closes."""
  depth = 0
  for i in range(start, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if not depth:
      return i
  raise ValueError(f"no closing parenthesis in {text[:80]!r}")


def _split(text: str) -> list[str]:
  """Splits at commas that are in no bracket."""
  parts, depth, begin = [], 0, 0
  for i, letter in enumerate(text):
    depth += (letter in "([{") - (letter in ")]}")
    if letter == "," and not depth:
      parts.append(text[begin:i])
      begin = i + 1
  return [*parts, text[begin:]]


def _called(op: _Op, attribute: str) -> str:
  found = re.search(rf"\b{attribute}=%?([\w.\-]+)", op.attributes)
  return found[1] if found else ""


def _callees(op: _Op) -> list[str]:
  """Names of the computations that an op runs."""
  if op.opcode == "conditional":
    found = re.search(r"branch_computations=\{([^}]*)\}", op.attributes)
    if found:
      return [n.strip().lstrip("%") for n in found[1].split(",")]
    names: tuple[str, ...] = ("true_computation", "false_computation")
  elif op.opcode == "while":
    names = ("body", "condition")
  elif op.opcode in ("call", "fusion") or op.opcode.startswith("async-start"):
    names = ("to_apply", "calls")
  else:
    names = ()
  return [name for name in (_called(op, n) for n in names) if name]


def _kind(op: _Op) -> str | None:
  if op.opcode.endswith("-done"):  # Counted where it starts.
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
  """(devices, stride) of the first of the groups that an op runs in."""
  if found := _MESH.search(attributes):
    names = re.findall(r"'(\w+)'=", found["sizes"])
    sizes = [int(n) for n in re.findall(r"=(\d+)", found["sizes"])]
    ids = _iota(found["ids"] or f"[{math.prod(sizes)}]").reshape(sizes)
    own = re.findall(r"'(\w+)'", found["axes"])
    at = tuple(slice(None) if name in own else 0 for name in names)
    return _of_ids(ids[at].ravel().tolist())
  if found := _IOTA.search(attributes):
    groups = _iota(found["ids"]).reshape(_ints(found["shape"]))
    return _of_ids(groups[0].tolist())
  if found := _PAIRS.search(attributes):
    pairs = [_ints(pair) for pair in re.findall(r"\d+,\d+", found[1])]
    steps = [abs(a - b) for a, b in pairs if a != b]
    return (len(pairs), min(steps)) if steps else (1, 1)
  found = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
  return _of_ids(_ints(found[1])) if found else (num_devices, 1)


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
  """Device numbers as "[8,8]T(1,0)" has them: counted, then transposed."""
  dims, _, order = text.partition("T")
  sizes = _ints(dims.strip("[]"))
  ids = np.arange(math.prod(sizes)).reshape(sizes)
  return ids.transpose(_ints(order.strip("()"))) if order else ids


def _ints(text: str) -> list[int]:
  return [int(n) for n in text.split(",") if n]


def _of_ids(ids: list[int]) -> tuple[int, int]:
  return len(ids), abs(ids[1] - ids[0]) if len(ids) > 1 else 1
