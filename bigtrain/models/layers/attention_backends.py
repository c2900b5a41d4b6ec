"""The backends of attention: what each can compute, and which one is used.

"xla" multiplies all queries with all keys, "blockwise" block by block, in plain
JAX. "ring" does the same, while the devices that share an example pass its keys
and values around a ring. The others are kernels: "splash", from jax's Pallas
library, for TPUs; NVIDIA's "cudnn" and those of the package "tokamax" for GPUs.

The table at the end has two functions for each backend: one says why it cannot
compute a call, the other why it is the best one for a call. `choose` goes
through the table from top to bottom. Its reasons are in the log and in
run.json.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend
from absl import logging

from bigtrain import sharding
from bigtrain.config import choices
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import masks

NAMES = ("auto", "splash", "cudnn", "tokamax", "blockwise", "ring", "xla")

KEY = "config.model.attention"

# "blockwise" is used from this number of scores per head on. With just as many,
# on two CPU cores, it needs 0.77 of the time and 0.26 of the memory of "xla".
_BLOCKWISE_MIN_SCORES = 1024 * 1024

# For shorter texts, or the 196 tokens of a ViT, padding to whole blocks costs
# more than Splash gains.
_SPLASH_MIN_LENGTH = 512
# Fewest queries in a block of Splash.
_SPLASH_MIN_BLOCK = 128

# Where blocks compute, a ring replaces gathers if all keys and values of an
# example are larger, with their gradients. For fewer it saves little memory,
# sends more and takes longer to compile.
_MAX_GATHERED_BYTES = 4e9

# Entries of the largest matrix for a mask: 128 MiB an example. Beyond,
# "blockwise" needs less memory.
_MAX_MASK = 8192 * 8192


class Call(NamedTuple):
  """Properties of a call that decide which backend runs it."""

  platform: str
  device_kind: str
  splits: bool  # Whether the ambient mesh, if any, splits the batch.
  queries: int
  positions: int
  heads: int
  kv_heads: int
  width: int
  dtype: str
  causal: bool = False
  window: int | None = None
  prefix: bool = False
  groups: bool = False  # Such as pictures, see masks.Mask.
  documents: bool = False
  padding: bool = False
  bias: bool = False
  softcap: bool = False
  sinks: bool = False
  sequence: int = 1  # Number of devices among which an example is split.

  def __str__(self) -> str:
    heads = f"{self.heads} heads"
    if self.kv_heads != self.heads:
      heads += f" in {self.kv_heads} groups"
    flags = (
      "prefix",
      "groups",
      "documents",
      "padding",
      "bias",
      "softcap",
      "sinks",
    )
    words = [
      f"{self.queries} queries of {self.positions} positions",
      f"{heads} of width {self.width}",
      self.dtype,
      "causal" if self.causal else "",
      f"window={self.window}" if self.causal and self.window else "",
      *(name for name in flags if getattr(self, name)),
      f"sequence={self.sequence}" if self.sequence > 1 else "",
    ]
    return ", ".join(filter(None, words))


def call_of(
  batch_size: int, mask: masks.Mask, *, queries: int, **others: Any
) -> Call:
  platform, device_kind = sharding.device()
  return Call(
    platform=platform,
    device_kind=device_kind,
    splits=sharding.splits(batch_size),
    queries=queries,
    sequence=sharding.length_ways(batch_size, queries),
    causal=mask.causal,
    window=mask.window if mask.causal else None,
    prefix=mask.prefix_B is not None,
    groups=mask.groups_BL is not None,
    documents=mask.segments_BL is not None,
    padding=mask.real_BS is not None,
    **others,
  )


class Backend(NamedTuple):
  """Reasons against and for a backend; None if there is no reason."""

  unsupported_because: Callable[[Call], str | None]
  # For a call that it supports: why it is better than all later backends.
  best_because: Callable[[Call], str | None]


def choose(name: str, call: Call) -> str:
  """Returns the backend with this name or, for "auto", the best; logs it."""
  unsupported = {
    other: backend.unsupported_because(call)
    for other, backend in _BACKENDS.items()
  }
  if name != "auto":
    if unsupported[name]:
      able = [repr(other) for other in _BACKENDS if not unsupported[other]]
      raise ConfigError(
        f"{KEY}={name!r} cannot compute {call}: {unsupported[name]}. Expected "
        f"{', '.join(able)} or 'auto'."
      )
    return name
  against = []
  for name, backend in _BACKENDS.items():
    best = None if unsupported[name] else backend.best_because(call)
    if best:
      break
    against.append(f"{name}: {unsupported[name] or 'not the fastest here'}")
  reason = "; ".join([str(best), *against])
  if choices.note_choice(KEY, str(call), name, reason):
    logging.debug("%s: %s for %s (%s).", KEY, name, call, reason)
  return name


def _splash_unsupported_because(call: Call) -> str | None:
  if call.platform != "tpu":
    return f"it needs a TPU, not a {call.platform}"
  if call.dtype not in ("bfloat16", "float32"):
    return f"it computes in bfloat16 or float32, not {call.dtype}"
  if call.bias:
    return "it adds no bias to the scores"
  if call.prefix:
    return "its order of positions is fixed, without a prefix for each text"
  if call.groups:
    return "its order of positions is fixed, without groups such as pictures"
  if call.causal and call.queries != call.positions:
    return "causal queries need as many positions"
  if not call.splits:
    return "the mesh does not split the batch"
  return None


def _splash_best_because(call: Call) -> str | None:
  if min(call.queries, call.positions) < _SPLASH_MIN_LENGTH:
    return None
  if call.causal and call.queries < 2 * call.sequence * _SPLASH_MIN_BLOCK:
    return None  # Padding would more than double a device's queries.
  return f"from {_SPLASH_MIN_LENGTH} positions on the fastest on a TPU"


def _cudnn_unsupported_because(call: Call) -> str | None:
  reason = _gpu_unsupported_because(call, least_capability=8.0)  # Ampere.
  if reason:
    return reason
  if call.width % 8 or call.width > 128:
    return f"the head width must be a multiple of 8 up to 128, not {call.width}"
  if call.softcap:
    return "it cannot cap scores"
  return _inputs_unsupported_because(call)


def _tokamax_unsupported_because(call: Call) -> str | None:
  if call.platform == "gpu" and importlib.util.find_spec("tokamax") is None:
    return "it needs tokamax (pip install 'bigtrain[tokamax]')"
  reason = _gpu_unsupported_because(call, least_capability=9.0)  # Hopper.
  if reason:
    return reason
  if not call.splits:
    return "the mesh does not split the batch"
  return _inputs_unsupported_because(call)


def _inputs_unsupported_because(call: Call) -> str | None:
  """Why GPU kernels cannot compute a call; their masks are matrices."""
  if call.sinks:
    return "its softmax has no sinks"
  if call.bias:
    return "its bias is a matrix of all scores"
  if call.causal and call.sequence > 1:
    return "its causal order begins with the first position of an example"
  masked = call.prefix or call.groups or call.documents or call.padding
  if masked and call.queries * call.positions > _MAX_MASK:
    return "its mask would be a matrix of more than 128 MiB an example"
  return None


def _gpu_unsupported_because(call: Call, least_capability: float) -> str | None:
  if call.platform != "gpu":
    return f"it needs an NVIDIA GPU, not a {call.platform}"
  if jax.default_backend() == "gpu":
    backend = jax.extend.backend.get_backend()
    if "cuda" not in backend.platform_version:
      return "it needs an NVIDIA GPU"
    capability = jax.devices()[0].compute_capability
    if float(capability) < least_capability:
      return f"it needs compute capability {least_capability}, not {capability}"
  elif "AMD" in call.device_kind or "Radeon" in call.device_kind:
    return "it needs an NVIDIA GPU"
  if call.dtype not in ("bfloat16", "float16"):
    return f"it computes in bfloat16 or float16, not {call.dtype}"
  return None


def _blockwise_unsupported_because(call: Call) -> str | None:
  if call.causal and call.queries != call.positions:
    return "causal queries need as many positions"
  return None


def _blockwise_best_because(call: Call) -> str | None:
  if call.sequence > 1 and (call.causal or call.bias):
    return "a device's queries begin anywhere in an example"
  if call.queries * call.positions < _BLOCKWISE_MIN_SCORES:
    return None
  least = f"{_BLOCKWISE_MIN_SCORES:,}"
  return f"memory linear in the length, from {least} scores a head on"


def _ring_unsupported_because(call: Call) -> str | None:
  if call.sequence == 1:
    return "no devices share an example"
  return _blockwise_unsupported_because(call)


def _ring_best_because(call: Call) -> str | None:
  itemsize = 4 if call.dtype == "float32" else 2
  sizes = call.positions, call.kv_heads, call.width
  if not call.causal or not prefers_ring(*sizes, itemsize):
    return None
  return "no device has all keys and values, which are large here"


def prefers_ring(
  positions: int, kv_heads: int, width: int, itemsize: int
) -> bool:
  """Whether all keys and values of an example are too large to be gathered."""
  bytes_per_number = itemsize + 4  # Gradients are summed in float32.
  gathered_bytes = 2 * bytes_per_number * positions * kv_heads * width
  return gathered_bytes > _MAX_GATHERED_BYTES


def _xla_best_because(call: Call) -> str:
  return f"the fastest for {call.queries * call.positions:,} scores a head"


# In the order in which "auto" considers them; the last supports every call.
_BACKENDS = {
  "splash": Backend(_splash_unsupported_because, _splash_best_because),
  "cudnn": Backend(
    _cudnn_unsupported_because, lambda call: "the fastest on an NVIDIA GPU"
  ),
  # Not measured, so "auto" does not choose it.
  "tokamax": Backend(_tokamax_unsupported_because, lambda call: None),
  "ring": Backend(_ring_unsupported_because, _ring_best_because),
  "blockwise": Backend(_blockwise_unsupported_because, _blockwise_best_because),
  "xla": Backend(lambda call: None, _xla_best_because),
}
