"""Optimizer state that stays in host memory between two updates.

config.opt_memory is "device", "pinned_host", or a list of (regular expression,
one of these) pairs over names in the train state, such as "opt/0/nu/.*". The
first full match decides, and arrays without a match stay on the device.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError, check_choice, regex
from bigtrain.config.settings import Config

_KEY = "config.opt_memory"
# Smaller arrays stay on the device: a transfer costs more than they save.
_MIN_SIZE = 1024

# (regular expression, kind of memory) pairs.
OptMemory = Sequence[tuple[str, str]]


def read_opt_memory(config: Config) -> OptMemory:
  value = config.get("opt_memory", "device")
  pairs = [(".*", value)] if isinstance(value, str) else value
  for pair in pairs:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
      raise ConfigError(f"{_KEY}: expected (regex, kind), got {pair!r}.")
    check_choice(_KEY, pair[1], ("device", "pinned_host"))
    regex(_KEY, pair[0])
  return tuple((pattern, kind) for pattern, kind in pairs)


def placed(shapes: Any, shardings: Any, mesh: Mesh, pairs: OptMemory) -> Any:
  """Sets the memory kind in the shardings of the optimizer's state."""
  for kind in {kind for _, kind in pairs} - {"device"}:
    # A device of this process: others cannot say what memory they have. There
    # is none if all devices are absent.
    local = mesh.local_devices
    device = local[0] if local else mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if kind not in kinds:
      raise ConfigError(
        f"{_KEY}: {device.device_kind} has no memory {kind!r}; expected "
        f"'device', because this platform has only {' and '.join(kinds)}."
      )
  matched = set()

  def place(name: str, array: Any, sharding: Any) -> Any:
    if not name.startswith("opt/"):
      return sharding
    for pattern, kind in pairs:
      if re.fullmatch(pattern, name):
        matched.add(pattern)
        if kind == "device" or array.size < _MIN_SIZE:
          return sharding
        return sharding.with_memory_kind(kind)
    return sharding

  result = trees.map_with_names(place, shapes, shardings)
  for pattern, _ in pairs:
    if pattern not in matched and pattern != ".*":
      names = [n for n in trees.names(shapes) if n.startswith("opt/")]
      shown = f", such as {names[-1]!r}" if names else ""
      raise ConfigError(
        f"{_KEY}: {pattern!r} decides nothing; expected a regular expression "
        f"over names of the optimizer's state{shown}."
      )
  return result


def in_host(x: Any) -> bool:
  """Whether an array, which may be traced, is in host memory."""
  return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def on_device(tree: Any) -> Any:
  """Copies arrays that are in host memory to the device.

  In a jitted function XLA copies as early as it can. Inside a branch of
  jax.lax.cond the copies occupy the device's memory only during the branch.
  """

  def copy(x: Any) -> Any:
    if not in_host(x):
      return x
    return jax.device_put(x, jax.memory.Space.Device)

  return jax.tree.map(copy, tree)


def in_memory_of(tree: Any, like: Any) -> Any:
  """Copies arrays to host memory where those of `like` are in host memory."""

  def copy(x: Any, old: Any) -> Any:
    return jax.device_put(x, jax.memory.Space.Host) if in_host(old) else x

  return jax.tree.map(copy, tree, like)


def bytes_per_device(
  shapes: Any, shardings: Any, *, in_host: bool = False
) -> int:
  """Bytes of a tree of shapes that a device holds, on it or in host memory."""
  return sum(
    math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings))
    if (sharding.memory_kind == "pinned_host") == in_host
  )
