"""From the config to one optax transformation.

A gradient g of a parameter p passes through these stages, in this order:

  1. g *= grad_mult                        config.grad_mults
  2. clip g elementwise                    config.grad_clip_value
  3. clip g by the norm of its group       config.grad_clip_groups
     and by the norm of all gradients      config.grad_clip_norm, and its _type
  4. g += wd * wd_mult * p                 only if wd_coupling is "gradient"
  5. u = the base optimizer's direction    config.optimizer
  6. update = -schedule(step) * (lr * lr_mult * u + wd * wd_mult * p)

Weight decay is decoupled from the learning rate, but not from the schedule
(Loshchilov and Hutter 2019, arxiv.org/abs/1711.05101, algorithm 2; the
published ViT recipes mean this by wd). The AdamW of optax and PyTorch also
multiplies it by the learning rate: wd_coupling="lr" does that, lr_mult
included. docs/config.md lists all keys.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.arrays.types import Params
from bigtrain.config.errors import ConfigError
from bigtrain.config.lengths import Units
from bigtrain.config.settings import Config
from bigtrain.optim import optimizers
from bigtrain.optim.recipe import Recipe, read
from bigtrain.optim.views import View


class Optimizer(NamedTuple):
  """An optimizer for the trainable parameters."""

  # Over the trainable parameters ALONE. Its update also takes `step`, the count
  # of earlier updates; `hparams`, those of the step by default, with the "seed"
  # of stochastic rounding; and `loss`, a (sum, weight).
  tx: optax.GradientTransformationExtraArgs
  hparams: Callable[[int], dict[str, Any]]
  trainable: Any  # Nested dicts of bools with the structure of the parameters.


def make(
  cfg: Config,
  params_shapes: Any,
  units: Units,
  param_views: Mapping[str, View] | None = None,
) -> Optimizer:
  recipe = read(cfg, params_shapes, units, param_views)
  return Optimizer(build(recipe), recipe.hparams, recipe.trainable)


def build(recipe: Recipe) -> optax.GradientTransformationExtraArgs:
  initial = _last_stages(recipe, recipe.hparams(0))

  def update(
    grads: Params,
    state: Any,
    params: Params,
    *,
    step: Any,
    hparams: Mapping[str, Any] | None = None,
    loss: tuple[Any, Any] | None = None,
    grad_norm: jax.Array | None = None,
  ) -> tuple[Params, Any]:
    extra = {} if loss is None else {"value": loss[0] / loss[1]}
    hparams = recipe.hparams(step) if hparams is None else hparams
    given, grads = grads, _multiplied(recipe, grads)
    if recipe.clip_value is not None:
      limit = recipe.clip_value
      grads = jax.tree.map(lambda g: jnp.clip(g, -limit, limit), grads)
    for members, largest in recipe.clip_norms:
      norm = grad_norm if grads is given else None
      grads = _clipped(grads, members, largest, recipe.clip_norm_type, norm)
    if recipe.coupling == "gradient":
      grads = _with_decay(recipe, grads, params, hparams["wd"])
    old = sharding.on_device(state)
    # Moments may be stored in bfloat16, but the arithmetic is float32: in
    # bfloat16, b1=0.9 would become 0.898 and 0.999 become 1.
    stored = recipe.stored_arithmetic
    moments = old if stored else jax.tree.map(_as_float32, old)
    update = _last_stages(recipe, hparams).update
    updates, new = update(grads, moments, params, **extra)
    new = recipe.moments.stored(new, old, step, hparams.get("seed", 0))
    return updates, sharding.in_memory_of(new, state)

  return optax.GradientTransformationExtraArgs(
    lambda params: recipe.moments.initial(initial.init(params)), update
  )


def _last_stages(
  recipe: Recipe, hparams: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
  """Stages 5 and 6 and their wrapper, with the learning rate of a trace."""
  base = _base_optimizer(recipe, hparams)
  after = _scale_by_schedule_and_decay(recipe, hparams)

  def update(
    grads: Params, state: Any, params: Params, **extra: Any
  ) -> tuple[Params, Any]:
    updates, state = base.update(grads, state, params, **extra)
    return after(updates, params), state

  tx = optax.GradientTransformationExtraArgs(base.init, update)
  if recipe.wrap is None:
    return tx
  _check_one_schedule(recipe)
  wrapped = recipe.wrap(tx, _only_one(hparams["next_lr"]))
  return optax.with_extra_args_support(wrapped)


# Operations that would change nothing are not traced: with several for each of
# hundreds of parameters, tracing them takes seconds at the start.


def _multiplied(recipe: Recipe, grads: Params) -> Params:
  mults = {name: leaf.grad_mult for name, leaf in recipe.leaves.items()}
  if all(mult is None for mult in mults.values()):
    return grads
  return trees.map_with_names(
    lambda name, g: g if (m := mults[name]) is None else g * m, grads
  )


def _clipped(
  grads: Params, members: set[str], limit: float, kind: str, norm: Any
) -> Params:
  """Clips a group; `norm` is that of all unclipped gradients, if known."""
  named = trees.flatten_with_names(grads)
  group = [g for name, g in named if name in members]
  if not group:  # The whole group is frozen.
    return grads
  if kind != "l2":
    sizes = [jnp.abs(_as_float32(g)) for g in group]
    total = jnp.sum if kind == "l1" else jnp.max
    norm = total(jnp.stack([total(size) for size in sizes]))
  elif norm is None or len(group) < len(named):
    squares = [jnp.sum(jnp.square(_as_float32(g))) for g in group]
    norm = jnp.sqrt(sum(squares))
  # A norm of 0 gives a scale of 1; NaN stays NaN, for the guard to see.
  scale = jnp.minimum(1.0, limit / norm)
  clip = lambda name, g: g * scale.astype(g.dtype) if name in members else g
  return trees.map_with_names(clip, grads)


def _with_decay(
  recipe: Recipe, grads: Params, params: Params, wd: Mapping[str, Any]
) -> Params:
  def add(name: str, g: jax.Array, p: jax.Array) -> jax.Array:
    leaf = recipe.leaves[name]
    if leaf.wd_mult is None:
      return g
    return g + (wd[leaf.schedule] * leaf.wd_mult) * p.astype(g.dtype)

  return trees.map_with_names(add, grads, params)


def _only_one(rates: Mapping[str, Any]) -> Callable[[Any], Any]:
  (rate,) = rates.values()
  return lambda count: rate


def _base_optimizer(
  recipe: Recipe, hparams: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
  learning_rate: Any = 1.0
  if optimizers.lr_inside(recipe.optimizer):
    _check_one_schedule(recipe)
    if any(leaf.lr_mult != 1.0 for leaf in recipe.leaves.values()):
      name = recipe.optimizer["name"]
      raise ConfigError(f"{recipe.path}.lr_mults: {name!r} takes none.")
    learning_rate = _only_one(hparams["lr"])
  return optax.with_extra_args_support(
    optimizers.base_optimizer(
      recipe.optimizer,
      learning_rate,
      recipe.shapes,
      f"{recipe.path}.optimizer",
      recipe.views,
    )
  )


def _scale_by_schedule_and_decay(
  recipe: Recipe, hparams: Mapping[str, Any]
) -> Callable[[Params, Params], Params]:
  lr_inside = optimizers.lr_inside(recipe.optimizer)

  @functools.cache  # Of scalars: many parameters share a product.
  def scaled(name: str, schedule: str, mult: float) -> jax.Array:
    return hparams[name][schedule] * jnp.float32(mult)

  def update(name: str, u: jax.Array, p: jax.Array) -> jax.Array:
    leaf = recipe.leaves[name]
    u = _as_float32(u)
    u = u if lr_inside else u * scaled("lr", leaf.schedule, leaf.lr_mult)
    if recipe.coupling == "gradient" or leaf.wd_mult is None:
      return u
    return u - _as_float32(p) * scaled("wd", leaf.schedule, leaf.wd_mult)

  return lambda updates, params: trees.map_with_names(update, updates, params)


def _check_one_schedule(recipe: Recipe) -> None:
  if len({leaf.schedule for leaf in recipe.leaves.values()}) > 1:
    name = recipe.optimizer["name"]
    raise ConfigError(f"{recipe.path}.schedule: {name!r} takes only one.")


def _as_float32(x: jax.Array) -> jax.Array:
  if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.float32:
    return x
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
