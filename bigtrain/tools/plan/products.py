"""The matrix products of a program, from the text of the GPU's compiler.

This compiler does not estimate times, but its text has every product that a
step really runs. It shows, for instance, if a product of experts became dense.
"""

import collections
import json
import math
import re
from typing import NamedTuple

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
  unknown_loops: int


def products(module: Module) -> Products:
  total_flops = 0
  unknown_loops = set()
  kernels: collections.Counter[str] = collections.Counter()
  for run in module.runs():
    target = TARGET.search(run.op.attributes)
    if target and "fmha" in target[1]:
      kernels[target[1]] += run.times
    flops = flops_of(run.op, run.computation)
    total_flops += run.times * flops
    if flops and run.is_guess:
      unknown_loops.add(id(run.computation))
  return Products(total_flops, dict(kernels), len(unknown_loops))


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
