"""config.json of timm: the name of an architecture, and other arguments.

timm.json has the arguments of each ViT of timm 1.0.31 that differ from those of
"", the defaults; tests/golden/make_timm.py writes it. "norm_eps" and "swiglu"
belong to the architecture.
"""

import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

from bigtrain.config.errors import ConfigError, did_you_mean

MODEL_TYPE = "timm_wrapper"  # As in the config.json of transformers.
_FILE = importlib.resources.files(__package__).joinpath("timm.json")
_MODELS: dict[str, dict[str, Any]] = json.loads(_FILE.read_text())
_DEFAULTS = _MODELS.pop("")
_FIXED = ("norm_eps", "swiglu")


def flat(file: str, values: Mapping[str, Any]) -> dict[str, Any]:
  """A config.json with all arguments in place of the architecture's name."""
  name = str(values["architecture"]).partition(".")[0]
  if name not in _MODELS:
    raise ConfigError(
      f"{file}: architecture={name!r}: none of the ViTs of timm that "
      f"config.model_name='vit' computes.{did_you_mean(name, _MODELS)}"
    )
  given = values.get("model_args") or {}
  processing = values.get("pretrained_cfg") or values
  args = {**_DEFAULTS, **_MODELS[name], **given}
  size = args.get("img_size") or processing.get("input_size", [224])[-1]
  return {
    "num_classes": processing.get("num_classes", 1000),
    **args,
    **{key: values[key] for key in ("num_classes",) if key in values},
    "model_type": MODEL_TYPE,
    "image_size": size if isinstance(size, int) else size[-1],
    "patch_bias": not args["pre_norm"],
    "pretrained_cfg": processing,
  }


def folded(config: Mapping[str, Any]) -> dict[str, Any]:
  """The inverse of `flat`: the nearest architecture, and what differs."""
  if config.get("patch_bias") == config["pre_norm"]:
    raise ConfigError(
      "--layout=timm: expected biases of the patches, or pre_norm; not both."
    )
  args = {key: config[key] for key in _DEFAULTS}

  def changes(name: str) -> dict[str, Any]:
    theirs = _DEFAULTS | _MODELS[name]
    if theirs["init_values"] and args["init_values"]:
      theirs["init_values"] = args["init_values"]  # Only initial.
    if int(theirs["mlp_ratio"] * args["embed_dim"]) == config["mlp_size"]:
      theirs["mlp_ratio"] = args["mlp_ratio"]
    return {key: x for key, x in args.items() if x != theirs[key]}

  options = {name: changes(name) for name in _MODELS}
  fit = [n for n, x in options.items() if not {*x} & {*_FIXED}]
  if not fit:
    fixed = ", ".join(f"{key}={args[key]}" for key in _FIXED)
    raise ConfigError(f"--layout=timm: no architecture of timm has {fixed}.")
  name = min(fit, key=lambda name: len(options[name]))
  classes = config["num_classes"]
  given: dict[str, Any] = options[name] | {"num_classes": classes}
  about: dict[str, Any] = {"num_classes": classes, "fixed_input_size": True}
  about |= dict(first_conv="patch_embed.proj", classifier="head")
  if size := config.get("image_size"):
    sides = [size, size] if isinstance(size, int) else [*size]
    given["img_size"], about["input_size"] = sides, [3, *sides]
  return {
    "architecture": name,
    "num_classes": classes,
    "num_features": args["embed_dim"],
    "global_pool": args["global_pool"],
    "model_args": given,
    "pretrained_cfg": about,
  }
