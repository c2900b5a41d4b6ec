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

  All but the schedule are keys of `Recipe.values`: numbers are arguments of the
  compiled update, and not a part of its structure.

  Attributes:
    lr: learning rate with the multiplier.
    wd: weight decay with the multiplier and, if coupled, the learning rate;
      None for no decay.
    grad_mult: multiplier of the gradient; None for 1.
    schedule: name of the schedule.
  """

  lr: str
  wd: str | None
  grad_mult: str | None
  schedule: str


class Recipe(NamedTuple):
  """Everything that the config says about the optimizer.

  Attributes:
    leaves: settings by name of the trainable parameters.
    trainable: nested dicts of bools with the structure of the parameters.
    shapes: shapes of the trainable parameters.
    clip_norms: (parameters, key of the largest norm of their gradients), in
      order.
    coupling: one of "schedule", "lr" and "gradient".
    factors: {name: schedule}, whose values are factors of the learning rate.
    values: the numbers: all that a Leaf and `clip_norms` name, "lr" where the
      schedule is 1, "grad_clip_value" if set, "seed" if updates are random,
      and "schedules", the schedules' own by name.
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
  clip_norms: Sequence[tuple[set[str], str]]
  coupling: str
  factors: Mapping[str, schedules.Schedule]
  values: Mapping[str, Any]
  optimizer: Mapping[str, Any]
  wrap: wrappers.Wrap | None
  stored_arithmetic: bool
  moments: moments.Moments
  views: Mapping[str, views.View]
  path: str

  @property
  def learning_rates(self) -> dict[str, schedules.Schedule]:
    """{name: schedule of the learning rate}, without multipliers.

    Their values are `values`.
    """
    return {name: self._learning_rate(name) for name in self.factors}

  def _learning_rate(self, name: str) -> schedules.Schedule:
    factor = self.factors[name].fn
    return schedules.Schedule(
      lambda step, v: factor(step, v["schedules"][name]) * v["lr"], self.values
    )


def read(
  cfg: Config,
  params_shapes: Any,
  units: Units,
  param_views: Mapping[str, views.View] | None = None,
) -> Recipe:
  """Reads the optimizer's keys; see chain.make."""
  names = trees.names(params_shapes)
  lr = float(settings.check_number(f"{cfg.path}.lr", cfg["lr"], least=0))
  wd = settings.check_number(f"{cfg.path}.wd", cfg.get("wd", 0.0), least=0)
  coupling = cfg.get("wd_coupling", "schedule")
  if coupling not in _COUPLINGS:
    hint = settings.did_you_mean(str(coupling), _COUPLINGS)
    raise ConfigError(f"{cfg.path}.wd_coupling: unknown {coupling!r}.{hint}")
  factors, schedule_of = _schedules(cfg, names, units)
  lr_mult = _multipliers(cfg, "lr_mults", names, 1.0)
  wd_mult = _multipliers(cfg, "wd_mults", names, 0.0, _KERNELS if wd else ())
  grad_mult = _multipliers(cfg, "grad_mults", names, 1.0)
  values: dict[str, Any] = {"lr": lr}
  clip_norms = _clip_norms(cfg, names, values)
  leaves = {}
  for name in names:
    if schedule_of[name] is None:
      continue
    (lr_key, by_lr), (wd_key, by_wd) = lr_mult[name], wd_mult[name]
    decay = wd * by_wd
    if coupling == "lr":
      decay, wd_key = decay * lr * by_lr, f"{wd_key}, {lr_key}"
    grad_key, by_grad = grad_mult[name]
    values |= {lr_key: lr * by_lr}
    values |= {wd_key: decay} if wd and by_wd else {}
    values |= {grad_key: by_grad} if by_grad != 1.0 else {}
    leaves[name] = Leaf(
      lr_key,
      wd_key if wd_key in values else None,
      grad_key if grad_key in values else None,
      schedule_of[name],
    )
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
  stored = moments.read(base, shapes, arithmetic, key)
  if stored.stochastic:
    values["seed"] = seed
  if (clip := _positive(cfg, "grad_clip_value")) is not None:
    values["grad_clip_value"] = clip
  values["schedules"] = {name: x.values for name, x in factors.items()}
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
    clip_norms=clip_norms,
    coupling=coupling,
    factors=factors,
    values=values,
    optimizer=base,
    wrap=wrap,
    stored_arithmetic=arithmetic == "stored",
    moments=stored,
    views=every,
    path=cfg.path,
  )


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
) -> dict[str, tuple[str, float]]:
  """{parameter: (name, multiplier)} of a list of (regex, multiplier)."""
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
  numbers = [
    (f"{key}[{i}]", float(value)) for i, (_, value) in enumerate(pairs)
  ]
  return {
    name: numbers[which[name]] if name in which else (key, otherwise)
    for name in names
  }


def _clip_norms(
  cfg: Config, names: Sequence[str], values: dict[str, Any]
) -> list[tuple[set[str], str]]:
  """Reads the limits of norms into `values`; see Recipe.clip_norms."""
  key = "grad_clip_groups"
  pairs = read_pairs(cfg, key, (int, float), "largest norm")
  for regex, norm in pairs:
    if norm <= 0:
      raise ConfigError(f"{cfg.path}.{key}: ({regex!r}, {norm}): not positive.")
  which = first_match([regex for regex, _ in pairs], names, f"{cfg.path}.{key}")
  clips = []
  for i, (_, norm) in enumerate(pairs):
    values[f"{key}[{i}]"] = float(norm)
    members = {name for name, group in which.items() if group == i}
    clips.append((members, f"{key}[{i}]"))
  if (largest := _positive(cfg, "grad_clip_norm")) is not None:
    values["grad_clip_norm"] = largest
    clips.append((set(names), "grad_clip_norm"))
  return clips


def _positive(cfg: Config, key: str) -> float | None:
  value = cfg.get(key)
  if value is None:
    return None
  return float(settings.check_number(f"{cfg.path}.{key}", value, above=0))
