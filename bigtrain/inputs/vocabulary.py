"""Compares the tokenizers of an input with that of config.model_init.

A model knows the ids of the tokenizer it was trained with. The tokenizer of a
later run may add tokens after these, but must not change their ids.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.inputs.engine import Part
from bigtrain.pp import registry
from bigtrain.text import tokenizers

# (Tokenizer.name, fingerprint).
Used = tuple[str, str]


class NewTokens(NamedTuple):
  """The tokens [first, stop) that the tokenizer of model_init lacks."""

  first: int
  stop: int
  old: tokenizers.Tokenizer
  new: tokenizers.Tokenizer

  def pieces(self) -> list[list[int]]:
    """The ids that the old tokenizer makes of each new token's text."""
    return [
      self.old.encode(self.new.spell([i])).tolist()
      for i in range(self.first, self.stop)
    ]


def used_by(parts: Iterable[Part]) -> dict[str, Used]:
  """Returns {location in the config: tokenizer} of sources and ops."""
  result = {}
  for part in parts:
    of_source = getattr(part.source, "tokenizer", None)
    if used := registry.tokenizer(part.ops) or of_source:
      result[part.key] = used
  return result


def check(used: dict[str, Used], folder: str) -> None:
  """Refuses tokenizers that do not know the tokens of a published model."""
  own = tokenizers.get(folder)
  for key, (name, fingerprint) in used.items():
    if fingerprint == own.fingerprint():
      continue
    tokenizer = tokenizers.get(name)
    if not tokenizer.extends(own):
      raise ConfigError(
        f"{key}: its tokenizer {name!r} ({tokenizer.vocab_size} ids) is not "
        f"that of config.model_init={folder!r} ({own.vocab_size} ids), with "
        "which the model was trained. Use the folder's tokenizer, which may "
        "have new_tokens, or put yours into the folder."
      )


def of_folder(folder: str) -> Used | None:
  """The tokenizer of a published model, or None."""
  if not tokenizers.is_folder(folder):
    return None
  return folder, tokenizers.get(folder).fingerprint()


def check_evaluations(config: settings.Config, new: NewTokens) -> None:
  """Refuses evaluations whose tokenizer is the old one, without new tokens."""
  path, _ = tokenizers.parse(new.new.name)
  for key, spec in settings.flatten(
    config.to_dict().get("evals") or {}
  ).items():
    if key.endswith(".tokenizer") and spec == path and new.old.name == path:
      raise ConfigError(
        f"config.evals.{key}={spec!r}: expected that of the training, with its "
        f"new tokens: {new.new.name}."
      )


def new_tokens(used: Sequence[Used], own: Used | None) -> NewTokens | None:
  """Returns the new tokens of an input, or None.

  Args:
    used: the tokenizers of the input.
    own: the tokenizer of model_init, if known. Without it, the new tokens are
      those that the config adds to a tokenizer's file.
  """
  old_tokenizer = None
  if own is not None:
    used = [each for each in used if each[1] != own[1]]
    with contextlib.suppress(ConfigError):  # Its file may be gone.
      old_tokenizer = tokenizers.get(own[0])
  if old_tokenizer is None:
    used = [each for each in used if any(tokenizers.parse(each[0])[1])]
  if not used:
    return None
  by_size = sorted(
    (tokenizers.get(name) for name, _ in used), key=lambda x: x.vocab_size
  )
  for small, large in zip(by_size, by_size[1:]):
    if not large.extends(small):
      raise ConfigError(
        f"tokenizers {small.name!r} and {large.name!r}: their new tokens have "
        "the same ids; give all sources the same list."
      )
  new = by_size[-1]
  old = old_tokenizer or tokenizers.get(tokenizers.parse(new.name)[0])
  if new.vocab_size <= old.vocab_size:
    return None
  return NewTokens(old.vocab_size, new.vocab_size, old, new)
