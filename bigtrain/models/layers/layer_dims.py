"""Dimensions of the parameters of this package's layers; see dims.py."""

from bigtrain import dims
from bigtrain.models.layers.moe import Options

LAYERS = {
  r"(.*/)?query/kernel": "D -> H K",
  r"(.*/)?query/bias": "H K",
  r"(.*/)?(key|value)/kernel": "D -> G K",
  r"(.*/)?(key|value)/bias": "G K",
  r"(.*/)?out/kernel": "H K -> D",
  r"(.*/)?attention/sinks": "H",
  r"(.*/)?(moe/router|shared_gate)/kernel": "D -> E",
  r"(.*/)?moe/router/bias": "E",
  r"(.*/)?moe/(up|gate)/kernel": "E; D -> F",
  r"(.*/)?moe/(up|gate)/bias": "E; F",
  r"(.*/)?moe/down/kernel": "E; F -> D",
  r"(.*/)?moe/down/bias": "E; D",
  r"(.*/)?(up|gate|Dense_0)/kernel": "D -> F",
  r"(.*/)?(up|gate|Dense_0)/bias": "F",
  r"(.*/)?(down|Dense_1)/kernel": "F -> D",
  r"(.*/)?(scale|bias|layer_scale_\d)": "D",
}

# Before LAYERS, for norms over all heads together.
PROJECTION_NORMS = {
  r"(.*/)?query_norm/scale": "H K",
  r"(.*/)?key_norm/scale": "G K",
}


def head(name: str) -> dict[str, str]:
  return {f"{name}/kernel": "D -> V", f"{name}/bias": "V"}


def with_experts(table: dims.Table, options: Options | None) -> dims.Table:
  if options is None or options.axis is None:
    return table
  split = f"E:{options.axis};"
  return {name: text.replace("E;", split) for name, text in table.items()}
