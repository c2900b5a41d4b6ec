"""Objectives of encoder-decoder models, made from windows of tokens.

Token sources give windows: `targets` [L], with `segments` [L] where documents
were packed, or `loss_mask` [L] where a last window is not full. An op here
turns one into what a model reads, `inputs`, and what it writes, `targets`, both
padded with 0. From packed windows come also `inputs_segments` (from 1, 0 is
padding), `inputs_positions` (from 0), and the same of `targets`: document by
document, so that nothing is learned across them.

Legend: B batch, L length of the window, I and T lengths of the results.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bigtrain.pp import arrays, registry
from bigtrain.pp.registry import Op
from bigtrain.settings import ConfigError, DataError

# Features that say nothing about what is made here.
_OF_WINDOWS = (
  "tokens",
  "targets",
  "segments",
  "positions",
  "loss_mask",
  "num_bytes",
)
# (ids [n], u [n]) -> (inputs, targets), or None if there are too few ids.
Objective = Callable[
  [np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray] | None
]


class Spans(NamedTuple):
  """How many tokens span corruption takes from a text, and in how many spans.

  Attributes:
    noise: tokens that are taken out, none if there is nothing left else.
    spans: runs of them.
  """

  noise: int
  spans: int

  @classmethod
  def of(cls, length: int, density: float, mean_span: float) -> "Spans":
    """Those of a text of `length` tokens: they depend on nothing else."""
    if length < 2:
      return cls(0, 0)
    noise = min(max(round(length * density), 1), length - 1)
    spans = max(round(noise / mean_span), 1)
    # Spans do not touch, so as many runs are between them.
    return cls(noise, min(spans, noise, length - noise))

  def lengths(self, length: int) -> tuple[int, int]:
    """Tokens of inputs and targets: sentinels and the end are there, too."""
    if not self.noise:
      return 0, 0
    return length - self.noise + self.spans + 1, self.noise + self.spans + 1


@registry.register("span_corruption")
def span_corruption(
  length: int,
  density: float = 0.15,
  mean_span: float = 3.0,
  sentinel: int = 32099,
  num_sentinels: int = 100,
  eos_id: int = 1,
  inputs_length: int | None = None,
  targets_length: int | None = None,
) -> Op:
  """T5's objective: write the spans that were taken out (arXiv 1910.10683).

  Spans are replaced by sentinels in `inputs`; `targets` are the sentinels, each
  followed by its span. Both end in `eos_id`. Where spans begin is random, how
  many there are is not: windows of 568 tokens give inputs of 512 and targets of
  114.

  Args:
    length: L, tokens of a window, as the source has it.
    density: share of tokens that are taken out.
    mean_span: tokens of a span, on average.
    sentinel: id of the first; the second has the id below, and so on.
    num_sentinels: how many the vocabulary has.
    eos_id: ends inputs and targets.
    inputs_length: I, of the padded result; what a full window takes unless
      given. Packed documents take more, the shorter they are.
    targets_length: T, likewise.
  """
  if not (length > 1 and 0 < density < 1 and mean_span >= 1):
    raise ConfigError(
      "expected length > 1, a density between 0 and 1 and mean_span >= 1, got "
      f"length={length}, density={density}, mean_span={mean_span}."
    )
  full = Spans.of(length, density, mean_span)
  if full.spans > min(num_sentinels, sentinel):
    raise ConfigError(
      f"length={length} takes {full.spans} sentinels; there are "
      f"{min(num_sentinels, sentinel)}."
    )
  need = full.lengths(length)
  sizes = (inputs_length or need[0], targets_length or need[1])
  if sizes[0] < need[0] or sizes[1] < need[1]:
    raise ConfigError(
      f"length={length} gives inputs of {need[0]} tokens and targets of "
      f"{need[1]}, which do not fit into inputs_length={sizes[0]} and "
      f"targets_length={sizes[1]}."
    )

  def objective(
    ids: np.ndarray, u: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray] | None:
    noise, spans = Spans.of(len(ids), density, mean_span)
    if not noise:
      return None
    taken = _lengths(noise, spans, u[: noise - 1])
    kept = _lengths(len(ids) - noise, spans, u[noise - 1 : len(ids) - 2])
    # Runs take turns, and the first is kept: span i begins after i + 1 of them.
    number = np.arange(spans)
    starts = np.cumsum(kept) + np.cumsum(taken) - taken
    span_of = np.repeat(number, taken)
    noise_at = np.arange(noise) + np.cumsum(kept)[span_of]
    is_kept = np.ones(len(ids), bool)
    is_kept[noise_at] = False
    is_kept[starts] = True  # Of a span, its sentinel stays.
    marked = ids.copy()
    marked[starts] = sentinel - number
    inputs = np.empty(len(ids) - noise + spans + 1, ids.dtype)
    inputs[:-1], inputs[-1] = marked[is_kept], eos_id
    targets = np.empty(noise + spans + 1, ids.dtype)
    targets[np.arange(noise) + span_of + 1] = ids[noise_at]
    targets[np.cumsum(taken) - taken + number] = sentinel - number
    targets[-1] = eos_id
    return inputs, targets

  op = _objective(objective, "span_corruption", length, sizes)
  return op._replace(
    vocab_sizes={"inputs": sentinel + 1, "targets": sentinel + 1}
  )


def _lengths(total: int, runs: int, u: np.ndarray) -> np.ndarray:
  """Lengths of runs that add up to `total`, each set of them as likely.

  Args:
    total: at least `runs`.
    runs: how many; each has at least 1.
    u: uniform numbers [total - 1], one for each place to cut.
  """
  ends = np.empty(runs + 1, np.int64)
  ends[0], ends[-1] = 0, total
  ends[1:-1] = np.argsort(u, kind="stable")[: runs - 1] + 1
  ends[1:-1].sort()
  return ends[1:] - ends[:-1]


@registry.register("prefix_lm")
def prefix_lm(length: int, eos_id: int = 1) -> Op:
  """Continue a text: inputs are its beginning, targets the rest and an end.

  Where it is cut is uniformly random; both have at least one token.

  Args:
    length: L, tokens of a window, as the source has it; also I and T.
    eos_id: ends the targets.
  """
  if length < 2:
    raise ConfigError(f"length={length}: expected at least 2.")

  def objective(
    ids: np.ndarray, u: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray] | None:
    if len(ids) < 2:
      return None
    # u < 1, and so is its product in float64.
    at = 1 + int(float(u[0]) * (len(ids) - 1))
    return ids[:at], np.append(ids[at:], eos_id)

  return _objective(objective, "prefix_lm", length, (length, length))


def _objective(
  objective: Objective, name: str, length: int, sizes: tuple[int, int]
) -> Op:
  """An op that applies an objective to each document of a window.

  Args:
    objective: what becomes of one document.
    name: of the op, for messages.
    length: L.
    sizes: I and T.
  """

  def row(
    ids: np.ndarray, segments: np.ndarray, u: np.ndarray
  ) -> list[np.ndarray]:
    """ids, segments and positions of inputs, then of targets."""
    found = [np.zeros((3, size), np.int32) for size in sizes]
    used, number = [0, 0], 0
    for segment in range(1, int(segments.max(initial=0)) + 1):
      # Documents are runs.
      first = int(np.argmax(segments == segment))
      at = slice(first, first + int(np.count_nonzero(segments == segment)))
      both = objective(ids[at], u[at])
      if both is None:
        continue
      number += 1
      for k, part in enumerate(both):
        stop = used[k] + len(part)
        if stop > sizes[k]:
          which = ("inputs", "targets")[k]
          raise DataError(
            f"preprocessing op {name!r}: the documents of a window take more "
            f"than {sizes[k]} {which}; give a larger {which}_length."
          )
        into = found[k][:, used[k] : stop]
        into[0], into[1], into[2] = part, number, np.arange(len(part))
        used[k] = stop
    return [*found[0], *found[1]]

  def all_rows(
    ids: np.ndarray, segments: np.ndarray, u: np.ndarray
  ) -> list[np.ndarray]:
    if ids.shape[-1] != length:
      raise ConfigError(
        f"preprocessing op {name!r} is given windows of {ids.shape[-1]} "
        f"tokens, but length={length}."
      )
    if ids.ndim == 1:
      return row(ids, segments, u)
    rows = [row(*each) for each in zip(ids, segments, u)]
    return [np.stack(column) for column in zip(*rows)]

  names = [
    f"{part}{suffix}"
    for part in ("inputs", "targets")
    for suffix in ("", "_segments", "_positions")
  ]

  def fn(features: dict[str, Any], u: Any) -> dict[str, Any]:
    ids = features["targets"]
    packed = "segments" in features
    arguments = [ids, _segments(features), u]
    if arrays.on_host(ids):
      found = all_rows(*arguments)
    else:
      import tensorflow as tf

      found = tf.numpy_function(all_rows, arguments, [tf.int32] * len(names))
      found = [
        tf.ensure_shape(x, (sizes[i // 3],)) for i, x in enumerate(found)
      ]
    made = {n: x for n, x in zip(names, found) if packed or "_" not in n}
    rest = {n: x for n, x in features.items() if n not in _OF_WINDOWS}
    return {**rest, **made}

  return Op(fn, draws=length, batched=True, reads=("targets",))


def _segments(features: dict[str, Any]) -> Any:
  """Which document each target is of, from 1; 0 is padding."""
  if "segments" in features:
    return features["segments"]
  if "loss_mask" in features:
    return arrays.cast(features["loss_mask"], "int32")
  return arrays.cast(features["targets"] == features["targets"], "int32")
