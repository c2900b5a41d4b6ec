"""Rules of the config.json of encoders, ResNets, ConvNeXts, Swins, T5.

Each rule reads keys into fields of a model and writes them again.
"""

import math
from collections.abc import Mapping
from typing import Any

from bigtrain.config import settings
from bigtrain.models.published import conversions, families
from bigtrain.models.published.families import ConfigJson, Family, Rule

_GELUS = settings.read_table(__file__, "gelus.toml")
_SITES = ("qkv", "out", "mlp", "patch")


def patch() -> Rule:
  read = lambda size: tuple(size) if isinstance(size, list) else (size, size)
  write = lambda sizes: sizes[0] if len({*sizes}) == 1 else sizes
  return families.converted("patch_size", "patch_size", 16, read, write)


def image_size() -> Rule:
  """Written by the grid of positions; images of any size can be read."""

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    shapes = fields.get("shapes", {}).items()
    named = {name.rpartition("/")[2]: shape for name, shape in shapes}
    if "pos_embedding" in named:
      number = named["pos_embedding"][1] - fields["posemb_class"]
    elif "table" in named:
      number = (math.isqrt(named["table"][-2]) + 1) ** 2 // 4
    else:
      return {}
    grid = fields["posemb_grid"] or (math.isqrt(number),) * 2
    size = [n * pixels for n, pixels in zip(grid, fields["patch_size"])]
    return {"image_size": size[0] if len({*size}) == 1 else size}

  return Rule({"image_size": 224}, lambda config: {}, write)


def mlp(
  key: str = "hidden_act", tanh: str = "gelu_pytorch_tanh", **swiglu: Any
) -> Rule:
  """GELUs by name; `swiglu` are the keys of a gated MLP and their values."""

  def read(config: ConfigJson) -> dict[str, Any]:
    if swiglu and all(config[name] == value for name, value in swiglu.items()):
      return {"mlp": "swiglu"}
    config.require(key, *_GELUS)
    return {"mlp": _GELUS[config[key]]}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["mlp"] == "swiglu" and swiglu:
      return {key: "gelu", **swiglu}
    named = {tanh: "gelu", **_GELUS}
    names = [name for name, kind in named.items() if kind == fields["mlp"]]
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


def biases(**sites: str) -> Rule:
  """`sites` are {site of the ViT: key that is true if it has biases}."""

  def read(config: ConfigJson) -> dict[str, Any]:
    off = [site for site, key in sites.items() if not config[key]]
    return {"use_bias": tuple(site for site in _SITES if site not in off)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: site in fields["use_bias"] for site, key in sites.items()}

  return Rule(dict.fromkeys(sites.values(), True), read, write)


def layer_scale(key: str, value: float) -> Rule:
  read = lambda x: x or value
  return families.converted("layer_scale", key, value, read, lambda x: x)


def dinov2_width() -> Rule:
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
    ratios = (*range(1, 9), size * 1.5 / width)
    whole = lambda ratio: (int(int(width * ratio) * 2 / 3) + 7) // 8 * 8
    fits = (x for x in (*ratios, 0) if not x or whole(x) == size)
    return {"mlp_ratio": next(fits)}

  return Rule({"mlp_ratio": 4}, read, write)


def dinov3_biases() -> Rule:
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


def dinov3_rope() -> Rule:
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


def beit_positions() -> Rule:
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


def timm_width() -> Rule:
  """Of a SwiGLU, the ratio is of both products together."""

  def read(config: ConfigJson) -> dict[str, Any]:
    size = int(config["embed_dim"] * config["mlp_ratio"])
    return {"mlp_dim": size // 2 if config["swiglu"] else size}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    size = fields["mlp_dim"] * (2 if fields["mlp"] == "swiglu" else 1)
    ratio = size / fields["width"]
    if int(fields["width"] * ratio) != size:
      ratio = (size + 0.5) / fields["width"]
    return {"mlp_ratio": ratio, "mlp_size": size}

  return Rule({"mlp_ratio": 4, "mlp_size": None}, read, write)


def timm_positions() -> Rule:
  def read(config: ConfigJson) -> dict[str, Any]:
    learned = config["pos_embed"] == "learn"
    first = learned and not config["no_embed_class"]
    if first and config["reg_tokens"]:
      raise config.error("no_embed_class: expected true with reg_tokens.")
    return {
      "class_token": config["class_token"],
      "posemb": "learn" if learned else "none",
      "posemb_class": first and config["class_token"],
    }

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    has_class = fields["class_token"]
    without = not fields["posemb_class"] and (has_class or fields["registers"])
    return {
      "class_token": has_class,
      "pos_embed": fields["posemb"],
      "no_embed_class": bool(without),
    }

  keys = dict(class_token=True, pos_embed="learn", no_embed_class=False)
  return Rule(keys, read, write)


def timm_pooling() -> Rule:
  pools = families.choice(
    "pool_type", "global_pool", dict(token="tok", avg="gap", map="map")
  )

  def read(config: ConfigJson) -> dict[str, Any]:
    last = config["fc_norm"]
    last = config["global_pool"] == "avg" if last is None else last
    number = config["num_classes"] or None
    return {**pools.read(config), "norm_pooled": last, "num_classes": number}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    last = fields["norm_pooled"]
    given = None if last == (fields["pool_type"] == "gap") else last
    number = fields["num_classes"] or 0
    return {**pools.write(fields), "fc_norm": given, "num_classes": number}

  return Rule({**pools.keys, "fc_norm": None, "num_classes": 1000}, read, write)


def posemb_grid() -> Rule:
  key = "num_patches"

  def read(config: ConfigJson) -> dict[str, Any]:
    side = round(config[key] ** 0.5)
    if side**2 != config[key]:
      raise config.error(f"{key}={config[key]}: expected a square.")
    return {"posemb_grid": (side, side)}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    height, width = fields["posemb_grid"] or (1, 1)
    return {key: height * width}

  return Rule({key: 256}, read, write)


def end() -> Rule:
  """The token whose features are pooled: by old files the largest id."""
  key = "eos_token_id"
  last = lambda config: config["vocab_size"] - 1
  return Rule(
    {key: 49407},
    lambda config: {
      "eos_id": last(config) if config[key] == 2 else config[key]
    },
    lambda fields: {key: fields["eos_id"]},
  )


def towers(vision: Family, text: Family) -> Rule:
  of = {"image": ("vision_config", vision), "text": ("text_config", text)}

  def read(config: ConfigJson) -> dict[str, Any]:
    result = {}
    for name, (key, family) in of.items():
      fields = family.read(f"{config.path}: {key}", config[key])
      given = [field for field, x in fields.items() if not x.is_neutral]
      result[name] = {field: fields[field].value for field in given}
    return result

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    shapes = conversions.below("img/", fields.get("shapes", {}))
    written = {
      name: of[name][1].write({**fields[name], "shapes": shapes}) for name in of
    }
    parts = {of[name][0]: part for name, part in written.items()}
    for part in parts.values():
      del part["architectures"]
    return parts

  return Rule({"vision_config": {}, "text_config": {}}, read, write)


def clip_dim() -> Rule:
  read, write = lambda x: (x, x), lambda pair: pair[0]
  return families.converted("out_dim", "projection_dim", 512, read, write)


def siglip_dim() -> Rule:
  """The text's head is as wide as the image tower, or as the key says."""

  def read(config: ConfigJson) -> dict[str, Any]:
    text = {"hidden_size": 768, **config["text_config"]}
    size = text.get("projection_size") or text["hidden_size"]
    return {"out_dim": (None, size)}

  return Rule({}, read, lambda fields: {})


def bert_use(stem: str) -> Rule:
  def read(config: ConfigJson) -> dict[str, Any]:
    name = str((config.get("architectures") or [""])[0]).removeprefix(stem)
    mlm = name in ("ForMaskedLM", "ForPreTraining")
    number = config.get("num_labels") or len(config["id2label"] or "ab")
    classes = number if name == "ForSequenceClassification" else None
    return {"mlm_head": mlm, "rep_size": not mlm, "num_classes": classes}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["mlm_head"]:
      return {"architectures": [f"{stem}ForMaskedLM"]}
    if not (number := fields["num_classes"]):
      return {}
    return {
      "architectures": [f"{stem}ForSequenceClassification"],
      "id2label": {str(i): f"LABEL_{i}" for i in range(number)},
    }

  return Rule({"id2label": None}, read, write)


def roberta_padding() -> Rule:
  """Positions count from the one after the padding's."""
  key = "pad_token_id"
  return Rule(
    {key: 1},
    lambda config: {"pad_id": config[key], "first_position": config[key] + 1},
    lambda fields: {key: fields["pad_id"]},
  )


def bit_sizes() -> Rule:
  def read(config: ConfigJson) -> dict[str, Any]:
    size, sizes = config["embedding_size"], config["hidden_sizes"]
    if [*sizes] != [4 * size * 2**i for i in range(len(sizes))]:
      raise config.error(
        f"hidden_sizes={sizes}: expected 4 times embedding_size={size}, and "
        "twice as many in each next stage."
      )
    return {"width": size / 64, "depth": tuple(config["depths"])}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    size, depths = int(64 * fields["width"]), [*fields["depth"]]
    sizes = [4 * size * 2**i for i in range(len(depths))]
    return dict(embedding_size=size, hidden_sizes=sizes, depths=depths)

  absent = dict(hidden_sizes=(256, 512, 1024, 2048), depths=(3, 4, 6, 3))
  return Rule({"embedding_size": 64, **absent}, read, write)


_SPARSE = ("num_sparse_encoder_layers", "num_sparse_decoder_layers")
_NO_CAPACITY = 2**30


def decoder_depth() -> Rule:
  key, field = "num_decoder_layers", "decoder_depth"
  return Rule(
    {key: None},
    lambda config: {field: config[key] or config["num_layers"]},
    lambda fields: {key: fields[field]},
  )


def tied() -> Rule:
  # Older versions of transformers scale the input of a tied head, newer ones
  # tie whatever is equal and have a key for the scale.
  tied, scaled = "tie_word_embeddings", "scale_decoder_outputs"
  of_head = lambda config: config[tied if config[scaled] is None else scaled]
  return Rule(
    {tied: True, scaled: None},
    lambda config: {"tied_head": of_head(config)},
    lambda fields: {tied: fields["tied_head"]},
  )


def experts() -> Rule:
  """Experts in all layers or in layers 1, 3, 5, ..., one for each token."""

  def read(config: ConfigJson) -> dict[str, Any]:
    depths = (config["num_layers"], config["num_decoder_layers"])
    # Layers 1, 1 + step, 1 + 2 step, ... have experts; all at step 1.
    given = [(n or depths[0], config[x]) for x, n in zip(_SPARSE, depths)]
    steps = {depth // number if number else 0 for depth, number in given}
    if steps == {0}:
      return {"moe": None}
    if not steps < {1, 2}:
      raise config.error(
        f"{_SPARSE[0]}={config[_SPARSE[0]]!r}, {_SPARSE[1]}="
        f"{config[_SPARSE[1]]!r}: the model computes only experts in all "
        "layers or in every second layer of both stacks."
      )
    (every,) = steps
    num = config["num_experts"]
    moe = dict(num_experts=num, top_k=1, every=every, normalize=False)
    return {"moe": moe}

  def write(fields: Mapping[str, Any]) -> dict[str, Any]:
    moe = fields["moe"] or dict(num_experts=1, every=1, jitter=0.0)
    depths = (fields["depth"], fields["decoder_depth"])
    sparse = [depth // moe["every"] for depth in depths]
    return {
      "num_experts": moe["num_experts"],
      **dict(zip(_SPARSE, sparse if fields["moe"] else (0, 0))),
      # The layout's capacity is a number of tokens, ours a share of the length.
      "expert_capacity": _NO_CAPACITY,
      "router_jitter_noise": fields["jitter"],
      "router_bias": False,
    }

  return Rule(dict.fromkeys(_SPARSE, 3) | {"num_experts": 8}, read, write)


def others() -> Rule:
  """Keys that no field depends on."""
  ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None}
  return Rule(
    {"is_encoder_decoder": True},
    lambda config: {},
    lambda fields: {
      "dropout_rate": fields["dropout"],
      "is_encoder_decoder": True,
      **ids,
    },
  )
