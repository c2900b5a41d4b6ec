"""Learning-rate schedules: warm-up x decay x cool-down, lengths in any unit.

A schedule is a function of the number of updates done so far. Its value is a
factor of config.lr, the product of:

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
  wsd         1, then for the last `decay` steps end + (1 - end) * f(q), where q
              goes from 0 to 1 and f is by `shape`: "linear" 1 - q, "sqrt"
              1 - sqrt(q), "cosine" (1 + cos(pi q)) / 2 (warm-up, stable, decay:
              Hu et al. 2024, arxiv.org/abs/2404.06395; shapes: Haegele et al.
              2024, arxiv.org/abs/2405.18392)
  one_cycle   cosines from 1 / div_factor at step 0 up to 1 at step `peak`, and
              down to 1 / (div_factor * final_div_factor) in the last step; by
              default 25, 30 percent less a step and 10,000, as PyTorch's
              OneCycleLR (Smith and Topin 2017, arxiv.org/abs/1708.07120)
  pieces      the schedules of the list `pieces`, one after the other
  a dotted path such as "package.module.function": function(p) or, with other
              keys of the dict, function(p, key=value); p is a float

warmup, cooldown, timescale, shift, stair, decay and peak are lengths with a
unit: warmup_steps, warmup_epochs, warmup_examples, warmup_tokens or
warmup_percent, and so on. stair_epochs=[30, 60, 80] is a list of lengths.

A piece is the dict of a schedule and its length, such as length_percent=10. An
optional `scale` multiplies its values. Lengths in percent inside a piece are
relative to the length of the piece. The last piece has no length: it lasts
until the end of the run.

`make` builds a schedule from its dict. The functions named after the decay
types make only the decay.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_kwargs,
  check_number,
  did_you_mean,
)
from bigtrain.config.lengths import UNITS, Units, steps
from bigtrain.config.modules import find_attribute

# Number of updates done so far -> factor of the learning rate.
Schedule = Callable[[int], float]


class _At(NamedTuple):
  """A moment of the run, in the form that decays use."""

  step: int
  since: int  # Steps since the end of the warm-up; 0 before.
  progress: (
    float  # From 0 at the end of the warm-up to 1 at the end of the run.
  )


_Decay = Callable[[_At], float]


def _clip(value: float) -> float:
  return min(max(value, 0.0), 1.0)


def _constant() -> _Decay:
  return lambda at: 1.0


def _cosine(*, end: float = 0.0) -> _Decay:
  """A cosine from 1 to `end`.

  Args:
    end: factor at the end of the run.
  """
  return lambda at: end + (1 - end) * _SHAPES["cosine"](at.progress)


def _linear(*, linear_end: float = 0.0) -> _Decay:
  """A line from 1 to `linear_end`.

  Args:
    linear_end: factor at the end of the run.
  """
  return _polynomial(end=linear_end)


def _polynomial(*, power: float = 1.0, end: float = 0.0) -> _Decay:
  """A polynomial from 1 to `end`.

  Args:
    power: exponent of the rest of the run.
    end: factor at the end of the run.
  """
  return lambda at: end + (1 - end) * (1 - at.progress) ** power


def _rsqrt(*, timescale: int = 10_000, shift: int = 0) -> _Decay:
  """The inverse square root of the steps since the warm-up.

  Args:
    timescale: length after which the factor is 1 / sqrt(2), without `shift`.
    shift: length that is added to the steps.
  """
  return lambda at: 1 / math.sqrt(1 + (at.since + shift) / timescale)


def _stair(*, stair: list[int], mults: list[float]) -> _Decay:
  """A factor for each part of the run.

  Args:
    stair: lengths at which the factor changes.
    mults: the factor from each of these lengths on.
  """
  factors = [1.0, *mults]
  return lambda at: factors[sum(at.step >= step for step in stair)]


def _wsd(
  total: int, *, decay: int, shape: str = "linear", end: float = 0.0
) -> _Decay:
  """Constant at 1, with a decay in the last steps.

  Args:
    total: length of the run in steps.
    decay: length of the decay.
    shape: "linear", "sqrt" or "cosine".
    end: factor at the end of the run.
  """

  def value(at: _At) -> float:
    q = _clip((at.step - (total - decay)) / decay)
    return end + (1 - end) * _SHAPES[shape](q)

  return value


_SHAPES: dict[str, Callable[[float], float]] = {
  "linear": lambda q: 1 - q,
  "sqrt": lambda q: 1 - math.sqrt(q),
  "cosine": lambda q: (1 + math.cos(math.pi * q)) / 2,
}


def _one_cycle(
  total: int,
  *,
  peak: int | None = None,
  div_factor: float = 25.0,
  final_div_factor: float = 1e4,
) -> _Decay:
  """A cosine up to 1 and another one down.

  Args:
    total: length of the run in steps.
    peak: length after which the factor is 1; by default 30 percent of the run,
      minus one step.
    div_factor: 1 over the factor at step 0.
    final_div_factor: factor at step 0 over the factor in the last step.
  """
  top = 0.3 * total - 1 if peak is None else float(peak)
  start, end = 1 / div_factor, 1 / (div_factor * final_div_factor)

  def value(at: _At) -> float:
    if at.step <= top:
      return 1 - (1 - start) * _SHAPES["cosine"](at.step / top if top else 1.0)
    fall = _clip((at.step - top) / max(total - 1 - top, 1e-9))
    return end + (1 - end) * _SHAPES["cosine"](fall)

  return value


DECAYS: dict[str, Callable[..., _Decay]] = {
  "constant": _constant,
  "cosine": _cosine,
  "linear": _linear,
  "polynomial": _polynomial,
  "rsqrt": _rsqrt,
  "stair": _stair,
  "wsd": _wsd,
  "one_cycle": _one_cycle,
}
_NAMES = (*DECAYS, "pieces")
# Arguments of decays that are lengths: a config gives them with a unit.
_LENGTHS = ("timescale", "shift", "decay", "peak")
_NEED_TOTAL = ("cosine", "linear", "polynomial", "wsd", "one_cycle")


def make(
  spec: Mapping[str, Any], units: Units, path: str = "config.schedule"
) -> Schedule:
  """Builds the schedule of a dict, which is at `path` in the config."""
  spec = dict(spec)
  decay_type = spec.pop("decay_type", None)
  if decay_type is None:
    raise ConfigError(f"{path}.decay_type: missing.{did_you_mean('', _NAMES)}")
  if "." not in str(decay_type):
    check_choice(f"{path}.decay_type", decay_type, _NAMES)
    _check_keys(spec, decay_type, path)
  warmup = steps(spec, "warmup", units, path=path) or 0
  cooldown = steps(spec, "cooldown", units, path=path) or 0
  total = units.total_steps
  _check_lengths(warmup, cooldown, total, decay_type, path)
  if "." in decay_type:
    decay = _user_function(decay_type, spec, path)
  elif decay_type == "pieces":
    decay = _pieces(spec.pop("pieces", None), units, path)
  else:
    decay = DECAYS[decay_type](**_arguments(spec, decay_type, units, path))
  steps_after_warmup = max(1, (total or 0) - warmup)

  def schedule(step: int) -> float:
    since = max(step - warmup, 0)
    progress = min(since / steps_after_warmup, 1.0)
    value = decay(_At(step, since, progress))
    if warmup:
      value *= min(step / warmup, 1.0)
    if cooldown and total:
      value *= _clip((total - step) / cooldown)
    return value

  return schedule


def _user_function(
  dotted: str, options: Mapping[str, Any], path: str
) -> _Decay:
  """The decay computed by a function that a dotted path names."""
  key = f"{path}.decay_type"
  fn = find_attribute(dotted, key)
  if not callable(fn):
    raise ConfigError(f"{key}: expected a function, got {dotted!r}: {fn!r}.")
  first = next(iter(inspect.signature(fn).parameters), "")
  check_kwargs(fn, options, path, given=(first,))
  value = fn(0.0, **options)
  try:
    finite = math.isfinite(value)
  except TypeError:
    finite = False
  if not finite:
    raise ConfigError(
      f"{key}: expected {dotted!r} to return a number at 0, got {value!r}."
    )
  return lambda at: float(fn(at.progress, **options))


class _Piece(NamedTuple):
  """A part of a run with its own schedule."""

  begin: int
  length: int | None  # None for the last piece of a run without an end.
  scale: float
  schedule: Schedule


def _pieces(pieces: Any, units: Units, path: str) -> _Decay:
  """Several schedules, one after the other."""
  if not isinstance(pieces, list | tuple) or not pieces:
    raise ConfigError(
      f"{path}.pieces: expected a list of dicts, got {pieces!r}."
    )
  begin = 0
  made: list[_Piece] = []
  for i, piece in enumerate(pieces):
    key = f"{path}.pieces[{i}]"
    if not isinstance(piece, Mapping):
      raise ConfigError(f"{key}: expected the dict of a schedule, got {piece}.")
    spec = dict(piece)
    scale = float(check_number(f"{key}.scale", spec.pop("scale", 1.0), least=0))
    length = steps(spec, "length", units, None, key)
    rest = units.total_steps and units.total_steps - begin
    is_last = i == len(pieces) - 1
    if not is_last and (not length or (rest and length >= rest)):
      raise ConfigError(
        f"{key}: expected a length, such as length_percent=10, that leaves "
        f"steps to the next piece, got {length} of {rest}."
      )
    if is_last and length not in (None, rest):
      raise ConfigError(
        f"{key}: expected no length, as the last piece takes the remaining "
        f"{rest} steps, got {length}."
      )
    if is_last:
      length = rest
    inner_units = dataclasses.replace(units, total_steps=length)
    schedule = make(spec, inner_units, key)
    made.append(_Piece(begin, length, scale, schedule))
    begin += length or 0

  def value(at: _At) -> float:
    piece = [piece for piece in made if at.step >= piece.begin][-1]
    since = at.step - piece.begin
    if piece.length is not None:
      since = min(since, piece.length)
    return piece.scale * piece.schedule(since)

  return value


def _check_keys(spec: dict[str, Any], decay_type: str, path: str) -> None:
  """Refuses keys that the decay type does not have."""
  arguments = {"pieces"}
  if decay_type in DECAYS:
    arguments = {*inspect.signature(DECAYS[decay_type]).parameters}
    arguments.discard("total")  # The run's length, from `units`.
  lengths = arguments & {*_LENGTHS, "stair"}
  keys = {"decay_type"} | (arguments - lengths)
  for name in {"warmup", "cooldown"} | lengths:
    keys |= {f"{name}_{unit}" for unit in UNITS}
  for key in spec:
    if key not in keys:
      hint = did_you_mean(key, keys)
      raise ConfigError(f"{path}.{key}: unknown key of {decay_type!r}.{hint}")


def _check_lengths(
  warmup: int, cooldown: int, total: int | None, decay_type: str, path: str
) -> None:
  if total is None:
    if cooldown or decay_type in _NEED_TOTAL or "." in decay_type:
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
  """Arguments of a decay; lengths are in steps."""
  kwargs: dict[str, Any] = {}
  for name in _LENGTHS:
    length = steps(spec, name, units, None, path)  # Takes the key off `spec`.
    if length is not None:
      kwargs[name] = length
  if decay_type == "stair":
    kwargs.update(_stair_arguments(spec, units, path))
  if decay_type in ("wsd", "one_cycle"):
    kwargs["total"] = units.total_steps
  if decay_type == "wsd":
    shape = spec.pop("shape", "linear")
    kwargs["shape"] = check_choice(f"{path}.shape", shape, _SHAPES)
    total, decay = units.total_steps or 0, kwargs.get("decay", 0)
    if not decay or (decay > total > 1):
      raise ConfigError(
        f"{path}: wsd needs the length of its decay, such as decay_percent=20, "
        f"within the run of {units.total_steps} steps."
      )
  for key, value in spec.items():
    above = 0 if key in ("power", "div_factor", "final_div_factor") else None
    kwargs[key] = float(check_number(f"{path}.{key}", value, above=above))
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
  if not all(isinstance(x, list | tuple) for x in (amounts, mults)):
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
