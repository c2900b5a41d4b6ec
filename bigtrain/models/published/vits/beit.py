"""BEiT, with relative position biases of each layer or of all."""

from collections.abc import Mapping
from typing import Any

from bigtrain.models.published.encoder_rules import layer_scale, use
from bigtrain.models.published.families import ConfigJson, Rule
from bigtrain.models.published.tables import norm, plain, table, within
from bigtrain.models.published.vits import plain_vit
from bigtrain.models.published.vits.plain_vit import VIT

_BIAS_TABLE = "relative_position_bias.relative_position_bias_table"


def _positions() -> Rule:
  """Relative biases, and learned absolute embeddings."""
  absolute = "use_absolute_position_embeddings"
  relative = {
    "layer": "use_relative_position_bias",
    "shared": "use_shared_relative_position_bias",
  }

  def read(config: ConfigJson) -> dict[str, Any]:
    kinds = [kind for kind, key in relative.items() if config[key]]
    if len(kinds) > 1:
      names = ", ".join(relative.values())
      raise config.error(f"{names}: expected one of them.")
    return {
      "relative_bias": kinds[0] if kinds else None,
      "posemb": "learn" if config[absolute] else "none",
      "posemb_class": bool(config[absolute]),
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    kind = fields["relative_bias"]
    of_kinds = {key: name == kind for name, key in relative.items()}
    return {absolute: fields["posemb"] == "learn", **of_kinds}

  keys = dict.fromkeys((absolute, *relative.values()), False)
  return Rule(("relative_bias", "posemb", "posemb_class"), keys, read, write)


BEIT = VIT.but(
  "beit",
  "BeitModel",
  without=("use_bias", "posemb_class"),
  arrays=table(
    plain_vit.ARRAYS,
    norm("pooler.layernorm", "pooled_norm"),
    within(
      "encoder.layer.{i}.",
      "Transformer/encoderblock/",
      plain("lambda_1", "layer_scale_0"),
      plain("lambda_2", "layer_scale_1"),
    ),
    plain(f"encoder.{_BIAS_TABLE}", "relative_bias/table"),
    within(
      "encoder.layer.{i}.attention.attention.",
      "Transformer/encoderblock/",
      plain(_BIAS_TABLE, "relative_bias/table"),
    ),
  ),
  # Keys have no biases.
  constants={"norm_pooled": True, "use_bias": ("qv", "out", "mlp", "patch")},
  rules=(
    _positions(),
    layer_scale("layer_scale_init_value", 0.1),
    use("Beit", pool_type="gap", features="gap"),
  ),
  requires={"use_mean_pooling": (True,)},
)
