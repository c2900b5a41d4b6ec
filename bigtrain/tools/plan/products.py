"""Counts the matrix products of a program for GPUs.

The GPU's compiler estimates no times, but its text has every product that a
step runs, whatever the model asked for: a product of experts that became dense
shows here. A loop's body counts once for each iteration, and a branch counts
with all its sides.

The products of cuDNN's attention are not in the sum: its kernels hide them.
"""

import collections
import json
import math
import re
from typing import NamedTuple

from bigtrain.tools.plan import hlo

_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_CONFIG = re.compile(r'"dot_dimension_numbers":(\{.*?\}),"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=\w+_(\w+)->")


class Products(NamedTuple):
  """Products of a step on one device.

  Attributes:
    flops: FLOPs of the products, two for each multiplication and addition.
    kernels: {name: number of runs} of attention kernels, which are not in it.
    unknown_loops: number of loops with an unknown trip count; they count once.
  """

  flops: int
  kernels: dict[str, int]
  unknown_loops: int


def read(text: str) -> Products:
  """Returns the products of a program."""
  module = hlo.Module(text)
  flops = 0
  unknown = 0
  kernels: collections.Counter[str] = collections.Counter()
  for computation, times, guessed in module.walk():
    has_any = False
    for op in computation.values():
      target = _TARGET.search(op.attributes)
      if target and "fmha" in target[1]:
        kernels[target[1]] += times
      of_op = _flops(op, computation, target[1] if target else "")
      flops += times * of_op
      has_any |= bool(of_op)
    unknown += has_any and guessed
  return Products(flops, dict(kernels), unknown)


def _flops(op: hlo.Op, computation: hlo.Computation, target: str) -> int:
  """2 x results x contracted elements of a product; 0 of other operations."""
  if op.opcode == "convolution" or target.startswith("__cudnn$conv"):
    return _convolution(op, computation, target)
  if op.opcode != "dot" and not target.startswith("__cublas$"):
    return 0
  contracted = _CONTRACTED.search(op.attributes)
  if contracted:
    dims = [int(n) for n in contracted[1].split(",") if n]
  elif numbers := _CONFIG.search(op.attributes):
    names = json.loads(numbers[1])
    dims = [int(n) for n in names["lhs_contracting_dimensions"]]
  else:
    return 0
  if op.operands[0] not in computation:
    return 0
  lhs = hlo.shape(computation[op.operands[0]].type)
  result = _first(op.type)
  return 2 * math.prod(result) * math.prod(lhs[d] for d in dims)


def _convolution(op: hlo.Op, computation: hlo.Computation, target: str) -> int:
  """2 x outputs x elements of a kernel; a gradient costs the same."""
  labels = _LABELS.search(op.attributes)
  if not labels or any(n not in computation for n in op.operands[:2]):
    return 0
  first, second = (hlo.shape(computation[n].type) for n in op.operands[:2])
  result = _first(op.type)
  # (outputs, kernel) of the convolution of which this is a gradient.
  outputs, kernel = {
    "__cudnn$convBackwardInput": (first, second),
    "__cudnn$convBackwardFilter": (second, result),
  }.get(target, (result, second))
  return (
    2 * math.prod(outputs) * math.prod(kernel) // kernel[labels[1].index("o")]
  )


def _first(of_type: str) -> list[int]:
  """Shape of an array, or of the first of a tuple: a result and workspace."""
  return hlo.shape(of_type.lstrip("("))
