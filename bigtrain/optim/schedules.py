"""Learning-rate schedules: warm-up x decay x cool-down, lengths in any unit.

A schedule is a function of the number of updates done so far. Its value is a
factor of config.lr, the product of

  warmup    linear, from 0 at step 0 to 1 at step `warmup`
  decay     by decay_type, see below; progress p goes from 0 at the end of the
            warm-up to 1 at the end of the run
  cooldown  linear, down to 0 at the end of the run

  constant    1
  cosine      end + (1 - end) * (1 + cos(pi p)) / 2
  linear      linear_end + (1 - linear_end) * (1 - p)
  polynomial  end + (1 - end) * (1 - p) ** power
  rsqrt       1 / sqrt(1 + (s + shift) / timescale), s steps after the warm-up
              (Zhai et al. 2021, arxiv.org/abs/2106.04560, with cooldown)
  stair       1, then mults[i] from step stair[i] on

warmup, cooldown, timescale, shift and stair are lengths with a unit:
warmup_steps, warmup_epochs, warmup_examples, warmup_tokens or warmup_percent,
and so on. stair_epochs=[30, 60, 80] is a list of lengths.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.lengths import UNITS, Units, steps
from bigtrain.settings import ConfigError, check_number, did_you_mean

Schedule = Callable[[Any], Any]


class _At(NamedTuple):
  """A moment of the run.

  Attributes:
    step: number of updates done so far.
    since: steps since the end of the warm-up; 0 before.
    progress: `since` as a fraction of the run after the warm-up.
    np: numpy for host steps, jax.numpy for device steps.
  """

  step: Any
  since: Any
  progress: Any
  np: Any


_Decay = Callable[[_At], Any]


def _constant() -> _Decay:
  return lambda at: at.np.ones_like(at.since)


def _cosine(*, end: float = 0.0) -> _Decay:
  half = (1 - end) / 2
  return lambda at: end + half * (1 + at.np.cos(np.pi * at.progress))


def _linear(*, linear_end: float = 0.0) -> _Decay:
  return _polynomial(end=linear_end)


def _polynomial(*, power: float = 1.0, end: float = 0.0) -> _Decay:
  return lambda at: end + (1 - end) * (1 - at.progress) ** power


def _rsqrt(*, timescale: int = 10_000, shift: int = 0) -> _Decay:
  return lambda at: 1 / at.np.sqrt(1 + (at.since + shift) / timescale)


def _stair(*, stair: list[int], mults: list[float]) -> _Decay:
  ratios = np.diff([1.0, *mults])
  return lambda at: sum(
    (jump * (at.step >= step) for step, jump in zip(stair, ratios)),
    start=at.np.ones_like(at.since),
  )


_DECAYS: dict[str, Callable[..., _Decay]] = {
  "constant": _constant,
  "cosine": _cosine,
  "linear": _linear,
  "polynomial": _polynomial,
  "rsqrt": _rsqrt,
  "stair": _stair,
}
_LENGTHS = ("timescale", "shift")  # Arguments of decays with a unit.
_NEED_TOTAL = ("cosine", "linear", "polynomial")


def make(
  spec: Mapping[str, Any], units: Units, path: str = "config.schedule"
) -> Schedule:
  """Builds the schedule that a dict of the config describes.

  Args:
    spec: decay_type, and the keys in the module docstring.
    units: sizes for converting lengths; decays end at total_steps.
    path: location of `spec` in the config, for messages.

  Returns:
    fn(step) -> factor of the learning rate. A traced or device step gives a
    float32 jax scalar. A Python or numpy step gives a host value, so that
    logging dispatches nothing to the device.

  Raises:
    ConfigError: an unknown decay or key, a value out of range, or lengths that
      do not fit into the run.
  """
  spec = dict(spec)
  decay_type = spec.pop("decay_type", None)
  if decay_type is None:
    raise ConfigError(f"{path}.decay_type: missing.{did_you_mean('', _DECAYS)}")
  if decay_type not in _DECAYS:
    hint = did_you_mean(decay_type, _DECAYS)
    raise ConfigError(f"{path}.decay_type: unknown {decay_type!r}.{hint}")
  _check_keys(spec, decay_type, path)
  warmup = steps(spec, "warmup", units, 0, path)
  cooldown = steps(spec, "cooldown", units, 0, path)
  total = units.total_steps
  _check_lengths(warmup, cooldown, total, decay_type, path)
  decay = _DECAYS[decay_type](**_arguments(spec, decay_type, units, path))

  def schedule(step: Any) -> Any:
    xp = jnp if isinstance(step, jax.Array) else np
    # Subtract ints: float32 cannot represent all steps beyond 2**24.
    since = xp.maximum(step - warmup, 0)
    rest = max(1, (total or 0) - warmup)
    progress = xp.minimum(since / rest, 1.0)
    value = decay(_At(step, since * 1.0, progress, xp))
    if warmup:
      value = value * xp.minimum(step / warmup, 1.0)
    if cooldown:
      value = value * xp.clip((total - step) / cooldown, 0.0, 1.0)
    return xp.asarray(value, xp.float32)

  return schedule


def _check_keys(spec: dict[str, Any], decay_type: str, path: str) -> None:
  keys = {"decay_type"}
  lengths = ["warmup", "cooldown"]
  for name in inspect.signature(_DECAYS[decay_type]).parameters:
    if name in _LENGTHS or name == "stair":
      lengths.append(name)
    else:
      keys.add(name)
  keys |= {f"{name}_{unit}" for name in lengths for unit in UNITS}
  for key in spec:
    if key not in keys:
      hint = did_you_mean(key, keys)
      raise ConfigError(f"{path}.{key}: unknown key of {decay_type!r}.{hint}")


def _check_lengths(
  warmup: int, cooldown: int, total: int | None, decay_type: str, path: str
) -> None:
  if total is None:
    if cooldown or decay_type in _NEED_TOTAL:
      part = "cooldown" if cooldown else decay_type
      raise ConfigError(f"{path}: {part} needs the length of the run.")
  # A run of one step, for evaluation or debugging, may keep longer lengths.
  elif total > 1 and (warmup >= total or warmup + cooldown > total):
    raise ConfigError(
      f"{path}: warm-up of {warmup} and cool-down of {cooldown} steps do not "
      f"fit into a run of {total}."
    )


def _arguments(
  spec: dict[str, Any], decay_type: str, units: Units, path: str
) -> dict[str, Any]:
  """Returns the decay's arguments: `spec` with lengths in steps."""
  kwargs: dict[str, Any] = {}
  for name in _LENGTHS:
    length = steps(spec, name, units, None, path)
    if length is not None:
      kwargs[name] = length
  if decay_type == "stair":
    kwargs.update(_stair_arguments(spec, units, path))
  for key, value in spec.items():
    above = 0 if key == "power" else None
    kwargs[key] = check_number(f"{path}.{key}", value, above=above)
  if "timescale" in kwargs:
    check_number(f"{path}.timescale", kwargs["timescale"], above=0)
  return kwargs


def _stair_arguments(
  spec: dict[str, Any], units: Units, path: str
) -> dict[str, Any]:
  given = [unit for unit in UNITS if f"stair_{unit}" in spec]
  mults = spec.pop("mults", None)
  if len(given) != 1 or mults is None:
    raise ConfigError(
      f"{path}: stair needs mults and one of stair_steps, stair_epochs, ..."
    )
  (unit,) = given
  key = f"{path}.stair_{unit}"
  amounts = spec.pop(f"stair_{unit}")
  if not isinstance(amounts, list | tuple) or not isinstance(
    mults, list | tuple
  ):
    raise ConfigError(
      f"{key} and {path}.mults: expected lists, got {amounts!r} and {mults!r}."
    )
  stair = [units.to_steps(amount, unit, key) for amount in amounts]
  if len(stair) != len(mults) or sorted(set(stair)) != stair:
    raise ConfigError(
      f"{key}: expected {len(mults)} growing steps, one for each of "
      f"{path}.mults, got {stair}."
    )
  return dict(stair=stair, mults=[float(m) for m in mults])
