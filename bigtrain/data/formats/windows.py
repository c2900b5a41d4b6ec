"""Cuts arrays of token ids into windows of a fixed length.

The arrays are called shards. A window consists of pieces, which are runs of
consecutive target tokens in one shard. The context of a piece's first target is
the token before it. A plan maps the number of a window to its pieces. There are
three plans:

- `Stream`: windows ignore where documents begin and end.
- `Masked`: the same windows, but no token has another document as context.
- `Documents`: windows of whole documents, one or several of them.

In every plan, each token that has a context is a target exactly once, unless
`stride` makes windows overlap. `fill` reads the tokens of the pieces.

Legend: B windows of a batch, L tokens of a window, N pieces.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from bigtrain.arrays import hashing
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.data.formats import files, packing, splits


class Pieces(NamedTuple):
  """The pieces of a batch of windows; arrays [N]."""

  row: np.ndarray  # Number of the window in the batch, ascending.
  at: np.ndarray  # Position of the piece in the window.
  shard: np.ndarray  # Number of the array of tokens.
  begin: np.ndarray  # Index of the first target in that array.
  size: np.ndarray  # Number of targets.
  fresh: np.ndarray  # Whether the first context is the start token.


class Stream:
  """Consecutive windows of shards that ignore document boundaries.

  If `fresh`, the first token of a shard is a target, with the start token as
  context. Otherwise it is only context.
  """

  def __init__(
    self,
    sizes: Sequence[int],
    length: int,
    stride: int,
    fresh: bool,
    *,
    drop_last: bool,
  ):
    self._length, self._stride, self._fresh = length, stride, fresh
    self._first = 0 if fresh else 1
    self._sizes = np.asarray(sizes, np.int64)
    predicted = np.maximum(self._sizes - self._first, 0)
    # The last window is the first one that reaches the shard's end.
    beyond = np.maximum(predicted - length, 0)
    if drop_last:
      counts = np.where(predicted >= length, beyond // stride + 1, 0)
    else:
      counts = np.where(predicted > 0, -(-beyond // stride) + 1, 0)
    self._windows = files.Shards(counts.tolist())

  def __len__(self) -> int:
    return len(self._windows)

  def pieces(self, index: np.ndarray) -> Pieces:
    shard, number = self._windows.locate(index)
    begin = self._first + number * self._stride
    size = np.minimum(self._length, self._sizes[shard] - begin)
    fresh = (begin == 0) & self._fresh
    row = np.arange(len(index))
    return Pieces(row, np.zeros_like(row), shard, begin, size, fresh)


class Documents:
  """Windows of whole documents; documents longer than a window are split.

  For each shard, `starts` has the starts of its documents, int64, ascending,
  followed by its number of tokens. If `packed`, documents may share a window.
  """

  def __init__(
    self,
    starts: Sequence[np.ndarray],
    length: int,
    *,
    fresh: bool,
    packed: bool,
  ):
    # Of each document: its number of targets, and where the first one is, in
    # all shards one after the other.
    first = 0 if fresh else 1
    shard_sizes = [int(each[-1]) for each in starts]
    self._shards = files.Shards(shard_sizes)
    shard_begins = np.cumsum([0, *shard_sizes])[:-1]
    size = np.concatenate(
      [np.maximum(np.diff(each) - first, 0) for each in starts]
    )
    begin = np.concatenate(
      [each[:-1] + first + at for each, at in zip(starts, shard_begins)]
    )
    # Of each piece of at most `length` targets: the same.
    counts = -(-size // length)
    number = packing.numbered(counts)
    self._begin = np.repeat(begin, counts) + number * length
    left = np.repeat(size, counts) - number * length
    self._size = np.minimum(left, length).astype(np.int32)
    self._fresh = (number == 0) & fresh
    # Window w has the pieces _first[w] to _first[w + 1] - 1.
    if packed:
      items, self._first = _shuffled(*packing.first_fit(self._size, length))
      self._begin, self._size = self._begin[items], self._size[items]
      self._fresh = self._fresh[items]
      percent = 100 * size.sum() / max(1, len(self) * length)
      logging.info(
        f"Packed {np.count_nonzero(size)} documents into {len(self)} windows "
        f"of {length} tokens, {percent:.1f}% full."
      )
    else:
      self._first = np.arange(len(self._size) + 1)

  def __len__(self) -> int:
    return len(self._first) - 1

  def pieces(self, index: np.ndarray) -> Pieces:
    first, stop = self._first[index], self._first[np.asarray(index) + 1]
    counts = stop - first
    row = np.repeat(np.arange(len(counts)), counts)
    item = np.repeat(first, counts) + packing.numbered(counts)
    size = self._size[item].astype(np.int64)
    # Subtract the sizes before each window's first piece.
    ends = np.cumsum(size)
    at = ends - size
    at -= np.repeat(at[np.cumsum(counts) - counts], counts)
    shard, begin = self._shards.locate(self._begin[item])
    return Pieces(row, at, shard, begin, size, self._fresh[item])


def _shuffled(
  items: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the bins in a fixed random order, so that a slice is a sample."""
  number = len(first) - 1
  bins = hashing.permute(np.arange(number), number, seed=0)
  counts = np.diff(first)[bins]
  order = np.repeat(first[bins], counts) + packing.numbered(counts)
  return items[order], np.append(0, np.cumsum(counts))


class Masked:
  """Windows of a stream, split into pieces at document boundaries.

  If not `fresh`, the first token of a document is not a target, because its
  only context would be another document.
  """

  def __init__(
    self, stream: Stream, starts: Sequence[np.ndarray], *, fresh: bool
  ):
    self._stream, self._starts, self._fresh = stream, starts, fresh

  def __len__(self) -> int:
    return len(self._stream)

  def pieces(self, index: np.ndarray) -> Pieces:
    pieces = []
    windows = self._stream.pieces(index)
    for row, _, shard, begin, size, fresh in zip(*_as_lists(windows)):
      # Documents that begin inside of the window cut it.
      starts = self._starts[shard]
      span = np.searchsorted(starts, [begin, begin + size], side="left")
      inside = starts[span[0] : span[1]]
      cuts = [begin, *inside[inside > begin].tolist(), begin + size]
      heads = set(inside.tolist())
      for start, stop in zip(cuts[:-1], cuts[1:]):
        is_head = start in heads
        if is_head and not self._fresh:
          start += 1
        if start < stop:
          is_fresh = fresh or (is_head and self._fresh)
          piece = row, start - begin, shard, start, stop - start, is_fresh
          pieces.append(piece)
    columns = np.asarray(pieces, np.int64).reshape(-1, len(Pieces._fields)).T
    result = Pieces(*columns)
    return result._replace(fresh=result.fresh.astype(bool))


def _as_lists(pieces: Pieces) -> list[list[int]]:
  return [field.tolist() for field in pieces]


# Maps window numbers, int64 [B], to pieces.
Plan = Stream | Documents | Masked


def fill(
  pieces: Pieces,
  shape: tuple[int, int],
  tokens_of: Callable[[int], np.ndarray],
  start_id: int,
  segments: bool,
  *,
  shift: int = 0,
) -> dict[str, np.ndarray]:
  """Reads the tokens of a batch of windows; see data/tokens.py for features.

  Args:
    shape: (B, L).
    tokens_of: returns the tokens of a shard.
    start_id: the start token, context of the first target of a fresh piece.
    segments: whether to add the features `segments` and `positions`.
    shift: number to add to the shards' contents to get ids.
  """
  tokens = np.zeros(shape, np.int32)
  targets = np.zeros(shape, np.int32)
  mask = np.zeros(shape, np.float32)
  batch = {"tokens": tokens, "targets": targets, "loss_mask": mask}
  if segments:
    segment_ids = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    batch |= {"segments": segment_ids, "positions": positions}
    count = np.arange(shape[1], dtype=np.int32)
  last_row, segment = -1, 0
  for row, at, shard, begin, size, fresh in zip(*_as_lists(pieces)):
    data = tokens_of(shard)
    span = slice(at, at + size)
    targets[row, span] = data[begin : begin + size]
    targets[row, span] += shift
    tokens[row, at + fresh : at + size] = data[
      begin - 1 + fresh : begin + size - 1
    ]
    tokens[row, span] += shift
    if fresh:
      tokens[row, at] = start_id
    mask[row, span] = 1
    if segments:
      segment = segment + 1 if row == last_row else 1
      last_row = row
      segment_ids[row, span] = segment
      positions[row, span] = count[:size]
  return batch


class Selected:
  """The windows of a plan that a source uses: slice `then` of slice `part`."""

  def __init__(self, plan: Plan, part: str, then: str, key: str):
    self._plan = plan
    start, stop = splits.bounds(part, len(plan), f"{key}: split")
    more = splits.bounds(then, stop - start, f"{key}: slice")
    self._start, self._length = start + more[0], more[1] - more[0]

  def __len__(self) -> int:
    return self._length

  def pieces(self, index: np.ndarray) -> Pieces:
    return self._plan.pieces(self._start + np.asarray(index, np.int64))


def check_options(
  key: str, length: int, stride: int | None, last: str, packing: bool
) -> None:
  check_number(f"{key}: length", length, least=1, whole=True)
  if stride is not None:
    check_number(f"{key}: stride", stride, least=1, whole=True)
  check_choice(f"{key}: last", last, ("pad", "drop"))
  if packing and (stride is not None or last == "drop"):
    raise ConfigError(f"{key}: packing=True excludes stride and last='drop'.")


def spec(
  length: int, *, segments: bool, last: str, num_bytes: bool
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
  ids, floats = np.dtype(np.int32), np.dtype(np.float32)
  features: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
    "tokens": (ids, (length,)),
    "targets": (ids, (length,)),
  }
  if segments:
    features |= {"segments": (ids, (length,)), "positions": (ids, (length,))}
  elif last == "pad":
    features["loss_mask"] = (floats, (length,))
  return {**features, "num_bytes": (floats, ())} if num_bytes else features
