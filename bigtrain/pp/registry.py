"""Preprocessing ops: their definition, registry and composition.

An op is a pure function of an example and of uniform random numbers,
fn(features, u) -> features. `features` is a dict with the features of one
example: numpy arrays and scalars, or tensors inside a tf.data graph. An op
never changes it in place. Images are HWC. `u` is a float32 array or tensor
[draws] of numbers in [0, 1) and the op's only source of randomness, so results
do not depend on hosts, order or restarts.

A missing feature, or an unsupported type or rank, raises ConfigError. An
unusable value, such as an unknown label, raises DataError on numpy arrays and
tf.errors.InvalidArgumentError on tensors; both messages show the value.

To add an op, register a factory under the op's name. It should check as much as
possible before there is data:

  @registry.register("scale")
  def scale(factor: float, key: str = "image", key_result: str | None = None):
    return registry.on_feature(lambda x, u: x * factor, key, key_result)
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from bigtrain.config.errors import ConfigError, did_you_mean

Features = dict[str, Any]


class Op(NamedTuple):
  """A preprocessing op; the module's docstring defines the contract."""

  fn: Callable[[Features, Any], Features]
  draws: int = 0  # Uniform numbers that `fn` uses.
  # Whether `fn` runs on tensors only. Otherwise it also runs on numpy arrays,
  # with the same results and without importing tensorflow.
  tensorflow: bool = False
  # Whether `fn` also takes a batch of numpy arrays: `u` is [B, draws] and every
  # feature has a leading axis B (dtype object for bytes, str and ragged
  # values). The rank of `u` distinguishes a batch from an example.
  batched: bool = False
  reads: tuple[str, ...] = ()  # Features that `fn` requires.
  name: str = ""  # As written in the spec.
  vocab_sizes: dict[str, int] = {}  # {feature: largest id + 1 that it makes}.
  fingerprints: dict[str, str] = {}  # {file that the op reads: hash}.
  # {feature that the op sets: feature whose ids it has, or None if it is new}.
  # Other features stay as they are. The whole is None if nothing is known.
  origins: dict[str, str | None] | None = None
  class_names: dict[str, list[str]] = {}  # {feature: names by number}.
  ignores_exif: bool = False  # Whether it decodes pictures as they are stored.


Factory = Callable[..., Op]
# A fusion takes the arguments, by name, of two adjacent ops of a spec and
# returns one op that replaces both, or None to keep both.
Fusion = Callable[[dict[str, Any], dict[str, Any]], Op | None]

_factories: dict[str, Factory] = {}
# By the names of the two ops.
fusions: dict[tuple[str, str], Fusion] = {}


def register(name: str) -> Callable[[Factory], Factory]:
  """Returns a decorator that registers the factory of an op."""

  def decorate(factory: Factory) -> Factory:
    registered = _factories.get(name)
    # The same function again means a reloaded module, as in a notebook.
    if registered is not None and _origin(registered) != _origin(factory):
      raise ConfigError(
        f"preprocessing op {name!r}: {_origin(registered)} has already "
        f"registered this name; rename {_origin(factory)}."
      )
    _factories[name] = factory
    return factory

  return decorate


def find(name: str) -> Factory:
  if name not in _factories:
    raise ConfigError(f"unknown op {name!r}.{did_you_mean(name, _factories)}")
  return _factories[name]


def names() -> list[str]:
  return sorted(_factories)


def on_feature(
  fn: Callable[[Any, Any], Any],
  key: str,
  key_result: str | None = None,
  **properties: Any,
) -> Op:
  """Makes an op that maps one feature by fn(value, u)."""
  result = key if key_result is None else key_result

  def apply(features: Features, u: Any) -> Features:
    return {**features, result: fn(features[key], u)}

  return Op(apply, reads=(key,), origins={result: None}, **properties)


def compose(ops: Sequence[Op]) -> Op:
  """Makes one op that runs `ops` in order; without ops, the identity."""
  # Each op has its own part of the random numbers.
  ends = itertools.accumulate(op.draws for op in ops)
  calls = [(op, slice(end - op.draws, end)) for op, end in zip(ops, ends)]

  def fn(features: Features, u: Any) -> Features:
    for op, own_draws in calls:
      for key in op.reads:
        if key not in features:
          # Names of features are short, and the full list shows the mistake.
          available = ", ".join(sorted(features)) or "none"
          raise ConfigError(
            f"preprocessing op {op.name!r} needs the feature {key!r}; there "
            f"are: {available}."
          )
      # Not sliced for ops without draws, because slicing costs the most here.
      features = op.fn(features, u[..., own_draws] if op.draws else u)
    return features

  return Op(
    fn,
    draws=sum(op.draws for op in ops),
    tensorflow=any(op.tensorflow for op in ops),
    batched=all(op.batched for op in ops),
    reads=ops[0].reads if ops else (),
    name="|".join(op.name for op in ops),
    vocab_sizes={
      name: size for op in ops for name, size in op.vocab_sizes.items()
    },
    fingerprints={
      path: digest for op in ops for path, digest in op.fingerprints.items()
    },
    origins=_origins(ops),
  )


def _origins(ops: Sequence[Op]) -> dict[str, str | None] | None:
  result: dict[str, str | None] = {}
  for op in ops:
    if op.origins is None:
      return None
    result |= {
      name: None if source is None else result.get(source, source)
      for name, source in op.origins.items()
    }
  return result


def _origin(factory: Factory) -> str:
  return f"{factory.__module__}.{factory.__qualname__}"


class Needed(NamedTuple):
  """The result of `needed`."""

  ops: tuple[Op, ...]  # In order.
  reads: frozenset[str]  # Features of the source that are needed for them.


def needed(ops: Sequence[Op], features: Collection[str]) -> Needed:
  """Returns those of all `ops` that are needed to make some features.

  Inference runs only these. An op whose results are unknown (`Op.origins` is
  None) is always included; `keep` and `drop`, which make nothing, never are.
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
  """Returns an op's name in the registry; of a fused op, that of the first."""
  return op.name.partition("(")[0].partition("|")[0].strip()


def tokenizer(ops: Sequence[Op]) -> tuple[str, str] | None:
  """Returns (name, fingerprint) of the tokenizer of the last `tokenize`."""
  for op in reversed(ops):
    if base_name(op) == "tokenize" and op.fingerprints:
      return next(iter(op.fingerprints.items()))
  return None
