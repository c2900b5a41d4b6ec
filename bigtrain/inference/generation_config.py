"""generation_config.json of a published model: how it generates by default.

`options` returns our options for the keys that we compute. A key that changes
the texts of transformers, and not ours, is named in a warning.
"""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

FILE = "generation_config.json"


class _Ignored(NamedTuple):
  """A key that is not computed."""

  neutral: tuple[Any, ...]  # Values with which it changes nothing.
  instead: str  # What is done instead, for the warning.


_PLAIN = "scores are not changed by it"
_SAMPLING = "tokens are drawn by temperature, top_k, top_p and min_p alone"
_ENDS = "a text ends with eos_token_id, or after the given number of tokens"
# Keys that change the texts of transformers whether it samples or not.
_IGNORED: Mapping[str, _Ignored] = {
  "num_beams": _Ignored(
    (1,), "there is no search unless the option num_beams is given"
  ),
  "guidance_scale": _Ignored((1, 1.0), _PLAIN),
  "sequence_bias": _Ignored((), _PLAIN),
  "encoder_repetition_penalty": _Ignored((1.0,), _PLAIN),
  "encoder_no_repeat_ngram_size": _Ignored((0,), _PLAIN),
  "exponential_decay_length_penalty": _Ignored((), _PLAIN),
  "watermarking_config": _Ignored((), _PLAIN),
  "dola_layers": _Ignored((), "scores are those of the last layer"),
  "forced_bos_token_id": _Ignored((), "the first token is free"),
  "forced_eos_token_id": _Ignored((), "the last token is free"),
  "force_words_ids": _Ignored((), "no words are forced"),
  "constraints": _Ignored((), "no words are forced"),
  "token_healing": _Ignored((), "the prompt stays as it is"),
  "stop_strings": _Ignored((), _ENDS),
  "max_time": _Ignored((), _ENDS),
  "num_return_sequences": _Ignored((1,), "each prompt has one text"),
}
# Keys that only sampling reads.
_IGNORED_IN_SAMPLING: Mapping[str, _Ignored] = {
  "typical_p": _Ignored((1.0, 1), _SAMPLING),
  "epsilon_cutoff": _Ignored((0.0,), _SAMPLING),
  "eta_cutoff": _Ignored((0.0,), _SAMPLING),
  "top_h": _Ignored((), _SAMPLING),
}
# Keys that only decoding without sampling reads.
_IGNORED_OTHERWISE: Mapping[str, _Ignored] = {
  "penalty_alpha": _Ignored((0.0,), "the most likely token is taken"),
}


def options(
  path: str, given: Mapping[str, Any], end_ids: Any, task: str
) -> dict[str, Any]:
  """Our options of generation for a file's values.

  Args:
    path: the file, for warnings.
    given: its values.
    end_ids: the token or tokens that end a text in files that name none.
    task: "seq2seq", or another one for a decoder.
  """
  result: dict[str, Any] = {}
  end_ids = given.get("eos_token_id", end_ids)
  if end_ids is not None:
    result["eos_id"] = end_ids
  for name in (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
  ):
    if given.get(name):
      result[name] = given[name]
  result |= _least_length(path, given, task)
  samples = bool(given.get("do_sample"))
  if samples:
    result["temperature"] = given.get("temperature") or 1.0
    # transformers omits values that equal its defaults; that of top_k is 50.
    result["top_k"] = 50
    names = ["top_k", "top_p"]
    if task == "language_modeling":
      names.append("min_p")
    for name in names:
      if given.get(name) is not None:
        result[name] = given[name]
  others = _IGNORED_IN_SAMPLING if samples else _IGNORED_OTHERWISE
  for name, key in {**_IGNORED, **others}.items():
    value = given.get(name)
    # An id may be 0, which is no other word for False.
    is_set = value is not None and value is not False and value not in ([], {})
    if is_set and value not in key.neutral:
      _warn(path, name, value, key.instead)
  return result


def _least_length(
  path: str, given: Mapping[str, Any], task: str
) -> dict[str, Any]:
  """The least number of new tokens, as an option."""
  min_new = given.get("min_new_tokens")
  min_length = given.get("min_length") or 0
  if not min_new and task == "seq2seq":
    # min_length also counts the token that starts the decoder.
    min_new = min_length - 1
  elif not min_new and min_length:
    instead = "it counts the prompt, and min_new_tokens does not"
    _warn(path, "min_length", min_length, instead)
  return {"min_new": min_new} if min_new and min_new > 0 else {}


def _warn(path: str, name: str, value: Any, instead: str) -> None:
  logging.warning("%s: %s=%r is ignored; %s.", path, name, value, instead)
