"""Ops that make examples of encoder-decoder models from windows of tokens.

An op turns a window, `targets` [L] and `segments` [L] or `loss_mask` [L], into
the encoder's `inputs` and the decoder's `targets`, both padded with 0. Packed
documents also give `inputs_segments` (from 1; 0 is padding), `inputs_positions`
(from 0), and the same for `targets`.

Legend: B batch, L length of the window, I and T lengths of the results.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, check_number
from bigtrain.pp import registry, xp
from bigtrain.pp.host_tensorflow import tf
from bigtrain.pp.registry import Op

# Features of the window, which are not passed on.
_WINDOW_FEATURES = set(
  "tokens targets segments positions loss_mask num_bytes".split()
)
Pair = tuple[np.ndarray, np.ndarray]
# (ids [n], u [n]) -> (inputs, targets), or None if there are too few ids.
Objective = Callable[[np.ndarray, np.ndarray], Pair | None]


class Spans(NamedTuple):
  """Numbers of tokens and of spans that span corruption removes from a text."""

  noise: int
  spans: int

  @classmethod
  def of(cls, length: int, density: float, mean_span: float) -> "Spans":
    """Returns the numbers for a text of `length` tokens; 0 below 2 tokens.

    Rounded in float32, as random_spans_noise_mask of t5/data/preprocessors.py.
    """
    if length < 2:
      return cls(0, 0)
    noise = int(np.rint(np.float32(length) * np.float32(density)))
    noise = min(max(noise, 1), length - 1)
    spans = max(int(np.rint(np.float32(noise) / np.float32(mean_span))), 1)
    # Spans do not touch, so each needs a kept token before it.
    return cls(noise, min(spans, noise, length - noise))

  def lengths(self, length: int) -> tuple[int, int]:
    """Returns the lengths of inputs and targets, with sentinels and ends."""
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
  """Makes T5's objective: predict the removed spans (arXiv 1910.10683).

  Sentinels replace the spans in `inputs`; `targets` are the sentinels, each
  followed by its span. Both end in `eos_id`. Windows of 568 tokens give inputs
  of 512 and targets of 114 tokens.

  Args:
    length: L, tokens per window; must match the source.
    density: fraction of tokens to remove.
    mean_span: average number of tokens per span.
    sentinel: id of the first sentinel; ids of further sentinels count down.
    num_sentinels: number of sentinels in the vocabulary.
    eos_id: id of the end of sequence, for inputs and targets.
    inputs_length, targets_length: I and T; by default what a full window needs.
      Packed documents need more, the shorter they are.
  """
  if not (length > 1 and 0 < density < 1 and mean_span >= 1):
    raise ConfigError(
      "expected length > 1, a density between 0 and 1 and mean_span >= 1, got "
      f"length={length}, density={density}, mean_span={mean_span}."
    )
  full = Spans.of(length, density, mean_span)
  most = min(num_sentinels, sentinel)
  if full.spans > most:
    raise ConfigError(
      f"length={length} needs {full.spans} sentinels, but there are only "
      f"{most}."
    )
  need = full.lengths(length)
  sizes = (inputs_length or need[0], targets_length or need[1])
  if sizes[0] < need[0] or sizes[1] < need[1]:
    raise ConfigError(
      f"length={length} gives inputs of {need[0]} tokens and targets of "
      f"{need[1]}, which do not fit into inputs_length={sizes[0]} and "
      f"targets_length={sizes[1]}."
    )

  def objective(ids: np.ndarray, u: np.ndarray) -> Pair | None:
    noise, spans = Spans.of(len(ids), density, mean_span)
    if not noise:
      return None
    removed = _random_lengths(noise, spans, u[: noise - 1])
    kept = _random_lengths(len(ids) - noise, spans, u[noise - 1 : len(ids) - 2])
    # Kept and removed runs alternate and the first run is kept, so span i
    # starts after i + 1 kept runs and i removed ones.
    number = np.arange(spans)
    starts = np.cumsum(kept) + np.cumsum(removed) - removed
    span_of = np.repeat(number, removed)
    noise_at = np.arange(noise) + np.cumsum(kept)[span_of]
    is_kept = np.ones(len(ids), bool)
    is_kept[noise_at] = False
    is_kept[starts] = True  # The place of the sentinel.
    marked = ids.copy()
    marked[starts] = sentinel - number
    inputs = np.empty(len(ids) - noise + spans + 1, ids.dtype)
    inputs[:-1], inputs[-1] = marked[is_kept], eos_id
    targets = np.empty(noise + spans + 1, ids.dtype)
    targets[np.arange(noise) + span_of + 1] = ids[noise_at]
    targets[np.cumsum(removed) - removed + number] = sentinel - number
    targets[-1] = eos_id
    return inputs, targets

  op = _objective(objective, "span_corruption", length, sizes)
  return op._replace(
    vocab_sizes=dict.fromkeys(("inputs", "targets"), sentinel + 1)
  )


def _random_lengths(total: int, runs: int, u: np.ndarray) -> np.ndarray:
  """Returns lengths [runs] from 1 of sum `total`, all equally likely.

  `u` has a uniform number for each place to cut, [total - 1].
  """
  ends = np.sort(np.argsort(u, kind="stable")[: runs - 1] + 1)
  return np.diff(ends, prepend=0, append=total)


@registry.register("prefix_lm")
def prefix_lm(length: int, eos_id: int = 1) -> Op:
  """Makes the prefix-LM objective: predict the rest of a text.

  `inputs` are the beginning of the text; `targets` are the rest and the end of
  sequence. The cut is uniformly random, with a token on each side.

  Args:
    length: L, tokens per window, must match the source; also I and T.
    eos_id: id of the end of sequence, for the targets.
  """
  check_number("argument 'length'", length, least=2, whole=True)

  def objective(ids: np.ndarray, u: np.ndarray) -> Pair | None:
    if len(ids) < 2:
      return None
    # u < 1, so in float64 the product is below len(ids) - 1.
    at = 1 + int(float(u[0]) * (len(ids) - 1))
    return ids[:at], np.append(ids[at:], eos_id)

  return _objective(objective, "prefix_lm", length, (length, length))


def _objective(
  objective: Objective, name: str, length: int, sizes: tuple[int, int]
) -> Op:
  """Makes an op that applies an objective to each document of a window.

  Args:
    length: L.
    sizes: I and T.
  """

  def window(ids, segments, u):
    """Returns ids, segments and positions of inputs, then of targets."""
    result = [np.zeros((3, size), np.int32) for size in sizes]
    used, number = [0, 0], 0  # Tokens of the results, and documents, so far.
    for segment in range(1, int(segments.max(initial=0)) + 1):
      at = segments == segment
      inputs_targets = objective(ids[at], u[at])
      if inputs_targets is None:
        continue
      number += 1
      for k, part in enumerate(inputs_targets):
        stop = used[k] + len(part)
        if stop > sizes[k]:
          which = ("inputs", "targets")[k]
          raise DataError(
            f"preprocessing op {name!r}: the documents of a window need more "
            f"than {sizes[k]} {which}; give a larger {which}_length."
          )
        slot = result[k][:, used[k] : stop]
        slot[0], slot[1], slot[2] = part, number, np.arange(len(part))
        used[k] = stop
    return [*result[0], *result[1]]

  def all_windows(ids, segments, u):
    if ids.shape[-1] != length:
      raise ConfigError(
        f"preprocessing op {name!r} got windows of {ids.shape[-1]} tokens, but "
        f"length={length}."
      )
    if ids.ndim == 1:
      return window(ids, segments, u)
    windows = [window(*each) for each in zip(ids, segments, u)]
    return [np.stack(arrays) for arrays in zip(*windows)]

  suffixes = ("", "_segments", "_positions")
  names = [part + end for part in ("inputs", "targets") for end in suffixes]

  def fn(features: dict[str, Any], u: Any) -> dict[str, Any]:
    ids = features["targets"]
    packed = "segments" in features
    arguments = [ids, _segments(features), u]
    if xp.on_host(ids):
      results = all_windows(*arguments)
    else:
      kinds = [tf.int32] * len(names)
      results = tf.numpy_function(all_windows, arguments, kinds)
      shapes = [(size,) for size in sizes for _ in range(3)]
      results = list(map(tf.ensure_shape, results, shapes))
    new = {n: x for n, x in zip(names, results) if packed or "_" not in n}
    rest = {n: x for n, x in features.items() if n not in _WINDOW_FEATURES}
    return {**rest, **new}

  return Op(
    fn,
    draws=length,
    batched=True,
    reads=("targets",),
    origins=dict.fromkeys(names) | {"inputs": "targets", "targets": "targets"},
  )


def _segments(features: dict[str, Any]) -> Any:
  """Returns the document number of each target, from 1; 0 is padding."""
  if "segments" in features:
    return features["segments"]
  if "loss_mask" in features:
    return xp.cast(features["loss_mask"], "int32")
  return xp.cast(features["targets"] == features["targets"], "int32")
