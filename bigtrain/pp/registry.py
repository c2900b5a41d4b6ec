"""What a preprocessing op is, the ops by name, and their composition.

An op is a pure function of an example and of uniform numbers that somebody
else drew:

  fn(features, u) -> features

`features` is a dict of one example: numpy arrays and scalars, or, inside of a
tf.data graph, tensors. It is never changed in place. Images are HWC. `u` is a
float32 array or tensor [draws] of numbers in [0, 1), and all randomness of
the op comes from it. So the result is a function of the example and of `u`
alone: the same on any number of hosts, in any order, after any restart.

An engine runs `compose(parse.parse(spec))`, and what it has to know is there:

- `draws`: how many numbers the op takes, maybe none: then `u` is [0].
- `tensorflow`: True means that it runs on tensors only, so the engine must be
  tf.data. False means that it runs on numpy arrays as well, without importing
  tensorflow, and gives the same there.
- `batched`: True means that on numpy arrays it also takes a whole batch at
  once: `u` [B, draws] and every feature with a leading axis B (one that holds
  a bytes, str or ragged value for each example has dtype object). What tells
  a batch from an example is the rank of `u`, which is why ops without draws
  get one. Never True where `tensorflow` is.

A feature that an op needs and does not find, or finds with a type or rank
that it cannot use, is a ConfigError, raised by the call itself: on tensors
when the graph is traced, so before any data flows. (Trace with
`tf.autograph.experimental.do_not_convert`, or autograph rewraps the error.) A
value that an op cannot use, such as an unknown label or an image smaller than
the crop, is a settings.DataError on numpy, and on tensors a
tf.errors.InvalidArgumentError, which say what the value was.

A new op is a factory, registered under the name that specs use; whatever it
can check, it checks when it is called, before there is data:

  @registry.register("scale")
  def scale(factor: float, key: str = "image", key_result: str | None = None):
    return registry.on_feature(lambda x, u: x * factor, key, key_result)

The arguments of a factory are checked against its annotations.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bigtrain.settings import ConfigError, did_you_mean

Features = dict[str, Any]


class Op(NamedTuple):
  """A preprocessing op; the module's docstring has the contract.

  Attributes:
    fn: (features, u [draws]) -> features.
    draws: uniform numbers that `fn` takes.
    tensorflow: `fn` needs tensors; otherwise numpy arrays will do.
    batched: on numpy arrays, `fn` also takes a batch: u [B, draws].
    reads: the features without which `fn` cannot run.
    name: how the spec writes it.
    vocab_sizes: {feature: one more than its largest id}, where the op makes
      ids, so that a model with fewer can be refused before there is data.
    fingerprints: {file that the op has read: what changes with its content},
      so that a run is not continued with another one.
  """

  fn: Callable[[Features, Any], Features]
  draws: int = 0
  tensorflow: bool = False
  batched: bool = False
  reads: tuple[str, ...] = ()
  name: str = ""
  vocab_sizes: dict[str, int] = {}
  fingerprints: dict[str, str] = {}


Factory = Callable[..., Op]
# A fusion gets the arguments of two neighbours in a spec, by name, and returns
# one op that does the work of both, or None where it cannot.
Fusion = Callable[[dict[str, Any], dict[str, Any]], Op | None]

_factories: dict[str, Factory] = {}
_fusions: dict[tuple[str, str], Fusion] = {}


def register(name: str) -> Callable[[Factory], Factory]:
  """Decorator that makes a factory known to specs as `name`."""

  def decorate(factory: Factory) -> Factory:
    known = _factories.get(name)
    # The same function again is a reloaded module, as in a notebook.
    if known is not None and _origin(known) != _origin(factory):
      raise ConfigError(
        f"preprocessing op {name!r}: {_origin(factory)} registers a name "
        f"that {_origin(known)} has taken."
      )
    _factories[name] = factory
    return factory

  return decorate


def register_fusion(first: str, second: str) -> Callable[[Fusion], Fusion]:
  """Decorator: "first|second" may be run as one op, with equal results."""

  def decorate(fusion: Fusion) -> Fusion:
    _fusions[first, second] = fusion
    return fusion

  return decorate


def find(name: str) -> Factory:
  """The factory that specs call `name`, or ConfigError with the nearest."""
  if name not in _factories:
    raise ConfigError(f"unknown op {name!r}.{did_you_mean(name, _factories)}")
  return _factories[name]


def find_fusion(first: str, second: str) -> Fusion | None:
  """The fusion of two neighbouring ops, if there is one."""
  return _fusions.get((first, second))


def names() -> list[str]:
  """The names of all registered ops, sorted."""
  return sorted(_factories)


def on_feature(
  fn: Callable[[Any, Any], Any],
  key: str,
  key_result: str | None = None,
  **properties: Any,
) -> Op:
  """An op that maps one feature and leaves the others as they are.

  Args:
    fn: (value of the feature, u) -> new value.
    key: the feature.
    key_result: where the result goes; None for back to `key`.
    **properties: other fields of the Op, such as `draws` and `batched`.
  """
  result = key if key_result is None else key_result

  def apply(features: Features, u: Any) -> Features:
    return {**features, result: fn(features[key], u)}

  return Op(apply, reads=(key,), **properties)


def compose(ops: Sequence[Op]) -> Op:
  """One op that runs `ops` in their order.

  It takes the draws of all of them, the first op's first, and runs on numpy,
  or on batches, if all of them do. Composing no ops gives the identity.
  """
  ops = tuple(ops)
  cuts = [0]
  for op in ops:
    cuts.append(cuts[-1] + op.draws)
  parts = [
    (op.fn, slice(start, stop), op)
    for op, start, stop in zip(ops, cuts[:-1], cuts[1:])
  ]

  def fn(features: Features, u: Any) -> Features:
    for call, own, op in parts:
      for key in op.reads:
        if key not in features:
          raise missing(op.name, key, features)
      # Slicing is the dearest thing here; ops without draws ignore u.
      features = call(features, u[..., own] if op.draws else u)
    return features

  return Op(
    fn,
    draws=cuts[-1],
    tensorflow=any(op.tensorflow for op in ops),
    batched=all(op.batched for op in ops),
    reads=ops[0].reads if ops else (),
    name="|".join(op.name for op in ops),
    vocab_sizes={k: n for op in ops for k, n in op.vocab_sizes.items()},
    fingerprints={k: x for op in ops for k, x in op.fingerprints.items()},
  )


def missing(name: str, key: str, features: Iterable[str]) -> ConfigError:
  """The error of op `name` that does not find feature `key`."""
  # A feature's name is short and the list tells what went wrong: show all.
  there = ", ".join(sorted(features)) or "none"
  return ConfigError(
    f"preprocessing op {name!r} needs the feature {key!r}; there are: {there}."
  )


def _origin(factory: Factory) -> str:
  return f"{factory.__module__}.{factory.__qualname__}"
