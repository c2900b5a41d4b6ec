"""Replaces the data of a config by made-up data, to plan without data."""

from collections.abc import Mapping
from typing import Any

from bigtrain.data.formats import windows

# Features of common image data sets. Preprocessing ops report others that they
# need.
_USUAL_FEATURES = {
  "image": "jpeg[375,500,3]",
  "label": "int64",
  "labels": "int64[?]",
  "text": "text",
  "captions/text": "text[?]",
}
_FROM_FILES = ("tfds", "image_folder")


def overrides(
  config: Mapping[str, Any],
  features: Mapping[str, str] | None,
  num_examples: int,
) -> list[str]:
  """Returns "key=value" for the keys of a config that need data.

  Data that is read from files becomes made-up data of the same shapes; other
  data stays. Evaluations, hooks and wandb are removed.

  Args:
    features: {name: "KIND[SHAPE]"} of the data, see data/synthetic.py; usual
      ones unless given.
  """
  entries = {"input.data": config["input"].get("data")}
  for name, entry in config["input"].get("mixture", {}).items():
    entries[f"input.mixture.{name}.data"] = entry.get("data")
  changes = []
  for key, data in entries.items():
    made_up_features = features or (_features(data) if data else None)
    if made_up_features:
      made_up = dict(
        type="synthetic",
        features=dict(made_up_features),
        num_examples=num_examples,
      )
      changes.append(f"{key}={made_up!r}")
  removed: Any = {"evals": {}, "hooks": {}, "wandb": {}}
  return changes + [f"{k}={v}" for k, v in removed.items() if config.get(k)]


def _features(data: Mapping[str, Any]) -> dict[str, str] | None:
  """Features of a source that reads files; None for other sources."""
  kind = data.get("type")
  if kind in _FROM_FILES:
    return _USUAL_FEATURES
  if kind not in ("tokens", "text") or not isinstance(data.get("length"), int):
    return None
  spec = windows.spec(
    data["length"],
    segments=bool(data.get("segments") or data.get("packing")),
    last=data.get("last", "pad"),
    num_bytes=kind == "text",
  )
  return {
    name: f"{dtype.name}[{','.join(map(str, shape))}]"
    for name, (dtype, shape) in spec.items()
  }
