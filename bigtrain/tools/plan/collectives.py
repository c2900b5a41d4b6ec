"""What a program sends between devices.

The text is the output of XLA's partitioner, because later passes differ between
backends: the CPU's compiler sends float32 in place of bfloat16, and the TPU's
may fuse parts of a gather into products.

The partitioner writes a reduce-scatter as an all-reduce and a slice. The
compilers for GPUs and TPUs fuse the two into a reduce-scatter, so such a pair
counts as one.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bigtrain.tools.plan import groups
from bigtrain.tools.plan.groups import Group
from bigtrain.tools.plan.hlo import Computation, Module, Op, numbers, type_bytes

KINDS = (
  "all-gather",
  "reduce-scatter",
  "all-reduce",
  "all-to-all",
  "collective-permute",
)
# Rare collectives that send as much as one of KINDS.
_ALIASES = {
  "ragged-all-to-all": "all-to-all",
  "collective-broadcast": "all-gather",
}

# Operations that keep the values of an array.
_UNCHANGED = {"bitcast", "convert", "copy", "reshape", "transpose"}

# The four notations for groups of devices.
# mesh['axis_0'=1,'axis_1'=8,'axis_2'=8], device_ids=([8,8]T(1,0)) {'axis_1'}
_MESH = re.compile(
  r"replica_groups=@?mesh\[(?P<sizes>[^\]]*)\]"
  r"(?:, device_ids=\((?P<ids>[^{]*)\))? \{(?P<axes>[^}]*)\}"
)
# replica_groups=[4,4]<=[2,8]T(1,0)
_IOTA = re.compile(
  r"replica_groups=\[(?P<shape>[\d,]+)\]<=(?P<ids>\[[\d,]+\](?:T\([\d,]+\))?)"
)
# source_target_pairs={{0,1},{1,0}}
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
# replica_groups={{0,1},{2,3}}
_LIST = re.compile(r"replica_groups=\{\{([\d,]*)\}")


class Collective(NamedTuple):
  """All collectives of one kind and group in a step of a program."""

  kind: str  # One of KINDS.
  group_size: int
  stride: int  # This and `inner` and `span` are as in `Group`.
  runs: int  # Number of executions per step.
  # Per step, of the whole arrays: the outputs of all-gathers, the inputs of
  # reduce-scatters, either for the other kinds.
  nbytes: int
  inner: int = 0
  span: int = 0

  @property
  def group(self) -> Group:
    return Group(self.group_size, self.stride, self.inner, self.span)

  def over(self, group: Group) -> "Collective":
    """The same collective on other devices."""
    return self._replace(
      group_size=group.size,
      stride=group.stride,
      inner=group.inner,
      span=group.span,
    )

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
    passes = 2 if self.kind == "all-reduce" else 1
    return passes * self.nbytes * (self.group_size - 1) / self.group_size

  def axes(self, mesh: Mapping[str, int]) -> str:
    """The axes of a mesh that it goes over, as in groups.py, or "others"."""
    if self.kind == "collective-permute":
      # Its size counts the pairs of all groups, so only the stride tells.
      return groups.axis_of_stride(self.stride, mesh)
    return groups.axes_of(self.group, mesh)


def sent(module: Module) -> tuple[list[Collective], int]:
  """Returns the collectives, largest first, and the number of unknown loops.

  Loops are unknown if their trip count is; they count once.
  """
  totals: dict[tuple[str, Group], Collective] = {}
  unknown_loops = set()
  for run in module.runs():
    one = of_op(run.op, run.computation, module.num_devices)
    if one is None:
      continue
    key = one.kind, one.group
    total = totals.get(key, one._replace(runs=0, nbytes=0))
    totals[key] = total._replace(
      runs=total.runs + run.times,
      nbytes=total.nbytes + run.times * one.nbytes,
    )
    if run.is_guess:
      unknown_loops.add(id(run.computation))
  largest_first = sorted(totals.values(), key=lambda one: -one.nbytes)
  return largest_first, len(unknown_loops)


def of_op(
  op: Op, computation: Computation, num_devices: int
) -> Collective | None:
  """One run of an operation as a collective; None if it is none."""
  # An asynchronous collective counts at its start and not at its "-done".
  name = op.opcode.removesuffix("-start")
  kind = _ALIASES.get(name, name)
  if kind not in KINDS:
    return None
  group = _group(op.attributes, num_devices)
  operands = [computation[name] for name in op.operands if name in computation]
  all_bytes = [type_bytes(operand.type) for operand in operands]
  nbytes = sum(all_bytes)
  if name == "ragged-all-to-all" and len(all_bytes) > 1:
    # From one buffer into another. If devices send and receive equally much,
    # that is what the smaller one holds; a larger one has room for more.
    nbytes = min(all_bytes[:2])
  if group.size < 2 or not nbytes:
    return None
  if kind == "all-gather":
    nbytes *= group.size
  if kind == "all-reduce" and _is_sliced(op.name, computation, group.size):
    kind = "reduce-scatter"
  return Collective(
    kind=kind,
    group_size=group.size,
    stride=group.stride,
    runs=1,
    nbytes=nbytes,
    inner=group.inner,
    span=group.span,
  )


def _is_sliced(name: str, computation: Computation, size: int) -> bool:
  """Whether every use of a result takes only this device's part of it."""
  users = [op for op in computation.values() if name in op.operands]
  for op in users:
    if op.opcode == "dynamic-slice" and op.operands[0] == name:
      if type_bytes(op.type) * size > type_bytes(computation[name].type):
        return False
    elif op.opcode not in _UNCHANGED:
      return False
    elif not _is_sliced(op.name, computation, size):
      return False
  return bool(users)


def _group(attributes: str, num_devices: int) -> Group:
  """The first group of devices of an operation."""
  if match := _MESH.search(attributes):
    names = re.findall(r"'(\w+)'=", match["sizes"])
    sizes = [int(n) for n in re.findall(r"=(\d+)", match["sizes"])]
    ids = _iota(match["ids"] or f"[{math.prod(sizes)}]").reshape(sizes)
    group_axes = re.findall(r"'(\w+)'", match["axes"])
    index = tuple(slice(None) if name in group_axes else 0 for name in names)
    return groups.of_devices(ids[index].ravel().tolist())
  if match := _IOTA.search(attributes):
    all_groups = _iota(match["ids"]).reshape(numbers(match["shape"]))
    return groups.of_devices(all_groups[0].tolist())
  if match := _PAIRS.search(attributes):
    pairs = [numbers(pair) for pair in re.findall(r"\d+,\d+", match[1])]
    strides = [abs(a - b) for a, b in pairs if a != b]
    return Group(len(pairs), min(strides)) if strides else Group(1, 1)
  if match := _LIST.search(attributes):
    return groups.of_devices(numbers(match[1]))
  return Group(num_devices, 1)


def _iota(text: str) -> np.ndarray:
  """The device numbers of "[8,8]T(1,0)": 0 to 63 as an array, transposed."""
  dims, _, order = text.partition("T")
  sizes = numbers(dims.strip("[]"))
  ids = np.arange(math.prod(sizes)).reshape(sizes)
  return ids.transpose(numbers(order.strip("()"))) if order else ids
