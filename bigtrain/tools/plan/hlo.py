"""Reads the text of a compiled program (HLO): what it sends, computes, waits.

A program consists of computations, lists of operations. Loops, branches and
calls name the computations that they run; a loop's body counts once for each
iteration. `Module` parses a text once; what follows reads a module:

  sent       its collectives, from the text of XLA's partitioner
  products   its matrix products, from the text of the GPU's compiler
  cycles     its time, from the text of the TPU's compiler
"""

import collections
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

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
    if self.opcode == "conditional":
      return self.branches
    if self.opcode == "while":
      names = ("body", "condition")
    elif self.opcode in ("call", "fusion", "async-start"):
      names = ("to_apply", "calls")
    else:
      return []
    return [name for name in map(self.called, names) if name]

  @property
  def branches(self) -> list[str]:
    if match := re.search(r"branch_computations=\{([^}]*)\}", self.attributes):
      return [n.strip().lstrip("%") for n in match[1].split(",")]
    names = ("true_computation", "false_computation")
    return [name for name in map(self.called, names) if name]


Computation = dict[str, Op]

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*->.*\{\s*$")  # Not indented.
_RESULT = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<= ]*)\]")
_NAME = re.compile(r"%?([\w.\-#]+)\s*$")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "tf32": 32}


class Module:
  """A program: its computations by name, and the name of the first one."""

  def __init__(self, text: str):
    self.computations: dict[str, Computation] = {}
    self.entry = ""
    counts = (r"\bnum_partitions=(\d+)", r"\breplica_count=(\d+)")
    matches = [re.search(pattern, text) for pattern in counts]
    self.num_devices = math.prod(int(match[1]) for match in matches if match)
    current: Computation = {}
    for line in text.splitlines():
      if header := _HEADER.match(line):
        current = self.computations[header[2]] = {}
        self.entry = header[2] if header[1] else self.entry
      elif result := _RESULT.match(line):
        op = _parse(result[1], result[2])
        current |= {n: _element(n, current) for n in op.operands if "#" in n}
        current[op.name] = op

  def runs(self) -> Iterator[tuple[Op, Computation, int, bool]]:
    """Yields (operation, its computation, number of runs, guessed).

    The number is a guess inside of loops with an unknown trip count.
    """
    stack = [(self.entry, 1, False)]
    while stack:
      name, times, guessed = stack.pop()
      computation = self.computations.get(name, {})
      for op in computation.values():
        yield op, computation, times, guessed
        rounds = self.rounds(op) if op.opcode == "while" else 1
        inside = times * (rounds or 1), guessed or rounds is None
        stack += [(callee, *inside) for callee in op.callees]

  def _inner(self, name: str) -> Iterator[Op]:
    """Yields the operations of a computation and of the fusions in it."""
    for op in self.computations.get(name, {}).values():
      yield op
      if op.opcode == "fusion":
        yield from self._inner(op.called("calls"))

  def rounds(self, op: Op) -> int | None:
    """Trip count of a loop from its annotation or condition, or None."""
    if match := _TRIPS.search(op.attributes):
      return int(match[1])
    condition = list(self._inner(op.called("condition")))
    if not any("direction=LT" in one.attributes for one in condition):
      return None
    # Counters of scans start at 0 and end at the only whole number.
    limits = [
      int(one.operands[0])
      for one in condition
      if one.opcode == "constant" and one.type[:3] in ("s32", "u32", "s64")
    ]
    return max(limits, default=None)


def _type_bytes(text: str) -> int:
  """Bytes of an array, or of all arrays of a tuple, without padding."""
  total = 0
  for name, dims in _ARRAY.findall(text):
    digits = re.search(r"\d+", name)
    bits = _BITS.get(name, int(digits[0]) if digits else 0)
    total += math.prod(_sizes(dims)) * bits // 8
  return total


def _shape(text: str) -> list[int]:
  match = _ARRAY.search(text)
  return _sizes(match[2]) if match else []


def _sizes(dims: str) -> list[int]:
  return [int(d.replace("<=", "")) for d in dims.split(",") if d.strip()]


def _parse(name: str, text: str) -> Op:
  """Parses "TYPE opcode(operands), attributes"."""
  end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
  rest = text[end:].lstrip()
  begin = rest.index("(")
  close = _closing(rest, begin)
  parts = map(_NAME.search, split_at_commas(rest[begin + 1 : close]))
  operands = [match[1] for match in parts if match]
  return Op(name, text[:end], rest[:begin], operands, rest[close + 1 :])


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


# Collectives. The text is the partitioner's output, because later passes differ
# between backends: the CPU's send float32 in place of bfloat16, and the TPU's
# may fuse parts of a gather into products. The partitioner emits no
# reduce-scatter but an all-reduce and a slice, which GPU and TPU compilers fuse
# into a reduce-scatter, so that pair counts as one.

KINDS = tuple(
  "all-gather reduce-scatter all-reduce all-to-all collective-permute".split()
)
_OTHER_NAMES = {
  "ragged-all-to-all": "all-to-all",
  "collective-broadcast": "all-gather",
}

# Ops that keep the values of an array.
_UNCHANGED = {"bitcast", "convert", "copy", "reshape", "transpose"}

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
_LIST = re.compile(r"replica_groups=\{\{([\d,]*)\}")


class Collective(NamedTuple):
  """All collectives of one kind and group in a step of a program."""

  kind: str
  group_size: int
  stride: int  # Between the numbers of neighbouring devices in a group.
  runs: int  # Number of executions per step.
  # Per step, of the whole arrays: the outputs of all-gathers, the inputs of
  # reduce-scatters, either for the other kinds.
  nbytes: int
  # Number of neighbours in a group at this stride, if the distance then
  # changes, as in a group over two axes of the mesh; 0 if it does not.
  inner: int = 0
  span: int = 0  # Devices from the first to the last of such a group.

  @property
  def sent_bytes(self) -> float:
    """Bytes that each device sends, and receives, per step.

    In a ring of n devices, each passes on n - 1 of the n parts of a gather or
    scatter. An all-reduce is both (doi.org/10.1016/j.jpdc.2008.09.002).
    """
    if self.group_size < 2:
      return 0.0
    if self.kind == "collective-permute":
      return float(self.nbytes)
    times = 2 if self.kind == "all-reduce" else 1
    return times * self.nbytes * (self.group_size - 1) / self.group_size


def sent(module: Module) -> tuple[list[Collective], int]:
  """Returns the collectives, largest first, and the number of unknown loops."""
  totals: dict[Collective, Collective] = {}
  unknown = set()
  for op, computation, times, guessed in module.runs():
    one = _collective(op, computation, module.num_devices)
    if one is None:
      continue
    key = one._replace(runs=0, nbytes=0)
    total = totals.get(key, key)
    totals[key] = key._replace(
      runs=total.runs + times, nbytes=total.nbytes + times * one.nbytes
    )
    if guessed:
      unknown.add(id(computation))
  return sorted(totals.values(), key=lambda c: -c.nbytes), len(unknown)


def _collective(
  op: Op, computation: Computation, num_devices: int
) -> Collective | None:
  name = op.opcode.removesuffix("-start")  # A "-done" is counted at its start.
  kind = _OTHER_NAMES.get(name, name)
  if kind not in KINDS:
    return None
  size, stride, *gaps = _groups(op.attributes, num_devices)
  operands = [computation[name] for name in op.operands if name in computation]
  nbytes = sum(_type_bytes(operand.type) for operand in operands)
  if size < 2 or not nbytes:
    return None
  if kind == "all-gather":
    nbytes *= size
  if kind == "all-reduce" and _sliced(op.name, computation, size):
    kind = "reduce-scatter"
  return Collective(kind, size, stride, 1, nbytes, *gaps)


def _sliced(name: str, computation: Computation, size: int) -> bool:
  """Whether every use of a result takes only this device's part of it."""
  users = [op for op in computation.values() if name in op.operands]
  for op in users:
    if op.opcode == "dynamic-slice" and op.operands[0] == name:
      if _type_bytes(op.type) * size > _type_bytes(computation[name].type):
        return False
    elif op.opcode not in _UNCHANGED or not _sliced(op.name, computation, size):
      return False
  return bool(users)


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
    groups = _iota(match["ids"]).reshape(_sizes(match["shape"]))
    return distances(groups[0].tolist())
  if match := _PAIRS.search(attributes):
    pairs = [_sizes(pair) for pair in re.findall(r"\d+,\d+", match[1])]
    strides = [abs(a - b) for a, b in pairs if a != b]
    return (len(pairs), min(strides)) if strides else (1, 1)
  match = _LIST.search(attributes)
  return distances(_sizes(match[1])) if match else (num_devices, 1)


def _iota(text: str) -> np.ndarray:
  """Device numbers that "[8,8]T(1,0)" stands for: an iota, transposed."""
  dims, _, order = text.partition("T")
  sizes = _sizes(dims.strip("[]"))
  ids = np.arange(math.prod(sizes)).reshape(sizes)
  return ids.transpose(_sizes(order.strip("()"))) if order else ids


def distances(ids: Sequence[int]) -> tuple[int, ...]:
  """(group_size, stride) of devices; with inner and span if these differ."""
  if len(ids) < 2:
    return len(ids), 1
  steps = [abs(b - a) for a, b in itertools.pairwise(ids)]
  changed = [at for at, step in enumerate(steps) if step != steps[0]]
  if not changed:
    return len(ids), steps[0]
  return len(ids), steps[0], changed[0] + 1, max(ids) - min(ids) + 1


# Products. The GPU's compiler estimates no times, but its text has every
# product that a step runs, whatever the model asked for: a product of experts
# that became dense shows here.

_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_CONFIG = re.compile(r'"dot_dimension_numbers":(\{.*?\}),"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")


class Products(NamedTuple):
  """Products of a step on one device; loops of unknown length count once."""

  flops: int  # Branches count with all their sides.
  kernels: dict[str, int]  # Runs of cuDNN's attention, which is not in `flops`.
  unknown_loops: int


def products(module: Module) -> Products:
  flops = 0
  unknown = set()
  kernels: collections.Counter[str] = collections.Counter()
  for op, computation, times, guessed in module.runs():
    target = _TARGET.search(op.attributes)
    if target and "fmha" in target[1]:
      kernels[target[1]] += times
    if of_op := _product_flops(op, computation):
      flops += times * of_op
      if guessed:
        unknown.add(id(computation))
  return Products(flops, dict(kernels), len(unknown))


def _product_flops(op: Op, computation: Computation) -> int:
  """2 x results x contracted elements; 0 of other operations."""
  match = _TARGET.search(op.attributes)
  target = match[1] if match else ""
  if op.opcode == "convolution" or target.startswith("__cudnn$conv"):
    return _convolution_flops(op, computation, target)
  if op.opcode != "dot" and not target.startswith("__cublas$"):
    return 0
  if contracted := _CONTRACTED.search(op.attributes):
    dims = _sizes(contracted[1])
  elif numbers := _CONFIG.search(op.attributes):
    names = json.loads(numbers[1])
    dims = [int(n) for n in names["lhs_contracting_dimensions"]]
  else:
    return 0
  if op.operands[0] not in computation:
    return 0
  lhs = _shape(computation[op.operands[0]].type)
  return 2 * math.prod(_shape(op.type)) * math.prod(lhs[d] for d in dims)


def _convolution_flops(op: Op, computation: Computation, target: str) -> int:
  """2 x outputs x elements of a kernel; a gradient costs the same."""
  labels = _LABELS.search(op.attributes)
  if not labels or not computation.keys() >= {*op.operands[:2]}:
    return 0
  first, second = (_shape(computation[n].type) for n in op.operands[:2])
  result = _shape(op.type)
  # (outputs, kernel) of the convolution of which this is a gradient.
  outputs, kernel = {
    "__cudnn$convBackwardInput": (first, second),
    "__cudnn$convBackwardFilter": (second, result),
  }.get(target, (result, second))
  products = math.prod(outputs) * math.prod(kernel)
  return 2 * products // kernel[labels[1].index("o")]


# Cycles. The TPU's compiler writes its estimate for each operation into the
# text. Transfers have no cycles: they take the time of their bytes, one after
# the other. An asynchronous transfer runs behind the operations between its
# start and its end; only the rest of it is exposed. The compiler does not know
# the cycles of kernels (Pallas).

# The compiler writes the largest number for some products. Those get the rate
# at which the same compiler estimates large products: with 8,192 x 8,192
# matrices it reaches 88% of a v5e's peak and 90% of a v5p's.
_UNKNOWN_CYCLES = 10**15
_PRODUCT_EFFICIENCY = 0.88

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_SCOPE = re.compile(r'op_name="([^"]*)"')

TransferSecs = Callable[[Collective], float]
# Seconds by the names of Cycles, and ("kernel", name): number of runs.
_Cost = dict[Any, float]


class Cycles(NamedTuple):
  """Estimated cost of a step on a TPU; loops of unknown length count once."""

  compute_secs: float  # Without kernels; a branch counts as its dearest side.
  exposed_secs: float  # The step only waits for transfers.
  transfer_secs: float
  sent_bytes: float  # By each device.
  kernels: dict[str, int]  # {name: number of runs}.
  unknown_loops: int


def cycles(
  module: Module,
  clock_hertz: float,
  flops_per_cycle: float,
  transfer_secs: TransferSecs,
) -> Cycles | None:
  """Returns the time of a program; None if its text has no cycles."""
  if not any(_CYCLES.search(op.attributes) for op, *_ in module.runs()):
    return None
  reader = _CycleReader(module, clock_hertz, flops_per_cycle, transfer_secs)
  cost = reader.computation(module.entry)
  kernels = {key[1]: int(n) for key, n in cost.items() if key[0] == "kernel"}
  sums = {name: cost[name] for name in Cycles._fields[:4]}
  return Cycles(**sums, kernels=kernels, unknown_loops=reader.unknown_loops)


@dataclasses.dataclass
class _CycleReader:
  module: Module
  clock_hertz: float
  flops_per_cycle: float
  transfer_secs: TransferSecs
  unknown_loops: int = 0

  def computation(self, name: str) -> _Cost:
    """Cost of a run of a computation, whose text is in the order of its run."""
    computation = self.module.computations[name]
    last = {self._channel(op): op.name for op in computation.values()}
    total: _Cost = collections.defaultdict(float)
    links_free = 0.0  # On the same clock as `now`.
    ends: dict[str, float] = {}  # Of transfers that have started.

    def now() -> float:
      return total["compute_secs"] + total["exposed_secs"]

    for op in computation.values():
      # An asynchronous transfer is a pair of operations, or fusions with parts
      # of a collective, which share a channel.
      key = self._channel(op) or op.name
      collective = self._transfer(op, computation)
      if collective is not None and key not in ends:
        secs = self.transfer_secs(collective)
        ends[key] = links_free = max(links_free, now()) + secs
        total["transfer_secs"] += secs
        total["sent_bytes"] += collective.sent_bytes
      cost, runs = self._operation(op)
      for entry, value in cost.items():
        total[entry] += value * runs
      if op.opcode.endswith("-done"):
        ended = [name for name in op.operands if name in ends]
      else:
        continues = last.get(key) not in (None, op.name)
        starts = op.opcode.endswith("-start") or continues
        ended = [key] if key in ends and not starts else []
      for one in ended:
        total["exposed_secs"] += max(0.0, ends.pop(one) - now())
    return total

  def _operation(self, op: Op) -> tuple[_Cost, int]:
    """(cost of one run, number of runs) of an operation."""
    if op.opcode == "while":
      rounds = self.module.rounds(op)
      self.unknown_loops += rounds is None
      return self.computation(op.called("body")), rounds or 1
    if op.opcode == "call":
      return self.computation(op.called("to_apply")), 1
    if op.opcode == "conditional":
      secs = lambda cost: cost["compute_secs"] + cost["exposed_secs"]
      return max(map(self.computation, op.branches), key=secs), 1
    target = _TARGET.search(op.attributes)
    if target and target[1] == "tpu_custom_call":
      scope = _SCOPE.search(op.attributes)
      name = scope[1].rsplit("/", 1)[-1] if scope else op.name
      return {("kernel", name): 1}, 1
    match = _CYCLES.search(op.attributes)
    number = float(match[1]) if match else 0.0
    if number >= _UNKNOWN_CYCLES:
      number = self._flops(op) / (self.flops_per_cycle * _PRODUCT_EFFICIENCY)
    return {"compute_secs": number / self.clock_hertz}, 1

  def _flops(self, op: Op) -> int:
    ops = self.module.computations.get(op.called("calls")) or {op.name: op}
    return sum(_product_flops(one, ops) for one in ops.values()) + sum(
      self._flops(one) for one in ops.values() if one.opcode == "fusion"
    )

  def _wrapped(self, op: Op) -> Computation:
    if op.opcode not in ("fusion", "async-start"):
      return {}
    return self.module.computations.get(op.called("calls"), {})

  def _channel(self, op: Op) -> str:
    if op.opcode == "fusion":
      for one in self._wrapped(op).values():
        match = _CHANNEL.search(one.attributes)
        if match and one.opcode in KINDS:
          return f"channel {match[1]}"
    return ""

  def _transfer(self, op: Op, computation: Computation) -> Collective | None:
    inner = self._wrapped(op)
    for one in inner.values() if inner else [op]:
      body = inner or computation
      if sent := _collective(one, body, self.module.num_devices):
        return sent
    return None
