"""The ops that a feature depends on, traced backwards through a preprocessing.

A new picture has no label, so prediction runs only the ops that make the
model's inputs. Class names are traced in the same way: from the labels
of a batch back to the op or the source that numbered them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from bigtrain.pp import registry
from bigtrain.pp.registry import Op


class Needed(NamedTuple):
  """Part of a preprocessing.

  Attributes:
    ops: the ops, in order.
    reads: features of the source that they read, or that they leave unchanged.
  """

  ops: tuple[Op, ...]
  reads: frozenset[str]


def needed(ops: Sequence[Op], features: Collection[str]) -> Needed:
  """Returns the ops that make some features.

  An op whose results are unknown (`Op.origins` is None) is always included.
  `keep` and `drop` make nothing and are never included.

  Args:
    ops: all ops of a preprocessing, in order.
    features: names of the features.
  """
  wanted, result = set(features), []
  for op in reversed(ops):
    made = op.origins
    if made is None:
      wanted |= set(op.reads)
    elif wanted & set(made):
      wanted = wanted - set(made) | set(op.reads)
    else:
      continue
    result.append(op)
  return Needed(tuple(reversed(result)), frozenset(wanted))


def class_names(
  ops: Sequence[Op],
  source_names: Mapping[str, Sequence[str]],
  feature: str,
) -> list[str] | None:
  """Returns the names of the classes that a feature numbers, or None.

  Args:
    ops: all ops of a preprocessing, in order.
    source_names: {feature of the source: names by class number}.
    feature: feature after all ops: class numbers, or vectors over classes.
  """
  for op in reversed(ops):
    if op.origins is None:
      return None
    if feature not in op.origins:
      continue
    if feature in op.class_names:
      return list(op.class_names[feature])
    if len(op.reads) != 1:
      return None
    (feature,) = op.reads
  names = source_names.get(feature)
  return None if names is None else list(names)


def base_name(op: Op) -> str:
  """Returns the name of an op in the registry, of a fused op the first one."""
  return op.name.partition("(")[0].partition("|")[0].strip()


def tokenizer(ops: Sequence[Op]) -> tuple[str, str] | None:
  """Returns (argument of `tokenizers.get`, fingerprint) of the last tokenize.

  Args:
    ops: all ops of a preprocessing, in order.
  """
  for op in reversed(ops):
    if base_name(op) == "tokenize" and op.fingerprints:
      return next(iter(op.fingerprints.items()))
  return None


def draws(needs: Needed) -> list[str]:
  """Returns the ops that draw random numbers, as written."""
  return [op.name for op in needs.ops if op.draws]


def compose(needs: Needed) -> Op:
  """Returns the ops as one."""
  return registry.compose(needs.ops)
