"""Reads everything that the config says about the optimizer.

`read` checks the keys and returns a `Recipe` with the settings of each
parameter, which is all that the stages of chain.py use.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.config.lengths import Units
from bigtrain.config.settings import Config
from bigtrain.optim import moments, schedules, views, wrappers
from bigtrain.optim.patterns import first_match, read_pairs

# The default of config.wd_mults: matrices decay; biases, norms and embeddings
# do not.
_DECAYED = ((".*/(kernel|lora_a|lora_b)$", 1.0),)
_COUPLINGS = ("schedule", "lr", "gradient")
_ARITHMETIC = ("float32", "stored")
_NORMS = ("l2", "l1", "max")


class Leaf(NamedTuple):
  """Settings of one trainable parameter."""

  lr_mult: float
  wd_mult: float | None  # None for no decay.
  grad_mult: float | None  # None for 1.
  schedule: str  # Name of its schedule.


class Recipe(NamedTuple):
  """Everything that the config says about the optimizer."""

  leaves: Mapping[str, Leaf]  # Settings by name of the trainable parameters.
  trainable: Any  # Bools in the structure of all parameters.
  shapes: Any  # Specs of the trainable parameters.
  lr: float
  wd: float
  coupling: str  # config.wd_coupling
  # {name: schedule}, whose values are factors of the learning rate.
  schedules: Mapping[str, schedules.Schedule]
  clip_value: float | None
  # (names of parameters, largest norm of their gradients), in order.
  clip_norms: Sequence[tuple[set[str], float]]
  clip_norm_type: str  # "l1", "l2" or "max".
  optimizer: Mapping[str, Any]  # The base optimizer's config.
  wrap: wrappers.Wrap | None
  stored_arithmetic: bool  # Whether arithmetic uses the moments' stored dtype.
  moments: moments.Moments
  views: Mapping[str, views.View]
  path: str  # The config's path, for messages.
  # Sets the updates of rows that do not train to 0.
  mask: Callable[[Any], Any] = lambda updates: updates

  def hparams(self, step: int) -> dict[str, dict[str, np.float32]]:
    """Learning rate and weight decay of the update after `step` updates.

    Returns: {"lr": {schedule: value}, "wd": {schedule: value}}, without the
      parameters' multipliers. A single schedule is named "lr"; several are
      named "lr/<regex>". With a wrapper there is also "next_lr", because
      wrappers count updates from 1.
    """
    result: dict[str, dict[str, np.float32]] = {"lr": {}, "wd": {}}
    for name, schedule in self.schedules.items():
      factor = schedule(step)
      result["lr"][name] = np.float32(self.lr * factor)
      wd_factor = {
        "schedule": factor,
        "lr": factor * self.lr,
        "gradient": 1.0,
      }
      result["wd"][name] = np.float32(self.wd * wd_factor[self.coupling])
    if self.wrap is not None:
      result["next_lr"] = {
        name: np.float32(self.lr * schedule(step + 1))
        for name, schedule in self.schedules.items()
      }
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

  # The settings of each trainable parameter.
  schedule_by_name, schedule_of = _schedules(cfg, names, units)
  lr_mults = _multipliers(cfg, "lr_mults", names, 1.0)
  # Without wd, the default must not raise an error if it matches nothing.
  wd_default = _DECAYED if wd else ()
  wd_mults = _multipliers(cfg, "wd_mults", names, 0.0, wd_default)
  grad_mults = _multipliers(cfg, "grad_mults", names, 1.0)
  leaves = {}
  for name in names:
    schedule_name = schedule_of[name]
    if schedule_name is None:  # Frozen.
      continue
    wd_mult = wd_mults[name]
    if coupling == "lr":
      wd_mult *= lr_mults[name]
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

  # A model without a description of its parameters has no views for them.
  all_views = {}
  for name, x in trees.flatten_with_names(shapes):
    view = (param_views or {}).get(name)
    all_views[name] = view or views.default(name, tuple(x.shape))
  return Recipe(
    leaves=leaves,
    trainable=trainable,
    shapes=shapes,
    lr=lr,
    wd=float(wd),
    coupling=coupling,
    schedules=schedule_by_name,
    clip_value=_positive(cfg, "grad_clip_value"),
    clip_norms=_clip_norms(cfg, names),
    clip_norm_type=norm_type,
    optimizer=base,
    wrap=wrap,
    stored_arithmetic=arithmetic == "stored",
    moments=moments.read(base, shapes, arithmetic, key),
    views=all_views,
    path=cfg.path,
  )


def _schedules(
  cfg: Config, names: Sequence[str], units: Units
) -> tuple[dict[str, schedules.Schedule], dict[str, str | None]]:
  """Reads config.schedule: a schedule, or (regex, schedule or None) pairs.

  Returns: {name: schedule} and {parameter: name of its schedule, or None if it
    is frozen}.
  """
  key = f"{cfg.path}.schedule"
  default = {"decay_type": "constant"}
  value = cfg.get("schedule", default)
  if value is None:
    raise ConfigError(f"{key}: expected a dict, or (regex, dict) pairs.")
  if isinstance(value, Config):
    spec = cfg.kwargs("schedule", default)
    return {"lr": schedules.make(spec, units, key)}, dict.fromkeys(names, "lr")
  pairs = read_pairs(cfg, "schedule", (dict, type(None)), "dict | None")
  pair_of = first_match([regex for regex, _ in pairs], names, key)
  unmatched = [name for name in names if name not in pair_of]
  if unmatched:
    shown = ", ".join(unmatched[:10])
    shown += ", ..." if len(unmatched) > 10 else ""
    raise ConfigError(
      f"{key}: matches {len(pair_of)} of {len(names)} parameters, but not "
      f"{shown}; (regex, None) freezes."
    )
  active = [i for i, (_, spec) in enumerate(pairs) if spec is not None]
  if not active:
    raise ConfigError(f"{key}: freezes every parameter.")
  schedule_by_name = {}
  name_of_pair = {}
  for i in active:
    regex, spec = pairs[i]
    name = "lr" if len(active) == 1 else f"lr/{regex}"
    schedule_by_name[name] = schedules.make(spec, units, f"{key}[{i}]")
    name_of_pair[i] = name
  schedule_of = {name: name_of_pair.get(i) for name, i in pair_of.items()}
  return schedule_by_name, schedule_of


def _multipliers(
  cfg: Config,
  key: str,
  names: Sequence[str],
  otherwise: float,
  default: Sequence[tuple[str, float]] = (),
) -> dict[str, float]:
  """Reads (regex, multiplier) pairs, as {parameter: multiplier}."""
  pairs = read_pairs(cfg, key, (int, float), "multiplier", default)
  for regex, value in pairs:
    if value < 0:
      raise ConfigError(f"{cfg.path}.{key}: ({regex!r}, {value}) is negative.")
    if value == 0 and key == "lr_mults":
      raise ConfigError(
        f"{cfg.path}.lr_mults: ({regex!r}, {value}) would still cost memory; "
        f"to freeze, put ({regex!r}, None) into {cfg.path}.schedule."
      )
  regexes = [regex for regex, _ in pairs]
  multipliers = dict.fromkeys(names, otherwise)
  for name, i in first_match(regexes, names, f"{cfg.path}.{key}").items():
    multipliers[name] = float(pairs[i][1])
  return multipliers


def _clip_norms(
  cfg: Config, names: Sequence[str]
) -> list[tuple[set[str], float]]:
  """Reads grad_clip_groups, and grad_clip_norm as a group of all parameters."""
  key = "grad_clip_groups"
  pairs = read_pairs(cfg, key, (int, float), "largest norm")
  for regex, norm in pairs:
    if norm <= 0:
      raise ConfigError(f"{cfg.path}.{key}: ({regex!r}, {norm}): not positive.")
  regexes = [regex for regex, _ in pairs]
  pair_of = first_match(regexes, names, f"{cfg.path}.{key}")
  clips = []
  for i, (_, norm) in enumerate(pairs):
    members = {name for name, pair in pair_of.items() if pair == i}
    clips.append((members, float(norm)))
  norm_of_all = _positive(cfg, "grad_clip_norm")
  if norm_of_all is not None:
    clips.append((set(names), norm_of_all))
  return clips


def _positive(cfg: Config, key: str) -> float | None:
  value = cfg.get(key)
  if value is None:
    return None
  return float(check_number(f"{cfg.path}.{key}", value, above=0))
