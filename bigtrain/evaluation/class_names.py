"""Names of classes as text and as tokens, for evaluators that read them."""

import os
from collections.abc import Sequence

import numpy as np

from bigtrain.evaluation import evaluations
from bigtrain.inputs import pipeline
from bigtrain.pp import parse, registry
from bigtrain.settings import ConfigError, DataError


def read(names: Sequence[str] | str, key: str) -> list[str]:
  """The names, or those in a text file with one a line.

  Args:
    names: the names in the order of their class numbers, or a path.
    key: what the config calls them, for messages.

  Raises:
    ConfigError: no such file, none, one that is empty, or no strings.
  """
  if isinstance(names, str):
    path = os.path.expanduser(names)
    if not os.path.isfile(path):
      raise ConfigError(f"{key}: no such file: {path}.")
    with open(path, encoding="utf-8") as file:
      names = file.read().removesuffix("\n").split("\n")
  for number, name in enumerate(names):
    if not isinstance(name, str) or not name.strip():
      raise ConfigError(f"{key}: class {number} is {name!r}; expected a name.")
  if not names:
    raise ConfigError(f"{key}: there is no name.")
  return [name.strip() for name in names]


def fill(prompt: str, names: Sequence[str], key: str) -> list[str]:
  """The prompt with each name in place of its {}."""
  if prompt.count("{}") != 1:
    raise ConfigError(
      f"{key}: expected one {{}}, where the name goes, got {prompt!r}."
    )
  return [prompt.replace("{}", name) for name in names]


def check(
  names: Sequence[str] | str,
  prompts: Sequence[str],
  pp: str,
  context: evaluations.Context,
  *,
  path: str,
  prompt_key: str,
) -> None:
  """Checks what can be wrong with names, prompts and ops, by a single text.

  Args:
    names: see `read`.
    prompts: texts with a {} for the name.
    pp: see `tokens`, at `path`.pp_text.
    context: the evaluator's.
    path: of the entry in the config, where `class_names` are.
    prompt_key: what the entry calls the prompts.
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
  """Tokenizes texts by the ops that tokenize captions.

  Args:
    texts: such as what `fill` returns.
    pp: ops from "text" to `feature`, which draw nothing: "tokenize(...)".
    context: the evaluator's.
    key: of `pp` in the config, for messages.
    feature: where the ops leave the tokens.

  Returns:
    int32 [len(texts), L].

  Raises:
    ConfigError: ops that leave no tokens, draw random numbers or need
      tensorflow; a text that they cannot use.
  """
  op = registry.compose(parse.parse(pp, context.pp_modules))
  pipeline.check_vocab_sizes(op.vocab_sizes, context.vocab_sizes, key)
  if op.draws or op.tensorflow:
    raise ConfigError(
      f"{key}: expected ops that draw nothing and run on text, got {pp!r}."
    )
  rows = []
  for text in texts:
    try:
      features = op.fn({"text": text}, np.zeros(0, np.float32))
    except DataError as e:
      raise ConfigError(f"{key}: {text!r}: {e}") from e
    if feature not in features:
      raise ConfigError(f"{key}: the ops leave no {feature!r}: {pp!r}.")
    rows.append(np.asarray(features[feature], np.int32))
  return np.stack(rows)
