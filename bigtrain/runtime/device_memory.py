"""Device memory: errors about programs that need more than a device has.

A compiled program knows how much memory it needs. If a device has less, `check`
ends the run before its first step. If a device runs out of memory later,
`explained` makes an error that names the phase of the run. Both errors have the
sizes of state, batch and temporary values, and the tools.plan command that
finds settings that fit.
"""

import math
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from bigtrain.config import settings
from bigtrain.config.errors import check_number
from bigtrain.files.disk import size

UPDATE = "update"

# After an error at run time, tools.plan is asked for a program with this
# fraction of the memory of the one that failed: something else was on the
# device, too.
_MARGIN = 0.9


class OutOfMemory(RuntimeError):
  """A program needs more memory than a device has."""


def limit_bytes(config: settings.Config, mesh: Mesh) -> int | None:
  """The memory of a device that programs may use; None if unknown."""
  given = config.get("device_memory_bytes")
  if given is not None:
    key = "config.device_memory_bytes"
    return int(check_number(key, given, least=1, whole=True))
  present = set(jax.local_devices())  # Absent devices cannot be asked.
  devices = [device for device in mesh.devices.flat if device in present]
  stats = [device.memory_stats() or {} for device in devices]
  limits = [s["bytes_limit"] for s in stats if s.get("bytes_limit")]
  return min(limits, default=None)


def memory_bytes(program: jax.stages.Compiled) -> dict[str, int]:
  """Memory of a compiled program on each device; {} if it is unknown.

  alias_bytes is the size of buffers that arguments and outputs share. The
  host_*_bytes are in host memory, and the others do not include them.
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
    memory: result of `memory_bytes`.
    by_peak: whether to use the peak, as on TPUs, whose compiler plans the place
      of each buffer. Other backends allocate all temporary memory at once.
  """
  if by_peak:
    return memory["peak_bytes"]
  own = memory["output_bytes"] - memory["alias_bytes"]
  return memory["argument_bytes"] + own + memory["temporary_bytes"]


def check(name: str, program: jax.stages.Compiled, limit: int | None) -> None:
  """Raises OutOfMemory if a program needs more than `limit`."""
  memory = memory_bytes(program)
  if limit is None or not memory or _needed(memory) <= limit:
    return
  if name == UPDATE:
    raise OutOfMemory(f"the update {_sizes(program, limit)}. {_advice(limit)}")
  raise OutOfMemory(
    f"the program {name!r} needs {size(_needed(memory))} on each device, which "
    f"has {size(limit)}.{_smaller_batch(name, program, limit)}"
  )


def is_exhausted(error: BaseException | None) -> bool:
  """Whether an error of jax is about a device's memory."""
  exhausted = "RESOURCE_EXHAUSTED" in str(error)
  return isinstance(error, jax.errors.JaxRuntimeError) and exhausted


def explained(
  error: BaseException,
  name: str,
  update: jax.stages.Compiled | None,
  limit: int | None,
) -> OutOfMemory:
  """Makes an OutOfMemory of an error of jax.

  Args:
    error: the error; its notes name the phase of the run.
    name: the program that was being compiled; "" if a program was running.
    update: the compiled update, if it exists.
    limit: memory of a device.
  """
  where = ", ".join(getattr(error, "__notes__", [])) or "while training"
  if name:
    what = "update" if name == UPDATE else f"program {name!r}"
    where = f"compiling the {what}"
  cause = str(error).partition("RESOURCE_EXHAUSTED: ")[2].partition("\n")[0]
  text = f"out of memory {where}: {cause.rstrip('.')}."
  memory = memory_bytes(update) if update else {}
  if update and memory:
    text += f" The update {_sizes(update, limit)}."
    # The program fits into `limit`, and failed nevertheless.
    needed = _needed(memory)
    limit = int(_MARGIN * min(needed, limit or needed))
  advice = f" {_advice(limit)}" if name in ("", UPDATE) else ""
  return OutOfMemory(text + advice)


def _needed(memory: Mapping[str, int]) -> int:
  return needed_bytes(memory, by_peak=jax.default_backend() == "tpu")


def _sizes(update: jax.stages.Compiled, limit: int | None) -> str:
  """Text for messages: the memory of the update, by part of the state."""
  memory = memory_bytes(update)
  arguments = zip(update.args_info[0], update.input_shardings[0])
  # The update's arguments are state, running metrics, batch, ...
  (state, state_shardings), _, (batch, batch_shardings), *_ = arguments
  parts = {
    name: _on_device(state[name], state_shardings[name]) for name in state
  }
  parts["batch"] = _on_device(batch, batch_shardings)
  parts["temporary values"] = memory["temporary_bytes"]
  listed = ", ".join(
    f"{name} {size(nbytes)}" for name, nbytes in parts.items() if name != "step"
  )
  has = f", which has {size(limit)}" if limit else ""
  return f"needs {size(_needed(memory))} on each device{has} ({listed})"


def _on_device(infos: Any, shardings: Any) -> int:
  """Bytes of arguments in the memory of each device."""
  # An argument that the program does not use has no sharding.
  pairs = zip(
    jax.tree.leaves(infos),
    jax.tree.leaves(shardings, is_leaf=lambda sharding: sharding is None),
  )
  return sum(
    math.prod(sharding.shard_shape(info.shape)) * info.dtype.itemsize
    for info, sharding in pairs
    if sharding is not None and sharding.memory_kind != "pinned_host"
  )


def _advice(limit: int | None) -> str:
  """The tools.plan command that finds settings that fit.

  It repeats the --config flags of this process.
  """
  words = iter(sys.argv[1:])
  config = [
    word if "=" in word else f"{word}={next(words, '')}"
    for word in words
    if word.startswith("--config")
  ]
  if not any(word.startswith("--config=") for word in config):
    config = ["--config=FILE"]  # A notebook, or another program.
  if limit:
    key = "--config.device_memory_bytes="
    config = [word for word in config if not word.startswith(key)]
    config.append(f"{key}{limit}")
  flags = [f"--devices={jax.device_count()}", "--choose"]
  device = jax.devices()[0]
  if device.platform != "cpu":
    flags.append(f"--hardware={device.device_kind}")
  if device.platform == "tpu" or "H100" in device.device_kind:
    flags.append(f"--compiler={device.platform}")
  command = shlex.join([*config, *flags])
  return (
    f"This finds settings that fit: python -m bigtrain.tools.plan {command}"
  )


def _smaller_batch(name: str, program: jax.stages.Compiled, limit: int) -> str:
  """Advice for an evaluation: the largest batch that would fit, or ""."""
  variables, batch = program.args_info[0]
  fixed = _on_device(variables, program.input_shardings[0][0])
  now = jax.tree.leaves(batch)[0].shape[0]
  per_example = (_needed(memory_bytes(program)) - fixed) / now
  for number in range(now - 1, 0, -1):
    divides = now % number == 0 and number % jax.device_count() == 0
    needed = fixed + per_example * number
    if divides and needed <= limit:
      flag = f"--config.evals.{name}.batch_size={number}"
      return f" With {flag} it needs about {size(needed)}."
  return ""
