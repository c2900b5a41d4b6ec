"""Parameters of T5X's T5, under the names of Hugging Face's T5.

T5X has the matrices as (inputs, outputs), with heads and their width in one
axis, and the relative biases as (heads, buckets). Its scalable_t5 stacks layers
along the second axis. The names are from google-research/t5x,
examples/t5/network.py and examples/scalable_t5/network.py.
"""

import re
from collections.abc import Mapping
from typing import Any

# T5X's name inside of a layer -> ours, for {stack}.block.{i}.layer.
_NORMS = {
  "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
  "decoder": (
    "pre_self_attention_layer_norm",
    "pre_cross_attention_layer_norm",
    "pre_mlp_layer_norm",
  ),
}
_ATTENTION = {
  "attention": "0.SelfAttention",
  "self_attention": "0.SelfAttention",
  "encoder_decoder_attention": "1.EncDecAttention",
}
_PARTS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_OUTSIDE = {
  "token_embedder/embedding": ("shared.weight", False),
  "decoder/logits_dense/kernel": ("lm_head.weight", True),
  "encoder/encoder_norm/scale": ("encoder.final_layer_norm.weight", False),
  "decoder/decoder_norm/scale": ("decoder.final_layer_norm.weight", False),
}
_LAYER = re.compile(
  r"(encoder|decoder)/(?:layers_(\d+)|(encoder|decoder))/(.+)"
)
_BIAS = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def renamed(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the arrays with Hugging Face's names and axes, if it has them."""
  if "token_embedder/embedding" not in flat:
    return dict(flat)
  result: dict[str, Any] = {}
  for name, array in flat.items():
    stack, _, rest = name.partition("/")
    match = _LAYER.fullmatch(name)
    if name in _OUTSIDE:
      new, transposed = _OUTSIDE[name]
      result[new] = array.T if transposed else array
    elif rest == "relpos_bias/rel_embedding":
      result[_BIAS.format(stack)] = array.T
    elif match and (place := _in_layer(stack, match[4])):
      inside, transposed = place
      for i in range(array.shape[1]) if match[3] else [int(match[2])]:
        layer = array[:, i] if match[3] else array
        new = f"{stack}.block.{i}.layer.{inside}.weight"
        result[new] = layer.T if transposed else layer
    else:
      result[name] = array
  return result


def _in_layer(stack: str, name: str) -> tuple[str, bool] | None:
  """(Hugging Face's name in the layer, whether it is transposed)."""
  module, _, rest = name.partition("/")
  if module in _NORMS[stack] and rest == "scale":
    return f"{_NORMS[stack].index(module)}.layer_norm", False
  part, _, leaf = rest.partition("/")
  if leaf != "kernel":
    return None
  if module in _ATTENTION and part in _PARTS:
    return f"{_ATTENTION[module]}.{_PARTS[part]}", True
  if module == "mlp" and part in ("wi", "wi_0", "wi_1", "wo"):
    return f"{len(_NORMS[stack]) - 1}.DenseReluDense.{part}", True
  return None
