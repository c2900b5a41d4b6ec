"""The ops that a feature depends on, traced backwards through a preprocessing.

New data have no labels: prediction runs only the ops of the model's inputs.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from bigtrain.pp.registry import Op


class Needed(NamedTuple):
  """Ops in order, and the features of the source that they read or leave."""

  ops: tuple[Op, ...]
  reads: frozenset[str]


def needed(ops: Sequence[Op], features: Collection[str]) -> Needed:
  """Returns the ops that make some features, of all ops in order.

  An op whose results are unknown (`Op.origins` is None) is always included.
  `keep` and `drop` make nothing and are never included.
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


def base_name(op: Op) -> str:
  """Returns the name of an op in the registry, of a fused op the first one."""
  return op.name.partition("(")[0].partition("|")[0].strip()


def tokenizer(ops: Sequence[Op]) -> tuple[str, str] | None:
  """Returns (name, fingerprint) of the tokenizer of the last `tokenize`."""
  for op in reversed(ops):
    if base_name(op) == "tokenize" and op.fingerprints:
      return next(iter(op.fingerprints.items()))
  return None
