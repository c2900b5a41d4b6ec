"""Changes of a config for a plan: its mesh, its batch, and made-up data.

A mesh here is a dict with the number of devices, the size of each axis and,
after `batch`, how a batch is split.
"""

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

# {"devices", each of AXES, "batch_size", "microbatches"}.
Mesh = dict[str, int]


def mesh(
  config: Mapping[str, Any], devices: int, given: Mapping[str, int | None]
) -> Mesh:
  """Returns {"devices": ..., axis: size, ...}.

  Args:
    given: sizes that replace the config's, or None. If it has `fsdp`, `replica`
      gets the devices that are left.
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


def batch_ways(mesh: Mapping[str, int]) -> int:
  """Number of parts of a batch; devices along other axes share examples."""
  return mesh["replica"] * mesh["pipeline"] * mesh["fsdp"]


def batch(
  config: Mapping[str, Any], mesh: Mapping[str, int], microbatch: int | None
) -> dict[str, int]:
  """Returns {"batch_size": ..., "microbatches": ...}, which divide evenly.

  Args:
    microbatch: largest number of examples per microbatch of the devices that
      share examples; None for the config's microbatches.
  """
  size = config["input"]["batch_size"]
  parts = batch_ways(mesh)
  if size % parts:  # The nearest size that divides.
    size = max(1, round(size / parts)) * parts
  if microbatch is not None:
    share = size // parts
    largest = min(share, microbatch)
    at_once = max(n for n in range(1, largest + 1) if share % n == 0)
    microbatches = share // at_once
  elif examples := config.get("microbatch_examples"):
    microbatches = max(1, size // examples)
  else:
    microbatches = max(1, config.get("microbatches", 1))
  return {"batch_size": size, "microbatches": microbatches}


def bases(
  config: Mapping[str, Any],
  meshes: Sequence[Mesh],
  given: Mapping[str, int | None],
  compile_up_to: int,
) -> dict[int, Mesh]:
  """The meshes to extrapolate from: {number of devices: smaller mesh}.

  It has an entry for each mesh of more than `compile_up_to` devices.
  """
  compiled = [m["devices"] for m in meshes if m["devices"] <= compile_up_to]
  number = max(compiled, default=compile_up_to)
  result = {}
  for large in meshes:
    devices = large["devices"]
    if devices <= compile_up_to:
      continue
    base = mesh(config, number, given)
    for axis in AXES:
      # The sizes of `replica` and `fsdp` may grow, but not from 1: then the
      # larger program has collectives that the smaller one lacks.
      may_grow = axis in sharding.BATCH_AXES
      same = base[axis] == large[axis] or may_grow
      if (base[axis] > 1) != (large[axis] > 1) or not same:
        raise ConfigError(
          f"--devices={devices}: cannot be extrapolated from {number} devices, "
          f"where {axis}={base[axis]}; add a number up to {compile_up_to} for "
          f"which {axis} is {'above 1' if same else large[axis]}."
        )
    share = large["batch_size"] // batch_ways(large)
    base["batch_size"] = share * batch_ways(base)
    base["microbatches"] = large["microbatches"]
    result[devices] = base
  return result


def changes(config: Mapping[str, Any], mesh: Mapping[str, int]) -> list[str]:
  """The changes of a config for a mesh, as "KEY=VALUE"."""
  result = [f"mesh.{axis}={mesh[axis]}" for axis in AXES]
  if "slices" in config.get("mesh", {}):
    # The planned devices are one slice, or do not tell.
    result.append("mesh.slices=None")
  if "microbatch_examples" in config:
    result.append("microbatch_examples=None")
  result.append(f"input.batch_size={mesh['batch_size']}")
  result.append(f"microbatches={mesh['microbatches']}")
  return result


def without_data(
  config: Mapping[str, Any],
  features: Mapping[str, str] | None,
  num_examples: int,
) -> list[str]:
  """Returns "KEY=VALUE" for the keys of a config that need data.

  Data from files becomes made-up data of the same shapes. Evaluations and hooks
  are removed.
  """
  sources = {"input.data": config["input"].get("data")}
  for name, entry in config["input"].get("mixture", {}).items():
    sources[f"input.mixture.{name}.data"] = entry.get("data")
  result = []
  for key, data in sources.items():
    made_up = features or (_features(data) if data else None)
    if made_up:
      synthetic = dict(
        type="synthetic", features=dict(made_up), num_examples=num_examples
      )
      result.append(f"{key}={synthetic!r}")
  without: dict[str, Any] = {
    "evals": {},
    "hooks": {},
    "wandb": None,
    "mlflow": None,
    "trackio": None,
    "loggers": {},
  }
  for key, nothing in without.items():
    if config.get(key):
      result.append(f"{key}={nothing}")
  return result


def _features(data: Mapping[str, Any]) -> dict[str, str] | None:
  """Features of a source that reads files; None for other sources.

  Those of images are only typical: the program decodes them to the same size.
  """
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
