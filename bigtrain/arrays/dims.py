"""Says which dimensions of a parameter are inputs, outputs, layers or experts.

Optimizers, initializers, tensor parallelism and adapters all need this. A model
describes its parameters once, in a function beside its Model class:

  def param_dims(model: Model) -> dims.Table:
    return {r".*/up/kernel": "D -> F", r".*/up/bias": "F"}

A table maps a regular expression, which has to match the whole name, to a
letter or a word for each dimension. The first match decides. "D -> H K" is a
matrix with D inputs and H x K outputs, "F" a vector, and "E; D -> F" a stack of
matrices, here of experts. If a parameter has more dimensions than that, the
first ones are its layers. "E:fsdp; D -> F" splits the experts over the axis
`fsdp` of the mesh.

Letters: D width of the model, H heads, G heads of keys and values, K width of a
head, F hidden width, E experts, V vocabulary or classes. Other dimensions have
words.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

Table: TypeAlias = Mapping[str, str]


class Dims(NamedTuple):
  """The letters of a parameter's dimensions, not counting layers."""

  stack: tuple[str, ...]  # Of separate matrices, such as experts.
  inputs: tuple[str, ...]  # A vector has none.
  outputs: tuple[str, ...]
  # {dimension, counted from the end as -1, -2, ...: its axis of the mesh}.
  axes: dict[int, str]


def of_model(module: Any, model: Any) -> Table:
  """Returns the table of a model; without `param_dims`, an empty one."""
  return module.param_dims(model) if hasattr(module, "param_dims") else {}


def of_all(table: Table) -> Callable[[Any], Table]:
  """Makes a `param_dims` that returns the same table for all models."""
  return lambda model: table


def parse(text: str) -> Dims:
  """Parses the value of a table.

  >>> parse("E:fsdp; D -> F")
  Dims(stack=('E',), inputs=('D',), outputs=('F',), axes={-3: 'fsdp'})
  """
  stack, _, array = text.rpartition(";")
  inputs, _, outputs = array.rpartition("->")
  words = [*stack.split(), *inputs.split(), *outputs.split()]
  axes = {}
  for i, word in enumerate(words):
    _, _, axis = word.partition(":")
    if axis:
      axes[i - len(words)] = axis
  return Dims(_letters(stack), _letters(inputs), _letters(outputs), axes)


def _letters(words: str) -> tuple[str, ...]:
  return tuple(word.partition(":")[0] for word in words.split())


def find(table: Table, name: str) -> Dims | None:
  """Returns the dimensions of a parameter; None if no pattern matches."""
  entry = text(table, name)
  return parse(entry) if entry else None


def text(table: Table, name: str) -> str:
  """Returns a parameter's entry in a table; "" if no pattern matches."""
  for pattern, entry in table.items():
    if re.fullmatch(pattern, name):
      return entry
  return ""


def under(prefix: str, table: Table) -> dict[str, str]:
  """Returns the table of a submodel, for names that begin with `prefix`."""
  return {f"{prefix}(?:{pattern})": text for pattern, text in table.items()}
