"""The parameters that result from training with a schedule-free optimizer.

Such an optimizer (optim/wrappers.py) computes gradients at a point y, the
parameters of the train state, and keeps the iterate z in the optimizer state.
The result of the training is the average x, where y = b1 * x + (1 - b1) * z.

`evaluation_form` computes x from a train state, `read` from the files of a
checkpoint. Tools that do not use jax import this module.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bigtrain.checkpoints import integrity
from bigtrain.checkpoints.manifest import Manifest

# Scalars of a schedule-free optimizer in a train state.
STATE = ("opt/b1", "opt/weight_sum", "opt/max_lr")
_Z = "opt/z/"


def averaged(names: Iterable[str]) -> dict[str, str]:
  """{parameter: its iterate z}; {} for other optimizers."""
  names = set(names)
  if not names.issuperset(STATE):
    return {}
  return {
    f"params/{name.removeprefix(_Z)}": name
    for name in names
    if name.startswith(_Z)
  }


def _average(y: Any, z: Any, b1: Any) -> Any:
  """Solves y = b1 * x + (1 - b1) * z for x, in the dtype of y."""
  return ((y - (1.0 - b1) * z) / b1).astype(y.dtype)


def read(
  directory: str,
  manifest: Manifest,
  parts: Sequence[tuple[str, tuple[slice, ...]]],
) -> Iterator[Any]:
  """Like `integrity.read`, but returns the averages as the parameters."""
  iterates = averaged(manifest.arrays)
  if not iterates.keys() & {name for name, _ in parts}:
    yield from integrity.read(directory, manifest, parts)
    return
  (b1,) = integrity.read(directory, manifest, [(STATE[0], ())])
  for name, index in parts:
    if name in iterates:
      reads = [(name, index), (iterates[name], index)]
      y, z = integrity.read(directory, manifest, reads)
      yield _average(y, z, b1)
    else:
      yield from integrity.read(directory, manifest, [(name, index)])


def evaluation_form(params: Any, opt: Any) -> Any:
  """The averages of a schedule-free train state; otherwise the parameters."""
  import jax

  from bigtrain import sharding
  from bigtrain.arrays import trees

  state = dict(trees.flatten_with_names({"params": params, "opt": opt}))
  pairs = averaged(state)
  if not pairs or isinstance(state[STATE[0]], jax.ShapeDtypeStruct):
    return params
  average = jax.jit(_average)
  b1 = state[STATE[0]]
  averages = {}
  for name, iterate in pairs.items():
    # The optimizer's state may be in host memory (config.opt_memory).
    z = sharding.on_device(state[iterate])
    averages[name] = average(state[name], z, b1)
  return trees.map_with_names(
    lambda name, y: averages.get(f"params/{name}", y), params
  )
