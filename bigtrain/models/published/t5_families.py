"""T5, T5 1.1, mT5 and Switch Transformers: their config.json and their arrays.

Keys and defaults follow transformers, and names also T5X or Mesh TensorFlow.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain.arrays import dims
from bigtrain.models.published import encoder_rules, families, tables
from bigtrain.models.published.conversions import renamed
from bigtrain.models.published.families import Family
from bigtrain.models.published.tables import Entry

_ALL, _ARRAYS = families.load("t5_families", encoder_rules)
FAMILIES = {n: x for n, x in _ALL.items() if n == x.model_type}
LAYOUTS = {
  "t5": _ALL["t5_1_0"],
  "t5_1_1": _ALL["t5_1_1"],
  "switch": _ALL["switch_transformers"],
}
# Copies of the embedding.
_COPIES = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
# A table in the released files of version 1.0.
_UNUSED = "decoder.block.*EncDecAttention.relative_attention_bias.*"


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  layouts = {name: family.arrays for name, family in LAYOUTS.items()}
  layouts |= {n: x for n, x in _ARRAYS.items() if n.endswith(("1_0", "1_1"))}
  flat = {renamed("mesh_tensorflow", name): x for name, x in flat.items()}
  return tables.load(
    layouts,
    _unstacked(flat),
    like,
    param_dims,
    ignored={_UNUSED: "no implementation uses it"},
    copies=_COPIES,
  )


def _unstacked(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Layers of T5X's scalable_t5, which stacks them along the second axis."""
  result: dict[str, Any] = {}
  for name, array in flat.items():
    stack, _, rest = name.partition("/")
    if rest.startswith(f"{stack}/"):
      start, end = f"{stack}/layers_", rest.removeprefix(stack)
      layers = range(array.shape[1])
      result |= {f"{start}{i}{end}": array[:, i] for i in layers}
    else:
      result[name] = array
  return result


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  moe = values.get("moe")
  if moe is not None and not isinstance(moe, Mapping):
    moe = moe._asdict() | {"normalize": moe.normalizes()}
  names = ("num_experts", "top_k", "every", "normalize")
  own = moe and {name: moe[name] for name in names}
  jitter = moe.get("jitter", 0.0) if moe else 0.0
  return {**values, "moe": own, "jitter": jitter}


def _of_model(model: Any) -> dict[str, Family]:
  if model.tied_head:
    return LAYOUTS
  # transformers reads all three embeddings of a Switch Transformer.
  copies = [Entry(name, ("token_embedding",)) for name in _COPIES]
  switch = LAYOUTS["switch"]
  switch = switch._replace(arrays=[*switch.arrays, *copies])
  return LAYOUTS | {"switch": switch}


PUBLISHED = families.Layouts(FAMILIES, canonical, _of_model)
