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
    names: see pp.class_names.read; the option `class_names` at `path`.
    prompts: texts with a {} for the name.
    pp: see `tokens`; the option `pp_text` at `path`.
    context: context of the evaluator.
    path: location of the entry in the config.
    prompt_key: the entry's key of the prompts.

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
    texts: texts, such as the result of pp.class_names.fill.
    pp: ops from the feature "text" to `feature`, without random numbers, such
      as "tokenize(...)".
    context: context of the evaluator.
    key: key of `pp` in the config, for error messages.
    feature: name of the feature with the tokens.

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
