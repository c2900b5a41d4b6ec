"""The T5 in Hugging Face's layouts of T5, T5 1.1 and Switch Transformers.

See layouts.py for the tables, and t5x.py for T5X's names. In the published
names a block's layers are numbered: attention and MLP in the encoder;
attention, cross-attention and MLP in the decoder.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.models.published import layouts, t5_config, t5x
from bigtrain.models.published.arrays import Remark
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
# Copies of the embedding. Without tied embeddings, transformers reads them.
_COPIES = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
# A table in the released files of version 1.0 that no implementation uses.
_UNUSED = (
  "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
)


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, Any] | None:
  """Converts a published model's arrays to our names and shapes.

  Args:
    like: our parameters by name; gives shapes, and whether layers are stacked.

  Returns:
    See layouts.load; None for a file in another layout.
  """
  flat = t5x.renamed(flat)
  layout = layouts.find(LAYOUTS, flat)
  if layout is None:
    return None
  shared = "shared.weight"
  remarks = layouts.copies(flat, _COPIES, shared, "the model has one embedding")
  if "head/kernel" not in like:
    remarks |= layouts.copies(flat, ["lm_head.weight"], shared, layouts.UNTIE)
  if _UNUSED in flat:
    remarks[_UNUSED] = Remark("ignored", "no implementation uses it")
  arrays = {name: x for name, x in flat.items() if name not in remarks}
  return layouts.load(LAYOUTS[layout], arrays, like) | remarks


def export(
  model: Any, shapes: Mapping[str, Sequence[int]], layout: str
) -> tuple[dict[str, Any], list[layouts.Tensor]]:
  """Returns the contents of a published folder, for checkpoint_export.

  Args:
    model: the T5.
    shapes: shapes of its parameters, by name.

  Returns:
    (contents of config.json, arrays).

  Raises:
    ConfigError: unknown layout, or one that cannot represent the model.
  """
  config = t5_config.write(model, layout)
  table = list(LAYOUTS[layout])
  if layout == "switch" and not model.tied_head:
    table += [Entry(name, ("token_embedding",), 1) for name in _COPIES]
  return config, layouts.export(layout, table, shapes)
