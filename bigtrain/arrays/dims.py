"""Dimensions of parameters: which are inputs, outputs, layers or experts.

A model describes its parameters once, in a function beside its Model:

  def param_dims(model: Model) -> dims.Table:
    return {r".*/up/kernel": "D -> F", r".*/up/bias": "F"}

A table maps regular expressions of whole names to a letter or a word for each
dimension; the first that matches decides. "D -> H K" is a matrix, "F" a vector,
and "E; D -> F" a stack of matrices, here of experts. Dimensions before these
are the layers of a stack. "E:fsdp; D -> F" splits the experts over the axis
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
  """Letters of a parameter's dimensions, without its layers.

  `stack` numbers separate arrays. A vector has no inputs. `axes` is {negative
  number of a dimension: its axis of the mesh}.
  """

  stack: tuple[str, ...]
  inputs: tuple[str, ...]
  outputs: tuple[str, ...]
  axes: dict[int, str]


def of_model(module: Any, model: Any) -> Table:
  return module.param_dims(model) if hasattr(module, "param_dims") else {}


def of_all(table: Table) -> Callable[[Any], Table]:
  """The function `param_dims` where all models have the same table."""
  return lambda model: table


def parse(text: str) -> Dims:
  """Parses the value of a table.

  >>> parse("E:fsdp; D -> F")
  Dims(stack=('E',), inputs=('D',), outputs=('F',), axes={-3: 'fsdp'})
  """
  stack, _, array = text.rpartition(";")
  inputs, _, outputs = array.rpartition("->")
  parts = [part.split() for part in (stack, inputs, outputs)]
  words = [word.partition(":") for part in parts for word in part]
  axes = {i - len(words): word[2] for i, word in enumerate(words) if word[2]}
  names = [tuple(word.partition(":")[0] for word in part) for part in parts]
  return Dims(names[0], names[1], names[2], axes)


def find(table: Table, name: str) -> Dims | None:
  return parse(found) if (found := text(table, name)) else None


def text(table: Table, name: str) -> str:
  """Returns a parameter's entry in a table; "" if no pattern matches."""
  return next((t for p, t in table.items() if re.fullmatch(p, name)), "")


def under(prefix: str, table: Table) -> dict[str, str]:
  return {f"{prefix}(?:{pattern})": text for pattern, text in table.items()}
