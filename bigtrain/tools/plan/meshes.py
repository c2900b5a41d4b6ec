"""Meshes and batches of a plan."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain import sharding
from bigtrain.settings import ConfigError

AXES = sharding.AXES

# {"devices", the axes, "batch_size", "microbatches"}.
Mesh = dict[str, int]


def mesh(
  config: Mapping[str, Any],
  devices: int,
  given: Mapping[str, int | None],
) -> Mesh:
  """Returns {"devices": ..., axis: size, ...}.

  Args:
    given: sizes in place of the config's, by axis; None for the
      config's. With `fsdp`, `replica` takes the devices that are left, or is 1
      if `fsdp` is -1.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices.
  """
  if devices == 1:
    return {"devices": 1, **dict.fromkeys(AXES, 1)}
  sizes = {"replica": 1, "fsdp": -1, "sequence": 1, "tensor": 1}
  of_config = {a: n for a, n in config.get("mesh", {}).items() if a in AXES}
  sizes |= of_config
  if (fsdp := given.get("fsdp")) is not None:
    sizes["replica"] = 1 if fsdp == -1 else -1
  sizes |= {axis: n for axis, n in given.items() if n is not None}
  known = math.prod(n for n in sizes.values() if n != -1)
  rest = max(1, devices // known)
  filled = {axis: rest if n == -1 else n for axis, n in sizes.items()}
  if math.prod(filled.values()) != devices:
    raise ConfigError(
      f"--devices={devices}: {in_words(filled)} is not {devices}; set --fsdp "
      "(-1 for all devices), --sequence or --tensor."
    )
  return {"devices": devices, **filled}


def in_words(sizes: Mapping[str, int]) -> str:
  """Describes the sizes, such as "replica=2 x fsdp=4"."""
  return " x ".join(
    f"{axis}={sizes[axis]}"
    for axis in AXES
    if axis in sharding.BATCH_AXES or sizes[axis] > 1
  )


def ways(of: Mapping[str, int]) -> int:
  """Number of parts into which a mesh splits the batch."""
  return of["replica"] * of["fsdp"]


def batch(
  config: Mapping[str, Any], of: Mapping[str, int], microbatch: int | None
) -> dict[str, int]:
  """Returns {"batch_size": ..., "microbatches": ...}, which divide evenly.

  Args:
    microbatch: largest number of examples per microbatch of the devices that
      share examples; None for config.microbatches.
  """
  size, parts = config["input"]["batch_size"], ways(of)
  if size % parts:
    size = max(1, round(size / parts)) * parts
  if microbatch is None:
    return {"batch_size": size, "microbatches": config.get("microbatches", 1)}
  share = size // parts
  largest = min(share, microbatch)
  at_once = max(n for n in range(1, largest + 1) if share % n == 0)
  return {"batch_size": size, "microbatches": share // at_once}


def sized(
  config: Mapping[str, Any],
  devices: int,
  given: Mapping[str, int | None],
  microbatch: int | None,
) -> Mesh:
  """Returns a mesh with its batch; see `mesh` and `batch`."""
  of = mesh(config, devices, given)
  return {**of, **batch(config, of, microbatch)}


def bases(
  config: Mapping[str, Any],
  meshes: Sequence[Mesh],
  given: Mapping[str, int | None],
  compile_up_to: int,
) -> dict[int, Mesh]:
  """{number of devices: mesh to extrapolate from} of meshes too large.

  Raises:
    ConfigError: no smaller mesh splits the same axes.
  """
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
    result[devices] = {
      **base,
      "batch_size": large["batch_size"] // ways(large) * ways(base),
      "microbatches": large["microbatches"],
    }
  return result


def changes(config: Mapping[str, Any], of: Mapping[str, int]) -> list[str]:
  """Returns changes of a config for a mesh and its batch."""
  return [
    *(f"mesh.{axis}={of[axis]}" for axis in AXES),
    # The planned devices are one slice, or do not say.
    *(["mesh.slices=None"] if "slices" in config.get("mesh", {}) else []),
    f"input.batch_size={of['batch_size']}",
    f"microbatches={of['microbatches']}",
  ]
