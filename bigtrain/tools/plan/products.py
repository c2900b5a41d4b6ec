"""The matrix products of a program, from the text of the GPU's compiler.

This compiler does not estimate times, but its text has every product that a
step really runs. It shows, for instance, if a product of experts became dense.
It also has the order of all operations, and so which collectives are on their
way while products run.
"""

import collections
import json
import math
import re
from typing import NamedTuple

from bigtrain.tools.plan import collectives
from bigtrain.tools.plan.hlo import Computation, Module, Op, numbers, shape

TARGET = re.compile(r'custom_call_target="([^"]+)"')
# cuBLAS has the dimensions in a JSON, other products in an attribute.
_CONFIG = re.compile(r'"dot_dimension_numbers":(\{.*?\}),"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
# dim_labels=b01f_01io->b01f
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")


class Products(NamedTuple):
  """Products of a step on one device; loops of unknown length count once."""

  flops: int  # Conditionals count with all their branches.
  # Number of runs of cuDNN's attention by name; they are not in `flops`.
  kernels: dict[str, int]
  sent_bytes: float  # By each device.
  # Of these, the bytes of collectives that are on their way while a product or
  # attention runs.
  hidden_bytes: float
  unknown_loops: int


def products(module: Module) -> Products:
  total_flops = 0
  sent_bytes = hidden_bytes = 0.0
  unknown_loops = set()
  kernels: collections.Counter[str] = collections.Counter()
  overlap = _Overlap(module)
  for run in module.runs():
    nbytes = run.times * overlap.sent_bytes(run.op, run.computation)
    sent_bytes += nbytes
    if nbytes and overlap.is_hidden(run.op, run.computation):
      hidden_bytes += nbytes
    target = TARGET.search(run.op.attributes)
    if target and "fmha" in target[1]:
      kernels[target[1]] += run.times
    flops = flops_of(run.op, run.computation)
    total_flops += run.times * flops
    if flops and run.is_guess:
      unknown_loops.add(id(run.computation))
  return Products(
    total_flops,
    dict(kernels),
    sent_bytes,
    hidden_bytes,
    len(unknown_loops),
  )


class _Overlap:
  """The collectives of a program, and the work beside them."""

  def __init__(self, module: Module):
    self._module = module
    # Computations that only wrap a collective, which counts at its start.
    self._wrapped = {
      id(module.computations.get(op.called("calls")))
      for computation in module.computations.values()
      for op in computation.values()
      if op.opcode == "async-start"
    }

  def sent_bytes(self, op: Op, computation: Computation) -> float:
    """Bytes that a device sends in one run of a collective; 0 for others."""
    if id(computation) in self._wrapped:
      return 0.0
    if op.opcode == "async-start":
      computation = self._module.computations.get(op.called("calls"), {})
      ops = list(computation.values())
    else:
      ops = [op]
    found = [
      collectives.of_op(one, computation, self._module.num_devices)
      for one in ops
    ]
    return sum(one.sent_bytes for one in found if one is not None)

  def is_hidden(self, op: Op, computation: Computation) -> bool:
    """Whether a product or attention runs between its start and its end."""
    if not op.opcode.endswith("-start") or '"is_sync":true' in op.attributes:
      return False
    ops = list(computation.values())
    rest = ops[ops.index(op) + 1 :]
    for one in rest:
      if one.opcode.endswith("-done") and op.name in one.operands:
        return False
      if self._multiplies(one, computation):
        return True
    return False

  def _multiplies(self, op: Op, computation: Computation) -> bool:
    target = TARGET.search(op.attributes)
    if target and "fmha" in target[1]:
      return True
    if flops_of(op, computation):
      return True
    inner = [self._module.computations.get(name, {}) for name in op.callees]
    return any(
      self._multiplies(one, called)
      for called in inner
      for one in called.values()
    )


def flops_of(op: Op, computation: Computation) -> int:
  """2 x results x contracted elements; 0 for other operations."""
  match = TARGET.search(op.attributes)
  target = match[1] if match else ""
  if op.opcode == "convolution" or target.startswith("__cudnn$conv"):
    return _convolution_flops(op, computation, target)
  if op.opcode != "dot" and not target.startswith("__cublas$"):
    return 0
  if contracted := _CONTRACTED.search(op.attributes):
    dims = numbers(contracted[1])
  elif config := _CONFIG.search(op.attributes):
    names = json.loads(config[1])
    dims = [int(n) for n in names["lhs_contracting_dimensions"]]
  else:
    return 0
  if op.operands[0] not in computation:
    return 0
  lhs = shape(computation[op.operands[0]].type)
  num_contracted = math.prod(lhs[dim] for dim in dims)
  return 2 * math.prod(shape(op.type)) * num_contracted


def _convolution_flops(op: Op, computation: Computation, target: str) -> int:
  """2 x outputs x elements of a kernel; a gradient costs the same."""
  labels = _LABELS.search(op.attributes)
  if not labels or not computation.keys() >= {*op.operands[:2]}:
    return 0
  first, second = (shape(computation[n].type) for n in op.operands[:2])
  result = shape(op.type)
  # A gradient has other operands and results than the convolution itself.
  if target == "__cudnn$convBackwardInput":
    outputs, kernel = first, second
  elif target == "__cudnn$convBackwardFilter":
    outputs, kernel = second, result
  else:
    outputs, kernel = result, second
  num_products = math.prod(outputs) * math.prod(kernel)
  # Each output uses one of the kernel's output channels.
  return 2 * num_products // kernel[labels[1].index("o")]
