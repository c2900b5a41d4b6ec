"""The whole optimizer, as one optax transformation.

`make` reads the config into a Recipe, and `build` makes the transformation. A
gradient g of a parameter p passes through these stages, in this order:

  1. g *= grad_mult                        config.grad_mults
  2. clip g elementwise                    config.grad_clip_value
  3. clip g by the norm of its group       config.grad_clip_groups
     and by the norm of all gradients      config.grad_clip_norm, and its _type
  4. g += wd * wd_mult * p                 only if wd_coupling is "gradient"
  5. u = the base optimizer's direction    config.optimizer
  6. update = -schedule(step) * (lr * lr_mult * u + wd * wd_mult * p)
  7. p + update is scaled down for heads of   config.qk_clip
     attention with logits above a limit

Weight decay is decoupled from the learning rate, but not from the schedule
(Loshchilov and Hutter 2019, arxiv.org/abs/1711.05101, algorithm 2; the
published ViT recipes mean this by wd). AdamW in optax and PyTorch also
multiplies it by the learning rate; wd_coupling="lr" does that too, including
lr_mult. docs/config.md lists all keys. Several optimizers, each with its own
parameters and stages, are joined by several.py.

Stages that would change nothing are not traced. With hundreds of parameters and
several operations for each, tracing them would add seconds to the start-up
time.
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
from bigtrain.optim import optimizers, several
from bigtrain.optim.recipe import Recipe, read
from bigtrain.optim.views import View

# (updates, parameters, largest logits of attention) -> updates.
QkClip = Callable[[Params, Params, Any], Params]


class Optimizer(NamedTuple):
  """An optimizer of the trainable parameters."""

  # The transformation, of the trainable parameters ALONE. `build` describes the
  # extra arguments of its update.
  tx: optax.GradientTransformationExtraArgs
  # Number of earlier updates -> scalars that the update uses.
  hparams: Callable[[int], dict[str, Any]]
  # Whether each parameter is trainable: bools in the parameters' structure.
  trainable: Any


def make(
  cfg: Config,
  params_shapes: Any,
  units: Units,
  param_views: Mapping[str, View] | None = None,
  mask: Callable[[Params], Params] = lambda updates: updates,
  qk_clip: QkClip | None = None,
) -> Optimizer:
  """Makes the optimizer of a config, for parameters of these shapes.

  With config.optimizers there are several, which are joined into one.

  Args:
    mask: sets the updates of rows that do not train to 0.
    qk_clip: stage 7; the update then has an argument `logits`.
  """
  if cfg.get("optimizers") is not None:
    optimizer = Optimizer(
      *several.make(
        cfg,
        params_shapes,
        units,
        param_views,
        lambda recipe: build(recipe._replace(mask=mask)),
      )
    )
  else:
    recipe = read(cfg, params_shapes, units, param_views)._replace(mask=mask)
    if qk_clip is not None:
      _check_has_no_copies(recipe)
    optimizer = Optimizer(build(recipe), recipe.hparams, recipe.trainable)
  return optimizer._replace(tx=_with_qk_clip(optimizer.tx, qk_clip))


def _check_has_no_copies(recipe: Recipe) -> None:
  """Raises ConfigError if the optimizer's state has parameters of its own."""
  if recipe.wrap is not None:
    raise ConfigError(
      "config.qk_clip: expected an optimizer without a wrapper, which keeps a "
      "second set of parameters that would not be clipped."
    )


def _with_qk_clip(
  tx: optax.GradientTransformationExtraArgs, clip: QkClip | None
) -> optax.GradientTransformationExtraArgs:
  """Stage 7."""

  def update(
    grads: Params,
    state: Any,
    params: Params,
    *,
    logits: Any = None,
    **extra: Any,
  ) -> tuple[Params, Any]:
    updates, state = tx.update(grads, state, params, **extra)
    if clip is not None and logits is not None:
      updates = clip(updates, params, logits)
    return updates, state

  return optax.GradientTransformationExtraArgs(tx.init, update)


def build(recipe: Recipe) -> optax.GradientTransformationExtraArgs:
  """Makes the transformation of a recipe.

  Extra arguments of its update:
    step: number of earlier updates.
    hparams: results of `Recipe.hparams`, computed by default, and the "seed" of
      stochastic rounding.
    loss: (sum, weight), for optimizers that use the loss.
    grad_norm: L2 norm of all gradients, if it is already known.
  """
  # Made here already, so that mistakes in the config are errors now.
  initial = _last_stages(recipe, recipe.hparams(0))

  def init(params: Params) -> Any:
    return recipe.moments.initial(initial.init(params))

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
    hparams = recipe.hparams(step) if hparams is None else hparams
    unchanged = grads

    # 1 to 4: the gradients.
    grads = _multiplied(recipe, grads)
    if recipe.clip_value is not None:
      limit = recipe.clip_value
      grads = jax.tree.map(lambda g: jnp.clip(g, -limit, limit), grads)
    for members, largest in recipe.clip_norms:
      known_norm = grad_norm if grads is unchanged else None
      grads = _clipped(
        grads, members, largest, recipe.clip_norm_type, known_norm
      )
    if recipe.coupling == "gradient":
      grads = _with_decay(recipe, grads, params, hparams["wd"])

    # 5 and 6: the direction of the base optimizer, and the update.
    old_state = sharding.on_device(state)
    moments = old_state
    if not recipe.stored_arithmetic:
      # Moments may be stored in bfloat16, but the arithmetic is float32: in
      # bfloat16, b1=0.9 would become 0.898, and 0.999 would become 1.
      moments = jax.tree.map(_as_float32, old_state)
    extra = {} if loss is None else {"value": loss[0] / loss[1]}
    last_stages = _last_stages(recipe, hparams)
    updates, new_state = last_stages.update(grads, moments, params, **extra)
    seed = hparams.get("seed", 0)
    new_state = recipe.moments.stored(new_state, old_state, step, seed)
    return recipe.mask(updates), sharding.in_memory_of(new_state, state)

  return optax.GradientTransformationExtraArgs(init, update)


def _last_stages(
  recipe: Recipe, hparams: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
  """Stages 5 and 6 and their wrapper.

  They are created again in each trace: optax needs the learning rate when it
  creates an optimizer, and here the rate is a traced scalar in `hparams`.
  """
  base = _base_optimizer(recipe, hparams)

  def update(
    grads: Params, state: Any, params: Params, **extra: Any
  ) -> tuple[Params, Any]:
    directions, state = base.update(grads, state, params, **extra)
    updates = _scaled_and_decayed(recipe, hparams, directions, params)
    # Weight decay, and some optimizers, move rows without gradients too. Their
    # updates are 0 here, for the averages of a wrapper, and at the end.
    return recipe.mask(updates), state

  tx = optax.GradientTransformationExtraArgs(base.init, update)
  if recipe.wrap is None:
    return tx
  _check_one_schedule(recipe)
  wrapped = recipe.wrap(tx, _the_schedule(hparams["next_lr"]))
  return optax.with_extra_args_support(wrapped)


def _multiplied(recipe: Recipe, grads: Params) -> Params:
  mults = {name: leaf.grad_mult for name, leaf in recipe.leaves.items()}
  if all(mult is None for mult in mults.values()):
    return grads

  def multiply(name: str, g: jax.Array) -> jax.Array:
    mult = mults[name]
    return g if mult is None else g * mult

  return trees.map_with_names(multiply, grads)


def _clipped(
  grads: Params, members: set[str], limit: float, kind: str, norm: Any
) -> Params:
  """Scales a group of gradients down to a norm of at most `limit`.

  Args:
    grads: all gradients.
    members: names of the group.
    limit: largest norm.
    kind: "l2", "l1" or "max".
    norm: L2 norm of all gradients, or None if it is not known.
  """
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

  def clip(name: str, g: jax.Array) -> jax.Array:
    return g * scale.astype(g.dtype) if name in members else g

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


def _the_schedule(rates: Mapping[str, Any]) -> Callable[[Any], Any]:
  """The only rate as an optax schedule, which ignores the optimizer's count."""
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
      raise ConfigError(f"{recipe.path}.lr_mults: {name!r} supports none.")
    learning_rate = _the_schedule(hparams["lr"])
  return optax.with_extra_args_support(
    optimizers.base_optimizer(
      recipe.optimizer,
      learning_rate,
      recipe.shapes,
      f"{recipe.path}.optimizer",
      recipe.views,
    )
  )


def _scaled_and_decayed(
  recipe: Recipe,
  hparams: Mapping[str, Any],
  directions: Params,
  params: Params,
) -> Params:
  """Stage 6. The base optimizer's directions point downhill already."""
  lr_inside = optimizers.lr_inside(recipe.optimizer)

  # Many parameters have the same factors, so each product is traced once.
  @functools.cache
  def factor(name: str, schedule: str, mult: float) -> jax.Array:
    return hparams[name][schedule] * jnp.float32(mult)

  def update(name: str, u: jax.Array, p: jax.Array) -> jax.Array:
    leaf = recipe.leaves[name]
    u = _as_float32(u)
    if not lr_inside:
      u = u * factor("lr", leaf.schedule, leaf.lr_mult)
    if recipe.coupling == "gradient" or leaf.wd_mult is None:
      return u
    return u - _as_float32(p) * factor("wd", leaf.schedule, leaf.wd_mult)

  return trees.map_with_names(update, directions, params)


def _check_one_schedule(recipe: Recipe) -> None:
  if len({leaf.schedule for leaf in recipe.leaves.values()}) > 1:
    name = recipe.optimizer["name"]
    raise ConfigError(f"{recipe.path}.schedule: {name!r} supports only one.")


def _as_float32(x: jax.Array) -> jax.Array:
  if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.float32:
    return x
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
