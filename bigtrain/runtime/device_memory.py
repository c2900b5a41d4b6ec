"""Memory of the devices: what a program needs, and settings that make it fit.

A compiled program knows how much memory it needs. If a device has less, the run
ends before its first step. If a device runs out of memory later, the error
names the phase of the run. In both cases the update is compiled again under
other settings, and the error lists those that fit:

  OutOfMemory: the update needs 31.2 GB on each device, which has 25.0 GB. It
  fits with --config.microbatches=4 (9.1 GB), or ...
"""

import inspect
import json
import math
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
from absl import logging
from jax.sharding import Mesh

from bigtrain import parts, settings
from bigtrain.cluster import process

UPDATE = "update"

# A search for settings compiles nothing more after this time.
_SEARCH_SECS = 900.0
# After an error at run time: fraction of the failed program's memory, so that
# what else is on the device gets room.
_MARGIN = 0.9
_NUM_SETTINGS = 3
_FIRST = "first_argument_bytes"
_REMAT = "nothing_saveable"

Changes = dict[str, Any]
# Bytes of the update under some changes of the config, with the parts that
# `memory_bytes` lists; None if it cannot be compiled.
Measure = Callable[[Changes], Mapping[str, int] | None]


class OutOfMemory(RuntimeError):
  """A program needs more memory than a device has.

  Attributes:
    program: name of the program; "" if unknown.
    memory: bytes of the program, or of the update; see memory_bytes.
    limit: bytes that the program may use.
  """

  def __init__(
    self, text: str, program: str, memory: Mapping[str, int], limit: int | None
  ):
    """See the attributes; `text` ends with a full stop."""
    super().__init__(text)
    self.program, self.memory, self.limit = program, dict(memory), limit


def limit_bytes(config: settings.Config, mesh: Mesh) -> int | None:
  """Memory of a device that programs may use; None if unknown.

  Args:
    config: the whole config; `device_memory_bytes` replaces what the devices
      report.

  Raises:
    ConfigError: device_memory_bytes is not a positive whole number.
  """
  given = config.get("device_memory_bytes")
  if given is not None:
    path = "config.device_memory_bytes"
    settings.check_number(path, given, least=1, whole=True)
  if config.get("compile_only", False):
    return None  # It reports what a program needs. The devices may be absent.
  if given is not None:
    return given
  stats = [d.memory_stats() or {} for d in mesh.local_devices]
  limits = [s["bytes_limit"] for s in stats if s.get("bytes_limit")]
  return min(limits, default=None)


def memory_bytes(program: jax.stages.Compiled) -> dict[str, int]:
  """Memory of a compiled program on each device, if the backend reports it.

  Returns:
    argument_bytes, output_bytes, temporary_bytes, alias_bytes, which arguments
    and outputs share, and peak_bytes, the most that is alive at a time. A
    program that uses host memory also has host_argument_bytes,
    host_output_bytes, host_temporary_bytes and host_alias_bytes, which the
    other figures leave out.
  """
  analysis = program.memory_analysis()
  if analysis is None:
    return {}
  host = {
    "host_argument_bytes": analysis.host_argument_size_in_bytes,
    "host_output_bytes": analysis.host_output_size_in_bytes,
    "host_temporary_bytes": analysis.host_temp_size_in_bytes,
    "host_alias_bytes": analysis.host_alias_size_in_bytes,
  }
  # libtpu's peak includes host memory.
  in_host = needed_bytes({k.removeprefix("host_"): v for k, v in host.items()})
  return {
    **(host if in_host else {}),
    "argument_bytes": analysis.argument_size_in_bytes,
    "output_bytes": analysis.output_size_in_bytes,
    "temporary_bytes": analysis.temp_size_in_bytes,
    "alias_bytes": analysis.alias_size_in_bytes,
    "peak_bytes": analysis.peak_memory_in_bytes - in_host,
  }


def needed_bytes(memory: Mapping[str, int], by_peak: bool = False) -> int:
  """Memory of a program on each device.

  Args:
    by_peak: for TPUs, whose compiler places each buffer. Other backends
      allocate all temporary memory at once.
  """
  if by_peak:
    return memory["peak_bytes"]
  own = memory["output_bytes"] - memory["alias_bytes"]
  return memory["argument_bytes"] + own + memory["temporary_bytes"]


def check(name: str, program: jax.stages.Compiled, limit: int | None) -> None:
  """Raises OutOfMemory if a program needs more than `limit` bytes."""
  if limit is None:
    return
  memory = memory_bytes(program)
  if not memory:
    return
  needed = needed_bytes(memory, jax.default_backend() == "tpu")
  if needed <= limit:
    return
  raise OutOfMemory(
    f"{_the(name)} needs {size(needed)} on each device, which has "
    f"{size(limit)} ({size(memory['argument_bytes'])} for the state and the "
    f"batch, {size(memory['temporary_bytes'])} for temporary values).",
    *(name, {**memory, _FIRST: _first_argument_bytes(program)}, limit),
  )


def _first_argument_bytes(program: jax.stages.Compiled) -> int:
  """Bytes on each device of the variables, for any size of the batch."""
  infos = jax.tree.leaves(program.args_info[0][0])
  shardings = jax.tree.leaves(program.input_shardings[0][0])
  return sum(
    math.prod(sharding.shard_shape(info.shape)) * info.dtype.itemsize
    for info, sharding in zip(infos, shardings)
  )


def is_exhausted(error: BaseException | None) -> bool:
  """Whether an error of jax says that a device is out of memory."""
  exhausted = "RESOURCE_EXHAUSTED" in str(error)
  return isinstance(error, jax.errors.JaxRuntimeError) and exhausted


def explained(
  error: BaseException,
  name: str,
  memory: Mapping[str, int],
  limit: int | None,
) -> OutOfMemory:
  """Returns an OutOfMemory for an error of jax while compiling or running.

  Args:
    name: the program that was being compiled; "" at run time.
    memory: bytes of the update, {} if unknown.
  """
  if name:
    text = f"compiling {_the(name)}"
  else:
    text = ", ".join(getattr(error, "__notes__", [])) or "while training"
  cause = str(error).partition("RESOURCE_EXHAUSTED: ")[2].partition("\n")[0]
  text = f"out of memory {text}: {cause.rstrip('.')}."
  if memory:
    needed = needed_bytes(memory, jax.default_backend() == "tpu")
    text += f" The update needs {size(needed)} on each device"
    text += f", which has {size(limit)}." if limit else "."
  return OutOfMemory(text, name, memory, limit)


def raise_with_advice(
  error: OutOfMemory,
  config: Mapping[str, Any],
  train: Callable[[Any, str], Any],
) -> NoReturn:
  """Adds settings that fit to the message of an error, and raises it.

  Each of them is compiled on the present devices. Several processes cannot do
  so: one of them may have failed alone. With compile_only nothing is added.
  """
  plain = settings.plain(config)
  if plain.get("compile_only"):
    raise error
  if error.program not in ("", UPDATE):
    hint = _of_evaluation(error, plain)
  elif jax.process_count() > 1:
    hint = (
      " python -m bigtrain.tools.plan computes what other settings need "
      "(docs/out_of_memory.md)."
    )
  else:
    _free(error)
    hint = _of_update(error, plain, _compiling(plain, train))
  error.args = (f"{error}{hint}",)
  raise error


def _of_update(error: OutOfMemory, plain: Changes, measure: Measure) -> str:
  memory = error.memory or measure({})
  if not memory:
    return ""
  by_peak = jax.default_backend() == "tpu"
  target = error.limit or 0
  if error.__cause__ is not None:  # Failed although this much was allowed.
    needed = needed_bytes(memory, by_peak)
    target = int(_MARGIN * min(needed, error.limit or needed))
  logging.info("Compiles the update with other settings, to find some that fit")
  until = time.monotonic() + _SEARCH_SECS
  fitting: list[str] = []
  smallest: tuple[int, str] | None = None
  try:
    for group in _candidates(plain, memory, target):
      for changes in group:
        if time.monotonic() > until or len(fitting) == _NUM_SETTINGS:
          break
        compiled = measure(changes)
        if compiled is None:
          continue
        needed = needed_bytes(compiled, by_peak)
        flags = [f"--config.{k}={v}" for k, v in changes.items()]
        text = f"{' '.join(flags)} needs {size(needed)}"
        smallest = min(smallest or (needed, text), (needed, text))
        if needed <= target:
          fitting.append(text)
          break
  except process.Preempted:
    pass  # The error is more important than the rest of the search.
  if fitting:
    return f" These settings fit: {'; '.join(fitting)}."
  if smallest is None:
    return ""
  return (
    f" None of the settings tried fits; {smallest[1]}. It takes more devices "
    "or a smaller model (docs/out_of_memory.md)."
  )


def _candidates(
  plain: Changes, memory: Mapping[str, int], target: int
) -> Iterator[list[Changes]]:
  """Yields lists of changes of the config; in a list, the mildest comes first.

  Only the last list changes what the run learns.
  """
  devices = jax.device_count()
  batch_size = plain["input"]["batch_size"]
  numbers, now = _microbatches(plain, batch_size // devices)

  def split(number: int) -> Changes:
    if plain.get("microbatch_examples"):
      return {"microbatch_examples": batch_size // number}
    return {"microbatches": number}

  # Enough microbatches if all temporary values belonged to the examples.
  temporary = memory["temporary_bytes"]
  room = target - (needed_bytes(memory) - temporary)
  likely = [n for n in numbers if temporary * now <= room * n]
  yield [split(n) for n in [*likely[:2], *likely[2:][-1:]]]
  remat = _remat(plain)
  yield [remat] if remat else []
  fsdp = plain.get("mesh", {}).get("fsdp", -1)
  shards: Changes = {}
  if fsdp not in (-1, devices):
    shards = {"mesh.replica": 1, "mesh.fsdp": devices}
  yield [shards] if shards else []
  splits = split(numbers[-1]) if numbers else {}
  kinds = [change for change in (shards, remat, splits) if change]
  if len(kinds) > 1 or not likely:
    yield [{k: v for change in kinds for k, v in change.items()}]
  smaller = batch_size // 2
  if batch_size % 2 == 0 and smaller % (devices * now) == 0:
    yield [{"input.batch_size": smaller}]


def _microbatches(plain: Changes, share: int) -> tuple[list[int], int]:
  """(possible larger numbers of microbatches, the present one)."""
  now = plain.get("microbatches") or 1
  if examples := plain.get("microbatch_examples"):
    now = max(1, plain["input"]["batch_size"] // examples)
  return [n for n in range(now + 1, share + 1) if share % n == 0], now


def _remat(plain: Changes) -> Changes:
  """{"model.remat_policy": ...} for a model with that field, else {}."""
  try:
    _, model = parts.model(settings.Config(plain))
  except settings.ConfigError:
    return {}
  policy = getattr(model, "remat_policy", None)
  known = "remat_policy" in inspect.signature(type(model)).parameters
  if not known or policy == _REMAT:
    return {}
  return {"model.remat_policy": _REMAT}


def _compiling(plain: Changes, train: Callable[[Any, str], Any]) -> Measure:
  """Returns a function that compiles the update in a folder of its own."""

  def measure(changes: Changes) -> Mapping[str, int] | None:
    config = settings.plain(plain)
    for key, value in {**changes, "compile_only": True}.items():
      node = config
      *parents, last = key.split(".")
      for parent in parents:
        node = node.setdefault(parent, {})
      node[last] = value
    with tempfile.TemporaryDirectory() as folder:
      try:
        train(config, folder)
        with open(os.path.join(folder, "run.json")) as file:
          return json.load(file)["starts"][-1]["programs"][UPDATE]
      except (settings.ConfigError, OutOfMemory, KeyError) as e:
        logging.info("%s: not possible: %s", changes, e)
        return None

  return measure


def _of_evaluation(error: OutOfMemory, plain: Changes) -> str:
  options = plain.get("evals", {}).get(error.program)
  if not isinstance(options, Mapping):
    return ""
  now = options.get("batch_size") or plain["input"]["batch_size"]
  fixed = error.memory[_FIRST]
  per_example = (needed_bytes(error.memory) - fixed) / now
  for number in range(now - 1, 0, -1):
    divides = now % number == 0 == number % jax.device_count()
    needed = fixed + per_example * number
    if divides and needed <= (error.limit or 0):
      flag = f"--config.evals.{error.program}.batch_size={number}"
      return f" With {flag} it needs about {size(needed)}."
  return ""


def _free(error: BaseException | None) -> None:
  """Drops the arrays that the frames of a traceback keep alive."""
  while error is not None:
    traceback.clear_frames(error.__traceback__)
    error = error.__cause__ or error.__context__


def _the(name: str) -> str:
  return "the update" if name == UPDATE else f"the program {name!r}"


def size(nbytes: float) -> str:
  """Returns a size as text, such as "9.1 GB" (10^9 bytes)."""
  for unit, number in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if nbytes >= number:
      return f"{nbytes / number:.3g} {unit}"
  return f"{nbytes:.0f} bytes"
