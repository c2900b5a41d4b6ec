"""Views of parameters: the vectors and matrices that an array stands for.

An array of parameters may hold the layers of a whole stack, and a matrix may
have more than two dimensions: an attention's query kernel is (D, H, K), or
(N, D, H, K) for N layers. Optimizers that act by array or by matrix (Adafactor,
LAMB, Muon, ...) have to see each layer, and the matrix (D, H * K). A view says
which dimensions are which.

A model gives the views of its parameters as a function beside its Model:

  def param_view(model, name, shape) -> views.View

Without it, `default` tells by the names and shapes; it knows of no stacks.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bigtrain import trees

_ATTENTION_INPUT = re.compile(r"(.*/)?(query|key|value)/kernel")
# Parts of names of first and last layers.
_OUTER = re.compile(
  r"\w*embed\w*|(lm_)?head|logits\w*|cls|probe|wte|wpe", re.IGNORECASE
)


class View(NamedTuple):
  """What the dimensions of an array are. Each dimension is in one tuple.

  Attributes:
    stack: dimensions that number separate arrays, such as layers and experts.
    rows: dimensions of a matrix's input; () for a vector, None if the array is
      not split into rows and columns.
    columns: dimensions of its output, or of a vector.
    hidden: whether it belongs to a hidden layer. Embeddings and heads do not,
      and Muon leaves them to Adam.
  """

  stack: tuple[int, ...] = ()
  rows: tuple[int, ...] | None = ()
  columns: tuple[int, ...] = ()
  hidden: bool = True

  def array_dims(self) -> tuple[int, ...]:
    """Returns the dimensions of each of the stacked arrays."""
    return tuple(sorted((self.rows or ()) + self.columns))


def default(
  name: str,
  shape: tuple[int, ...],
  *,
  stack: int = 0,
  hidden: bool | None = None,
) -> View:
  """Returns the view that flax's names and shapes suggest.

  >>> default("blocks/attention/query/kernel", (12, 768, 12, 64), stack=1)
  View(stack=(0,), rows=(1,), columns=(2, 3), hidden=True)
  >>> default("conv/kernel", (3, 3, 64, 128))
  View(stack=(), rows=(0, 1, 2), columns=(3,), hidden=True)
  >>> default("lm_head/bias", (1000,))
  View(stack=(), rows=(), columns=(0,), hidden=False)

  The last dimension of a kernel is its output; the kernels "query", "key" and
  "value" have two, of heads and of their width.

  Args:
    name: name of the parameter, joined by "/".
    shape: its shape.
  """
  parts = name.split("/")
  dims = tuple(range(stack, len(shape)))
  if hidden is None:
    hidden = not any(_OUTER.fullmatch(part) for part in parts)
  num_rows = len(dims) - 1
  if len(dims) == 3 and _ATTENTION_INPUT.fullmatch(name):
    num_rows = 1
  rows, columns = dims[: max(num_rows, 0)], dims[max(num_rows, 0) :]
  is_vector = parts[-1] == "bias" or 1 in (
    math.prod(shape[d] for d in rows),
    math.prod(shape[d] for d in columns),
  )
  if is_vector:
    rows, columns = (), dims
  return View(tuple(range(stack)), rows, columns, hidden)


def of_stack(
  name: str, shape: tuple[int, ...], stack_name: str = "blocks"
) -> View:
  """Returns the view of a parameter of a model with a stack of blocks.

  With `scan`, arrays have a leading axis of layers (models/layers/stack.py).
  Those of experts have an axis of experts, and a router counts as a vector: T5X
  does not factor its second moments either, and it belongs to no hidden layer.

  Args:
    shape: its shape.
    stack_name: name of the stack, such as "blocks" for blocks/norm/scale.
  """
  stack = int(re.search(rf"(^|/){stack_name}/", name) is not None)
  if re.search(r"(^|/)moe/(up|gate|down)/kernel$", name):
    stack += 1
  if name.endswith("/router/kernel"):
    dims = tuple(range(len(shape)))
    return View(dims[:stack], (), dims[stack:], hidden=False)
  return default(name, shape, stack=stack)


def of_model(module: Any, model: Any, params: Any) -> dict[str, View]:
  """Returns the views of a model's parameters by name.

  Args:
    module: module of config.model_name; its `param_view` knows the model's
      stacks and matrices.
  """

  def view(name: str, shape: tuple[int, ...]) -> View:
    if not hasattr(module, "param_view"):
      return default(name, shape)
    result = module.param_view(model, name, shape)
    check(result, name, shape)
    return result

  named = trees.flatten_with_names(params)
  return {name: view(name, tuple(x.shape)) for name, x in named}


def check(view: View, name: str, shape: tuple[int, ...]) -> None:
  """Raises ValueError unless the view has each dimension of the shape once."""
  dims = [*view.stack, *view.array_dims()]
  if sorted(dims) != list(range(len(shape))):
    raise ValueError(
      f"param_view: the view of {name!r} must have each dimension of "
      f"{tuple(shape)} once, got {view}."
    )


# Levels of `seen`, which are also the values of config.optimizer.view.
ARRAYS = ("parameters", "layers", "matrices")


def seen(
  views: Mapping[str, View], shapes: Mapping[str, tuple[int, ...]], arrays: str
) -> dict[str, View]:
  """Returns the views of an optimizer that sees only some of the structure.

  Args:
    shapes: shapes by name.
    arrays: "matrices" keeps the views; "layers" keeps their stacks, and a
      layer has no rows; "parameters" has neither.
  """
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
