"""Parses the text of a compiled program (HLO).

A program consists of computations, which are lists of operations, one a line.
Loops, branches and calls name the computations that they run, so an operation
in the body of a loop runs once for each iteration. `Module` parses a text;
other modules of this package read it:

  collectives.py  what the program sends, from the text of XLA's partitioner
  products.py     its matrix products, from the text of the GPU's compiler
  cycles.py       its time, from the text of the TPU's compiler
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from bigtrain.arrays import model_flops
from bigtrain.tools.arguments import split_at_commas


class Op(NamedTuple):
  """An operation, from a line of the text."""

  name: str
  type: str  # Of its result, such as "f32[8,128]{1,0}".
  opcode: str
  operands: list[str]  # Their names; the value of a constant.
  attributes: str  # The rest of the line.

  def called(self, attribute: str) -> str:
    """Name of the computation in an attribute, such as "body", or ""."""
    match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
    return match[1] if match else ""

  @property
  def callees(self) -> list[str]:
    """Names of all computations that it runs."""
    if self.opcode == "conditional":
      return self.branches
    if self.opcode == "while":
      attributes = ("body", "condition")
    elif self.opcode in ("call", "fusion", "async-start"):
      attributes = ("to_apply", "calls")
    else:
      return []
    return [name for name in map(self.called, attributes) if name]

  @property
  def branches(self) -> list[str]:
    if match := re.search(r"branch_computations=\{([^}]*)\}", self.attributes):
      return [n.strip().lstrip("%") for n in match[1].split(",")]
    attributes = ("true_computation", "false_computation")
    return [name for name in map(self.called, attributes) if name]


Computation = dict[str, Op]


class Run(NamedTuple):
  """An operation, and how often a step runs it."""

  op: Op
  computation: Computation  # Where it is, with its operands.
  times: int
  # Whether it is inside a loop whose trip count is unknown; such a loop counts
  # once.
  is_guess: bool


# ENTRY %main.5 (p0: f32[8]) -> f32[8] {           (not indented)
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*->.*\{\s*$")
#   ROOT %add.1 = f32[8]{0} add(%p0, %p0)
_RESULT = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<= ]*)\]")
_NAME = re.compile(r"%?([\w.\-#]+)\s*$")
# backend_config={"known_trip_count":{"n":"12"}}
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
# Types of a counter of a loop.
_WHOLE_NUMBER = ("s32[]", "u32[]", "s64[]")
# Bits of the types whose names do not contain them, as "bf16" does.
_BITS = {"pred": 8, "token": 0, "opaque": 0}


class Module:
  """A program: its computations by name, and the name of the first one."""

  def __init__(self, text: str):
    self.computations: dict[str, Computation] = {}
    self.entry = ""
    self.num_devices = 1
    for pattern in (r"\bnum_partitions=(\d+)", r"\breplica_count=(\d+)"):
      if match := re.search(pattern, text):
        self.num_devices *= int(match[1])
    current: Computation = {}
    for line in text.splitlines():
      if header := _HEADER.match(line):
        current = self.computations[header[2]] = {}
        if header[1]:
          self.entry = header[2]
      elif result := _RESULT.match(line):
        op = _parse(result[1], result[2])
        for name in op.operands:
          if "#" in name:
            current[name] = _element(name, current)
        current[op.name] = op

  def runs(self) -> Iterator[Run]:
    """Yields all operations that a step runs."""
    stack = [(self.entry, 1, False)]
    while stack:
      name, times, is_guess = stack.pop()
      computation = self.computations.get(name, {})
      for op in computation.values():
        yield Run(op, computation, times, is_guess)
        rounds = self.rounds(op) if op.opcode == "while" else 1
        if rounds == 0:
          continue
        for callee in op.callees:
          stack.append(
            (callee, times * (rounds or 1), is_guess or rounds is None)
          )

  def rounds(self, op: Op) -> int | None:
    """Trip count of a loop, from its annotation or its condition, or None.

    0 for loops that hardly any step runs.
    """
    if model_flops.is_rare(op.attributes):
      return 0
    if match := _TRIPS.search(op.attributes):
      return int(match[1])
    most = model_flops.most_rounds(op.attributes)
    condition = list(self._with_fusions(op.called("condition")))
    if not any("direction=LT" in one.attributes for one in condition):
      return most
    # The counter of a scan starts at 0 and is compared with the only whole
    # number in the condition.
    limits = [
      int(one.operands[0])
      for one in condition
      if one.opcode == "constant" and one.type[:5] in _WHOLE_NUMBER
    ]
    return max(1, *limits) if limits else most

  def _with_fusions(self, name: str) -> Iterator[Op]:
    """Yields the operations of a computation and of the fusions in it."""
    for op in self.computations.get(name, {}).values():
      yield op
      if op.opcode == "fusion":
        yield from self._with_fusions(op.called("calls"))


def type_bytes(text: str) -> int:
  """Bytes of an array, or of all arrays of a tuple, without padding."""
  total = 0
  for name, dims in _ARRAY.findall(text):
    if name in _BITS:
      bits = _BITS[name]
    else:
      digits = re.search(r"\d+", name)
      bits = int(digits[0]) if digits else 0
    total += math.prod(numbers(dims)) * bits // 8
  return total


def shape(text: str) -> list[int]:
  """Sizes of an array, from its type."""
  match = _ARRAY.search(text)
  return numbers(match[2]) if match else []


def numbers(text: str) -> list[int]:
  """Parses "8,128", also with bounds of dynamic sizes: "<=8,128"."""
  return [int(n.replace("<=", "")) for n in text.split(",") if n.strip()]


def _parse(name: str, text: str) -> Op:
  """Parses "TYPE opcode(operands), attributes"."""
  if text.startswith("("):  # A tuple.
    end = _closing(text, 0) + 1
  else:
    end = text.index(" ")
  rest = text[end:].lstrip()
  begin = rest.index("(")
  close = _closing(rest, begin)
  words = split_at_commas(rest[begin + 1 : close])
  matches = [_NAME.search(word) for word in words]
  return Op(
    name=name,
    type=text[:end],
    opcode=rest[:begin],
    operands=[match[1] for match in matches if match],
    attributes=rest[close + 1 :],
  )


def _element(name: str, computation: Computation) -> Op:
  """The operation that gets an element of a tuple: jax 0.12's "tuple#2"."""
  whole, _, index = name.rpartition("#")
  of_whole = computation.get(whole) or _element(whole, computation)
  types = split_at_commas(of_whole.type[1:-1])
  return Op(name, types[int(index)], "get-tuple-element", [whole], "")


def _closing(text: str, start: int) -> int:
  """Index of the parenthesis that closes the one at `start`."""
  depth = 0
  for match in re.finditer(r"[()]", text[start:]):
    depth += 1 if match[0] == "(" else -1
    if not depth:
      return start + match.start()
  raise ValueError(f"no closing parenthesis in {text[:80]!r}")
