"""The op that tokenizes text, built on `tokenizers` and `ops_text`."""

import itertools
from typing import Any, Literal

import numpy as np
from absl import logging

from bigtrain.config.errors import ConfigError, check_number
from bigtrain.pp import registry
from bigtrain.pp.ops_text import BadText, excerpt, on_texts
from bigtrain.pp.registry import Op
from bigtrain.text import tokenizers


@registry.register("tokenize")
def tokenize(
  model: str | dict[str, Any] = "bytes",
  max_len: int = 64,
  eos: Literal["none", "yes", "sticky"] = "yes",
  bos: bool = False,
  pad: int | None = None,
  too_long: Literal["cut", "error"] = "cut",
  key: str = "text",
  key_result: str | None = "labels",
) -> Op:
  """Converts text to ids, int32 [..., max_len]: bos, the text, eos, padding.

  A text that is empty, blank, without tokens, or not UTF-8 is an error. Special
  tokens that are spelled out in a text, such as "</s>", are ordinary text.

  Args:
    model: "bytes", the path of a SentencePiece model, a tokenizer.json or a
      folder with one; or dict(path=..., new_tokens=[...]).
    max_len: length of the result. Longer texts are cut, with a warning.
    eos: end of sequence: "none"; "yes", unless the text was cut; or "sticky",
      always, if necessary in place of the last id that fits.
    bos: whether to put a beginning of sequence before the text.
    pad: id of the padding, by default the tokenizer's; no text has the id -1.
    too_long: whether to cut a text that does not fit, or to raise an error.
    key: name of the feature: a text, or a list of texts.
    key_result: name of the result; None for `key`.
  """
  tokenizer = tokenizers.get(model)
  begin = [_special(tokenizer, "bos", tokenizer.bos_id)] if bos else []
  end = []
  if eos != "none":
    end = [_special(tokenizer, "eos", tokenizer.eos_id)]
  if pad is None:
    pad = _special(tokenizer, "pad", tokenizer.pad_id)
  check_number("argument 'pad'", pad, least=-1, whole=True)
  if max_len <= len(begin) + len(end):
    raise ConfigError(
      f"argument 'max_len' is {max_len}, which leaves no room for text; "
      f"expected at least {len(begin) + len(end) + 1}."
    )
  room = max_len - len(begin) - len(end)
  cuts = itertools.count(1)  # Thread-safe.

  def ids_L(text: str) -> np.ndarray:
    ids = tokenizer.encode(text) if text.strip() else np.empty(0, np.int32)
    if not ids.size:
      raise BadText(
        f"the text {excerpt(text)} has no token" if text else "it is empty"
      )
    if (ids == pad).any():
      raise BadText(
        f"{excerpt(text)} contains the id {pad}, which is padding; give "
        "another one as argument pad"
      )
    if len(ids) > room:
      message = f"{excerpt(text)} of {len(ids)} tokens has room for {room}"
      if too_long == "error":
        raise BadText(message)
      number = next(cuts)
      if str(number).rstrip("0") == "1":  # The 1st, the 10th, the 100th, ...
        logging.warning(
          "tokenize(max_len=%d) cuts a text that is too long: %s (%d so far).",
          max_len,
          message,
          number,
        )
      if eos == "sticky":
        ids = ids[:room]
    whole = [*begin, *ids.tolist(), *end][:max_len]
    padded = np.full(max_len, pad, np.int32)
    padded[: len(whole)] = whole
    return padded

  result = key if key_result is None else key_result
  op = on_texts(ids_L, "tokenize", key, result, "int32", (max_len,))
  size = max(tokenizer.vocab_size, pad + 1)
  return op._replace(
    vocab_sizes={result: size},
    fingerprints={tokenizer.name: tokenizer.fingerprint()},
  )


def _special(
  tokenizer: tokenizers.Tokenizer, kind: str, token_id: int | None
) -> int:
  if token_id is None:
    instead = {
      "pad": "give pad=, an id that texts never contain",
      "bos": "leave bos out",
      "eos": "give eos='none'",
    }
    raise ConfigError(
      f"the tokenizer {tokenizer.name!r} has no {kind} token; {instead[kind]}."
    )
  return token_id
