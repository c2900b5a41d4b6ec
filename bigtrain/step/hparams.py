"""Numbers of the config that are arguments of the compiled update.

Runs that differ in these numbers alone share one program: in a sweep over
learning rates only the first variant compiles. The update receives the
numbers as `fixed["hparams"]`, float32 and int32 scalars on every device:

  lengths    steps between rows, length of the run      bigtrain/lengths.py
  optimizer  learning rate, weight decay, multipliers,
             limits of gradients, schedules             optim/recipe.py
  ema        decay and start of the average             optim/ema.py
  loss       options that the task names                `runtime_options`
  model      options that the model names, in training  `runtime_options`
  seed       of the parameters and of each step's key   step/gradients.py

What is left out of the program where a number is zero (weight decay, warm-up,
...) is structure, and so is everything else in the config. A task takes part
with a tuple of names of its loss_fn's arguments, a model's module with one of
its Model's fields, a schedule's function with such an attribute; a value other
than 0 is then an array. Names in nested options have dots. Where the names
depend on the options, the attribute is a function of these.

  runtime_options = ("dropout", "moe.dropout")
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bigtrain import parts, settings, sharding, trees

_NUMBER = "<number>"
_LENGTH = re.compile(r"(warmup|cooldown|length)_")
_ANY_NUMBER = re.compile(
  r"seed|lr|ema_decay|grad_clip_(norm|value)|"
  r"(total|log|ema_start)_(steps|epochs|examples|tokens|percent)"
)

# Keys of the config that no program depends on: they are about files, logs and
# the job. A key that is not listed here counts.
_NO_PROGRAM = re.compile(
  r"allow_changes|ckpt_.*|compile_cache|eval_at_start|expect_.*|keep_.*|"
  r"local_ckpt_.*|peak_flops_per_device|resume|save_at_start|tensorboard|"
  r"stop_at_(steps|epochs|examples|tokens|percent)|wandb|watchdog"
)


class Hparams:
  """The numbers of a run.

  Attributes:
    values: {"seed": number, "loss": ..., "model": ..., "lengths": ...,
      "optimizer": ..., "ema": ...}, of nested dicts and lists of numbers.
  """

  def __init__(
    self,
    config: settings.Config,
    lengths: Any,
    optimizer: Any,
    ema: Any,
  ):
    """Gathers the numbers.

    Args:
      ema: `optim.ema.Ema`, or None.
    """
    self.values = {
      "seed": settings.whole_number(config, "seed", 0, least=0),
      **_runtime_options(config),
      "lengths": lengths.values,
      "optimizer": optimizer.values,
      "ema": ema.values if ema else {},
    }

  def spec(self, mesh: Mesh) -> dict[str, Any]:
    """Returns the shapes, dtypes and shardings of `arrays`."""
    layout = sharding.replicated(mesh)

    def leaf(x: float) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct((), as_array(x).dtype, sharding=layout)

    return {"hparams": jax.tree.map(leaf, self.values)}

  def arrays(self, mesh: Mesh) -> dict[str, Any]:
    """Returns {"hparams": the numbers as scalars on all devices}."""
    layout = sharding.replicated(mesh)

    def leaf(x: float) -> jax.Array:
      # Unlike jax.device_put, this does not communicate.
      return jax.make_array_from_callback((), layout, lambda _: as_array(x))

    return {"hparams": jax.tree.map(leaf, self.values)}


def as_array(value: float) -> Any:
  """Returns an int as int32, of its last 32 bits, and a float as float32."""
  if isinstance(value, int):
    return np.uint32(value % 2**32).view(np.int32)
  return np.float32(value)


def traced_config(config: Mapping[str, Any]) -> dict[str, Any]:
  """Replaces the numbers by placeholders; leaves out what concerns no program.

  Two configs with the same result have the same programs, if all else is equal
  that these depend on: sizes of the data, devices, versions. A placeholder
  keeps what is structure, such as whether weight decay is 0.

  Returns:
    A plain config without keys about files, logs and the job.
  """
  plain = settings.plain(config)
  plain = {k: v for k, v in plain.items() if not _NO_PROGRAM.fullmatch(k)}
  placed = {key: _placed(key, value) for key, value in plain.items()}
  for key, values in _runtime_options(settings.Config(plain)).items():
    if values:
      names = dict.fromkeys(values, _NUMBER)
      placed[key] = trees.with_entries(plain[key], names)
  return placed


def _runtime_options(config: settings.Config) -> dict[str, dict[str, float]]:
  """Numbers of config.loss and config.model by path, see the module's text."""
  result = {}
  for key, kind, name in (
    ("loss", "tasks", "task"),
    ("model", "models", "model_name"),
  ):
    options, module = config.kwargs(key), config.get(name)
    owner = module and parts.find_module(kind, module, f"config.{name}")
    result[key] = parts.runtime_options(owner, options)
  return result


def _placed(key: str, value: Any) -> Any:
  """The value of a top-level key, with placeholders."""
  if value is None:
    return None
  if _ANY_NUMBER.fullmatch(key):
    return _NUMBER
  if key == "wd":
    return _unless(0, value)
  if key in ("lr_mults", "wd_mults", "grad_mults", "grad_clip_groups"):
    kept = {"wd_mults": 0, "grad_mults": 1}.get(key)
    return [[regex, _unless(kept, number)] for regex, number in value]
  if key == "schedule":
    if isinstance(value, Mapping):
      return _schedule(value)
    return [[regex, spec and _schedule(spec)] for regex, spec in value]
  return value


def _schedule(spec: Mapping[str, Any]) -> dict[str, Any]:
  """A schedule's dict with placeholders."""
  kind = str(spec.get("decay_type"))
  own = kind if "." in kind else ""
  options = own and parts.runtime_options(
    parts.find_attribute(own, "config.schedule.decay_type"), spec
  )
  placed: dict[str, Any] = {}
  for key, value in spec.items():
    if key == "pieces":
      placed[key] = [_schedule(piece) for piece in value]
    elif key == "power" or (own and not (_LENGTH.match(key) or key in options)):
      placed[key] = value  # A constant of the program.
    elif isinstance(value, list | tuple):
      placed[key] = [_NUMBER for _ in value]
    elif isinstance(value, str) or value is None:
      placed[key] = value
    else:
      placed[key] = _unless(0, value)
  return placed


def _unless(kept: float | None, value: float) -> Any:
  return kept if kept is not None and value == kept else _NUMBER
