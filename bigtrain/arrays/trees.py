"""Flattens, maps, splits and joins trees by the names of their leaves.

A leaf's name is its path, joined by "/": keys of dicts, field names of named
tuples, indices of other sequences, as in "params/head/kernel". Checkpoints,
sharding rules, optimizer masks and weight statistics all use these names.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

Tree = Any


_join = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


def flatten_with_names(tree: Tree) -> list[tuple[str, Any]]:
  """Returns all (name, leaf) pairs, in jax's order.

  >>> flatten_with_names({"b": [1, 2], "a": 3})
  [('a', 3), ('b/0', 1), ('b/1', 2)]
  """
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return [(_join(path), leaf) for path, leaf in flat]


def names(tree: Tree) -> list[str]:
  """Returns the names of the leaves, in jax's order."""
  return [name for name, _ in flatten_with_names(tree)]


def map_with_names(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
  """Like jax.tree.map, with the leaf's name as the first argument of `fn`."""
  return jax.tree_util.tree_map_with_path(
    lambda path, *leaves: fn(_join(path), *leaves),
    tree,
    *rest,
  )


def from_flat(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Returns nested dicts of {name: leaf}.

  Raises ValueError if one leaf's name is a parent of another's.

  >>> from_flat({"a/b": 1, "a/c": 2})
  {'a': {'b': 1, 'c': 2}}
  """
  tree: dict[str, Any] = {}
  for name, leaf in flat.items():
    *parents, last = name.split("/")
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
      if not isinstance(node, dict):
        raise ValueError(f"{name!r} lies below a leaf")
    if last in node:
      raise ValueError(f"{name!r} is a leaf, and other names lie below it")
    node[last] = leaf
  return tree


def partition(tree: Tree, mask: Tree) -> tuple[Tree, Tree]:
  """Splits nested dicts by a tree of bools of the same structure.

  Returns the leaves where the mask is True, then the others.
  """
  flags = dict(flatten_with_names(mask))
  if list(flags) != names(tree):
    differ = sorted(set(flags) ^ set(names(tree)))
    raise ValueError(f"tree and mask differ in structure: {differ}")
  chosen: dict[str, Any] = {}
  others: dict[str, Any] = {}
  for name, leaf in flatten_with_names(tree):
    (chosen if flags[name] else others)[name] = leaf
  return from_flat(chosen), from_flat(others)


def merge(first: Tree, second: Tree) -> Tree:
  """Joins the two parts of `partition`. A leaf in both raises a ValueError."""
  merged = dict(first)
  for key, value in second.items():
    if key not in merged:
      merged[key] = value
    elif isinstance(value, Mapping) and isinstance(merged[key], Mapping):
      merged[key] = merge(merged[key], value)
    else:
      raise ValueError(f"both parts hold a leaf named {key!r}")
  # Sorted, because jax flattens dicts in sorted order.
  return {key: merged[key] for key in sorted(merged)}


def num_bytes(leaves: Iterable[Any]) -> int:
  """Returns the bytes of arrays or ShapeDtypeStructs, over all devices."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
