"""Parses the text of a compiled program (HLO).

A program consists of computations, lists of operations. Loops, branches and
calls name the computations that they run.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple


class Op(NamedTuple):
  """An operation.

  Attributes:
    name: name of its result.
    type: type of its result, such as "f32[8,128]{1,0}".
    opcode: "add", "while", "all-gather-start", ...
    operands: names of its operands; the value of a constant.
    attributes: the rest of the line.
  """

  name: str
  type: str
  opcode: str
  operands: list[str]
  attributes: str

  def called(self, attribute: str) -> str:
    """Name of the computation in an attribute, such as "body", or ""."""
    match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
    return match[1] if match else ""

  @property
  def callees(self) -> list[str]:
    """Names of the computations that the operation runs."""
    if self.opcode == "conditional":
      return self.branches
    if self.opcode == "while":
      names = ("body", "condition")
    elif self.opcode in ("call", "fusion") or self.opcode == "async-start":
      names = ("to_apply", "calls")
    else:
      return []
    return [name for name in map(self.called, names) if name]

  @property
  def branches(self) -> list[str]:
    """Names of the computations of which a conditional runs one."""
    match = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
    if match:
      return [n.strip().lstrip("%") for n in match[1].split(",")]
    names = ("true_computation", "false_computation")
    return [name for name in map(self.called, names) if name]


Computation = dict[str, Op]

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*->.*\{\s*$")
_RESULT = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<= ]*)\]")
_NAME = re.compile(r"%?([\w.\-]+)\s*$")
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "tf32": 32}


class Module:
  """A program.

  Attributes:
    computations: by name.
    entry: name of the first computation.
    num_devices: number of devices that run it.
  """

  def __init__(self, text: str):
    """Parses what jax.stages.Compiled.as_text returns."""
    self.computations: dict[str, Computation] = {}
    self.entry = ""
    partitions = re.search(r"\bnum_partitions=(\d+)", text)
    replicas = re.search(r"\breplica_count=(\d+)", text)
    self.num_devices = math.prod(
      int(match[1]) for match in (partitions, replicas) if match
    )
    current: Computation = {}
    for line in text.splitlines():
      if line and not line[0].isspace():
        header = _HEADER.match(line)
        if header:
          current = self.computations[header[2]] = {}
          self.entry = header[2] if header[1] else self.entry
      elif result := _RESULT.match(line):
        current[result[1]] = _parse(result[1], result[2])

  def walk(self) -> Iterator[tuple[Computation, int, bool]]:
    """Yields (computation, number of runs, whether that is a guess)."""
    stack = [(self.entry, 1, False)]
    while stack:
      name, times, guessed = stack.pop()
      computation = self.computations.get(name, {})
      yield computation, times, guessed
      for op in computation.values():
        rounds = self.rounds(op) if op.opcode == "while" else 1
        for callee in op.callees:
          stack.append(
            (callee, times * (rounds or 1), guessed or rounds is None)
          )

  def inner(self, name: str) -> Iterator[Op]:
    """Yields the operations of a computation and of the fusions in it."""
    for op in self.computations.get(name, {}).values():
      yield op
      if op.opcode == "fusion":
        yield from self.inner(op.called("calls"))

  def rounds(self, op: Op) -> int | None:
    """Trip count of a loop from its annotation or condition, or None."""
    match = re.search(
      r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', op.attributes
    )
    if match:
      return int(match[1])
    condition = list(self.inner(op.called("condition")))
    if not any("direction=LT" in one.attributes for one in condition):
      return None
    # Counters of scans start at 0 and end at the only whole number.
    limits = [
      int(one.operands[0])
      for one in condition
      if one.opcode == "constant" and one.type[:3] in ("s32", "u32", "s64")
    ]
    return max(limits, default=None)


def type_bytes(text: str) -> int:
  """Bytes of an array, or of all arrays of a tuple, without padding."""
  total = 0
  for name, dims in _ARRAY.findall(text):
    total += math.prod(_sizes(dims)) * _bits(name) // 8
  return total


def shape(text: str) -> list[int]:
  """Dimensions of the first array of a type."""
  match = _ARRAY.search(text)
  return _sizes(match[2]) if match else []


def _bits(name: str) -> int:
  digits = re.search(r"\d+", name)
  return _BITS.get(name, int(digits[0]) if digits else 0)


def _sizes(dims: str) -> list[int]:
  return [int(d.replace("<=", "")) for d in dims.split(",") if d.strip()]


def _parse(name: str, text: str) -> Op:
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
  return Op(name, kind, rest[:begin], operands, rest[close + 1 :])


def _closing(text: str, start: int) -> int:
  """Index of the parenthesis that closes the one at `start`."""
  depth = 0
  for match in re.finditer(r"[()]", text[start:]):
    depth += 1 if match[0] == "(" else -1
    if not depth:
      return start + match.start()
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
