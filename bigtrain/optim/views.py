"""Views of parameters: the vectors and matrices that an array stands for.

An attention's query kernel is (D, H, K), or (N, D, H, K) for N stacked layers.
Optimizers that act by array or by matrix (Adafactor, LAMB, Muon, ...) have to
see each layer, and the matrix (D, H * K). The model's description of its
parameters (dims.py) says which dimensions are which, or names and shapes do.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bigtrain.arrays import dims, trees

_ATTENTION_INPUT = re.compile(r"(.*/)?(query|key|value)/kernel")
# Parts of names of first and last layers.
_OUTER = re.compile(
  r"\w*embed\w*|(lm_)?head|logits\w*|cls|probe|wte|wpe|conv_root", re.IGNORECASE
)
# Dimensions that hidden layers have on both sides.
_INNER = {"D", "H", "G", "K", "F"}


class View(NamedTuple):
  """What the dimensions of an array mean. Each dimension is in one tuple."""

  # Dimensions that number separate arrays, such as layers and experts.
  stack: tuple[int, ...] = ()
  # Dimensions of a matrix's input; () for a vector, None if it is not split.
  rows: tuple[int, ...] | None = ()
  columns: tuple[int, ...] = ()  # Dimensions of its output, or of a vector.
  # Whether it is a hidden layer's. Muon leaves embeddings and heads to Adam.
  hidden: bool = True

  def array_dims(self) -> tuple[int, ...]:
    return tuple(sorted((self.rows or ()) + self.columns))


def default(name: str, shape: tuple[int, ...], *, stack: int = 0) -> View:
  """The view that flax's names and shapes suggest.

  >>> default("blocks/attention/query/kernel", (12, 768, 12, 64), stack=1)
  View(stack=(0,), rows=(1,), columns=(2, 3), hidden=True)

  The last dimension of a kernel is its output; the kernels "query", "key" and
  "value" have two, of heads and of their width. The leading `stack` dimensions
  number separate arrays.
  """
  parts = name.split("/")
  rank = len(shape) - stack
  num_rows = 0 if parts[-1] == "bias" else max(rank - 1, 0)
  if rank == 3 and _ATTENTION_INPUT.fullmatch(name):
    num_rows = 1
  hidden = not any(_OUTER.fullmatch(part) for part in parts)
  return _view(shape, stack, num_rows, hidden)


def _view(
  shape: tuple[int, ...], stack: int, num_rows: int, hidden: bool
) -> View:
  """A view; a matrix with a single row or column is a vector."""
  every = tuple(range(len(shape)))
  rows, columns = every[stack : stack + num_rows], every[stack + num_rows :]
  if 1 in (math.prod(shape[d] for d in dims) for dims in (rows, columns)):
    rows, columns = (), rows + columns
  return View(every[:stack], rows, columns, hidden)


def described(name: str, shape: tuple[int, ...], roles: dims.Dims) -> View:
  """The view of known dimensions; a router counts as a vector, as in T5X."""
  num_rows, num_columns = len(roles.inputs), len(roles.outputs)
  stack = len(shape) - num_rows - num_columns
  if stack < len(roles.stack):
    raise ValueError(
      f"dims: {name!r} is described as {roles}, but has the shape {shape}."
    )
  if "E" in roles.outputs:
    num_rows = 0
  sides = (roles.inputs or roles.outputs, roles.outputs)
  hidden = all(_INNER.intersection(side) for side in sides)
  return _view(shape, stack, num_rows, hidden)


def of_model(module: Any, model: Any, params: Any) -> dict[str, View]:
  table = dims.of_model(module, model)
  result = {}
  for name, leaf in trees.flatten_with_names(params):
    shape, roles = tuple(leaf.shape), dims.find(table, name)
    view = described(name, shape, roles) if roles else default(name, shape)
    result[name] = view
  return result


# Levels of `seen`, which are also the values of config.optimizer.view.
ARRAYS = ("parameters", "layers", "matrices")


def seen(
  views: Mapping[str, View], shapes: Mapping[str, tuple[int, ...]], arrays: str
) -> dict[str, View]:
  """Views for an optimizer: "layers" have no rows, "parameters" no stacks."""
  if arrays == "matrices":
    return dict(views)
  stacks = {name: views[name].stack for name in shapes}
  if arrays == "parameters":
    stacks = dict.fromkeys(shapes, ())
  return {
    name: View(
      stacks[name],
      None,
      tuple(d for d in range(len(shape)) if d not in stacks[name]),
      views[name].hidden,
    )
    for name, shape in shapes.items()
  }
