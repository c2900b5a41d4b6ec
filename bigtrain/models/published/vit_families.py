"""ViTs of Hugging Face: their config.json and their arrays.

ViT and MAE's encoder, DINOv2 (with registers, with SwiGLU), DINOv3, BEiT, and
the towers of CLIP, SigLIP and SigLIP 2. Keys, defaults and names of arrays
follow transformers. What depends on the use of a model, not on its weights, is
read from its class in `architectures`: the pooling, and the number of classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain import dims
from bigtrain.models.published import families, tables
from bigtrain.models.published.families import (
  ConfigJson,
  Family,
  Rule,
  converted,
)
from bigtrain.models.published.tables import Entry, dense, norm, plain

_BLOCK = "Transformer/encoderblock"
_ATTENTION = "MultiHeadDotProductAttention_0"
_GELUS = {
  "gelu": "gelu_erf",
  "gelu_pytorch_tanh": "gelu",
  "gelu_new": "gelu",
  "quick_gelu": "gelu_quick",
}
KEYS = {
  "width": "hidden_size",
  "depth": "num_hidden_layers",
  "num_heads": "num_attention_heads",
  "mlp_dim": "intermediate_size",
  "norm_eps": "layer_norm_eps",
}
SIZES = dict(
  hidden_size=768,
  num_hidden_layers=12,
  num_attention_heads=12,
  intermediate_size=3072,
  patch_size=16,
)
_IN_SHAPES = ("width", "depth", "mlp_dim", "patch_size", "num_classes")
HARMLESS = """
  image_size num_channels encoder_stride attention_probs_dropout_prob
  hidden_dropout_prob drop_path_rate pooler_act pooler_output_size
  apply_layernorm reshape_hidden_states out_features out_indices stage_names
  use_mask_token backbone_out_indices auxiliary_channels use_auxiliary_head
  auxiliary_loss_weight auxiliary_num_convs auxiliary_concat_input
  semantic_loss_ignore_index pool_scales add_fpn use_decoder_layers vocab_size
  decoder_hidden_size decoder_num_attention_heads decoder_num_hidden_layers
  decoder_intermediate_size mask_ratio norm_pix_loss dropout projection_dim
  model_type vision_use_head
""".split()
_SITES = ("qkv", "out", "mlp", "patch")


def _patch() -> Rule:
  read = lambda size: tuple(size) if isinstance(size, list) else (size, size)
  write = lambda sizes: sizes[0] if len({*sizes}) == 1 else sizes
  return converted("patch_size", "patch_size", 16, read, write)


def _mlp(key: str = "hidden_act", **swiglu: Any) -> Rule:
  """GELUs by name; `swiglu` are the keys of a gated MLP and their values."""

  def read(config: ConfigJson) -> dict[str, Any]:
    if swiglu and all(config[name] == value for name, value in swiglu.items()):
      return {"mlp": "swiglu"}
    config.require(key, *_GELUS)
    return {"mlp": _GELUS[config[key]]}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["mlp"] == "swiglu" and swiglu:
      return {key: "gelu", **swiglu}
    names = [name for name, kind in _GELUS.items() if kind == fields["mlp"]]
    off = {name: False for name in swiglu if name != key}
    return {key: names[0] if names else "gelu", **off}

  absent = {key: "gelu"} | dict.fromkeys(swiglu, False) | {key: "gelu"}
  return Rule(absent, read, write)


def use(
  stem: str, pool_type: str, features: str = "tok", rep_size: bool = False
) -> Rule:
  """The pooling and the number of classes, by the class of the model.

  `pool_type` is that of {stem}ForImageClassification; `features` and `rep_size`
  are of {stem}Model, which has no classes.
  """

  classes = families.classes(stem, "Image")

  def read(config: ConfigJson) -> dict[str, Any]:
    number = classes.read(config)["num_classes"]
    use = {"pool_type": pool_type, "rep_size": False}
    if number is None:
      use = {"pool_type": features, "rep_size": rep_size}
    return {"num_classes": number, **use}

  return Rule(classes.keys, read, classes.write)


def _biases(**sites: str) -> Rule:
  """`sites` are {site of the ViT: key that is true if it has biases}."""

  def read(config: ConfigJson) -> dict[str, Any]:
    off = [site for site, key in sites.items() if not config[key]]
    return {"use_bias": tuple(site for site in _SITES if site not in off)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: site in fields["use_bias"] for site, key in sites.items()}

  return Rule(dict.fromkeys(sites.values(), True), read, write)


def layer_scale(key: str, value: float) -> Rule:
  read = lambda x: x or value
  return converted("layer_scale", key, value, read, lambda x: x)


def _vit_arrays(
  layer: str,
  attention: Sequence[str],
  norms: tuple[str, str],
  mlp: list[Entry],
  others: list[Entry],
) -> list[Entry]:
  """A table: `attention` are its projections, `mlp` and `others` entries."""
  parts = zip(("query", "key", "value", "out"), attention)
  return [
    Entry("embeddings.cls_token", ("cls",), ndim=3),
    Entry("embeddings.position_embeddings", ("pos_embedding",), ndim=3),
    Entry("embeddings.register_tokens", ("registers",), ndim=3),
    *(
      entry
      for ours, theirs in parts
      for entry in dense(f"{layer}.{theirs}", f"{_BLOCK}/{_ATTENTION}/{ours}")
    ),
    *(
      entry
      for i, theirs in enumerate(norms)
      for entry in norm(f"{layer}.{theirs}", f"{_BLOCK}/LayerNorm_{i}")
    ),
    *mlp,
    *others,
    *dense("classifier", "head"),
  ]


def patches(published: str) -> list[Entry]:
  return [
    Entry(f"{published}.weight", ("embedding/kernel",), convolution=True),
    plain(f"{published}.bias", "embedding/bias"),
  ]


def _mlp_arrays(layer: str, up: str, down: str, gate: str = "") -> list[Entry]:
  of = f"{_BLOCK}/MlpBlock_0"
  gated = dense(f"{layer}.{gate}", f"{of}/gate") if gate else []
  first = dense(f"{layer}.{up}", f"{of}/Dense_0")
  return first + dense(f"{layer}.{down}", f"{of}/Dense_1") + gated


_LAYER = "encoder.layer.{i}"
_HF_ATTENTION = (
  *("attention.attention.query", "attention.attention.key"),
  *("attention.attention.value", "attention.output.dense"),
)
_PROJECTION = "embeddings.patch_embeddings.projection"
_FINAL = "Transformer/encoder_norm"
_VIT_ARRAYS = _vit_arrays(
  _LAYER,
  _HF_ATTENTION,
  ("layernorm_before", "layernorm_after"),
  _mlp_arrays(_LAYER, "intermediate.dense", "output.dense"),
  [
    *patches(_PROJECTION),
    *norm("layernorm", _FINAL),
    *dense("pooler.dense", "pre_logits"),
  ],
)
_RELATIVE = "relative_position_bias.relative_position_bias_table"
_BEIT_ARRAYS = [
  *_VIT_ARRAYS,
  *norm("pooler.layernorm", "pooled_norm"),
  plain(f"{_LAYER}.lambda_1", f"{_BLOCK}/layer_scale_0"),
  plain(f"{_LAYER}.lambda_2", f"{_BLOCK}/layer_scale_1"),
  plain(f"encoder.{_RELATIVE}", "relative_bias/table"),
  plain(
    f"{_LAYER}.attention.attention.{_RELATIVE}", f"{_BLOCK}/relative_bias/table"
  ),
]


def _scales(layer: str) -> list[Entry]:
  return [
    plain(f"{layer}.layer_scale{i + 1}.lambda1", f"{_BLOCK}/layer_scale_{i}")
    for i in range(2)
  ]


def _dinov2_arrays(swiglu: bool) -> list[Entry]:
  of = f"{_BLOCK}/MlpBlock_0"
  mlp = _mlp_arrays(_LAYER, "mlp.fc1", "mlp.fc2")
  if swiglu:
    both = (f"{of}/gate", f"{of}/Dense_0")
    mlp = [
      *dense(f"{_LAYER}.mlp.weights_in", *both),
      *dense(f"{_LAYER}.mlp.weights_out", f"{of}/Dense_1"),
    ]
  others = [*patches(_PROJECTION), *norm("layernorm", _FINAL), *_scales(_LAYER)]
  return _vit_arrays(_LAYER, _HF_ATTENTION, ("norm1", "norm2"), mlp, others)


_DINOV3_LAYER = "layer.{i}"
_DINOV3_ARRAYS = _vit_arrays(
  _DINOV3_LAYER,
  tuple(f"attention.{x}_proj" for x in "qkvo"),
  ("norm1", "norm2"),
  _mlp_arrays(_DINOV3_LAYER, "mlp.up_proj", "mlp.down_proj", "mlp.gate_proj"),
  [
    *patches("embeddings.patch_embeddings"),
    *norm("norm", _FINAL),
    *_scales(_DINOV3_LAYER),
  ],
)


def _dinov2_width() -> Rule:
  """The hidden width of DINOv2's MLPs, of a SwiGLU two thirds of it."""

  def read(config: ConfigJson) -> dict[str, Any]:
    size = int(config["hidden_size"] * config["mlp_ratio"])
    if config["use_swiglu_ffn"]:
      size = (int(size * 2 / 3) + 7) // 8 * 8
    return {"mlp_dim": size}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, size = fields["width"], fields["mlp_dim"]
    if fields["mlp"] != "swiglu":
      return {"mlp_ratio": size // width if size % width == 0 else size / width}
    ratios = (size * 1.5 / width, 4)
    whole = lambda ratio: (int(int(width * ratio) * 2 / 3) + 7) // 8 * 8
    fits = (x for x in (*ratios, 0) if not x or whole(x) == size)
    return {"mlp_ratio": next(fits)}

  return Rule({"mlp_ratio": 4}, read, write)


def _dinov3_biases() -> Rule:
  keys = {name: f"{name}_bias" for name in ("query", "key", "value", "proj")}

  def read(config: ConfigJson) -> dict[str, Any]:
    query, key, value, out = (bool(config[name]) for name in keys.values())
    if query != value or (key and not query):
      raise config.error(
        "query_bias, key_bias, value_bias: the model computes only biases of "
        "all three, of queries and values, or of none."
      )
    sites = {"qkv": key, "qv": query and not key, "out": out}
    sites |= {"mlp": config["mlp_bias"], "patch": True}
    return {"use_bias": tuple(site for site, has in sites.items() if has)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    sites = fields["use_bias"]
    key = "qkv" in sites
    query = key or "qv" in sites
    return {
      **dict(query_bias=query, value_bias=query, key_bias=key),
      **dict(proj_bias="out" in sites, mlp_bias="mlp" in sites),
    }

  absent = dict.fromkeys((*keys.values(), "mlp_bias"), True)
  return Rule(absent | {"key_bias": False}, read, write)


def _dinov3_rope() -> Rule:
  names = ("shift", "jitter", "rescale")
  ours = {"rope_theta": "theta"} | {f"pos_embed_{name}": name for name in names}
  absent = dict(rope_theta=100.0, pos_embed_shift=None, pos_embed_jitter=None)

  def read(config: ConfigJson) -> dict[str, Any]:
    rope = {name: config[key] for key, name in ours.items()}
    return {"rope": {k: x for k, x in rope.items() if x is not None}}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    rope = fields["rope"] or {}
    return {key: rope.get(name) or None for key, name in ours.items()}

  return Rule(absent | {"pos_embed_rescale": 2.0}, read, write)


def _beit_positions() -> Rule:
  absolute = "use_absolute_position_embeddings"
  keys = {
    "layer": "use_relative_position_bias",
    "shared": "use_shared_relative_position_bias",
  }

  def read(config: ConfigJson) -> dict[str, Any]:
    kinds = [kind for kind, key in keys.items() if config[key]]
    if len(kinds) > 1:
      raise config.error(f"{', '.join(keys.values())}: expected one of them.")
    return {
      "relative_bias": kinds[0] if kinds else None,
      "posemb": "learn" if config[absolute] else "none",
      "posemb_class": bool(config[absolute]),
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    kind = fields["relative_bias"]
    relative = {key: name == kind for name, key in keys.items()}
    return {absolute: fields["posemb"] == "learn", **relative}

  return Rule(dict.fromkeys((absolute, *keys.values()), False), read, write)


_NEUTRAL = dict(
  registers=0,
  posemb="learn",
  posemb_class=False,
  posemb_grid=None,
  rope=None,
  relative_bias=None,
  rep_size=False,
  pre_norm=False,
  norm_pooled=False,
  head_bias=True,
  layer_scale=None,
)
VIT = Family(
  "vit",
  "ViTModel",
  _VIT_ARRAYS,
  keys=KEYS,
  defaults=SIZES | dict(layer_norm_eps=1e-12),
  constants=dict(class_token=True, posemb_class=True),
  rules=dict(
    patch=_patch(),
    mlp=_mlp(),
    biases=_biases(qkv="qkv_bias"),
    use=use("ViT", "tok", rep_size=True),
  ),
  harmless=HARMLESS,
  in_shapes=_IN_SHAPES,
  neutral=_NEUTRAL,
)
_DINOV2 = VIT.but(
  "dinov2",
  "Dinov2Model",
  ("mlp_dim",),
  arrays=_dinov2_arrays(swiglu=False),
  defaults=dict(layer_norm_eps=1e-6, patch_size=14),
  rules=dict(
    mlp=_mlp(use_swiglu_ffn=True),
    width=_dinov2_width(),
    scale=layer_scale("layerscale_value", 1.0),
    use=use("Dinov2", "tok_gap"),
  ),
  harmless=(*HARMLESS, "intermediate_size"),
)
_WITH_REGISTERS = _DINOV2.but(
  "dinov2_with_registers",
  "Dinov2WithRegistersModel",
  keys=dict(registers="num_register_tokens"),
  defaults=dict(num_register_tokens=4),
  rules=dict(use=use("Dinov2WithRegisters", "tok_gap")),
)
_DINOV3 = VIT.but(
  "dinov3_vit",
  "DINOv3ViTModel",
  arrays=_DINOV3_ARRAYS,
  keys=dict(registers="num_register_tokens"),
  defaults=dict(
    layer_norm_eps=1e-5,
    num_register_tokens=0,
    hidden_size=384,
    intermediate_size=1536,
    num_attention_heads=6,
  ),
  constants=dict(posemb="none", posemb_class=False),
  rules=dict(
    mlp=_mlp(use_gated_mlp=True, hidden_act="silu"),
    biases=_dinov3_biases(),
    rope=_dinov3_rope(),
    scale=layer_scale("layerscale_value", 1.0),
    use=use("DINOv3ViT", "tok"),
  ),
)
_BEIT = VIT.but(
  "beit",
  "BeitModel",
  ("biases", "posemb_class"),
  arrays=_BEIT_ARRAYS,
  constants=dict(norm_pooled=True, use_bias=("qv", "out", "mlp", "patch")),
  rules=dict(
    positions=_beit_positions(),
    scale=layer_scale("layer_scale_init_value", 0.1),
    use=use("Beit", "gap", features="gap"),
  ),
  requires={"use_mean_pooling": (True,)},
)
_MAE = VIT.but("vit_mae", "ViTMAEModel", rules=dict(use=use("ViTMAE", "tok")))
FAMILIES = {
  family.model_type: family
  for family in (VIT, _DINOV2, _WITH_REGISTERS, _DINOV3, _BEIT, _MAE)
}
_SWIGLU = _DINOV2._replace(arrays=_dinov2_arrays(swiglu=True))
LAYOUTS = FAMILIES | {"dinov2_swiglu": _SWIGLU}
_PREFIXES = ("vit.", "dinov2.", "dinov2_with_registers.", "beit.", "model.")
_IGNORED = {
  r"embeddings\.mask_token": "only for masked training",
  r"decoder\..*": "of masked training, not of the encoder",
  r".*\.relative_position_index": "a constant that the model computes",
}


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any], param_dims: dims.Table
) -> dict[str, Any] | None:
  """Converts published arrays; None for a file in another layout."""
  prefixes = [x for x in _PREFIXES if any(n.startswith(x) for n in flat)]
  names = {name: name for name in flat}
  for prefix in prefixes:
    names = {name.removeprefix(prefix): full for name, full in names.items()}
  result = tables.load(
    {name: family.arrays for name, family in LAYOUTS.items()},
    {name: flat[full] for name, full in names.items()},
    like,
    param_dims,
    ignored=_IGNORED,
  )
  if result is None or "embedding/kernel" not in result:
    return None
  return tables.with_names_of_file(result, names, like)


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
  """Comparable fields of a model."""
  rope = values.get("rope")
  if rope is not None and not isinstance(rope, Mapping):
    rope = {name: x for name, x in rope._asdict().items() if x}
  scaled = values.get("layer_scale") is not None
  return {
    **values,
    "rope": rope,
    "use_bias": tuple(sorted(values.get("use_bias", ()))),
    # The initial value says nothing of a trained model.
    "layer_scale": 1.0 if scaled else None,
    "num_classes": values.get("num_classes") or None,
  }


def _of_model(model: Any) -> dict[str, Family]:
  if not model.num_classes:
    return LAYOUTS
  return {
    name: below(family.model_type.removesuffix("_mae"), family)
    for name, family in LAYOUTS.items()
  }


def below(prefix: str, family: Family) -> Family:
  """The layout of a classifier: other arrays are below the model's name."""
  arrays = [
    entry
    if entry.published.startswith("classifier")
    else entry._replace(published=f"{prefix}.{entry.published}")
    for entry in family.arrays
  ]
  return family._replace(arrays=arrays)


PUBLISHED = families.Layouts(FAMILIES, canonical, _of_model)
