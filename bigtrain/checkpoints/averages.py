"""The parameters with which a schedule-free training ends.

A train state of a schedule-free optimizer (optim/wrappers.py) has the point y
of the gradients as its parameters, and the iterate z in the optimizer's state;
the result of the training is their average x. Tools that need no jax import
this module.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bigtrain.checkpoints import integrity
from bigtrain.checkpoints.manifest import Manifest

# Scalars of a schedule-free optimizer in a train state.
STATE = ("opt/b1", "opt/weight_sum", "opt/max_lr")
_Z = "opt/z/"


def averaged(names: Iterable[str]) -> dict[str, str]:
  """{parameter: its iterate z}; {} unless the state is schedule-free."""
  names = set(names)
  if not names.issuperset(STATE):
    return {}
  return {
    f"params/{name.removeprefix(_Z)}": name
    for name in names
    if name.startswith(_Z)
  }


def _average(y: Any, z: Any, b1: Any) -> Any:
  """Returns x, of y = b1 * x + (1 - b1) * z, in the dtype of y."""
  return ((y - (1.0 - b1) * z) / b1).astype(y.dtype)


def read(
  directory: str,
  manifest: Manifest,
  parts: Sequence[tuple[str, tuple[slice, ...]]],
) -> Iterator[Any]:
  iterates = averaged(manifest.arrays)
  if not iterates.keys() & {name for name, _ in parts}:
    yield from integrity.read(directory, manifest, parts)
    return
  (b1,) = integrity.read(directory, manifest, [(STATE[0], ())])
  for name, index in parts:
    names = [name, iterates[name]] if name in iterates else [name]
    reads = [(stored, index) for stored in names]
    y, *z = integrity.read(directory, manifest, reads)
    yield _average(y, z[0], b1) if z else y


def evaluation_form(params: Any, opt: Any) -> Any:
  import jax

  from bigtrain import sharding
  from bigtrain.arrays import trees

  state = dict(trees.flatten_with_names({"params": params, "opt": opt}))
  pairs = averaged(state)
  if not pairs or isinstance(state[STATE[0]], jax.ShapeDtypeStruct):
    return params
  average, b1 = jax.jit(_average), state[STATE[0]]
  # The optimizer's state may be in host memory (config.opt_memory).
  iterates = {y: sharding.on_device(state[z]) for y, z in pairs.items()}
  new = {y: average(state[y], z, b1) for y, z in iterates.items()}
  return trees.map_with_names(
    lambda name, y: new.get(f"params/{name}", y), params
  )
