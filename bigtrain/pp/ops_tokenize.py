"""The op that turns text into ids; see `tokenizers` and `ops_text`."""

import threading
from typing import Literal

import numpy as np
from absl import logging

from bigtrain.pp import registry, tokenizers
from bigtrain.pp.ops_text import BadText, excerpt, on_texts
from bigtrain.pp.registry import Op
from bigtrain.settings import ConfigError


@registry.register("tokenize")
def tokenize(
  model: str = "bytes",
  max_len: int = 64,
  eos: Literal["none", "yes", "sticky"] = "yes",
  bos: bool = False,
  pad: int | None = None,
  too_long: Literal["cut", "error"] = "cut",
  key: str = "text",
  key_result: str | None = "labels",
) -> Op:
  """Text as ids int32 [..., max_len]: (bos) ids (eos) padding.

  A text that is empty, blank, or without any token is an error, and so is one
  that is not UTF-8. What `eos`, `bos` and padding look like in a text is text.

  Args:
    model: of the tokenizer: "bytes" or a path, see `tokenizers.get`.
    max_len: ids of the result. What is beyond is cut off; the log says so, the
      first time and then ever more rarely.
    eos: whether an end follows the text: never; only if it was not cut
      ("yes"); or even then, in place of the last id that fits ("sticky").
    bos: whether a beginning precedes it.
    pad: the id that fills the rest, if not the tokenizer's own.
    too_long: whether a text that does not fit is cut or an error.
    key: the feature: a text, or a list of n of them, which gives [n, max_len].
    key_result: where the result goes; None for back to `key`.

  Raises:
    ConfigError: no such tokenizer, or it has no such token.
  """
  tokenizer = tokenizers.get(model)
  begin = [_special(tokenizer, "bos", tokenizer.bos_id)] if bos else []
  end = []
  if eos != "none":
    end = [_special(tokenizer, "eos", tokenizer.eos_id)]
  if pad is None:
    pad = _special(tokenizer, "pad", tokenizer.pad_id)
  if pad < 0:
    raise ConfigError(f"argument 'pad' is {pad}, expected at least 0.")
  if max_len <= len(begin) + len(end):
    raise ConfigError(
      f"argument 'max_len' is {max_len}, which leaves no room for text."
    )
  room = max_len - len(begin) - len(end)
  cuts = _Cuts(f"tokenize(max_len={max_len})")

  def ids_L(text: str) -> np.ndarray:
    ids = tokenizer.encode(text) if text.strip() else np.empty(0, np.int32)
    if not ids.size:
      raise BadText(
        f"the text {excerpt(text)} has no token" if text else "it is empty"
      )
    if (ids == pad).any():
      raise BadText(
        f"{excerpt(text)} has the id {pad}, which is padding; the argument "
        "pad takes another one"
      )
    if len(ids) > room:
      told = f"{excerpt(text)} of {len(ids)} tokens has room for {room}"
      if too_long == "error":
        raise BadText(told)
      cuts.note(told)
      if eos == "sticky":
        ids = ids[:room]
    result = np.full(max_len, pad, np.int32)
    row = [*begin, *ids.tolist(), *end][:max_len]
    result[: len(row)] = row
    return result

  result = key if key_result is None else key_result
  op = on_texts(ids_L, "tokenize", key, result, "int32", (max_len,))
  size = max(tokenizer.vocab_size, pad + 1)
  return op._replace(
    vocab_sizes={result: size}, fingerprints={model: tokenizer.fingerprint()}
  )


def _special(
  tokenizer: tokenizers.Tokenizer, kind: str, found: int | None
) -> int:
  if found is None:
    instead = {
      "pad": "give pad=, an id that texts never have",
      "bos": "leave bos out",
      "eos": "give eos='none'",
    }
    raise ConfigError(
      f"the tokenizer {tokenizer.name!r} has no {kind} token; {instead[kind]}."
    )
  return found


class _Cuts:
  """Counts texts that were cut, and logs the 1st, the 10th, the 100th, ..."""

  def __init__(self, name: str):
    self._name = name
    self._lock = threading.Lock()
    self._count = 0
    self._next = 1

  def note(self, told: str) -> None:
    """One more; `told` describes it."""
    with self._lock:
      self._count += 1
      due = self._count == self._next
      self._next *= 10 if due else 1
    if due:
      logging.warning(
        "%s cuts what is too long: %s (%d so far).",
        self._name,
        told,
        self._count,
      )
