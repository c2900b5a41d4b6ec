"""Counts model FLOPs of a function's jaxpr, and lists the devices' peaks.

Matrix products, convolutions and attention are counted; a multiply-add counts
as 2. Elementwise operations, reductions and look-ups are not, because published
model FLOPs leave them out. Model FLOPs count the mathematics, not the
implementation: recomputation, padding and empty slots of experts do not count
(arrays/model_flops.py). Causal attention counts as the full square, as in PaLM
(appendix B); a window of w positions counts min(w, L) keys per query.

MFU (model FLOPs utilisation, PaLM, https://arxiv.org/abs/2204.02311) is

  3 x forward FLOPs x steps / (seconds x devices x peak FLOP/s of a device)

The factor 3 stands for one product in the forward pass and two in the backward
pass. It assumes that every parameter is trained.
"""

import fractions
import math
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.extend import core as jex_core

from bigtrain.arrays import model_flops
from bigtrain.config.errors import check_number
from bigtrain.config.settings import Config

_Share = Callable[[str], fractions.Fraction]


def forward_flops(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
  """Counts the model FLOPs of one call of `fn` over all devices."""
  jaxpr = jax.make_jaxpr(fn)(*args, **kwargs)
  return round(_flops(jaxpr, model_flops.useful_share))


def executed_flops(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
  """Counts all FLOPs of a call, padding and recomputation included."""
  jaxpr = jax.make_jaxpr(fn)(*args, **kwargs)

  def share(name_stack: str) -> fractions.Fraction:
    return fractions.Fraction(0 if model_flops.is_rare(name_stack) else 1)

  return round(_flops(jaxpr, share))


def step_flops(loss_fn: Callable[..., Any], *args: Any) -> int:
  return 3 * forward_flops(loss_fn, *args)


def mfu(
  flops_per_step: float, step_secs: float, num_devices: int, peak: float
) -> float:
  """Returns the model FLOPs utilisation; `peak` is FLOP/s of one device."""
  return flops_per_step / (step_secs * num_devices * peak)


def _flops(jaxpr: Any, share: _Share) -> fractions.Fraction:
  total = fractions.Fraction(0)
  for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    if flops := _eqn_flops(eqn, share):  # Most operations have none.
      # Each nested jaxpr has its own name stack.
      total += flops * share(str(eqn.source_info.name_stack))
  return total


def _eqn_flops(eqn: Any, share: _Share) -> fractions.Fraction | int:
  name, params = eqn.primitive.name, eqn.params
  if name in _COUNTS:
    return _COUNTS[name](eqn)
  if name == "cond":  # One branch runs; count the largest.
    return max(_flops(branch, share) for branch in params["branches"])
  if name == "jit" and not eqn.outvars:
    return 0  # Recomputation of which nothing is used; XLA removes it.
  if model_flops.is_rare(str(eqn.source_info.name_stack)):
    return 0
  inner = sum(_flops(j, share) for j in nested(params))
  if not inner:
    return 0
  if name == "scan":
    return params["length"] * inner
  if name == "while":
    stack = str(eqn.source_info.name_stack)
    if (rounds := model_flops.most_rounds(stack)) is not None:
      return rounds * inner
    logging.warning(
      "FLOPs: a while loop runs an unknown number of times; its body "
      "(%d FLOPs) is counted once.",
      inner,
    )
  elif name == "shard_map":
    return inner * _num_shards(params)
  elif name == "pallas_call":
    return _kernel_flops(inner, params)
  return inner


def nested(params: dict[str, Any]) -> Iterator[Any]:
  """Yields the jaxprs in an equation's parameters (jit, remat, ...)."""
  kinds = (jex_core.Jaxpr, jex_core.ClosedJaxpr)
  for value in params.values():
    if isinstance(value, kinds):
      yield value
    elif isinstance(value, (tuple, list)):
      yield from (v for v in value if isinstance(v, kinds))


def product_flops(equation: Any) -> int:
  """Returns all FLOPs of one matrix product or convolution of a jaxpr."""
  return _COUNTS[equation.primitive.name](equation)


def _num_shards(params: dict[str, Any]) -> int:
  """Number of distinct shards: those along axes that split an input.

  Along the other axes, shards repeat the same work, which is counted once.
  """
  axes = set()
  for spec in params["in_specs"]:
    for entry in spec:
      axes |= set(entry if isinstance(entry, tuple) else (entry,))
  sizes = dict(params["mesh"].shape)
  return math.prod(sizes[a] for a in axes if a in sizes)


def _kernel_flops(inner: Any, params: dict[str, Any]) -> Any:
  grid, estimate = params["grid_mapping"].grid, params["cost_estimate"]
  if all(isinstance(n, int) for n in grid):
    return inner * math.prod(grid)
  if estimate is not None:
    return estimate.flops  # As the kernel's author has it.
  logging.warning(
    "FLOPs: a Pallas kernel has a dynamic grid; it is counted once."
  )
  return inner


def _shape(var: Any) -> tuple[int, ...]:
  return var.aval.shape


def _dot_general(eqn: Any) -> int:
  (lhs_contract, _), _ = eqn.params["dimension_numbers"]
  lhs = _shape(eqn.invars[0])
  contracted = math.prod(lhs[d] for d in lhs_contract)
  return 2 * math.prod(_shape(eqn.outvars[0])) * contracted


def _ragged_dot(eqn: Any) -> int:
  """Each row of the left side is multiplied with one group of the right."""
  numbers = eqn.params["ragged_dot_dimension_numbers"]
  (_, contract), (_, batch) = numbers.dot_dimension_numbers
  shared = {*contract, *batch, *numbers.rhs_group_dimensions}
  rhs = _shape(eqn.invars[1])
  columns = math.prod(n for d, n in enumerate(rhs) if d not in shared)
  return 2 * math.prod(_shape(eqn.invars[0])) * columns


def _scaled_matmul(eqn: Any) -> int:
  contracted = _shape(eqn.invars[0])[-1]  # [B, M, K] x [B, N, K].
  return 2 * math.prod(_shape(eqn.outvars[0])) * contracted


def _conv(eqn: Any) -> int:
  """2 x outputs x kernel taps x input channels of a group.

  Taps on padding count, as in published figures. Taps on the holes of a dilated
  input (transposed convolutions, gradients of strided ones) do not.
  """
  p = eqn.params
  numbers = p["dimension_numbers"]
  rhs, out = _shape(eqn.invars[1]), _shape(eqn.outvars[0])
  # The kernel has the input channels of one feature group, and the output's
  # batch is already divided by batch_group_count.
  channels = rhs[numbers.rhs_spec[1]]
  flops = 2 * out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * channels
  for i, (out_dim, rhs_dim) in enumerate(
    zip(numbers.out_spec[2:], numbers.rhs_spec[2:])
  ):
    first = np.arange(out[out_dim]) * p["window_strides"][i]
    taps = np.arange(rhs[rhs_dim]) * p["rhs_dilation"][i]
    # Positions in the input of each output's taps.
    positions = np.add.outer(first, taps) - p["padding"][i][0]
    flops *= np.count_nonzero(positions % p["lhs_dilation"][i] == 0)
  return flops


def _attention(eqn: Any) -> int:
  """Two products, q k^T and probabilities x v, in one cuDNN call."""
  query, value = _shape(eqn.invars[0]), _shape(eqn.invars[2])
  if eqn.params["layout"] == 0:  # [B, L, H, K]; else [B, H, L, K].
    batch, length, heads, width = query
    length_kv = value[1]
  else:
    batch, heads, length, width = query
    length_kv = value[2]
  return 2 * batch * heads * length * length_kv * (width + value[-1])


_COUNTS: dict[str, Callable[[Any], int]] = {
  "dot_general": _dot_general,
  "ragged_dot": _ragged_dot,
  "ragged_dot_general": _ragged_dot,
  "scaled_matmul": _scaled_matmul,
  "scaled_matmul_wrapper": _scaled_matmul,
  "conv_general_dilated": _conv,
}
for _name in ("dot_product_attention", "dot_product_attention_fp8"):
  for _suffix in ("", "_wrapper"):
    _COUNTS[f"{_name}_fwd{_suffix}"] = _attention
    # Four products; the fifth recomputes the scores and is not counted.
    _COUNTS[f"{_name}_bwd{_suffix}"] = lambda eqn: 2 * _attention(eqn)


# Teraflops by patterns of device kinds, see the file.
_PEAK_TFLOPS: dict[str, float] = tomllib.loads(
  pathlib.Path(__file__).with_name("peak_flops.toml").read_text()
)


def read_peak_flops(config: Config, device: Any) -> float | None:
  if (given := config.get("peak_flops_per_device")) is not None:
    check_number("config.peak_flops_per_device", given, above=0)
  return given or peak_flops(device)


def peak_flops(device: Any) -> float | None:
  """Returns the dense peak bfloat16 FLOP/s of a device.

  None for CPUs, slices of a GPU (MIG), and kinds that are not in the table.
  """
  kind = device if isinstance(device, str) else device.device_kind
  for pattern, peak_tflops in _PEAK_TFLOPS.items():
    if re.search(pattern, kind, re.IGNORECASE):
      return peak_tflops * 1e12 or None
  return None
