"""From the config to one optax transformation.

A gradient g of a parameter p passes through these stages, in this order:

  1. g *= grad_mult                        config.grad_mults
  2. clip g elementwise                    config.grad_clip_value
  3. clip g by the norm of its group       config.grad_clip_groups
     and by the norm of all gradients      config.grad_clip_norm
  4. g += wd * wd_mult * p                 only if wd_coupling is "gradient"
  5. u = the base optimizer's direction    config.optimizer
  6. update = -schedule(step) * (lr * lr_mult * u + wd * wd_mult * p)

recipe.py turns the config into a `Recipe`, `build` turns a recipe into this
list of stages, and `make` does both.

Weight decay is decoupled from the learning rate, but not from the schedule
(Loshchilov and Hutter 2019, arxiv.org/abs/1711.05101, algorithm 2; the
published ViT recipes mean this by wd). The AdamW of optax and PyTorch also
multiplies it by the learning rate: wd_coupling="lr" does that, lr_mult
included. wd_coupling="gradient" is PyTorch's SGD: an L2 penalty that the
moments see like the rest of the gradient; stage 6 then has no wd term.

The keys, all at the top of the config:

  optimizer        dict(name="adam", b1=0.9, mu_dtype="bfloat16", ...): an
                   optimizer of optax or optax.contrib that takes a
                   learning_rate, one of their scale_by_*, one of
                   adafactor.py or wrappers.py, or the dotted path of your
                   own function, with its keyword arguments. Also
    view              "parameters", "layers" or "matrices": what the optimizer
                      takes for one array, see views.py
    moment_dtype      "bfloat16": stores all moments in it; see moments.py
    moment_rounding   "stochastic" (default), or "nearest": with moment_dtype
    moment_arithmetic "float32" (default), or "stored": moments are multiplied
                      in the dtype in which they are stored, as in optax
    lr_inside         whether it gets lr times the schedule as a function of
                      the number of updates, in place of stage 6
  lr               learning rate where the schedule is 1
  wd               weight decay, default 0
  wd_coupling      "schedule" (default), "lr" or "gradient"
  schedule         dict, see schedules.py, or list of (regex, dict | None);
                   None freezes. Default: constant
  lr_mults         list of (regex, multiplier), default 1
  wd_mults         list of (regex, multiplier), default 1 for kernels, else 0
  grad_mults       list of (regex, multiplier), default 1
  grad_clip_norm   largest norm of all trainable gradients together
  grad_clip_value  largest absolute value of a gradient's element
  grad_clip_groups list of (regex, largest norm of those gradients together)

Regular expressions match whole names ("/"-joined). The first match in a list
decides, and an entry that decides nothing is an error.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bigtrain import sharding, trees
from bigtrain.lengths import Units
from bigtrain.optim import optimizers
from bigtrain.optim.recipe import Recipe, read
from bigtrain.optim.views import View
from bigtrain.settings import Config, ConfigError
from bigtrain.types import Params

# (gradients, parameters, weight decay by schedule, norm of the gradients or
# None) -> gradients, which are the same object if they do not change.
_Stage = Callable[[Params, Params, Any, Any], Params]


class Optimizer(NamedTuple):
  """An optimizer for the trainable parameters.

  Attributes:
    tx: transformation over the trainable parameters ALONE:

        trained, frozen = trees.partition(params, optimizer.trainable)
        opt = tx.init(trained)
        grads = jax.grad(lambda t: loss(trees.merge(t, frozen)))(trained)
        updates, opt = tx.update(
          grads, opt, trained, step=step, hparams=hparams, loss=pair)
        params = trees.merge(optax.apply_updates(trained, updates), frozen)

      `step` counts the updates before this one; without hparams it is a whole
      number of the host. hparams["seed"] is for stochastic rounding, `loss`
      for optimizers that use its value. Updates are float32.
    hparams: see Recipe.hparams.
    trainable: nested dicts of bools with the structure of the parameters.
  """

  tx: optax.GradientTransformationExtraArgs
  hparams: Callable[[int], dict[str, Any]]
  trainable: Any


def make(
  cfg: Config,
  params_shapes: Any,
  units: Units,
  param_views: Mapping[str, View] | None = None,
) -> Optimizer:
  """The optimizer that the top level of the config describes.

  Args:
    params_shapes: nested dicts of arrays or specs, all parameters.
    param_views: views by name; by default they follow from names and shapes.
  """
  recipe = read(cfg, params_shapes, units, param_views)
  return Optimizer(build(recipe), recipe.hparams, recipe.trainable)


def build(recipe: Recipe) -> optax.GradientTransformationExtraArgs:
  """Builds the stages at the head of this file; only stage 5 has a state."""
  initial = _last_stages(recipe, recipe.hparams(0))
  before = [
    _multiply_gradients(recipe),
    _clip_by_value(recipe.clip_value),
    *[_clip_by_norm(members, norm) for members, norm in recipe.clip_norms],
    _add_l2_gradients(recipe),
  ]

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
    for stage in before:
      before_stage = grads
      grads = stage(grads, params, hparams["wd"], grad_norm)
      grad_norm = grad_norm if grads is before_stage else None
    old = sharding.on_device(state)
    # Moments may be stored in bfloat16, but the arithmetic is float32: in
    # bfloat16, b1=0.9 would become 0.898 and 0.999 become 1.
    moments = old if recipe.stored_arithmetic else _float32(old)
    updates, new = _last_stages(recipe, hparams).update(
      grads, moments, params, **extra
    )
    new = recipe.moments.stored(new, old, step, hparams.get("seed", 0))
    return updates, sharding.in_memory_of(new, state)

  return optax.GradientTransformationExtraArgs(
    lambda params: recipe.moments.initial(initial.init(params)), update
  )


def _last_stages(
  recipe: Recipe, hparams: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
  """Stages 5 and 6, and what config.optimizer has around them.

  Built anew in each trace, as optax's optimizers keep the learning rate that
  they are given.
  """
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
  return optax.with_extra_args_support(
    recipe.wrap(tx, _only_one(hparams["next_lr"]))
  )


# The stages. Operations that would change nothing are not traced: with several
# for each of hundreds of parameters, tracing them takes seconds at the start.


def _multiply_gradients(recipe: Recipe) -> _Stage:
  """Stage 1: g *= grad_mult."""

  def multiply(name: str, g: jax.Array) -> jax.Array:
    mult = recipe.leaves[name].grad_mult
    return g if mult is None else g * mult

  def stage(grads: Params, params: Params, wd: Any, norm: Any) -> Params:
    if all(leaf.grad_mult is None for leaf in recipe.leaves.values()):
      return grads
    return trees.map_with_names(multiply, grads)

  return stage


def _clip_by_value(limit: float | None) -> _Stage:
  """Stage 2: clips each element to [-limit, limit]."""

  def stage(grads: Params, params: Params, wd: Any, norm: Any) -> Params:
    if limit is None:
      return grads
    return jax.tree.map(lambda g: jnp.clip(g, -limit, limit), grads)

  return stage


def _clip_by_norm(members: set[str], limit: float) -> _Stage:
  """Stage 3: scales these gradients to a joint norm of at most `limit`."""

  def stage(grads: Params, params: Params, wd: Any, norm: Any) -> Params:
    named = trees.flatten_with_names(grads)
    group = [g for name, g in named if name in members]
    if not group:  # The whole group is frozen.
      return grads
    if norm is None or len(group) < len(named):
      squares = [jnp.sum(jnp.square(_as_float32(g))) for g in group]
      norm = jnp.sqrt(sum(squares))
    # A norm of 0 gives a scale of 1; NaN stays NaN, for the guard to see.
    scale = jnp.minimum(1.0, limit / norm)
    return trees.map_with_names(
      lambda name, g: g * scale.astype(g.dtype) if name in members else g,
      grads,
    )

  return stage


def _add_l2_gradients(recipe: Recipe) -> _Stage:
  """Stage 4: g += wd * wd_mult * p, where weight decay is an L2 penalty."""

  def stage(grads: Params, params: Params, wd: Any, norm: Any) -> Params:
    if recipe.coupling != "gradient":
      return grads

    def add(name: str, g: jax.Array, p: jax.Array) -> jax.Array:
      leaf = recipe.leaves[name]
      if leaf.wd_mult is None:
        return g
      return g + (wd[leaf.schedule] * leaf.wd_mult) * p.astype(g.dtype)

    return trees.map_with_names(add, grads, params)

  return stage


def _only_one(rates: Mapping[str, Any]) -> Callable[[Any], Any]:
  """The learning rate as optax wants it, where there is one schedule."""
  (rate,) = rates.values()
  return lambda count: rate


def _base_optimizer(
  recipe: Recipe, hparams: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
  """Stage 5: the optimizer that config.optimizer names."""
  learning_rate: Any = 1.0
  if optimizers.lr_inside(recipe.optimizer):
    _check_one_lr(recipe)
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
  """Stage 6: learning rate, schedule and decoupled weight decay."""
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


def _check_one_lr(recipe: Recipe) -> None:
  _check_one_schedule(recipe)
  name, leaves = recipe.optimizer["name"], recipe.leaves.values()
  if any(leaf.lr_mult != 1.0 for leaf in leaves):
    raise ConfigError(f"{recipe.path}.lr_mults: {name!r} takes none.")


def _check_one_schedule(recipe: Recipe) -> None:
  if len({leaf.schedule for leaf in recipe.leaves.values()}) > 1:
    name = recipe.optimizer["name"]
    raise ConfigError(f"{recipe.path}.schedule: {name!r} takes only one.")


def _as_float32(x: jax.Array) -> jax.Array:
  return x if x.dtype == jnp.float32 else x.astype(jnp.float32)


def _float32(state: Any) -> Any:
  return jax.tree.map(
    lambda x: (
      x.astype(jnp.promote_types(x.dtype, jnp.float32))
      if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != jnp.float32
      else x
    ),
    state,
  )
