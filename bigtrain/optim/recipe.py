"""What the config says about the optimizer: `read` returns a `Recipe`.

chain.py lists the keys and builds the stages from gradients to updates.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain import settings, trees
from bigtrain.lengths import Units
from bigtrain.optim import moments, schedules, views, wrappers
from bigtrain.optim.patterns import first_match, read_pairs
from bigtrain.settings import Config, ConfigError

_KERNELS = ((".*/kernel$", 1.0),)
_COUPLINGS = ("schedule", "lr", "gradient")
_ARITHMETIC = ("float32", "stored")


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
    optimizer: name and arguments of the base optimizer.
    wrap: what config.optimizer has around it, or None; see wrappers.py.
    stored_arithmetic: whether moments are computed in the dtype in which they
      are stored.
    moments: how moments are stored, see moments.py.
    views: views by name of the trainable parameters.
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
  wrap: wrappers.Wrap | None
  stored_arithmetic: bool
  moments: moments.Moments
  views: Mapping[str, views.View]
  path: str

  @property
  def learning_rates(self) -> dict[str, schedules.Schedule]:
    """{name: fn(step) -> learning rate}, without multipliers."""
    return {
      name: _times(schedule, self.lr) for name, schedule in self.factors.items()
    }


def read(
  cfg: Config,
  params_shapes: Any,
  units: Units,
  param_views: Mapping[str, views.View] | None = None,
) -> Recipe:
  """Reads the optimizer's keys; see chain.make."""
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
  seed = settings.whole_number(cfg, "seed", 0, least=0)
  key = f"{cfg.path}.optimizer"
  options = cfg.kwargs("optimizer", required=True)
  arithmetic = options.get("moment_arithmetic", "float32")
  if arithmetic not in _ARITHMETIC:
    hint = settings.did_you_mean(str(arithmetic), _ARITHMETIC)
    raise ConfigError(f"{key}.moment_arithmetic: unknown {arithmetic!r}.{hint}")
  base, wrap = wrappers.split(options, key)
  if param_views is None:
    param_views = {}
  every = {
    name: param_views.get(name) or views.default(name, tuple(x.shape))
    for name, x in trees.flatten_with_names(shapes)
  }
  return Recipe(
    leaves=leaves,
    trainable=trainable,
    shapes=shapes,
    clip_value=_positive(cfg, "grad_clip_value"),
    clip_norms=clip_norms,
    coupling=coupling,
    factors=factors,
    lr=lr,
    optimizer=base,
    wrap=wrap,
    stored_arithmetic=arithmetic == "stored",
    moments=moments.read(base, seed, shapes, arithmetic, key),
    views=every,
    path=cfg.path,
  )


def _times(schedule: schedules.Schedule, lr: float) -> schedules.Schedule:
  return lambda step: schedule(step) * lr


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
