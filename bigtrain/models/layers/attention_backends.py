"""Chooses the implementation of an attention.

Axes: B batch, L length, S length attended to, H heads, G heads of keys and
values, K head width.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from absl import logging

from bigtrain import settings, sharding
from bigtrain.models.layers import masks

# "xla" multiplies all queries with all keys. "blockwise" does it block by
# block, in plain JAX. "ring" does the same, and devices that share an example
# pass its keys and values in a ring. The others are kernels: "splash" of jax's
# Pallas library for TPUs, "cudnn" of NVIDIA's.
NAMES = ("auto", "splash", "cudnn", "blockwise", "ring", "xla")

KEY = "config.model.attention"


class Case(NamedTuple):
  """Facts about an attention, on which the choice depends.

  Attributes:
    platform: "cpu", "gpu" or "tpu", for which the program is compiled.
    device_kind: kind of the devices.
    splits: whether the ambient mesh, if any, splits the batch.
    queries: L.
    positions: S.
    heads: H.
    kv_heads: G.
    width: K.
    dtype: dtype of queries, keys and values.
    causal: as in visibility.Sees, and so is the window.
    window: see there.
    prefix: whether a prefix is visible.
    documents: whether queries see their own document only.
    padding: whether there are positions that no query sees.
    bias: whether there is a bias of the scores.
    softcap: whether scores are capped.
    sequence: number of devices among which an example is split.
  """

  platform: str
  device_kind: str
  splits: bool
  queries: int
  positions: int
  heads: int
  kv_heads: int
  width: int
  dtype: str
  causal: bool = False
  window: int | None = None
  prefix: bool = False
  documents: bool = False
  padding: bool = False
  bias: bool = False
  softcap: bool = False
  sequence: int = 1

  def __str__(self) -> str:
    """Says it in a line, for the log and run.json."""
    words = [
      "causal" if self.causal else "",
      f"window={self.window}" if self.causal and self.window else "",
      "prefix" if self.prefix else "",
      "documents" if self.documents else "",
      "padding" if self.padding else "",
      "bias" if self.bias else "",
      "softcap" if self.softcap else "",
      f"sequence={self.sequence}" if self.sequence > 1 else "",
    ]
    heads = f"{self.heads} heads"
    if self.kv_heads != self.heads:
      heads = f"{self.heads} heads in {self.kv_heads} groups"
    return ", ".join(
      [
        f"{self.queries} queries of {self.positions} positions",
        f"{heads} of width {self.width}",
        self.dtype,
        *filter(None, words),
      ]
    )


class Kernel(NamedTuple):
  """An implementation, as seen by the choice.

  Attributes:
    refuses: function from a case to the reason for which the implementation
      cannot serve it; "" if it can.
    pays: function from a case that it can serve to the reason for which it is
      the best; "" if a later one in the order is better.
  """

  unsupported_because: Callable[[Case], str]
  best_because: Callable[[Case], str]


def choose(wanted: str, case: Case, kernels: Mapping[str, Kernel]) -> str:
  """Returns the name of an implementation, and notes the choice.

  Args:
    kernels: implementations by name, in the order in which "auto" considers
      them. The last serves every case.

  Raises:
    ConfigError: the implementation that `wanted` names cannot serve the case.
  """
  refusals = {
    name: kernel.unsupported_because(case) for name, kernel in kernels.items()
  }
  if wanted != "auto":
    if refusals[wanted]:
      able = [name for name in kernels if not refusals[name]]
      raise settings.ConfigError(
        f"{KEY}={wanted!r} cannot compute {case}: {refusals[wanted]}. Expected "
        f"{', '.join(map(repr, able))} or 'auto'."
      )
    return wanted
  against = []
  for name, kernel in kernels.items():
    reason = refusals[name]
    if not reason and (reason := kernel.best_because(case)):
      break
    against.append(f"{name}: {reason or 'does not pay'}")
  reason = "; ".join([reason, *against])
  if settings.note_choice(KEY, str(case), name, reason):
    logging.info("%s: %s for %s (%s).", KEY, name, case, reason)
  return name


def case_of(
  batch_size: int,
  mask: masks.Mask,
  *,
  queries: int,
  bias: bool,
  **sizes: Any,
) -> Case:
  """Returns the case of an attention in the program that is being traced.

  Args:
    bias: whether there is a bias of the scores.
  """
  platform, kind = sharding.device()
  return Case(
    platform=platform,
    device_kind=kind,
    splits=sharding.splits(batch_size),
    queries=queries,
    sequence=sharding.length_ways(batch_size, queries),
    causal=mask.causal,
    window=mask.window if mask.causal else None,
    prefix=mask.prefix_B is not None,
    documents=mask.segments_BL is not None,
    padding=mask.real_BS is not None,
    bias=bias,
    **sizes,
  )
