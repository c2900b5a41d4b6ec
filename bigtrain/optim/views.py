"""Views of parameters: which vectors or matrices the elements of an array form.

An attention's query kernel has the shape (D, H, K), or (N, D, H, K) for N
stacked layers. Optimizers that act on whole layers (LAMB) or on matrices
(Adafactor, Muon) have to treat it as N matrices (D, H * K). A view says which
dimensions are stacked, which are rows and which are columns. It comes from the
model's description of its parameters (arrays/dims.py), or is guessed from
flax's names and shapes.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bigtrain.arrays import dims, trees

_ATTENTION_INPUT = re.compile(r"(.*/)?(query|key|value)/kernel")
# Names of first and last layers, for models without a description.
_OUTER = re.compile(
  r"\w*embed\w*|(lm_)?head|logits\w*|cls|probe|wte|wpe|conv_root", re.IGNORECASE
)
# Names of dimensions, of arrays/dims.py, that hidden layers have as inputs and
# as outputs.
_INNER = {"D", "H", "G", "K", "F", "query_rank", "kv_rank", "both_widths"}
# Those that number heads.
_HEADS = {"H", "G", "R"}


class View(NamedTuple):
  """Roles of an array's dimensions. Each dimension is in exactly one tuple."""

  # Dimensions that number separate arrays, such as layers and experts.
  stack: tuple[int, ...] = ()
  # Dimensions of a matrix's input; () for a vector; None if rows and columns
  # are not distinguished, and all dimensions are in `columns`.
  rows: tuple[int, ...] | None = ()
  # Dimensions of a matrix's output, or of a vector.
  columns: tuple[int, ...] = ()
  # Whether it belongs to a hidden layer. Muon leaves the others to Adam.
  hidden: bool = True
  # Those of the rows or columns that number heads.
  heads: tuple[int, ...] = ()

  def by_head(self) -> "View":
    """The view in which each head has a separate matrix.

    The view does not change if no rows or no columns would be left, as in a
    gate with a single number for each head.
    """
    rows = tuple(dim for dim in self.rows or () if dim not in self.heads)
    columns = tuple(dim for dim in self.columns if dim not in self.heads)
    if not rows or not columns:
      return self
    stack = tuple(sorted(self.stack + self.heads))
    return View(stack, rows, columns, self.hidden)

  def array_dims(self) -> tuple[int, ...]:
    """All dimensions except the stack's."""
    return tuple(sorted((self.rows or ()) + self.columns))


def default(name: str, shape: tuple[int, ...], *, stack: int = 0) -> View:
  """The view that flax's names and shapes suggest.

  >>> default("blocks/attention/query/kernel", (12, 768, 12, 64), stack=1)
  View(stack=(0,), rows=(1,), columns=(2, 3), hidden=True, heads=(2,))

  The last dimension of a kernel is its output; the kernels "query", "key" and
  "value" have two, of heads and of their width. The leading `stack` dimensions
  number separate arrays.
  """
  parts = name.split("/")
  rank = len(shape) - stack
  num_rows = 0 if parts[-1] == "bias" else max(rank - 1, 0)
  heads: tuple[int, ...] = ()
  if rank == 3 and _ATTENTION_INPUT.fullmatch(name):
    num_rows, heads = 1, (stack + 1,)
  hidden = not any(_OUTER.fullmatch(part) for part in parts)
  return _view(shape, stack, num_rows, hidden, heads)


def _view(
  shape: tuple[int, ...],
  stack: int,
  num_rows: int,
  hidden: bool,
  heads: tuple[int, ...],
) -> View:
  """A view whose first dimensions are the stack, followed by the rows."""
  all_dims = tuple(range(len(shape)))
  rows = all_dims[stack : stack + num_rows]
  columns = all_dims[stack + num_rows :]
  sizes = [math.prod(shape[d] for d in side) for side in (rows, columns)]
  if 1 in sizes:  # A matrix with a single row or column is a vector.
    rows, columns = (), rows + columns
  return View(all_dims[:stack], rows, columns, hidden, heads)


def described(name: str, shape: tuple[int, ...], roles: dims.Dims) -> View:
  """The view that a model's description of the parameter gives."""
  num_rows = len(roles.inputs)
  stack = len(shape) - num_rows - len(roles.outputs)
  if stack < len(roles.stack):
    raise ValueError(
      f"dims: {name!r} is described as {roles}, but has the shape {shape}."
    )
  if "E" in roles.outputs:
    num_rows = 0  # A router counts as a vector, as in T5X.
  sides = (roles.inputs or roles.outputs, roles.outputs)
  hidden = all(_INNER.intersection(side) for side in sides)
  heads = tuple(
    stack + i
    for i, dim in enumerate(roles.inputs + roles.outputs)
    if dim in _HEADS
  )
  return _view(shape, stack, num_rows, hidden, heads)


def of_model(module: Any, model: Any, params: Any) -> dict[str, View]:
  """{name: view} of a model's parameters."""
  table = dims.of_model(module, model)
  result = {}
  for name, leaf in trees.flatten_with_names(params):
    shape = tuple(leaf.shape)
    roles = dims.find(table, name)
    if roles:
      result[name] = described(name, shape, roles)
    else:
      result[name] = default(name, shape)
  return result


# What an optimizer can see; the values of config.optimizer.view.
ARRAYS = ("parameters", "layers", "matrices", "heads")


def seen(
  views: Mapping[str, View], shapes: Mapping[str, tuple[int, ...]], arrays: str
) -> dict[str, View]:
  """The views for an optimizer that acts on `arrays`, one of ARRAYS.

  matrices    the views as they are
  heads       the same, and each head has its own matrix
  layers      stacks of arrays, whose rows and columns are not distinguished
  parameters  the same, and stacks count as one array
  """
  if arrays == "matrices":
    return dict(views)
  if arrays == "heads":
    return {name: view.by_head() for name, view in views.items()}
  result = {}
  for name, shape in shapes.items():
    stack = views[name].stack if arrays == "layers" else ()
    others = tuple(dim for dim in range(len(shape)) if dim not in stack)
    result[name] = View(stack, None, others, views[name].hidden)
  return result
