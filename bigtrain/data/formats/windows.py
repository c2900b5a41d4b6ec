"""Windows of a fixed length over long rows of token ids.

What a window is made of are pieces: runs of neighbouring tokens that are to
be predicted, each with the token before it as its first context. A plan says
which pieces window i has; `fill` reads them. Every plan predicts each token
that has a context exactly once.

Legend: B windows of a batch, L tokens of a window, N pieces.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from absl import logging

from bigtrain import hashing
from bigtrain.data.formats import files, packing, slices
from bigtrain.settings import ConfigError, did_you_mean


class Pieces(NamedTuple):
  """What the windows of a batch are made of; arrays [N].

  Attributes:
    row: the window of the batch, ascending.
    at: where in the window it begins.
    shard: which array of tokens.
    begin: its first predicted token there.
    size: how many tokens it predicts.
    fresh: it begins a document, so that its first context is the start token
      and not the token before it.
  """

  row: np.ndarray
  at: np.ndarray
  shard: np.ndarray
  begin: np.ndarray
  size: np.ndarray
  fresh: np.ndarray


class Plan(Protocol):
  """Says what windows are made of."""

  def __len__(self) -> int:
    """How many windows there are."""

  def pieces(self, index: np.ndarray) -> Pieces:
    """The pieces of windows int64 [B]."""


class Stream:
  """Windows one after the other, whatever documents are in them.

  Needs no memory for each window, so it goes on for trillions of tokens.

  Args:
    sizes: tokens of each shard; no window crosses from one to the next.
    length: of a window.
    stride: tokens from the beginning of a window to that of the next.
    fresh: each shard's first token is predicted, from the start token. Else it
      is only context.
    drop_last: leave out windows that the end of a shard cuts short.
  """

  def __init__(
    self,
    sizes: Sequence[int],
    length: int,
    *,
    stride: int,
    fresh: bool,
    drop_last: bool,
  ):
    self._length, self._stride, self._fresh = length, stride, fresh
    self._first = 0 if fresh else 1
    self._sizes = np.asarray(sizes, np.int64)
    predicted = np.maximum(self._sizes - self._first, 0)
    # The last window is the first one that reaches the end.
    beyond = np.maximum(predicted - length, 0)
    if drop_last:
      counts = np.where(predicted >= length, beyond // stride + 1, 0)
    else:
      counts = np.where(predicted > 0, -(-beyond // stride) + 1, 0)
    self._windows = files.Shards(counts.tolist())

  def __len__(self) -> int:
    return len(self._windows)

  def pieces(self, index: np.ndarray) -> Pieces:
    """One piece for each window."""
    shard, number = self._windows.locate(index)
    begin = self._first + number * self._stride
    size = np.minimum(self._length, self._sizes[shard] - begin)
    fresh = (begin == 0) & self._fresh
    rows = np.arange(len(index))
    return Pieces(rows, 0 * rows, shard, begin, size, fresh)


class Documents:
  """Windows made of documents, which are cut where they are too long.

  Args:
    starts: for each shard, where its documents begin, int64, ascending, and
      last the number of its tokens.
    length: of a window.
    fresh: as in Stream, of each document.
    packed: several documents share a window where they fit, see
      packing.first_fit. Else each window is of one document.
  """

  def __init__(
    self,
    starts: Sequence[np.ndarray],
    length: int,
    *,
    fresh: bool,
    packed: bool,
  ):
    first = 0 if fresh else 1
    sizes = [np.maximum(np.diff(s) - first, 0) for s in starts]
    self._shards = files.Shards([int(s[-1]) for s in starts])
    before = np.cumsum([0] + [int(s[-1]) for s in starts])[:-1]
    begins = [s[:-1] + first + at for s, at in zip(starts, before)]
    size, begin = np.concatenate(sizes), np.concatenate(begins)
    counts = -(-size // length)
    number = np.arange(counts.sum()) - np.repeat(
      np.cumsum(counts) - counts, counts
    )
    self._begin = np.repeat(begin, counts) + number * length
    left = np.repeat(size, counts) - number * length
    self._size = np.minimum(left, length).astype(np.int32)
    self._fresh = (number == 0) & fresh
    if packed:
      items, self._first = _shuffled(*packing.first_fit(self._size, length))
      self._begin, self._size = self._begin[items], self._size[items]
      self._fresh = self._fresh[items]
      logging.info(
        "Packing: %d documents in %d windows of %d tokens, %.1f%% full.",
        np.count_nonzero(size),
        len(self),
        length,
        100 * size.sum() / max(1, len(self) * length),
      )
    else:
      self._first = np.arange(len(self._size) + 1)

  def __len__(self) -> int:
    return len(self._first) - 1

  def pieces(self, index: np.ndarray) -> Pieces:
    """The pieces in the order of the documents."""
    first, stop = self._first[index], self._first[np.asarray(index) + 1]
    counts = stop - first
    row = np.repeat(np.arange(len(counts)), counts)
    own = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    item = np.repeat(first, counts) + own
    size = self._size[item].astype(np.int64)
    # Sums of sizes before a piece, less those before its window's first.
    ends = np.cumsum(size)
    at = ends - size
    at -= np.repeat(at[np.cumsum(counts) - counts], counts)
    shard, begin = self._shards.locate(self._begin[item])
    return Pieces(row, at, shard, begin, size, self._fresh[item])


def _shuffled(
  items: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """The same bins in an order that is always the same.

  Those that were filled first have the longest documents, so that a slice of
  the windows would be of other texts than the rest.
  """
  number = len(first) - 1
  bins = hashing.permute(np.arange(number), number, seed=0)
  counts = np.diff(first)[bins]
  ends = np.cumsum(counts)
  moved = np.repeat(first[bins] - (ends - counts), counts)
  return items[moved + np.arange(len(items))], np.append(0, ends)


class Masked:
  """Windows of a stream, whose pieces end where documents do.

  Args:
    stream: the windows.
    starts: as in Documents.
    fresh: as in Stream. If not, the first token of a document, whose only
      context would be another document, is not predicted.
  """

  def __init__(
    self, stream: Stream, starts: Sequence[np.ndarray], *, fresh: bool
  ):
    self._stream, self._starts, self._fresh = stream, starts, fresh

  def __len__(self) -> int:
    return len(self._stream)

  def pieces(self, index: np.ndarray) -> Pieces:
    """Each window's piece, cut at the documents that begin in it."""
    found = []
    skipped = 0 if self._fresh else 1
    whole = self._stream.pieces(index)
    for row, _, shard, begin, size, fresh in zip(*(f.tolist() for f in whole)):
      starts = self._starts[shard]
      span = np.searchsorted(starts, [begin, begin + size], side="left")
      inside = starts[span[0] : span[1]]
      cuts = [begin, *inside[inside > begin].tolist(), begin + size]
      heads = set(inside.tolist())
      for start, stop in zip(cuts[:-1], cuts[1:]):
        head = start in heads
        own = start + skipped if head else start
        if own < stop:
          new = fresh or (head and self._fresh)
          found.append((row, own - begin, shard, own, stop - own, new))
    columns = np.asarray(found, np.int64).reshape(-1, 6).T
    row_, at, shard_, begin_, size_, fresh_ = columns
    return Pieces(row_, at, shard_, begin_, size_, fresh_.astype(bool))


def fill(
  pieces: Pieces,
  batch_size: int,
  length: int,
  tokens_of: Callable[[int], np.ndarray],
  *,
  start_id: int | None,
  shift: int = 0,
  segments: bool = False,
) -> dict[str, np.ndarray]:
  """Reads the tokens of a batch of windows.

  Args:
    pieces: what the windows are made of.
    batch_size: number of windows, B.
    length: of a window, L.
    tokens_of: the array of a shard's tokens.
    start_id: context of the first token of a document.
    shift: added to the ids.
    segments: also give `segments` and `positions`.

  Returns:
    `tokens` and `targets` int32 [B, L], 0 where there is nothing;
    `loss_mask` float32 [B, L], 1 where there is a target; `segments` int32
    [B, L], pieces counted from 1, 0 where there is nothing, and `positions`
    int32 [B, L], from 0 in each piece.
  """
  shape = batch_size, length
  tokens, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
  mask = np.zeros(shape, np.float32)
  batch = {"tokens": tokens, "targets": targets, "loss_mask": mask}
  if segments:
    number, position = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    batch |= {"segments": number, "positions": position}
    count = np.arange(length, dtype=np.int32)
  last_row, own = -1, 0
  rows = zip(*(field.tolist() for field in pieces))
  for row, at, shard, begin, size, fresh in rows:
    data = tokens_of(shard)
    span = slice(at, at + size)
    targets[row, span] = data[begin : begin + size]
    if fresh:
      tokens[row, at + 1 : at + size] = data[begin : begin + size - 1]
    else:
      tokens[row, span] = data[begin - 1 : begin - 1 + size]
    if shift:
      targets[row, span] += shift
      tokens[row, span] += shift
    if fresh:
      tokens[row, at] = start_id
    mask[row, span] = 1
    if segments:
      own = own + 1 if row == last_row else 1
      last_row = row
      number[row, span] = own
      position[row, span] = count[:size]
  return batch


class Rows:
  """Which windows of a plan a source has: all, or a slice of them.

  Args:
    plan: of all windows.
    part: a slice such as "[:90%]", or "".
    then: another, of what that leaves.
    key: of the source, for messages.
  """

  def __init__(self, plan: Plan, part: str, then: str, key: str):
    start, stop = slices.bounds(part, len(plan), f"{key}: split")
    more = slices.bounds(then, stop - start, f"{key}: slice")
    self._start, self._length = start + more[0], more[1] - more[0]

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, index: np.ndarray) -> np.ndarray:
    return self._start + np.asarray(index, np.int64)


def check_options(
  key: str, length: int, stride: int | None, last: str, packing: bool
) -> None:
  """Raises ConfigError where the options of a source do not go together."""
  for name, value in (("length", length), ("stride", stride)):
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and value > 0):
      raise ConfigError(
        f"{key}: {name}={value!r}: expected a whole number of tokens, at "
        "least 1."
      )
  if last not in ("pad", "drop"):
    hint = did_you_mean(last, ("pad", "drop"))
    raise ConfigError(f"{key}: last={last!r}: expected 'pad' or 'drop'.{hint}")
  if packing and (stride is not None or last == "drop"):
    raise ConfigError(
      f"{key}: stride and last are of windows that are cut from a stream; "
      "packing=True plans its own."
    )


def spec(
  length: int, *, segments: bool, last: str, num_bytes: bool
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
  """Types and shapes of the features of a window; see `fill`.

  Args:
    length: of the window.
    segments: with `segments` and `positions`, which also tell what is padding.
    last: "drop" if there is no padding.
    num_bytes: with `num_bytes`.
  """
  ids, floats = np.dtype(np.int32), np.dtype(np.float32)
  found: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
    "tokens": (ids, (length,)),
    "targets": (ids, (length,)),
  }
  if segments:
    found |= {"segments": (ids, (length,)), "positions": (ids, (length,))}
  elif last == "pad":
    found["loss_mask"] = (floats, (length,))
  return {**found, "num_bytes": (floats, ())} if num_bytes else found
