"""Dimensions of the parameters of layers, which models share.

The first pattern that matches a name decides, so a model's `param_dims` puts
its own table before LAYERS. bigtrain/arrays/dims.py explains the notation and
the letters.
"""

from bigtrain.arrays import dims
from bigtrain.models.layers.moe import Options

LAYERS: dict[str, str] = {
  # Gated DeltaNet, whose heads of values are G R.
  r"(.*/)?deltanet/(query|key)/kernel": "D -> G K",
  r"(.*/)?deltanet/(value|gate)/kernel": "D -> G R K",
  r"(.*/)?deltanet/(beta|decay)/kernel": "D -> G R",
  r"(.*/)?deltanet/(gate|decay)_down/kernel": "D -> rank",
  r"(.*/)?deltanet/(gate|decay)_up/kernel": "rank -> G R K",
  r"(.*/)?deltanet/channel_time_step": "G R K",
  r"(.*/)?deltanet/(query|key)_conv/kernel": "taps -> G K",
  r"(.*/)?deltanet/value_conv/kernel": "taps -> G R K",
  r"(.*/)?deltanet/(log_rate|time_step)": "G R",
  r"(.*/)?deltanet/out/kernel": "G R K -> D",
  # Short convolutions.
  r"(.*/)?short_conv/(input_gate|output_gate|value)/kernel": "D -> F",
  r"(.*/)?short_conv/(input_gate|output_gate|value)/bias": "F",
  r"(.*/)?short_conv/conv/kernel": "taps -> F",
  r"(.*/)?short_conv/conv/bias": "F",
  r"(.*/)?short_conv/out/kernel": "F -> D",
  # Attention.
  r"(.*/)?query/kernel": "D -> H K",
  r"(.*/)?query/bias": "H K",
  r"(.*/)?output_gate/kernel": "D -> H K",
  r"(.*/)?output_gate/bias": "H K",
  r"(.*/)?(key|value)/kernel": "D -> G K",
  r"(.*/)?(key|value)/bias": "G K",
  r"(.*/)?out/kernel": "H K -> D",
  # Latent attention.
  r"(.*/)?query_down/kernel": "D -> query_rank",
  r"(.*/)?query_down(_norm)?/(bias|scale)": "query_rank",
  r"(.*/)?query_up/kernel": "query_rank -> H K",
  r"(.*/)?kv_down/kernel": "D -> kv_rank",
  r"(.*/)?kv_down(_norm)?/(bias|scale)": "kv_rank",
  r"(.*/)?kv_up/kernel": "kv_rank -> H K",
  r"(.*/)?attention/sinks": "H",
  # Experts and their router.
  r"(.*/)?(moe/router|shared_gate)/kernel": "D -> E",
  r"(.*/)?moe/router/bias": "E",
  r"(.*/)?moe/router_scale": "D",
  r"(.*/)?moe/expert_scale": "E",
  r"(.*/)?(layer_scalar|activation/(alpha_p|alpha_n|beta|eps))": "one",
  r"(.*/)?layer_input_gate/kernel": "D -> layer_input",
  r"(.*/)?layer_input_out/kernel": "layer_input -> D",
  r"(.*/)?moe/(up|gate)/kernel": "E; D -> F",
  r"(.*/)?moe/(up|gate)/bias": "E; F",
  r"(.*/)?moe/down/kernel": "E; F -> D",
  r"(.*/)?moe/down/bias": "E; D",
  # Bounds of linear layers.
  r"(.*/)?\w+_bounds/(input|output)_(min|max)": "one",
  # MLPs.
  r"(.*/)?(up|gate|Dense_0)/kernel": "D -> F",
  r"(.*/)?(up|gate|Dense_0)/bias": "F",
  r"(.*/)?(down|Dense_1)/kernel": "F -> D",
  # Norms, and biases of what writes to the residual stream.
  r"(.*/)?(scale|bias|layer_scale_\d)": "D",
}

# Norms of queries and keys with a scale for each head. They come before LAYERS,
# whose last pattern would take them for norms of the residual stream.
HEAD_NORMS: dict[str, str] = {
  r"(.*/)?query_norm/scale": "H K",
  r"(.*/)?key_norm/scale": "G K",
}


def with_experts(table: dims.Table, options: Options | None) -> dims.Table:
  """Splits the experts over the axis of the mesh that their options name."""
  if options is None or options.axis is None:
    return table
  split = f"E:{options.axis};"
  return {name: text.replace("E;", split) for name, text in table.items()}
