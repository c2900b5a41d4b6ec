"""What the config says about the optimizer: `read` returns a `Recipe`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.config.lengths import Units
from bigtrain.config.settings import Config
from bigtrain.optim import moments, schedules, views, wrappers
from bigtrain.optim.patterns import first_match, read_pairs

_MATRICES = ((".*/(kernel|lora_a|lora_b)$", 1.0),)
_COUPLINGS = ("schedule", "lr", "gradient")
_ARITHMETIC = ("float32", "stored")
_NORMS = ("l2", "l1", "max")


class Leaf(NamedTuple):
  """Settings of one trainable parameter; None: no decay, or a factor of 1."""

  lr_mult: float
  wd_mult: float | None
  grad_mult: float | None
  schedule: str


class Recipe(NamedTuple):
  """Everything that the config says about the optimizer."""

  leaves: Mapping[str, Leaf]  # Settings by name of the trainable parameters.
  trainable: Any
  shapes: Any  # Specs of the trainable parameters.
  lr: float
  wd: float
  coupling: str
  # {name: schedule}, whose values are factors of the learning rate.
  schedules: Mapping[str, schedules.Schedule]
  clip_value: float | None
  # (parameters, largest norm of their gradients), in order.
  clip_norms: Sequence[tuple[set[str], float]]
  clip_norm_type: str  # "l1", "l2" or "max".
  optimizer: Mapping[str, Any]
  wrap: wrappers.Wrap | None
  stored_arithmetic: bool
  moments: moments.Moments
  views: Mapping[str, views.View]
  path: str

  def hparams(self, step: int) -> dict[str, dict[str, np.float32]]:
    """{"lr" or "wd": {schedule: value}} of the update after `step` updates.

    The values do not include multipliers. A single schedule is named "lr", one
    of several "lr/<regex>". A wrapper counts updates from 1: it has "next_lr".
    """
    result: dict[str, dict[str, np.float32]] = {"lr": {}, "wd": {}}
    for name, schedule in self.schedules.items():
      factor = schedule(step)
      result["lr"][name] = np.float32(self.lr * factor)
      coupled = {"schedule": factor, "lr": factor * self.lr, "gradient": 1.0}
      result["wd"][name] = np.float32(self.wd * coupled[self.coupling])
    if self.wrap is not None:
      following = {n: fn(step + 1) for n, fn in self.schedules.items()}
      rates = {n: np.float32(self.lr * x) for n, x in following.items()}
      result["next_lr"] = rates
    return result


def read(
  cfg: Config,
  params_shapes: Any,
  units: Units,
  param_views: Mapping[str, views.View] | None = None,
) -> Recipe:
  names = trees.names(params_shapes)
  lr = float(check_number(f"{cfg.path}.lr", cfg["lr"], least=0))
  wd = check_number(f"{cfg.path}.wd", cfg.get("wd", 0.0), least=0)
  coupling = cfg.get("wd_coupling", "schedule")
  check_choice(f"{cfg.path}.wd_coupling", coupling, _COUPLINGS)
  by_name, schedule_of = _schedules(cfg, names, units)
  lr_mults = _multipliers(cfg, "lr_mults", names, 1.0)
  wd_mults = _multipliers(cfg, "wd_mults", names, 0.0, _MATRICES if wd else ())
  grad_mults = _multipliers(cfg, "grad_mults", names, 1.0)
  leaves = {}
  for name in names:
    if (schedule_name := schedule_of[name]) is not None:
      wd_mult = wd_mults[name] * (lr_mults[name] if coupling == "lr" else 1.0)
      leaves[name] = Leaf(
        lr_mult=lr_mults[name],
        wd_mult=wd_mult if wd and wd_mult else None,
        grad_mult=grad_mults[name] if grad_mults[name] != 1.0 else None,
        schedule=schedule_name,
      )
  trainable = trees.map_with_names(lambda n, _: n in leaves, params_shapes)
  shapes, _ = trees.partition(params_shapes, trainable)
  key = f"{cfg.path}.optimizer"
  options = cfg.kwargs("optimizer", required=True)
  arithmetic = options.get("moment_arithmetic", "float32")
  check_choice(f"{key}.moment_arithmetic", arithmetic, _ARITHMETIC)
  if options.get("decay_offset") and not cfg.get("resume"):
    raise ConfigError(
      f"{key}.decay_offset: expected config.resume with it, because it is the "
      "step of a restored state; a fresh state counts its updates from 0."
    )
  norm_type = cfg.get("grad_clip_norm_type", "l2")
  check_choice(f"{cfg.path}.grad_clip_norm_type", norm_type, _NORMS)
  base, wrap = wrappers.split(options, key)
  param_views = param_views or {}
  return Recipe(
    leaves=leaves,
    trainable=trainable,
    shapes=shapes,
    lr=lr,
    wd=float(wd),
    coupling=coupling,
    schedules=by_name,
    clip_value=_positive(cfg, "grad_clip_value"),
    clip_norms=_clip_norms(cfg, names),
    clip_norm_type=norm_type,
    optimizer=base,
    wrap=wrap,
    stored_arithmetic=arithmetic == "stored",
    moments=moments.read(base, shapes, arithmetic, key),
    views={
      name: param_views.get(name) or views.default(name, tuple(x.shape))
      for name, x in trees.flatten_with_names(shapes)
    },
    path=cfg.path,
  )


def _schedules(
  cfg: Config, names: Sequence[str], units: Units
) -> tuple[dict[str, schedules.Schedule], dict[str, str | None]]:
  """({name: schedule}, {parameter: its schedule's name, None if frozen})."""
  key = f"{cfg.path}.schedule"
  default = {"decay_type": "constant"}
  if (given := cfg.get("schedule", default)) is None:
    raise ConfigError(f"{key}: expected a dict, or (regex, dict) pairs.")
  if isinstance(given, Config):
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
  alone = len(active) == 1
  labels = {i: "lr" if alone else f"lr/{pairs[i][0]}" for i in active}
  make = lambda i: schedules.make(pairs[i][1], units, f"{key}[{i}]")
  made = {labels[i]: make(i) for i in active}
  return made, {name: labels.get(i) for name, i in which.items()}


def _multipliers(
  cfg: Config,
  key: str,
  names: Sequence[str],
  otherwise: float,
  default: Sequence[tuple[str, float]] = (),
) -> dict[str, float]:
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
  matched = {name: float(pairs[i][1]) for name, i in which.items()}
  return dict.fromkeys(names, otherwise) | matched


def _clip_norms(
  cfg: Config, names: Sequence[str]
) -> list[tuple[set[str], float]]:
  key = "grad_clip_groups"
  pairs = read_pairs(cfg, key, (int, float), "largest norm")
  for regex, norm in pairs:
    if norm <= 0:
      raise ConfigError(f"{cfg.path}.{key}: ({regex!r}, {norm}): not positive.")
  which = first_match([regex for regex, _ in pairs], names, f"{cfg.path}.{key}")
  group = lambda i: {name for name, of_name in which.items() if of_name == i}
  clips = [(group(i), float(norm)) for i, (_, norm) in enumerate(pairs)]
  if (largest := _positive(cfg, "grad_clip_norm")) is not None:
    clips.append((set(names), largest))
  return clips


def _positive(cfg: Config, key: str) -> float | None:
  value = cfg.get(key)
  if value is None:
    return None
  return float(check_number(f"{cfg.path}.{key}", value, above=0))
