"""Made-up data in place of that which a config names, to plan without it."""

from collections.abc import Mapping
from typing import Any

from bigtrain.data.formats import windows

# What the data sets have that are read from such files: pictures, their
# labels, and captions. An op that wants something else says so.
_USUAL_FEATURES = {
  "image": "jpeg[375,500,3]",
  "label": "int64",
  "labels": "int64[?]",
  "text": "text",
  "captions/text": "text[?]",
}
_FROM_FILES = ("tfds", "image_folder")


def stand_ins(
  config: Mapping[str, Any],
  features: Mapping[str, str] | None,
  num_examples: int,
) -> list[str]:
  """Changes to a config: made-up data in place of files, and no evaluations.

  Args:
    config: plain.
    features: of the data, as data/synthetic.py has them; those that such data
      usually has, unless given.
    num_examples: of an epoch.

  Returns:
    "key=value" of each change. Data that is not read from files is left.
  """
  entries = {"input.data": config["input"].get("data")}
  for name, entry in config["input"].get("mixture", {}).items():
    entries[f"input.mixture.{name}.data"] = entry.get("data")
  changes = []
  for key, data in entries.items():
    found = features or (_features(data) if data else None)
    if found:
      made_up = dict(
        type="synthetic", features=dict(found), num_examples=num_examples
      )
      changes.append(f"{key}={made_up!r}")
  nothing: Any = {"evals": {}, "hooks": {}, "wandb": {}}
  return changes + [f"{k}={v}" for k, v in nothing.items() if config.get(k)]


def _features(data: Mapping[str, Any]) -> dict[str, str] | None:
  """What a source of the config would give; None for those that are opened."""
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
