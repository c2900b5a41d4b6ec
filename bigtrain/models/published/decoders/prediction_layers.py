"""Names of layers that predict further tokens, in files and in tables.

Tables have the module of number 0 as `model.mtp.0.`, a layer like the others,
with norms and a projection named as in DeepSeek V3. Files name them so:

  DeepSeek V3, GLM 4.5, GLM 4.7 Flash   model.layers.{depth}.eh_proj
  Hunyuan 3                             the same, but final_layernorm
  Qwen3-Next, Qwen 3.5                  mtp.fc, mtp.layers.0.

Layers of these names are ignored unless the model has config.model.mtp. Those
of ERNIE 4.5 (`model.mtp_block.0.`), K-EXAONE (`mtp.`) and MiMo
(`model.mtp_layers.0.`) are always ignored: they are no layers like the model's
last one, or join their inputs in the other order.
"""

import re
from collections.abc import Iterable, Mapping

from bigtrain.models.published.decoders import shared_arrays

REASON = "a layer for the prediction of several tokens"
# {regular expression of names in a file that are not loaded: reason}.
IGNORED = {
  r"mtp\..*|model\.mtp_.*": REASON,
  r"model\.mtp\.\d+\.(embed_tokens|shared_head\.head)\.weight": (
    "a copy of the model's"
  ),
}
_FIRST = shared_arrays.PREDICTION_LAYER.format(i=0)
# {start of a name in Qwen's files: in tables}. There is one module.
_OF_QWEN = {
  "mtp.fc.": _FIRST + "eh_proj.",
  "mtp.norm.": _FIRST + "shared_head.norm.",
  "mtp.pre_fc_norm_embedding.": _FIRST + "enorm.",
  "mtp.pre_fc_norm_hidden.": _FIRST + "hnorm.",
  "mtp.layers.0.": _FIRST,
}
_QWEN_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Names of the norm behind a module's layer.
_NORM, _NORM_OF_HUNYUAN = "shared_head.norm.", "final_layernorm."


def with_names_of_tables(
  names: Mapping[str, str], wanted: int
) -> tuple[dict[str, str], dict[str, str]]:
  """Renames the layers of the modules that a model has.

  Args:
    names: {name without a prefix: name in the file}.
    wanted: number of modules of the model.

  Returns:
    (names as in the tables, {regular expression of names: reason to ignore}).
  """
  own = re.compile(r"(model\.layers\.(\d+)\.)eh_proj\.weight").fullmatch
  matches = sorted(filter(None, map(own, names)), key=lambda m: int(m[2]))
  starts = [match[1] for match in matches]
  ignored = {re.escape(start) + ".*": REASON for start in starts[wanted:]}
  result = dict(names)
  for number, start in enumerate(starts[:wanted]):
    new = shared_arrays.PREDICTION_LAYER.format(i=number)
    for name in names:
      if name.startswith(start):
        rest = name.removeprefix(start).replace(_NORM_OF_HUNYUAN, _NORM)
        result[new + rest] = result.pop(name)
  if wanted and not starts:
    result = {_renamed(name, _OF_QWEN): x for name, x in result.items()}
  return result, ignored


def name_in_file(name: str, model_type: str, depth: int) -> str:
  """The published name of an array in a family's table."""
  match = re.match(r"model\.mtp\.(\d+)\.", name)
  if match is None:
    return name
  if model_type in _QWEN_FAMILIES:
    return _renamed(name, {new: old for old, new in _OF_QWEN.items()})
  rest = name[match.end() :]
  if model_type == "hy_v3":
    rest = rest.replace(_NORM, _NORM_OF_HUNYUAN)
  return f"model.layers.{depth + int(match[1])}.{rest}"


def key_of_number(model_type: str) -> str:
  """The key of config.json with the number of modules."""
  is_qwen = model_type in _QWEN_FAMILIES
  return "mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"


def _renamed(name: str, starts: Mapping[str, str]) -> str:
  for start, new in starts.items():
    if name.startswith(start):
      return new + name.removeprefix(start)
  return name


def number_of(names: Iterable[str]) -> int:
  """Number of modules of a model with these parameters."""
  return len({name for name in names if name.endswith("/projection/kernel")})
