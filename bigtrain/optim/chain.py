"""From the config to one optax transformation.

A gradient g of a parameter p passes through these stages, in this order:

  1. g *= grad_mult                        config.grad_mults
  2. clip g elementwise                    config.grad_clip_value
  3. clip g by the norm of its group       config.grad_clip_groups
     and by the norm of all gradients      config.grad_clip_norm
  4. g += wd * wd_mult * p                 only if wd_coupling is "gradient"
  5. u = the base optimizer's direction    config.optimizer
  6. update = -schedule(step) * (lr * lr_mult * u + wd * wd_mult * p)

`read` turns the config into a `Recipe`, `build` turns a recipe into this list
of stages, and `make` does both.

Weight decay is decoupled from the learning rate, but not from the schedule
(Loshchilov and Hutter 2019, arxiv.org/abs/1711.05101, algorithm 2; the
published ViT recipes mean this by wd). The AdamW of optax and PyTorch also
multiplies it by the learning rate: wd_coupling="lr" does that, lr_mult
included. wd_coupling="gradient" is PyTorch's SGD: an L2 penalty that the
moments see like the rest of the gradient; stage 6 then has no wd term.

The keys, all at the top of the config:

  optimizer        dict(name="adam", b1=0.9, mu_dtype="bfloat16", ...): an
                   optimizer of optax or optax.contrib that takes a
                   learning_rate, one of their scale_by_*, or
                   "big_vision_adafactor", with its keyword arguments
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bigtrain import settings, trees
from bigtrain.lengths import Units
from bigtrain.optim import optimizers, schedules
from bigtrain.optim.patterns import first_match, read_pairs
from bigtrain.settings import Config, ConfigError

_KERNELS = ((".*/kernel$", 1.0),)
_COUPLINGS = ("schedule", "lr", "gradient")


class Optimizer(NamedTuple):
  """An optimizer for the trainable parameters.

  Attributes:
    tx: transformation over the trainable parameters ALONE. The caller splits
      them off and passes the step to each update:

        trained, frozen = trees.partition(params, optimizer.trainable)
        opt = tx.init(trained)
        grads = jax.grad(lambda t: loss(trees.merge(t, frozen)))(trained)
        updates, opt = tx.update(grads, opt, trained, step=step)
        params = trees.merge(optax.apply_updates(trained, updates), frozen)

      `step` counts the updates before this one, so schedules need no state of
      their own. Updates are float32 and include sign and learning rate.
    schedules: {name: fn(step) -> learning rate}, without multipliers. The name
      is "lr" if there is one schedule, else "lr/<regex>" for each.
    trainable: nested dicts of bools with the structure of the parameters.
  """

  tx: optax.GradientTransformationExtraArgs
  schedules: dict[str, schedules.Schedule]
  trainable: Any

  def rates(self, step: Any) -> dict[str, Any]:
    """{name: learning rate} of the update after `step` updates."""
    return {name: schedule(step) for name, schedule in self.schedules.items()}


class Leaf(NamedTuple):
  """Settings of one trainable parameter.

  Attributes:
    lr: learning rate with the multiplier.
    wd: weight decay with the multiplier and, if coupled, the learning rate.
    grad_mult: multiplier of the gradient.
    schedule: name of the schedule.
  """

  lr: float
  wd: float
  grad_mult: float
  schedule: str


class Recipe(NamedTuple):
  """Everything that the config says about the optimizer.

  Attributes:
    leaves: settings by name of the trainable parameters.
    trainable: nested dicts of bools with the structure of the parameters.
    shapes: shapes of the trainable parameters.
    clip_value: largest absolute value of a gradient's element, or None.
    clip_norms: (parameters, largest norm of their gradients), in order.
    coupling: one of "schedule", "lr" and "gradient".
    factors: {name: fn(step) -> factor of the learning rate}, the schedules.
    lr: learning rate where the schedule is 1.
    optimizer: config.optimizer.
    path: location of the optimizer's keys in the config.
  """

  leaves: Mapping[str, Leaf]
  trainable: Any
  shapes: Any
  clip_value: float | None
  clip_norms: Sequence[tuple[set[str], float]]
  coupling: str
  factors: Mapping[str, schedules.Schedule]
  lr: float
  optimizer: Mapping[str, Any]
  path: str

  @property
  def learning_rates(self) -> dict[str, schedules.Schedule]:
    """{name: fn(step) -> learning rate}, without multipliers."""
    return {
      name: _times(schedule, self.lr) for name, schedule in self.factors.items()
    }


def make(cfg: Config, params_shapes: Any, units: Units) -> Optimizer:
  """Builds the optimizer that the top level of the config describes.

  Args:
    cfg: the tracked config; its keys are listed at the head of this file.
    params_shapes: nested dicts of arrays or ShapeDtypeStructs, all parameters.
    units: sizes to convert lengths with, total_steps among them.

  Raises:
    ConfigError: a key is unknown, misspelled, unmatched or out of range.
  """
  recipe = read(cfg, params_shapes, units)
  return Optimizer(build(recipe), recipe.learning_rates, recipe.trainable)


def read(cfg: Config, params_shapes: Any, units: Units) -> Recipe:
  """Reads the optimizer's keys; see `make`."""
  names = trees.names(params_shapes)
  lr = settings.check_number(f"{cfg.path}.lr", cfg["lr"], least=0)
  wd = settings.check_number(f"{cfg.path}.wd", cfg.get("wd", 0.0), least=0)
  coupling = cfg.get("wd_coupling", "schedule")
  if coupling not in _COUPLINGS:
    hint = settings.did_you_mean(str(coupling), _COUPLINGS)
    raise ConfigError(f"{cfg.path}.wd_coupling: unknown {coupling!r}.{hint}")
  factors, schedule_of = _schedules(cfg, names, units)
  lr_mult = _multipliers(cfg, "lr_mults", names, 1.0)
  wd_mult = _multipliers(cfg, "wd_mults", names, 0.0, _KERNELS if wd else ())
  grad_mult = _multipliers(cfg, "grad_mults", names, 1.0)
  clip_norms = _clip_norms(cfg, names)
  leaves = {
    name: Leaf(
      lr * lr_mult[name],
      wd * wd_mult[name] * (lr * lr_mult[name] if coupling == "lr" else 1.0),
      grad_mult[name],
      schedule_of[name],
    )
    for name in names
    if schedule_of[name] is not None
  }
  trainable = trees.map_with_names(lambda n, _: n in leaves, params_shapes)
  shapes, _ = trees.partition(params_shapes, trainable)
  return Recipe(
    leaves=leaves,
    trainable=trainable,
    shapes=shapes,
    clip_value=_positive(cfg, "grad_clip_value"),
    clip_norms=clip_norms,
    coupling=coupling,
    factors=factors,
    lr=lr,
    optimizer=cfg.kwargs("optimizer", required=True),
    path=cfg.path,
  )


def build(recipe: Recipe) -> optax.GradientTransformationExtraArgs:
  """Builds the stages at the head of this file; only stage 5 has a state."""
  base = _base_optimizer(recipe)
  before = [
    _multiply_gradients(recipe),
    _clip_by_value(recipe),
    *[_clip_by_norm(members, norm) for members, norm in recipe.clip_norms],
    _add_l2_gradients(recipe),
  ]
  after = _scale_by_schedule_and_decay(recipe)

  def update(
    grads: Any, state: Any, params: Any = None, *, step: Any, **extra: Any
  ) -> tuple[Any, Any]:
    for stage in before:
      grads = stage(grads, params)
    # Moments may be stored in bfloat16, rounded to nearest, but the arithmetic
    # is float32: in bfloat16, b1=0.9 would become 0.898 and 0.999 become 1.
    updates, new_state = base.update(grads, _float32(state), params, **extra)
    state = jax.tree.map(_cast_like, new_state, state)
    return after(updates, params, step), state

  return optax.GradientTransformationExtraArgs(base.init, update)


# The stages. Operations that would change nothing are not traced: with several
# for each of hundreds of parameters, tracing them takes seconds at the start.


def _multiply_gradients(recipe: Recipe) -> Callable[[Any, Any], Any]:
  """Stage 1: g *= grad_mult."""

  def stage(grads: Any, params: Any) -> Any:
    return trees.map_with_names(
      lambda name, g: (
        g
        if recipe.leaves[name].grad_mult == 1.0
        else g * recipe.leaves[name].grad_mult
      ),
      grads,
    )

  return stage


def _clip_by_value(recipe: Recipe) -> Callable[[Any, Any], Any]:
  """Stage 2: clips each element to [-clip_value, clip_value]."""
  limit = recipe.clip_value

  def stage(grads: Any, params: Any) -> Any:
    if limit is None:
      return grads
    return jax.tree.map(lambda g: jnp.clip(g, -limit, limit), grads)

  return stage


def _clip_by_norm(
  members: set[str], max_norm: float
) -> Callable[[Any, Any], Any]:
  """Stage 3: scales these gradients to a joint norm of at most `max_norm`."""

  def stage(grads: Any, params: Any) -> Any:
    squares = [
      jnp.sum(jnp.square(g.astype(jnp.float32)))
      for name, g in trees.flatten_with_names(grads)
      if name in members
    ]
    if not squares:  # The whole group is frozen.
      return grads
    # A norm of 0 gives a scale of 1; NaN stays NaN, for the guard to see.
    scale = jnp.minimum(1.0, max_norm / jnp.sqrt(sum(squares)))
    return trees.map_with_names(
      lambda name, g: g * scale.astype(g.dtype) if name in members else g,
      grads,
    )

  return stage


def _add_l2_gradients(recipe: Recipe) -> Callable[[Any, Any], Any]:
  """Stage 4: g += wd * p, where weight decay is an L2 penalty."""

  def stage(grads: Any, params: Any) -> Any:
    if recipe.coupling != "gradient":
      return grads
    return trees.map_with_names(
      lambda name, g, p: g + recipe.leaves[name].wd * p.astype(g.dtype),
      grads,
      params,
    )

  return stage


def _base_optimizer(recipe: Recipe) -> optax.GradientTransformationExtraArgs:
  """Stage 5: the optimizer that config.optimizer names."""
  learning_rate: Any = 1.0
  if _lr_inside(recipe):
    _check_one_lr(recipe)
    learning_rate = next(iter(recipe.learning_rates.values()))
  return optax.with_extra_args_support(
    optimizers.base_optimizer(
      dict(recipe.optimizer),
      learning_rate,
      recipe.shapes,
      f"{recipe.path}.optimizer",
    )
  )


def _scale_by_schedule_and_decay(
  recipe: Recipe,
) -> Callable[[Any, Any, Any], Any]:
  """Stage 6: learning rate, schedule and decoupled weight decay."""
  lr_inside = _lr_inside(recipe)

  def stage(updates: Any, params: Any, step: Any) -> Any:
    factors = {name: fn(step) for name, fn in recipe.factors.items()}

    @functools.cache
    def scheduled(schedule: str, value: float) -> jax.Array:
      return factors[schedule] * value

    def update(name: str, u: jax.Array, p: jax.Array) -> jax.Array:
      leaf = recipe.leaves[name]
      u = _as_float32(u)
      u = u if lr_inside else u * scheduled(leaf.schedule, leaf.lr)
      if recipe.coupling == "gradient" or not leaf.wd:
        return u
      return u - _as_float32(p) * scheduled(leaf.schedule, leaf.wd)

    return trees.map_with_names(update, updates, params)

  return stage


def _lr_inside(recipe: Recipe) -> bool:
  """Whether the base optimizer applies the learning rate itself."""
  return recipe.optimizer.get("name") in optimizers.LR_INSIDE


def _check_one_lr(recipe: Recipe) -> None:
  name, leaves = recipe.optimizer["name"], recipe.leaves.values()
  if len({leaf.schedule for leaf in leaves}) > 1:
    raise ConfigError(f"{recipe.path}.schedule: {name!r} takes only one.")
  if len({leaf.lr for leaf in leaves}) > 1:
    raise ConfigError(f"{recipe.path}.lr_mults: {name!r} takes none.")


def _times(schedule: schedules.Schedule, lr: float) -> schedules.Schedule:
  return lambda step: schedule(step) * lr


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


def _cast_like(new: jax.Array, old: jax.Array) -> jax.Array:
  return new if new.dtype == old.dtype else new.astype(old.dtype)


def _schedules(
  cfg: Config, names: Sequence[str], units: Units
) -> tuple[dict[str, schedules.Schedule], dict[str, str | None]]:
  """({name: schedule}, {parameter: its schedule's name, None if frozen})."""
  key = f"{cfg.path}.schedule"
  default = {"decay_type": "constant"}
  if isinstance(cfg.get("schedule", default), Config):
    spec = cfg.kwargs("schedule", default)
    return {"lr": schedules.make(spec, units, key)}, dict.fromkeys(names, "lr")
  pairs = read_pairs(cfg, "schedule", (dict, type(None)), "dict | None")
  which = first_match([regex for regex, _ in pairs], names, key)
  unmatched = [name for name in names if name not in which]
  if unmatched:
    shown = ", ".join(unmatched[:10])
    shown += ", ..." if len(unmatched) > 10 else ""
    raise ConfigError(
      f"{key}: matches {len(which)} of {len(names)} parameters, but not "
      f"{shown}; (regex, None) freezes."
    )
  active = [i for i, (_, spec) in enumerate(pairs) if spec is not None]
  if not active:
    raise ConfigError(f"{key}: freezes every parameter.")
  labels = {
    i: "lr" if len(active) == 1 else f"lr/{pairs[i][0]}" for i in active
  }
  made = {
    labels[i]: schedules.make(pairs[i][1], units, f"{key}[{i}]") for i in active
  }
  return made, {name: labels.get(i) for name, i in which.items()}


def _multipliers(
  cfg: Config,
  key: str,
  names: Sequence[str],
  otherwise: float,
  default: Sequence[tuple[str, float]] = (),
) -> dict[str, float]:
  """{parameter: multiplier} of a list of (regex, multiplier)."""
  pairs = read_pairs(cfg, key, (int, float), "multiplier", default)
  for regex, value in pairs:
    if value < 0:
      raise ConfigError(f"{cfg.path}.{key}: ({regex!r}, {value}) is negative.")
    if value == 0 and key == "lr_mults":
      raise ConfigError(
        f"{cfg.path}.lr_mults: ({regex!r}, {value}) would still cost memory; "
        f"to freeze, put ({regex!r}, None) into {cfg.path}.schedule."
      )
  which = first_match([regex for regex, _ in pairs], names, f"{cfg.path}.{key}")
  return {
    name: float(pairs[which[name]][1]) if name in which else otherwise
    for name in names
  }


def _clip_norms(
  cfg: Config, names: Sequence[str]
) -> list[tuple[set[str], float]]:
  """(parameters, largest norm of their gradients), in order of application."""
  key = "grad_clip_groups"
  pairs = read_pairs(cfg, key, (int, float), "largest norm")
  for regex, norm in pairs:
    if norm <= 0:
      raise ConfigError(f"{cfg.path}.{key}: ({regex!r}, {norm}): not positive.")
  which = first_match([regex for regex, _ in pairs], names, f"{cfg.path}.{key}")
  clips = [
    ({name for name, group in which.items() if group == i}, norm)
    for i, (_, norm) in enumerate(pairs)
  ]
  norm = _positive(cfg, "grad_clip_norm")
  return clips if norm is None else [*clips, (set(names), norm)]


def _positive(cfg: Config, key: str) -> float | None:
  value = cfg.get(key)
  if value is None:
    return None
  return settings.check_number(f"{cfg.path}.{key}", value, above=0)
