"""Exports matrices in the block formats in which models are published.

"fp8" is that of DeepSeek V3 (fp8_blocks.py): each matrix of a layer, in float8
with scales of 128 x 128 numbers. "mxfp4" is the format of gpt-oss (mxfp4.py):
only the experts, in 4 bits. Embedding, head, norms, biases and routers stay as
they are. `plan` says which arrays a file has then, and how they are made.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.config.errors import ConfigError
from bigtrain.models.published import decoder_families, fp8_blocks, mxfp4
from bigtrain.models.published.tables import Tensor

METHODS = (fp8_blocks.METHOD, mxfp4.METHOD)
_KEY = "--quantize"
# Our kernels in layers that choose or join, and lose most by rounding.
_KEPT = r".*(router|shared_gate|projection)/kernel"


class Encoded(NamedTuple):
  """The arrays that encode one matrix in a file."""

  specs: Mapping[str, tuple[Sequence[int], str]]  # {name: (shape, dtype)}.
  encode: Callable[[np.ndarray], Sequence[np.ndarray]]  # In the same order.


class Plan(NamedTuple):
  """The quantised arrays of an export, and their entry in config.json."""

  encoded: Mapping[str, Encoded]  # By the name of the matrix.
  config: Mapping[str, Any]  # config.json's quantization_config.


def plan(
  method: str, config: Mapping[str, Any], tensors: Sequence[Tensor]
) -> Plan:
  """Args: config.json and the arrays of the export without quantisation."""
  kind = config.get("model_type", "")
  family = decoder_families.LAYOUTS.get(kind)
  if family is None or method not in family.quantised:
    raise ConfigError(
      f"{_KEY}={method}: expected a layout that is published in this format, "
      f"got {kind!r}."
    )
  if method == mxfp4.METHOD:
    return _in_mxfp4(tensors)
  return _in_fp8(kind, tensors)


def _in_fp8(kind: str, tensors: Sequence[Tensor]) -> Plan:
  encoded, kept = {}, ["lm_head"]
  for tensor in tensors:
    module = tensor.name.removesuffix(".weight")
    names = [name for name, _ in tensor.parts]
    in_layers = all(re.search(r"\bblocks\b|blocks_", name) for name in names)
    kernels = in_layers and all(name.endswith("kernel") for name in names)
    if kernels and len(tensor.shape) == 3 and "/moe/" in names[0]:
      raise ConfigError(
        f"{_KEY}={fp8_blocks.METHOD}: {tensor.name} has all experts of a layer;"
        f" expected a layout with an array for each, got {kind!r}."
      )
    if module == tensor.name or len(tensor.shape) != 2:
      continue
    if kernels and not any(re.fullmatch(_KEPT, name) for name in names):
      specs = fp8_blocks.specs(tensor.name, tensor.shape)
      encoded[tensor.name] = Encoded(specs, fp8_blocks.encoded)
    elif in_layers:
      kept.append(module)
  quantisation = {
    "quant_method": fp8_blocks.METHOD,
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [fp8_blocks.BLOCK, fp8_blocks.BLOCK],
    # Linear layers that stay as they are.
    "modules_to_not_convert": kept,
  }
  return Plan(encoded, quantisation)


def _in_mxfp4(tensors: Sequence[Tensor]) -> Plan:
  encoded = {}
  for tensor in tensors:
    if re.fullmatch(r".*\.experts\.(gate_up|down)_proj", tensor.name):
      specs = mxfp4.specs(tensor.name, tensor.shape)
      encoded[tensor.name] = Encoded(specs, mxfp4.encoded)
  quantisation = {
    "quant_method": mxfp4.METHOD,
    "modules_to_not_convert": [
      "model.layers.*.self_attn",
      "model.layers.*.mlp.router",
      "model.embed_tokens",
      "lm_head",
    ],
  }
  return Plan(encoded, quantisation)
