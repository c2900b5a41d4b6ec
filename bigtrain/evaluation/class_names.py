"""Names of classes as tokens, for evaluators that use them."""

from collections.abc import Sequence

import numpy as np

from bigtrain.evaluation import evaluations
from bigtrain.inputs import vocabulary
from bigtrain.pp import parse, registry
from bigtrain.pp.class_names import fill, read
from bigtrain.settings import ConfigError, DataError


def check(
  names: Sequence[str] | str,
  prompts: Sequence[str],
  pp: str,
  context: evaluations.Context,
  *,
  path: str,
  prompt_key: str,
) -> None:
  """Checks names, prompts and ops on the text of the first name.

  Args:
    prompts: texts with a {} for the name.

  Raises:
    ConfigError: see pp.class_names and `tokens`.
  """
  first = read(names, f"{path}.class_names")[:1]
  for prompt in prompts:
    texts = fill(prompt, first, f"{path}.{prompt_key}")
  tokens(texts, pp, context, key=f"{path}.pp_text")


def tokens(
  texts: Sequence[str],
  pp: str,
  context: evaluations.Context,
  *,
  key: str,
  feature: str = "labels",
) -> np.ndarray:
  """Tokenizes texts with the ops that tokenize captions.

  Args:
    pp: ops from the feature "text" to `feature`, without random numbers, such
      as "tokenize(...)".

  Returns:
    int32 [len(texts), L].

  Raises:
    ConfigError: the ops make no tokens, draw random numbers, need tensorflow,
      or cannot process a text.
  """
  op = registry.compose(parse.parse(pp, context.pp_modules))
  vocabulary.check(op.vocab_sizes, context.vocab_sizes, key)
  if op.draws or op.tensorflow:
    raise ConfigError(
      f"{key}: expected text ops without random numbers, got {pp!r}."
    )
  rows = []
  for text in texts:
    try:
      features = op.fn({"text": text}, np.zeros(0, np.float32))
    except DataError as e:
      raise ConfigError(f"{key}: {text!r}: {e}") from e
    if feature not in features:
      raise ConfigError(f"{key}: the ops make no {feature!r}: {pp!r}.")
    rows.append(np.asarray(features[feature], np.int32))
  return np.stack(rows)
