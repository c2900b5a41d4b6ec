"""The decoder in Hugging Face's layouts of GPT-2, Llama and Mixtral.

See layouts.py for the tables.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.models.published import decoder_config, layouts
from bigtrain.models.published.arrays import Remark
from bigtrain.models.published.layouts import Entry, linear


def _gpt2_layer(published: str, *ours: str, inputs: int = 1) -> list[Entry]:
  """Returns the entries of a weight (inputs, outputs) and a bias."""
  kernels = tuple(f"blocks/{name}/kernel" for name in ours)
  biases = tuple(f"blocks/{name}/bias" for name in ours)
  return [
    Entry(f"h.{{i}}.{published}.weight", kernels, inputs),
    Entry(f"h.{{i}}.{published}.bias", biases),
  ]


def _gpt2_norm(published: str, ours: str) -> list[Entry]:
  return [
    Entry(f"{published}.weight", (f"{ours}/scale",)),
    Entry(f"{published}.bias", (f"{ours}/bias",)),
  ]


_HEAD = linear("lm_head", "head/kernel")
_QKV = ("attention/query", "attention/key", "attention/value")
_GPT2 = [
  Entry("wte.weight", ("token_embedding",), 1),
  Entry("wpe.weight", ("pos_embedding",), 1),
  *_gpt2_norm("h.{i}.ln_1", "blocks/attention_norm"),
  *_gpt2_layer("attn.c_attn", *_QKV),
  *_gpt2_layer("attn.c_proj", "attention/out", inputs=2),
  *_gpt2_norm("h.{i}.ln_2", "blocks/mlp_norm"),
  *_gpt2_layer("mlp.c_fc", "mlp/up"),
  *_gpt2_layer("mlp.c_proj", "mlp/down"),
  *_gpt2_norm("ln_f", "norm"),
  _HEAD,
]


def _layer(published: str, ours: str, inputs: int = 1) -> Entry:
  """Returns the entry of a matrix in each of Llama's layers."""
  return linear(
    f"model.layers.{{i}}.{published}", f"blocks/{ours}/kernel", inputs=inputs
  )


def _layer_norm(published: str, ours: str) -> Entry:
  name = f"model.layers.{{i}}.{published}.weight"
  return Entry(name, (f"blocks/{ours}/scale",))


_LLAMA_ATTENTION = [
  Entry("model.embed_tokens.weight", ("token_embedding",), 1),
  _layer("self_attn.q_proj", "attention/query"),
  _layer("self_attn.k_proj", "attention/key"),
  _layer("self_attn.v_proj", "attention/value"),
  _layer("self_attn.o_proj", "attention/out", inputs=2),
  _layer_norm("input_layernorm", "attention_norm"),
  _layer_norm("post_attention_layernorm", "mlp_norm"),
  Entry("model.norm.weight", ("norm/scale",)),
]
_LLAMA_MLP = [
  _layer("mlp.gate_proj", "mlp/gate"),
  _layer("mlp.up_proj", "mlp/up"),
  _layer("mlp.down_proj", "mlp/down"),
]
_MIXTRAL_MOE = [
  _layer("block_sparse_moe.gate", "moe/router"),
  _layer("block_sparse_moe.experts.{e}.w1", "moe/gate"),
  _layer("block_sparse_moe.experts.{e}.w3", "moe/up"),
  _layer("block_sparse_moe.experts.{e}.w2", "moe/down"),
]
LAYOUTS: dict[str, layouts.Table] = {
  "gpt2": _GPT2,
  "llama": [*_LLAMA_ATTENTION, *_LLAMA_MLP, _HEAD],
  "mixtral": [*_LLAMA_ATTENTION, *_MIXTRAL_MOE, _HEAD],
}

# Constants in the files that the model computes itself.
_CONSTANTS = re.compile(
  r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq|.*\.position_ids"
)


_GPT2_PREFIX = "transformer."


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, Any] | None:
  """Converts a published model's arrays to our names and shapes.

  Args:
    flat: arrays of the file, by name; GPT-2's may start with "transformer.".
    like: our parameters by name; gives shapes, and whether layers are stacked.

  Returns:
    See layouts.load; None for a file in another layout.
  """
  # {name without the prefix: name in the file}. Of two, the one with it wins.
  in_order = sorted(flat, key=lambda name: name.startswith(_GPT2_PREFIX))
  names = {name.removeprefix(_GPT2_PREFIX): name for name in in_order}
  layout = layouts.find(LAYOUTS, names)
  if layout is None:
    return None
  remarks = {
    name: Remark("ignored", "a constant that the model computes")
    for name in names
    if _CONSTANTS.fullmatch(name)
  }
  file = {short: flat[name] for short, name in names.items()}
  if "head/kernel" not in like:
    table = LAYOUTS[layout]
    embedding = layouts.published_name(table, "token_embedding")
    remarks |= layouts.copies(
      file, ["lm_head.weight"], embedding, layouts.UNTIE
    )
  arrays = {name: x for name, x in file.items() if name not in remarks}
  result = layouts.load(LAYOUTS[layout], arrays, like) | remarks
  # A file may have a name with and without the prefix.
  twice = {name: flat[name] for name in set(flat) - set(names.values())}
  ours = {name: x for name, x in result.items() if name in like}
  theirs = {names[n]: x for n, x in result.items() if n not in like}
  return ours | theirs | twice


def export(
  model: Any, shapes: Mapping[str, Sequence[int]], layout: str
) -> tuple[dict[str, Any], list[layouts.Tensor]]:
  """Returns the contents of a published folder, for checkpoint_export.

  Args:
    shapes: shapes of its parameters, by name.

  Returns:
    (contents of config.json, arrays).

  Raises:
    ConfigError: unknown layout, or one that cannot represent the model.
  """
  config = decoder_config.write(model, layout)
  return config, layouts.export(layout, LAYOUTS[layout], shapes)
