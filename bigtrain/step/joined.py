"""Trees whose small arrays are parts of vectors; see small_arrays.py."""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax


class Place(NamedTuple):
  """Where a leaf of a tree is: in a vector from `start`, or by itself."""

  vector: int | None
  start: int
  shape: tuple[int, ...]


class Layout(NamedTuple):
  """Where the leaves of a tree are, in jax's flattening order."""

  structure: Any
  places: tuple[Place, ...]


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("alone", "vectors"),
  meta_fields=("layout",),
)
@dataclasses.dataclass(frozen=True)
class Joined:
  """A tree whose small arrays are parts of vectors.

  Attributes:
    alone: leaves that are not joined.
    vectors: arrays [number of elements].
    layout: where each leaf is.
  """

  alone: tuple[Any, ...]
  vectors: tuple[Any, ...]
  layout: Layout

  def split(self) -> Any:
    """Returns the tree."""
    alone = iter(self.alone)
    leaves = [
      part(self.vectors[place.vector], place.start, place.shape)
      if place.vector is not None
      else next(alone)
      for place in self.layout.places
    ]
    return jax.tree.unflatten(self.layout.structure, leaves)

  def like(self, tree: Any) -> "Joined":
    """Returns another tree of the same structure, joined in the same way."""
    leaves = self.layout.structure.flatten_up_to(tree)
    members: dict[int, list[tuple[int, Any]]] = collections.defaultdict(list)
    alone = []
    for place, leaf in zip(self.layout.places, leaves):
      if place.vector is None:
        alone.append(leaf)
      else:
        members[place.vector].append((place.start, leaf))
    vectors = [
      end_to_end(x for _, x in sorted(members[i], key=lambda m: m[0]))
      for i in range(len(members))
    ]
    return Joined(tuple(alone), tuple(vectors), self.layout)


def like(joined: Any, tree: Any) -> Any:
  """Joins a tree as another is, some of whose subtrees may be `Joined`."""
  return jax.tree.map(
    lambda x, subtree: x.like(subtree) if isinstance(x, Joined) else subtree,
    joined,
    tree,
    is_leaf=_is_joined,
  )


def split(tree: Any) -> Any:
  """Splits all `Joined` in a tree."""
  return jax.tree.map(
    lambda x: x.split() if _is_joined(x) else x, tree, is_leaf=_is_joined
  )


def _is_joined(x: Any) -> bool:
  return isinstance(x, Joined)


def end_to_end(arrays: Iterable[Any]) -> jax.Array:
  """Joins arrays of one dtype to a vector."""
  return jax.lax.concatenate([jax.lax.reshape(x, (x.size,)) for x in arrays], 0)


def part(vector: Any, start: int, shape: tuple[int, ...]) -> jax.Array:
  """Returns the array of this shape that is in a vector from `start`."""
  flat = jax.lax.slice(vector, (start,), (start + math.prod(shape),))
  return jax.lax.reshape(flat, shape)
