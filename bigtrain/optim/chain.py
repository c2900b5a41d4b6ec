"""From the config to one optax transformation: chain, multipliers, freezing.

What happens to a gradient g of a parameter p, in this order:

  1. g *= grad_mults
  2. clip by value, by the norm of its group, by the global norm
  3. u = direction of the optimizer that config.optimizer names
  4. update = -schedule(step) * (lr * lr_mult * u + wd * wd_mult * p)

Weight decay is decoupled from the learning rate, but not from the schedule
(Loshchilov and Hutter 2019, arxiv.org/abs/1711.05101, algorithm 2, which is
what the published ViT recipes mean by wd). Optax's and PyTorch's AdamW multiply
it by the learning rate too: wd_coupling="lr" does, lr_mult included. And
wd_coupling="gradient" adds wd * wd_mult * p to the gradient, between 2 and 3,
as PyTorch's SGD does: an L2 penalty, which moments see like the rest.

The keys, all at the top of the config:

  optimizer        dict(name="adam", b1=0.9, mu_dtype="bfloat16", ...): an
                   optimizer of optax or optax.contrib that takes a
                   learning_rate, one of their scale_by_*, or
                   "big_vision_adafactor", with its keyword arguments
  lr               learning rate where the schedule is 1
  wd               weight decay, default 0
  wd_coupling      "schedule" (default), "lr" or "gradient", as above
  schedule         dict, see schedules.py, or list of (regex, dict | None);
                   None freezes. Default: constant
  lr_mults         list of (regex, multiplier), default 1
  wd_mults         the same, default 1 for kernels and 0 for the rest
  grad_mults       the same, default 1
  grad_clip_norm   largest norm of all trainable gradients together
  grad_clip_value  largest absolute value of a gradient's element
  grad_clip_groups list of (regex, largest norm of those gradients together)
  ema_decay, ema_start_{steps,epochs,...}: see `ema_update`

Regular expressions match whole names ("/"-joined). In each list the first match
decides, and one that decides nothing is an error.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bigtrain import lengths, settings, trees
from bigtrain.lengths import Units
from bigtrain.optim import optimizers, schedules
from bigtrain.optim.patterns import first_match, read_pairs
from bigtrain.settings import Config, ConfigError

_KERNELS = ((".*/kernel$", 1.0),)
_COUPLINGS = ("schedule", "lr", "gradient")


class Optimizer(NamedTuple):
  """What `make` returns.

  Attributes:
    tx: transformation over the trainable parameters ALONE. The caller splits
      them off and hands the step to each update:

        train, frozen = trees.partition(params, optimizer.trainable)
        opt = tx.init(train)
        grads = jax.grad(lambda t: loss(trees.merge(t, frozen)))(train)
        updates, opt = tx.update(grads, opt, train, step=step)
        params = trees.merge(optax.apply_updates(train, updates), frozen)

      `step` counts the updates before this one, so schedules need no state of
      their own. Updates are float32 and hold sign and learning rate.
    schedules: {name: fn(step) -> learning rate}, multipliers left out. "lr" if
      there is one schedule, else "lr/<regex>" for each that does not freeze.
    trainable: nested dicts like the parameters', of bools.
  """

  tx: optax.GradientTransformationExtraArgs
  schedules: dict[str, schedules.Schedule]
  trainable: Any


class _Leaf(NamedTuple):
  """What the config says about one trainable parameter."""

  lr: float
  wd: float
  grad_mult: float
  schedule: str


def make(cfg: Config, params_shapes: Any, units: Units) -> Optimizer:
  """Builds the optimizer that the top level of the config describes.

  Args:
    cfg: the tracked config; see the head of this file for the keys.
    params_shapes: nested dicts of arrays or ShapeDtypeStructs, all parameters.
    units: sizes to convert lengths with, total_steps among them.

  Raises:
    ConfigError: anything unknown, misspelled, unmatched or out of range.
  """
  names = trees.names(params_shapes)
  lr, wd = _number(cfg, "lr"), _number(cfg, "wd", 0.0)
  coupling = cfg.get("wd_coupling", "schedule")
  if coupling not in _COUPLINGS:
    hint = settings.did_you_mean(str(coupling), _COUPLINGS)
    raise ConfigError(f"{cfg.path}.wd_coupling: unknown {coupling!r}.{hint}")
  relative, of_name = _schedules(cfg, names, units)
  lr_mult = _multipliers(cfg, "lr_mults", names, 1.0)
  wd_mult = _multipliers(cfg, "wd_mults", names, 0.0, _KERNELS if wd else ())
  grad_mult = _multipliers(cfg, "grad_mults", names, 1.0)
  clips = _clips(cfg, names)
  leaves = {
    name: _Leaf(
      lr * lr_mult[name],
      wd * wd_mult[name] * (lr * lr_mult[name] if coupling == "lr" else 1.0),
      grad_mult[name],
      of_name[name],
    )
    for name in names
    if of_name[name] is not None
  }
  trainable = trees.map_with_names(lambda n, _: n in leaves, params_shapes)
  train_shapes, _ = trees.partition(params_shapes, trainable)
  clip_value = _number(cfg, "grad_clip_value", None, positive=True)

  spec = cfg.kwargs("optimizer", required=True)
  logged = {name: _times(schedule, lr) for name, schedule in relative.items()}
  lr_inside = spec.get("name") in optimizers.LR_INSIDE
  if lr_inside:
    _check_one_lr(leaves, spec["name"], cfg.path)
  inner = optax.with_extra_args_support(
    optimizers.base_optimizer(
      spec,
      next(iter(logged.values())) if lr_inside else 1.0,
      train_shapes,
      f"{cfg.path}.optimizer",
    )
  )

  def update(
    grads: Any, state: Any, params: Any = None, *, step: Any, **extra: Any
  ) -> tuple[Any, Any]:
    # Here and below: what is not traced costs no time at the start, and with a
    # few operations for each of hundreds of parameters that is seconds.
    grads = trees.map_with_names(
      lambda name, g: (
        g if leaves[name].grad_mult == 1.0 else g * leaves[name].grad_mult
      ),
      grads,
    )
    if clip_value is not None:
      grads = jax.tree.map(
        lambda g: jnp.clip(g, -clip_value, clip_value), grads
      )
    for members, norm in clips:
      grads = _clip(grads, members, norm)
    if coupling == "gradient":
      grads = trees.map_with_names(
        lambda name, g, p: g + leaves[name].wd * p.astype(g.dtype),
        grads,
        params,
      )
    # Moments may be stored in bfloat16, rounded to nearest, but are not
    # multiplied in it: b1=0.9 would become 0.898 and 0.999 become 1, and eager
    # code would round more.
    updates, new_state = inner.update(grads, _float32(state), params, **extra)
    state = jax.tree.map(_like, new_state, state)
    scales = {label: schedule(step) for label, schedule in relative.items()}

    @functools.cache
    def scaled(label: str, factor: float) -> jax.Array:
      return scales[label] * factor

    def finish(name: str, u: jax.Array, p: jax.Array) -> jax.Array:
      leaf = leaves[name]
      u = _as_float32(u)
      u = u if lr_inside else u * scaled(leaf.schedule, leaf.lr)
      if coupling == "gradient" or not leaf.wd:
        return u
      return u - _as_float32(p) * scaled(leaf.schedule, leaf.wd)

    return trees.map_with_names(finish, updates, params), state

  tx = optax.GradientTransformationExtraArgs(inner.init, update)
  return Optimizer(tx, logged, trainable)


def _times(schedule: schedules.Schedule, lr: float) -> schedules.Schedule:
  return lambda step: schedule(step) * lr


def _clip(grads: Any, members: set[str], norm: float) -> Any:
  """Scales these gradients so that together they have at most `norm`."""
  squares = [
    jnp.sum(jnp.square(g.astype(jnp.float32)))
    for name, g in trees.flatten_with_names(grads)
    if name in members
  ]
  if not squares:  # The whole group is frozen.
    return grads
  # A norm of 0 gives a scale of 1; NaN stays NaN, for the caller to see.
  scale = jnp.minimum(1.0, norm / jnp.sqrt(sum(squares)))
  return trees.map_with_names(
    lambda name, g: g * scale.astype(g.dtype) if name in members else g, grads
  )


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


def _like(new: jax.Array, old: jax.Array) -> jax.Array:
  return new if new.dtype == old.dtype else new.astype(old.dtype)


def _check_one_lr(leaves: dict[str, _Leaf], optimizer: str, path: str) -> None:
  if len({leaf.schedule for leaf in leaves.values()}) > 1:
    raise ConfigError(f"{path}.schedule: {optimizer!r} takes only one.")
  if len({leaf.lr for leaf in leaves.values()}) > 1:
    raise ConfigError(f"{path}.lr_mults: {optimizer!r} takes none.")


def _schedules(
  cfg: Config, names: Sequence[str], units: Units
) -> tuple[dict[str, schedules.Schedule], dict[str, str | None]]:
  """({label: schedule}, {parameter: its label, or None if it is frozen})."""
  key = f"{cfg.path}.schedule"
  default = {"decay_type": "constant"}
  if isinstance(cfg.get("schedule", default), Config):
    spec = cfg.kwargs("schedule", default)
    return {"lr": schedules.make(spec, units, key)}, dict.fromkeys(names, "lr")
  pairs = read_pairs(cfg, "schedule", (dict, type(None)), "dict | None")
  which = first_match([regex for regex, _ in pairs], names, key)
  left = [name for name in names if name not in which]
  if left:
    shown = ", ".join(left[:10]) + (", ..." if len(left) > 10 else "")
    raise ConfigError(
      f"{key}: matches {len(which)} of {len(names)} parameters, and says "
      f"nothing about {shown}; (regex, None) freezes."
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


def _clips(cfg: Config, names: Sequence[str]) -> list[tuple[set[str], float]]:
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
  norm = _number(cfg, "grad_clip_norm", None, positive=True)
  return clips if norm is None else [*clips, (set(names), norm)]


_REQUIRED = object()


def _number(
  cfg: Config, key: str, default: Any = _REQUIRED, positive: bool = False
) -> Any:
  value = cfg[key] if default is _REQUIRED else cfg.get(key, default)
  if value is None and default is None:
    return None
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ConfigError(f"{cfg.path}.{key}: expected a number, got {value!r}.")
  if value < 0 or (positive and value == 0):
    raise ConfigError(f"{cfg.path}.{key}: must be positive, got {value!r}.")
  return value


def make_ema(
  cfg: Config, units: Units
) -> Callable[[Any, Any, Any], Any] | None:
  """fn(ema, params, step) -> ema as the config wants it, None for no EMA.

  Reads ema_decay and ema_start_{steps,epochs,...} (default 0).
  """
  decay = _number(cfg, "ema_decay", None)
  start = lengths.steps(cfg, "ema_start", units, 0)
  if decay is None:
    return None
  if decay >= 1:
    raise ConfigError(f"{cfg.path}.ema_decay: must be below 1, got {decay!r}.")
  return functools.partial(ema_update, decay=decay, start_step=start)


def ema_init(params: Any) -> Any:
  """The average before the first update: float32 copies.

  In bfloat16 a step of (1 - decay) * (params - ema) would round to nothing.
  """
  return jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)


def ema_update(
  ema: Any, params: Any, step: Any, decay: float, start_step: int = 0
) -> Any:
  """Exponential moving average of parameters, after an update.

  With t = step - start_step, ema = d * ema + (1 - d) * params, where d is 0
  for t < 0 and min(decay, (1 + t) / (10 + t)) then, so that an early average
  does not remember the initial parameters.

  Args:
    ema: tree of the averages so far; any tree that `params` agrees with.
    params: parameters after this update.
    step: the number of updates before this one.
    decay: d once the warm-up is over.
    start_step: until then the average is the parameters themselves.
  """
  t = jnp.asarray(step - start_step, jnp.float32)
  warm = jnp.minimum(decay, (1 + t) / (10 + jnp.maximum(t, 0)))
  d = jnp.where(t < 0, 0.0, warm)
  return jax.tree.map(
    lambda e, p: (d * e + (1 - d) * p.astype(jnp.float32)).astype(e.dtype),
    ema,
    params,
  )
