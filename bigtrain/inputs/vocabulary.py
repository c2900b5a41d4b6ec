"""Vocabulary sizes of an input, and their check against the model."""

from collections.abc import Mapping
from typing import Any

from bigtrain.pp import registry
from bigtrain.settings import ConfigError


def sizes(op: registry.Op, source: Any) -> dict[str, int]:
  """Returns {feature: largest id + 1}, as far as ops or the source know it.

  Args:
    op: composition of the preprocessing ops.
    source: a Source, or its class: some know their ids before they are opened.
  """
  return {**getattr(source, "vocab_sizes", {}), **op.vocab_sizes}


def check(
  input_sizes: Mapping[str, int], model_sizes: Mapping[str, int], path: str
) -> None:
  """Checks before anything compiles that the model has an embedding per id.

  On a device, looking up an id beyond the vocabulary is not an error: the
  result is NaN or the embedding of another token.

  Args:
    input_sizes: {feature: largest id + 1} of an input.
    model_sizes: {feature: vocabulary size} of the model.
    path: location of the input in the config.

  Raises:
    ConfigError: an id of the input is beyond the model's vocabulary.
  """
  for name, size in input_sizes.items():
    if size > model_sizes.get(name, size):
      raise ConfigError(
        f"{path}: the ids of {name!r} go up to {size - 1}, but the model's "
        f"vocabulary has {model_sizes[name]} entries: give config.model a "
        f"vocabulary of at least {size}, or use the model's own tokenizer."
      )
