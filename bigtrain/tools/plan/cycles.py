"""Estimates the seconds of a step from a program for TPUs.

The TPU's compiler writes its estimate of the cycles of each operation into the
text of the program. This module adds them up: a loop's body counts once for
each iteration, and a branch counts as its dearer side.

Transfers have no cycles. They take the time of their bytes at the published
bandwidth, one after the other. An asynchronous transfer runs behind the
operations between its start and its end; only the rest of it is exposed.

Two things are not in the sum but in entries of their own. Steps with a row
compute norms, others do not. And the compiler does not know the cycles of
kernels (Pallas).
"""

import collections
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from bigtrain.tools.plan import collectives, hlo

# The compiler writes the largest number for some products. Those get the rate
# at which the same compiler estimates large products: with 8,192 x 8,192
# matrices it reaches 88% of a v5e's peak and 90% of a v5p's.
_UNKNOWN_CYCLES = 10**15
_PRODUCT_EFFICIENCY = 0.88

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_KERNEL = re.compile(r'custom_call_target="tpu_custom_call"')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_SCOPE = re.compile(r'op_name="([^"]*)"')


class Estimate(NamedTuple):
  """Estimated cost of a step.

  Attributes:
    compute_secs: time of the operations, without kernels and norms.
    exposed_secs: time in which the step only waits for transfers.
    transfer_secs: time of all transfers.
    sent_bytes: bytes that each device sends in them.
    row_secs: time of the norms, in steps with a row.
    kernels: {name: number of runs} of kernels.
    unknown_loops: number of loops with an unknown trip count; they count once.
  """

  compute_secs: float
  exposed_secs: float
  transfer_secs: float
  sent_bytes: float
  row_secs: float
  kernels: dict[str, int]
  unknown_loops: int

  @property
  def secs(self) -> float:
    """Time of a step without a row and without the kernels."""
    return self.compute_secs + self.exposed_secs


def read(
  text: str,
  clock_hertz: float,
  flops_per_cycle: float,
  transfer_secs: Callable[[collectives.Collective], float],
) -> Estimate | None:
  """Returns the estimate; None if the text has no cycles."""
  if not _CYCLES.search(text):
    return None
  reader = _Reader(hlo.Module(text), flops_per_cycle, clock_hertz)
  cost = reader.computation(reader.module.entry, transfer_secs)
  return Estimate(
    cost.compute,
    cost.exposed,
    cost.transfer,
    cost.sent,
    cost.row,
    dict(cost.kernels),
    reader.unknown_loops,
  )


class _Cost(NamedTuple):
  """Seconds, bytes sent, and runs of kernels."""

  compute: float = 0.0
  exposed: float = 0.0
  transfer: float = 0.0
  sent: float = 0.0
  row: float = 0.0
  kernels: collections.Counter[str] = collections.Counter()

  def plus(self, other: "_Cost", times: int = 1) -> "_Cost":
    kernels = collections.Counter(self.kernels)
    for name, runs in other.kernels.items():
      kernels[name] += runs * times
    return _Cost(
      self.compute + other.compute * times,
      self.exposed + other.exposed * times,
      self.transfer + other.transfer * times,
      self.sent + other.sent * times,
      self.row + other.row * times,
      kernels,
    )


class _Reader:
  """Adds up the costs of a program.

  Attributes:
    module: the program.
    unknown_loops: number of loops so far with an unknown trip count.
  """

  def __init__(
    self, module: hlo.Module, flops_per_cycle: float, clock_hertz: float
  ):
    self.module = module
    self.unknown_loops = 0
    self._flops_per_cycle = flops_per_cycle
    self._clock_hertz = clock_hertz

  def computation(
    self,
    name: str,
    transfer_secs: Callable[[collectives.Collective], float],
  ) -> _Cost:
    """Cost of a run of a computation, whose text is in the order of its run."""
    computation = self.module.computations[name]
    last = {self._channel(op): op.name for op in computation.values()}
    total = _Cost()
    links_free = 0.0  # On the same clock as `now`.
    ends: dict[str, float] = {}  # Of transfers that have started.

    def now() -> float:
      return total.compute + total.exposed

    for op in computation.values():
      # An asynchronous transfer is a pair of operations, or fusions with parts
      # of a collective, which share a channel.
      key = self._channel(op) or op.name
      collective = self._collective(op, computation)
      if collective is not None and key not in ends:
        secs = transfer_secs(collective)
        links_free = max(links_free, now()) + secs
        total = total._replace(
          transfer=total.transfer + secs,
          sent=total.sent + collective.sent_bytes,
        )
        ends[key] = links_free
      total = total.plus(*self._operation(op, transfer_secs))
      if op.opcode.endswith("-done"):
        ended = [name for name in op.operands if name in ends]
      else:
        starts = op.opcode.endswith("-start") or last.get(key) not in (
          None,
          op.name,
        )
        ended = [key] if key in ends and not starts else []
      for one in ended:
        wait = max(0.0, ends.pop(one) - now())
        total = total._replace(exposed=total.exposed + wait)
    return total

  def _operation(
    self,
    op: hlo.Op,
    transfer_secs: Callable[[collectives.Collective], float],
  ) -> tuple[_Cost, int]:
    """(cost of one run, number of runs) of an operation."""
    if op.opcode == "while":
      rounds = self.module.rounds(op)
      self.unknown_loops += rounds is None
      return self.computation(op.called("body"), transfer_secs), rounds or 1
    if op.opcode == "call":
      return self.computation(op.called("to_apply"), transfer_secs), 1
    if op.opcode == "conditional":
      costs = [self.computation(n, transfer_secs) for n in op.branches]
      cost = max(costs, key=lambda c: c.compute + c.exposed)
      scope = _SCOPE.search(op.attributes)
      if scope and "row_norms" in scope[1].split("/"):
        cost = _Cost(row=cost.compute + cost.exposed)
      return cost, 1
    if op.opcode == "custom-call" and _KERNEL.search(op.attributes):
      scope = _SCOPE.search(op.attributes)
      name = scope[1].rsplit("/", 1)[-1] if scope else op.name
      return _Cost(kernels=collections.Counter([name])), 1
    return _Cost(compute=self._cycles(op) / self._clock_hertz), 1

  def _cycles(self, op: hlo.Op) -> float:
    """The compiler's estimate of an operation."""
    match = _CYCLES.search(op.attributes)
    number = int(match[1]) if match else 0
    if number < _UNKNOWN_CYCLES:
      return number
    return self._flops(op) / (self._flops_per_cycle * _PRODUCT_EFFICIENCY)

  def _flops(self, op: hlo.Op) -> int:
    """FLOPs of the products in an operation."""
    computation = self.module.computations.get(op.called("calls"), {})
    ops = {op.name: op} if not computation else computation
    return sum(_product_flops(one, ops) for one in ops.values()) + sum(
      self._flops(one) for one in ops.values() if one.opcode == "fusion"
    )

  def _inner(self, op: hlo.Op) -> hlo.Computation:
    """Operations of a fusion, or of the wrapper of an asynchronous one."""
    if op.opcode not in ("fusion", "async-start"):
      return {}
    return self.module.computations.get(op.called("calls"), {})

  def _channel(self, op: hlo.Op) -> str:
    """Channel of the collective in a fusion, or ""."""
    if op.opcode == "fusion":
      for one in self._inner(op).values():
        match = _CHANNEL.search(one.attributes)
        if match and one.opcode in collectives.KINDS:
          return f"channel {match[1]}"
    return ""

  def _collective(
    self, op: hlo.Op, computation: hlo.Computation
  ) -> collectives.Collective | None:
    """The transfer that an operation is, starts or continues."""
    inner = self._inner(op)
    for one in inner.values() if inner else [op]:
      body = inner or computation
      if collective := collectives.of(one, body, self.module.num_devices):
        return collective
    return None


def _product_flops(op: hlo.Op, computation: hlo.Computation) -> int:
  """2 x results x contracted elements; TPUs write products as convolutions."""
  if op.opcode != "convolution" or op.operands[1] not in computation:
    return 0
  labels = re.search(r"dim_labels=\w+_(\w+)->", op.attributes)
  kernel = hlo.shape(computation[op.operands[1]].type)
  contracted = math.prod(kernel) // kernel[labels[1].index("o")]
  return 2 * math.prod(hlo.shape(op.type)) * contracted
