"""The T5 in Hugging Face's layouts of T5, T5 1.1 and Switch Transformers.

See layouts.py for the tables. In the published names a block's layers are
numbered: attention and MLP in the encoder; attention, cross-attention and MLP
in the decoder.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain import settings
from bigtrain.models.published import layouts
from bigtrain.models.published.layouts import Entry, linear


def _attention(
  stack: str, number: int, published: str, ours: str
) -> list[Entry]:
  name = f"{stack}.block.{{i}}.layer.{number}"
  of = lambda part: f"{stack}/blocks/{ours}/{part}/kernel"
  return [
    Entry(f"{name}.layer_norm.weight", (f"{stack}/blocks/{ours}_norm/scale",)),
    linear(f"{name}.{published}.q", of("query")),
    linear(f"{name}.{published}.k", of("key")),
    linear(f"{name}.{published}.v", of("value")),
    linear(f"{name}.{published}.o", of("out"), inputs=2),
  ]


def _mlp(published: str, ours: str, gated: bool) -> list[Entry]:
  """Returns the entries of an MLP or of each expert, with kernels in `ours`."""
  up = linear(f"{published}.wi", f"{ours}/up/kernel")
  ups = [
    linear(f"{published}.wi_0", f"{ours}/gate/kernel"),
    linear(f"{published}.wi_1", f"{ours}/up/kernel"),
  ]
  down = linear(f"{published}.wo", f"{ours}/down/kernel")
  return [*(ups if gated else [up]), down]


def _stack(stack: str, gated: bool, switch: bool) -> list[Entry]:
  blocks = f"{stack}/blocks"
  number = 2 if stack == "decoder" else 1
  layer = f"{stack}.block.{{i}}.layer.{number}"
  table = [
    Entry(
      f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
      (f"{stack}/relative_bias/embedding",),
      1,
    ),
    *_attention(stack, 0, "SelfAttention", "attention"),
  ]
  if stack == "decoder":
    table += _attention(stack, 1, "EncDecAttention", "cross_attention")
  table.append(
    Entry(f"{layer}.layer_norm.weight", (f"{blocks}/mlp_norm/scale",))
  )
  if switch:
    expert = f"{layer}.mlp.experts.expert_{{e}}"
    router = f"{layer}.mlp.router.classifier"
    table += [
      *_mlp(f"{layer}.mlp", f"{blocks}/mlp", gated),
      linear(router, f"{blocks}/moe/router/kernel"),
      *_mlp(expert, f"{blocks}/moe", gated),
    ]
  else:
    table += _mlp(f"{layer}.DenseReluDense", f"{blocks}/mlp", gated)
  norm = Entry(f"{stack}.final_layer_norm.weight", (f"{stack}/norm/scale",))
  return [*table, norm]


def _table(gated: bool = False, switch: bool = False) -> list[Entry]:
  return [
    Entry("shared.weight", ("token_embedding",), 1),
    *_stack("encoder", gated, switch),
    *_stack("decoder", gated, switch),
    linear("lm_head", "head/kernel"),
  ]


LAYOUTS: dict[str, layouts.Table] = {
  "t5": _table(),
  "t5_1_1": _table(gated=True),
  "switch": _table(switch=True),
}
# An array that only this layout has.
_SIGNATURES = {
  "t5": "encoder.block.0.layer.1.DenseReluDense.wi.weight",
  "t5_1_1": "encoder.block.0.layer.1.DenseReluDense.wi_0.weight",
  "switch": "encoder.block.1.layer.1.mlp.router.classifier.weight",
}
# Copies of the embedding, and a table in the released files of version 1.0 that
# no implementation uses.
_UNUSED = re.compile(
  r"(encoder|decoder)\.embed_tokens\.weight"
  r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\."
  r"weight"
)


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, Any] | None:
  """Converts a published model's arrays to our names and shapes.

  Args:
    flat: arrays of the file, by name.
    like: our parameters by name; gives shapes, and whether layers are stacked.

  Returns:
    See layouts.load; None for a file in another layout.
  """
  layout = next((k for k, name in _SIGNATURES.items() if name in flat), None)
  if layout is None:
    return None
  flat = {n: x for n, x in flat.items() if not _UNUSED.fullmatch(n)}
  if "head/kernel" not in like:
    flat.pop("lm_head.weight", None)  # A copy of the embedding.
  return layouts.load(LAYOUTS[layout], flat, like)


_NEEDS: dict[str, dict[str, Any]] = {
  "t5": dict(mlp="relu", moe=None),
  "t5_1_1": dict(mlp="geglu", moe=None),
  "switch": dict(mlp="relu"),
}
_NO_CAPACITY = 2**30


def export(
  model: Any, shapes: Mapping[str, Sequence[int]], layout: str
) -> tuple[dict[str, Any], list[layouts.Tensor]]:
  """Returns the contents of a published folder, for tools/published_export.py.

  Args:
    model: the T5.
    shapes: shapes of its parameters, by name.
    layout: a name in LAYOUTS.

  Returns:
    (contents of config.json, arrays).

  Raises:
    ConfigError: unknown layout, or one that cannot represent the model.
  """
  layouts.check_model(layout, LAYOUTS, model, _NEEDS)
  config = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": model.vocab_size,
    "d_model": model.width,
    "d_kv": model.head_dim,
    "d_ff": model.mlp_dim,
    "num_layers": model.depth,
    "num_decoder_layers": model.decoder_depth,
    "num_heads": model.num_heads,
    "relative_attention_num_buckets": model.num_buckets,
    "relative_attention_max_distance": model.max_distance,
    "dropout_rate": model.dropout,
    "layer_norm_epsilon": model.norm_eps,
    "is_encoder_decoder": True,
    "tie_word_embeddings": model.tied_head,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": None,
  }
  if layout == "switch":
    config |= _switch(model)
  else:
    gated = model.mlp == "geglu"
    config["feed_forward_proj"] = "gated-gelu" if gated else "relu"
  return config, layouts.export(layout, LAYOUTS[layout], shapes)


def _switch(model: Any) -> dict[str, Any]:
  """Returns the part of config.json for experts."""
  moe = model.moe
  # The layout has experts in all layers or in layers 1, 3, 5, ..., and one for
  # each token.
  if moe is None or moe.every > 2 or moe.top_k > 1 or moe.normalizes():
    raise settings.ConfigError(
      "--layout=switch: expected config.model.moe with every=1 or 2, top_k=1 "
      f"and normalize=False, got {moe}."
    )
  return {
    "architectures": ["SwitchTransformersForConditionalGeneration"],
    "model_type": "switch_transformers",
    "num_experts": moe.num_experts,
    "num_sparse_encoder_layers": model.depth // moe.every,
    "num_sparse_decoder_layers": model.decoder_depth // moe.every,
    # The layout's capacity is a number of tokens, ours a share of the length.
    "expert_capacity": _NO_CAPACITY,
    "router_jitter_noise": moe.jitter,
    "router_bias": False,
    "dense_act_fn": "relu",
  }
