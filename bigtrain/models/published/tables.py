"""Tables that map published arrays to our parameters.

A table lists the arrays of a published layout with the parameters of ours in
each. Arrays of all layers are one entry, with {i} for the layer and {e} for the
expert; ours are then ".../blocks/<name>", whether a model stacks its blocks or
not. array_files.py loads and exports files by these tables. It learns from the
model's `param_dims` how many dimensions of a parameter are inputs.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Entry(NamedTuple):
  """A published array and our parameters in it."""

  # Name of the array; {i} is the layer, {e} the expert. Without {e}, an array
  # of experts has all of them in its first axis.
  published: str
  ours: tuple[str, ...]  # Our parameters, joined along their output axes.
  transposed: bool = False  # Whether the published matrix is (outputs, inputs).
  # Whether some files have it in the other order of its last two dimensions.
  either_order: bool = False
  interleaved: bool = False  # Whether the outputs of our parameters take turns.
  # Whether they take turns by head, the first dimension of their outputs. If
  # heads of queries share keys, a group of them counts as one head.
  by_head: bool = False
  # Of torch: (outputs, inputs, height, width), or with frames in front of the
  # height.
  convolution: bool = False
  depthwise: bool = False  # Of torch: (channels, 1, width).
  # Number of dimensions, if the array has ones in front of ours.
  ndim: int | None = None
  ones_after: int = 0  # How many of these ones are behind ours.
  shaped: bool = False  # Whether it has all dimensions of our one parameter.

  @property
  def by_expert(self) -> bool:
    """Whether each expert has a separate array."""
    return "{e}" in self.published


Table = Sequence[Entry]
Shapes = Mapping[str, Sequence[int]]


class Tensor(NamedTuple):
  """One array of an exported file, built of parts of our parameters."""

  name: str
  shape: tuple[int, ...]
  # (name of our parameter, index of its part) of each part.
  parts: list[tuple[str, tuple[slice, ...]]]
  build: Callable[[list[np.ndarray]], np.ndarray]


def table(*parts: Table) -> Table:
  """Joins entries and tables, such as those that several families share."""
  return tuple(itertools.chain.from_iterable(parts))


def within(published: str, ours: str, *parts: Table) -> Table:
  """Puts prefixes before the names of entries, published and ours.

  >>> within("layer.{i}.", "blocks/", plain("scale", "norm/scale"))[0].ours
  ('blocks/norm/scale',)
  """
  return tuple(
    entry._replace(
      published=published + entry.published,
      ours=tuple(ours + name for name in entry.ours),
    )
    for entry in table(*parts)
  )


def renamed(entries: Table, names: Mapping[str, str]) -> Table:
  """Entries with other published names: each key of `names` becomes its value.

  >>> renamed(plain("layer.{i}.q_norm", "norm"), {"q_norm": "norm_q"})[
  ...   0
  ... ].published
  'layer.{i}.norm_q'
  """
  result = []
  for entry in entries:
    published = entry.published
    for old, new in names.items():
      published = published.replace(old, new)
    result.append(entry._replace(published=published))
  return tuple(result)


# Constructors of entries. Names are those of layers, to which each constructor
# adds the endings of the arrays in both libraries.


def plain(
  published: str, *ours: str, ndim: int | None = None, ones_after: int = 0
) -> Table:
  """An array by its whole name: a vector, or a matrix (inputs, outputs)."""
  return (Entry(published, ours, ndim=ndim, ones_after=ones_after),)


def transposed(published: str, *ours: str) -> Table:
  """A matrix (outputs, inputs) by its whole name."""
  return (Entry(published, ours, transposed=True),)


def interleaved(published: str, *ours: str) -> Table:
  """An array by its whole name, in which the outputs of ours take turns."""
  return (Entry(published, ours, interleaved=True),)


def linear(published: str, *ours: str) -> Table:
  """A linear layer of torch without a bias."""
  return transposed(f"{published}.weight", *[f"{x}/kernel" for x in ours])


def dense(published: str, *ours: str) -> Table:
  """A linear layer of torch, whose bias a model may lack."""
  return table(linear(published, *ours), _bias(published, *ours))


def dense_by_head(published: str, *ours: str) -> Table:
  """A linear layer of torch that has the outputs of ours head by head."""
  entries = dense(published, *ours)
  return tuple(entry._replace(by_head=True) for entry in entries)


def depthwise_conv1d(published: str, *ours: str) -> Table:
  """A depthwise convolution of torch over positions, without a bias."""
  entries = linear(published, *ours)
  return tuple(entry._replace(depthwise=True) for entry in entries)


def conv1d(published: str, *ours: str) -> Table:
  """A layer of GPT-2, which stores matrices as (inputs, outputs)."""
  kernel = plain(f"{published}.weight", *[f"{x}/kernel" for x in ours])
  return table(kernel, _bias(published, *ours))


def conv(published: str, ours: str) -> Table:
  """A convolution of torch."""
  kernel = Entry(f"{published}.weight", (f"{ours}/kernel",), convolution=True)
  return table((kernel,), _bias(published, ours))


def norm(published: str, ours: str) -> Table:
  """A normalisation of torch, whose bias a model may lack."""
  return table(
    plain(f"{published}.weight", f"{ours}/scale"),
    plain(f"{published}.bias", f"{ours}/bias"),
  )


def flax_dense(published: str, ours: str) -> Table:
  """A Dense layer of flax."""
  return table(
    plain(f"{published}/kernel", f"{ours}/kernel"),
    plain(f"{published}/bias", f"{ours}/bias"),
  )


def flax_norm(published: str, ours: str) -> Table:
  """A LayerNorm of flax."""
  return table(
    plain(f"{published}/scale", f"{ours}/scale"),
    plain(f"{published}/bias", f"{ours}/bias"),
  )


def _bias(published: str, *ours: str) -> Table:
  return plain(f"{published}.bias", *[f"{x}/bias" for x in ours])
