"""The time of a step on a TPU, by its compiler's own estimate.

The compiler writes into the text how many cycles it expects each operation to
take. Transfers have no cycles: each is assumed to take the time that follows
from the hardware's bandwidth, one after the other. An asynchronous transfer
overlaps with the operations between its start and its end. Only the rest is
exposed, which means that the step waits for it. The compiler does not know the
cycles of Pallas kernels, so the result has their number instead.
"""

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from bigtrain.tools.plan import collectives
from bigtrain.tools.plan.collectives import Collective
from bigtrain.tools.plan.hlo import Computation, Module, Op
from bigtrain.tools.plan.products import TARGET, flops_of

# The compiler writes the largest number for some products. Those get the rate
# at which the same compiler estimates large products: with 8,192 x 8,192
# matrices it reaches 88% of a v5e's peak and 90% of a v5p's.
_UNKNOWN_CYCLES = 10**15
_PRODUCT_EFFICIENCY = 0.88

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_SCOPE = re.compile(r'op_name="([^"]*)"')

TransferSecs = Callable[[Collective], float]
# The first four fields of Cycles by name, and the number of runs of a kernel as
# ("kernel", name).
_Cost = dict[Any, float]


class Cycles(NamedTuple):
  """Estimated cost of a step on a TPU; loops of unknown length count once."""

  # Without kernels. A conditional counts as its most expensive branch.
  compute_secs: float
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
  if not any(_CYCLES.search(run.op.attributes) for run in module.runs()):
    return None
  reader = _Reader(module, clock_hertz, flops_per_cycle, transfer_secs)
  cost = reader.computation(module.entry)
  return Cycles(
    compute_secs=cost["compute_secs"],
    exposed_secs=cost["exposed_secs"],
    transfer_secs=cost["transfer_secs"],
    sent_bytes=cost["sent_bytes"],
    kernels={key[1]: int(n) for key, n in cost.items() if key[0] == "kernel"},
    unknown_loops=reader.unknown_loops,
  )


@dataclasses.dataclass
class _Reader:
  module: Module
  clock_hertz: float
  flops_per_cycle: float
  transfer_secs: TransferSecs
  unknown_loops: int = 0

  def computation(self, name: str) -> _Cost:
    """Cost of one run of a computation, whose text is in execution order."""
    computation = self.module.computations[name]
    # {channel: its last operation}, to recognise the end of a transfer.
    last = {_channel(op, self.module): op.name for op in computation.values()}
    total: _Cost = collections.defaultdict(float)
    links_free = 0.0  # When the links have sent all, on the clock of `now`.
    ends: dict[str, float] = {}  # When each transfer in flight is complete.

    def now() -> float:
      return total["compute_secs"] + total["exposed_secs"]

    for op in computation.values():
      # An asynchronous transfer is a pair of operations, or several fusions
      # with parts of a collective, which have the same channel.
      key = _channel(op, self.module) or op.name
      collective = self._collective(op, computation)
      if collective is not None and key not in ends:
        secs = self.transfer_secs(collective)
        links_free = max(links_free, now()) + secs
        ends[key] = links_free
        total["transfer_secs"] += secs
        total["sent_bytes"] += collective.sent_bytes
      cost, runs = self._operation(op)
      for entry, value in cost.items():
        total[entry] += value * runs
      if op.opcode.endswith("-done"):
        awaited = [name for name in op.operands if name in ends]
      else:
        is_start = op.opcode.endswith("-start")
        continues = last.get(key) not in (None, op.name)
        awaited = [key] if key in ends and not (is_start or continues) else []
      for one in awaited:
        total["exposed_secs"] += max(0.0, ends.pop(one) - now())
    return total

  def _operation(self, op: Op) -> tuple[_Cost, int]:
    """(cost of one run, number of runs) of an operation."""
    if op.opcode == "while":
      rounds = self.module.rounds(op)
      if rounds is None:
        self.unknown_loops += 1
        rounds = 1
      if rounds == 0:
        return {}, 0
      return self.computation(op.called("body")), rounds
    if op.opcode == "call":
      return self.computation(op.called("to_apply")), 1
    if op.opcode == "conditional":
      costs = [self.computation(name) for name in op.branches]
      return max(costs, key=_secs), 1
    target = TARGET.search(op.attributes)
    if target and target[1] == "tpu_custom_call":
      scope = _SCOPE.search(op.attributes)
      name = scope[1].rsplit("/", 1)[-1] if scope else op.name
      return {("kernel", name): 1}, 1
    match = _CYCLES.search(op.attributes)
    num_cycles = float(match[1]) if match else 0.0
    if num_cycles >= _UNKNOWN_CYCLES:
      flops_per_cycle = self.flops_per_cycle * _PRODUCT_EFFICIENCY
      num_cycles = self._flops(op) / flops_per_cycle
    return {"compute_secs": num_cycles / self.clock_hertz}, 1

  def _flops(self, op: Op) -> int:
    """FLOPs of an operation, or of those that are fused in it."""
    inner = self.module.computations.get(op.called("calls")) or {op.name: op}
    total = sum(flops_of(one, inner) for one in inner.values())
    return total + sum(
      self._flops(one) for one in inner.values() if one.opcode == "fusion"
    )

  def _collective(self, op: Op, computation: Computation) -> Collective | None:
    """The collective that an operation is, or that is fused in it."""
    num_devices = self.module.num_devices
    inner = _wrapped(op, self.module)
    if not inner:
      return collectives.of_op(op, computation, num_devices)
    for one in inner.values():
      if found := collectives.of_op(one, inner, num_devices):
        return found
    return None


def _secs(cost: _Cost) -> float:
  return cost["compute_secs"] + cost["exposed_secs"]


def _wrapped(op: Op, module: Module) -> Computation:
  if op.opcode not in ("fusion", "async-start"):
    return {}
  return module.computations.get(op.called("calls"), {})


def _channel(op: Op, module: Module) -> str:
  """The channel of a collective that is fused in an operation, or ""."""
  if op.opcode == "fusion":
    for one in _wrapped(op, module).values():
      match = _CHANNEL.search(one.attributes)
      if match and one.opcode in collectives.KINDS:
        return f"channel {match[1]}"
  return ""
