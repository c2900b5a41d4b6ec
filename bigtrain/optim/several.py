"""Several optimizers, each for its own parameters: config.optimizers.

  adam = dict(name="adam", b1=0.0)
  config.optimizers = dict(
    critic=dict(params="critic/.*", optimizer=adam, lr=4e-4, steps=5),
    generator=dict(params="generator/.*", optimizer=adam, lr=1e-4, steps=1),
  )

An entry has the keys that a config has for its only optimizer: optimizer, lr,
wd, schedule, grad_clip_norm and so on; chain.py lists their stages. Every
parameter belongs to exactly one of them.

With `steps` they take turns: here five steps train the critic, the next one the
generator. An optimizer without `steps` is part of every step. In the steps of
the others, its parameters and its state, such as Adam's count, do not change.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bigtrain.arrays import trees
from bigtrain.arrays.types import Params
from bigtrain.config.errors import ConfigError, check_number, regex
from bigtrain.config.lengths import Units
from bigtrain.config.settings import Config
from bigtrain.optim import recipe
from bigtrain.optim.recipe import Recipe
from bigtrain.optim.views import View

# Keys of a config's only optimizer.
_OF_ONE = ("optimizer", "lr", "wd", "schedule")


class Turns(NamedTuple):
  """Which optimizer each step of a cycle belongs to."""

  cycle: tuple[str, ...] = ()  # () if nobody takes turns.

  def places(self, name: str | None) -> tuple[int, ...]:
    """The steps of the cycle in which an optimizer takes part."""
    if name not in self.cycle:
      return tuple(range(len(self.cycle) or 1))
    return tuple(i for i, other in enumerate(self.cycle) if other == name)

  @property
  def length(self) -> int:
    return len(self.cycle) or 1


def turns(config: Config) -> Turns:
  """Reads the turns of config.optimizers; without it there are none."""
  cycle: list[str] = []
  for name, part in _parts(config).items():
    steps = part.get("steps")
    if steps is not None:
      check_number(f"{part.path}.steps", steps, least=1, whole=True)
      cycle += [name] * steps
  return Turns(tuple(cycle))


def _parts(config: Config) -> dict[str, Config]:
  optimizers = config.get("optimizers")
  if optimizers is None:
    return {}
  if not isinstance(optimizers, Config) or not len(optimizers):
    raise ConfigError(
      "config.optimizers: expected dict(NAME=dict(params=..., optimizer=..., "
      f"lr=...)), got {optimizers!r}."
    )
  for key in _OF_ONE:
    if config.get(key) is not None:
      raise ConfigError(
        f"config.{key}: with config.optimizers, each of them has its own."
      )
  parts = {name: optimizers[name] for name in optimizers}
  for name, part in parts.items():
    if not isinstance(part, Config):
      raise ConfigError(
        f"config.optimizers.{name}: expected dict(params=..., optimizer=..., "
        f"lr=...), got {part!r}."
      )
  return parts


def members(config: Config, params_shapes: Any) -> dict[str, Any]:
  """{optimizer: tree of bools that says which parameters it has}."""
  names = trees.names(params_shapes)
  owners: dict[str, list[str]] = {name: [] for name in names}
  for optimizer, part in _parts(config).items():
    key = f"{part.path}.params"
    pattern = regex(key, part["params"])
    matching = [name for name in names if pattern.fullmatch(name)]
    if not matching:
      raise ConfigError(
        f"{key}={part['params']!r}: matches none of the {len(names)} "
        f"parameters, such as {names[0]}."
      )
    for name in matching:
      owners[name].append(optimizer)
  left_out = [name for name, own in owners.items() if not own]
  if left_out and _parts(config):
    raise ConfigError(
      f"config.optimizers: no optimizer has {_listed(left_out)}; a schedule "
      "with (regex, None) freezes parameters."
    )
  for name, own in owners.items():
    if len(own) > 1:
      raise ConfigError(
        f"config.optimizers: {name} belongs to {' and '.join(own)}; expected "
        "one optimizer for each parameter."
      )
  return {
    optimizer: trees.map_with_names(
      lambda name, _, own=optimizer: owners[name] == [own], params_shapes
    )
    for optimizer in _parts(config)
  }


def _listed(names: list[str], most: int = 4) -> str:
  more = f" and {len(names) - most} more" if len(names) > most else ""
  return f"{', '.join(names[:most])}{more}"


class _One(NamedTuple):
  """One of the optimizers."""

  recipe: Recipe
  tx: optax.GradientTransformationExtraArgs
  own: set[str]  # Names of its trainable parameters.


def make(
  config: Config,
  params_shapes: Any,
  units: Units,
  param_views: Mapping[str, View] | None,
  build: Callable[[Recipe], optax.GradientTransformationExtraArgs],
) -> tuple[
  optax.GradientTransformationExtraArgs, Callable[[int], dict[str, Any]], Any
]:
  """The fields of a chain.Optimizer; `build` makes one transformation."""
  ones: dict[str, _One] = {}
  flags: dict[str, bool] = {}
  parts = _parts(config)
  for name, mask in members(config, params_shapes).items():
    shapes, _ = trees.partition(params_shapes, mask)
    one = recipe.read(parts[name], shapes, units, param_views)
    if "schedule_free" in str(one.optimizer["name"]):
      raise ConfigError(
        f"{one.path}.optimizer.name={one.optimizer['name']!r}: can only be the "
        "optimizer of all parameters."
      )
    trainable = dict(trees.flatten_with_names(one.trainable))
    flags |= trainable
    ones[name] = _One(one, build(one), {n for n, x in trainable.items() if x})
  trainable = trees.map_with_names(lambda name, _: flags[name], params_shapes)
  return _joined(ones, turns(config)), _hparams(ones), trainable


def _hparams(ones: Mapping[str, _One]) -> Callable[[int], dict[str, Any]]:
  """All optimizers' scalars, and the learning rates by their names in rows."""

  def hparams(step: int) -> dict[str, Any]:
    of_each = {name: one.recipe.hparams(step) for name, one in ones.items()}
    rates = {
      f"lr/{name}{schedule.removeprefix('lr')}": rate
      for name, values in of_each.items()
      for schedule, rate in values["lr"].items()
    }
    return {"lr": rates, "optimizers": of_each}

  return hparams


def _joined(
  ones: Mapping[str, _One], turns: Turns
) -> optax.GradientTransformationExtraArgs:

  def of(one: _One, tree: Params) -> Params:
    named = trees.flatten_with_names(tree)
    return trees.from_flat({n: x for n, x in named if n in one.own})

  def init(params: Params) -> Any:
    return {name: one.tx.init(of(one, params)) for name, one in ones.items()}

  def update(
    grads: Params,
    state: Any,
    params: Params,
    *,
    step: Any,
    hparams: Mapping[str, Any],
    loss: tuple[Any, Any] | None = None,
    grad_norm: jax.Array | None = None,
  ) -> tuple[Params, Any]:
    del grad_norm  # That of all gradients is nobody's own.
    updates: Params = {}
    new_state = {}
    for name, one in ones.items():
      own_hparams = {**hparams["optimizers"][name]}
      if "seed" in hparams:
        own_hparams["seed"] = hparams["seed"]

      def advance(
        name: str = name, one: _One = one, own: Any = own_hparams
      ) -> Any:
        return one.tx.update(
          of(one, grads),
          state[name],
          of(one, params),
          step=step,
          hparams=own,
          loss=loss,
        )

      own_updates, new_state[name] = _in_turn(
        advance, state[name], step, turns, name
      )
      updates = trees.merge(updates, own_updates)
    return updates, new_state

  return optax.GradientTransformationExtraArgs(init, update)


def _in_turn(
  advance: Callable[[], Any], state: Any, step: Any, turns: Turns, name: str
) -> Any:
  """Calls `advance` in an optimizer's steps; in others, updates are zero."""
  places = turns.places(name)
  if len(places) == turns.length:
    return advance()

  def rest() -> Any:
    updates, _ = jax.eval_shape(advance)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), updates), state

  is_own = jnp.isin(step % turns.length, jnp.asarray(places))
  return jax.lax.cond(is_own, advance, rest)
