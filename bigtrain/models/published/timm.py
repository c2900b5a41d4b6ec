"""timm's config.json: the name of an architecture, and its arguments.

`flat` puts all arguments in place of the name, so that a family can read them;
`folded` finds the name again. timm.json has the arguments of each ViT of timm
1.0.31 that differ from the defaults, which are under "";
tests/golden/make_timm.py writes it.
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
# Parts of an architecture, which no argument of a config.json changes.
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
  result = {
    "num_classes": processing.get("num_classes", 1000),
    **args,
    "model_type": MODEL_TYPE,
    "image_size": size if isinstance(size, int) else size[-1],
    "patch_bias": not args["pre_norm"],
    "pretrained_cfg": processing,
  }
  if "num_classes" in values:
    result["num_classes"] = values["num_classes"]
  return result


def folded(config: Mapping[str, Any]) -> dict[str, Any]:
  """The inverse of `flat`: the nearest architecture, and what differs."""
  if config.get("patch_bias") == config["pre_norm"]:
    raise ConfigError(
      "--layout=timm: expected biases of the patches, or pre_norm; not both."
    )
  args = {key: config[key] for key in _DEFAULTS}
  changes = {name: _changes(name, args, config["mlp_size"]) for name in _MODELS}
  possible = [name for name in _MODELS if not {*changes[name]} & {*_FIXED}]
  if not possible:
    fixed = ", ".join(f"{key}={args[key]}" for key in _FIXED)
    raise ConfigError(f"--layout=timm: no architecture of timm has {fixed}.")
  name = min(possible, key=lambda name: len(changes[name]))
  num_classes = config["num_classes"]
  model_args = changes[name] | {"num_classes": num_classes}
  pretrained: dict[str, Any] = {
    "num_classes": num_classes,
    "fixed_input_size": True,
    "first_conv": "patch_embed.proj",
    "classifier": "head",
  }
  if size := config.get("image_size"):
    sides = [size, size] if isinstance(size, int) else [*size]
    model_args["img_size"] = sides
    pretrained["input_size"] = [3, *sides]
  return {
    "architecture": name,
    "num_classes": num_classes,
    "num_features": args["embed_dim"],
    "global_pool": args["global_pool"],
    "model_args": model_args,
    "pretrained_cfg": pretrained,
  }


def _changes(
  name: str, args: Mapping[str, Any], mlp_size: int
) -> dict[str, Any]:
  """The arguments that are not those of an architecture."""
  theirs = _DEFAULTS | _MODELS[name]
  if theirs["init_values"] and args["init_values"]:
    # The initial value says nothing of a trained model.
    theirs["init_values"] = args["init_values"]
  if int(theirs["mlp_ratio"] * args["embed_dim"]) == mlp_size:
    theirs["mlp_ratio"] = args["mlp_ratio"]
  return {key: x for key, x in args.items() if x != theirs[key]}
