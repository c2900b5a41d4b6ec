"""Changes of a config for a plan: its mesh, its batch, and made-up data."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.data.formats import windows

AXES = sharding.AXES

# Features of common image data sets, as the source "synthetic" declares them.
# Preprocessing ops report the other features that they need.
_USUAL_FEATURES = {
  "image": "jpeg[375,500,3]",
  "label": "int64",
  "labels": "int64[?]",
  "text": "text",
  "captions/text": "text[?]",
}

# {"devices", the axes, "batch_size", "microbatches"}.
Mesh = dict[str, int]


def mesh(
  config: Mapping[str, Any], devices: int, given: Mapping[str, int | None]
) -> Mesh:
  """Returns {"devices": ..., axis: size, ...}.

  `given` has sizes in place of the config's, or None. If it has `fsdp`,
  `replica` takes the devices that are left.
  """
  if devices == 1:
    return {"devices": 1, **dict.fromkeys(AXES, 1)}
  sizes = dict.fromkeys(AXES, 1) | {"fsdp": -1}
  sizes |= {a: n for a, n in config.get("mesh", {}).items() if a in AXES}
  if (fsdp := given.get("fsdp")) is not None:
    sizes["replica"] = 1 if fsdp == -1 else -1
  sizes |= {axis: n for axis, n in given.items() if n is not None}
  known = math.prod(n for n in sizes.values() if n != -1)
  rest = max(1, devices // known)
  filled = {axis: rest if n == -1 else n for axis, n in sizes.items()}
  if math.prod(filled.values()) != devices:
    raise ConfigError(
      f"--devices={devices}: {sharding.in_words(filled)} is not {devices}; set "
      "--fsdp (-1 for all devices), --sequence or --tensor."
    )
  return {"devices": devices, **filled}


def batch_ways(of: Mapping[str, int]) -> int:
  return of["replica"] * of["pipeline"] * of["fsdp"]


def batch(
  config: Mapping[str, Any], of: Mapping[str, int], microbatch: int | None
) -> dict[str, int]:
  """Returns {"batch_size": ..., "microbatches": ...}, which divide evenly.

  `microbatch` is the largest number of examples per microbatch of the devices
  that share examples; None for the config's microbatches.
  """
  size, parts = config["input"]["batch_size"], batch_ways(of)
  if size % parts:
    size = max(1, round(size / parts)) * parts
  if microbatch is None:
    examples = config.get("microbatch_examples")
    number = size // examples if examples else config.get("microbatches", 1)
    return {"batch_size": size, "microbatches": max(1, number)}
  share = size // parts
  largest = min(share, microbatch)
  at_once = max(n for n in range(1, largest + 1) if share % n == 0)
  return {"batch_size": size, "microbatches": share // at_once}


def bases(
  config: Mapping[str, Any],
  meshes: Sequence[Mesh],
  given: Mapping[str, int | None],
  compile_up_to: int,
) -> dict[int, Mesh]:
  """{number of devices: mesh to extrapolate from} of meshes too large."""
  result = {}
  for large in meshes:
    devices = large["devices"]
    if devices <= compile_up_to:
      continue
    compiled = [m["devices"] for m in meshes if m["devices"] <= compile_up_to]
    number = max(compiled, default=compile_up_to)
    base = mesh(config, number, given)
    for axis in AXES:
      same = base[axis] == large[axis] or axis in sharding.BATCH_AXES
      if (base[axis] > 1) != (large[axis] > 1) or not same:
        raise ConfigError(
          f"--devices={devices}: cannot be extrapolated from {number} devices, "
          f"where {axis}={base[axis]}; add a number up to {compile_up_to} for "
          f"which {axis} is {'above 1' if same else large[axis]}."
        )
    share = large["batch_size"] // batch_ways(large)
    base["batch_size"] = share * batch_ways(base)
    result[devices] = base | {"microbatches": large["microbatches"]}
  return result


def changes(config: Mapping[str, Any], of: Mapping[str, int]) -> list[str]:
  return [
    *(f"mesh.{axis}={of[axis]}" for axis in AXES),
    # The planned devices are one slice, or do not say.
    *(["mesh.slices=None"] if "slices" in config.get("mesh", {}) else []),
    *(["microbatch_examples=None"] if "microbatch_examples" in config else []),
    f"input.batch_size={of['batch_size']}",
    f"microbatches={of['microbatches']}",
  ]


def without_data(
  config: Mapping[str, Any],
  features: Mapping[str, str] | None,
  num_examples: int,
) -> list[str]:
  """Returns "key=value" for the keys of a config that need data.

  Data from files becomes made-up data of the same shapes.
  """
  entries = {"input.data": config["input"].get("data")}
  for name, entry in config["input"].get("mixture", {}).items():
    entries[f"input.mixture.{name}.data"] = entry.get("data")
  changes = []
  for key, data in entries.items():
    if made_up := features or (_features(data) if data else None):
      size = dict(num_examples=num_examples)
      source = dict(type="synthetic", features=dict(made_up), **size)
      changes.append(f"{key}={source!r}")
  removed: Any = {
    "evals": {},
    "hooks": {},
    "wandb": None,
    "mlflow": None,
    "trackio": None,
    "loggers": {},
  }
  return changes + [f"{k}={v}" for k, v in removed.items() if config.get(k)]


def _features(data: Mapping[str, Any]) -> dict[str, str] | None:
  """Features of a source that reads files; None for other sources."""
  kind = data.get("type")
  if kind in ("tfds", "image_folder"):
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
