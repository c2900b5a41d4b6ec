"""Class names: reading them, writing prompts with them, comparing them.

A source that numbers classes itself, such as image_folder, may number them
differently for training and for an evaluation. The metrics would then be wrong
without an error, so `check_same` compares the names of both.
"""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, did_you_mean
from bigtrain.data.formats import files
from bigtrain.inputs import checks, sources
from bigtrain.pp import parse, registry
from bigtrain.pp.registry import Op

# Class names that a message lists.
_NUM_SHOWN = 5


def read(
  names: Sequence[str] | str, key: str, kind: str = "class_names"
) -> list[str]:
  """Returns class names, or prompts, without surrounding spaces.

  Args:
    names: a list, the name of a published set, or a text file with one per
      line.
    kind: "class_names" or "prompts": the file beside this module that contains
      the published sets.
  """
  if isinstance(names, str):
    published = pathlib.Path(__file__).with_name(f"{kind}.json")
    known = json.loads(published.read_text(encoding="utf-8"))
    path = files.local_path(names, key)
    if names in known:
      names = known[names]["names"]
    elif os.path.isfile(path):
      with open(path, encoding="utf-8") as file:
        names = file.read().removesuffix("\n").split("\n")
    else:
      hint = did_you_mean(names, known)
      raise ConfigError(f"{key}: no such file: {path}.{hint}")
  for i, name in enumerate(names):
    if not isinstance(name, str) or not name.strip():
      raise ConfigError(f"{key}: class {i}: expected a name, got {name!r}.")
  if not names:
    raise ConfigError(f"{key}: expected at least one name, got none.")
  return [name.strip() for name in names]


def fill(prompt: str, names: Sequence[str], key: str) -> list[str]:
  """Returns a prompt such as "a photo of a {}." for each class name."""
  if prompt.count("{}") != 1:
    raise ConfigError(
      f"{key}: expected a prompt with one {{}} for the name, got {prompt!r}."
    )
  return [prompt.replace("{}", name) for name in names]


def tokens(
  texts: Sequence[str],
  pp: str,
  pp_modules: Sequence[str],
  vocab_sizes: Mapping[str, int],
  *,
  key: str,
) -> np.ndarray:
  """Returns the `labels` that the ops `pp` make of texts: [texts, ...]."""
  op = registry.compose(parse.parse(pp, pp_modules))
  checks.check_sizes(op.vocab_sizes, vocab_sizes, key)
  if op.draws or op.tensorflow:
    raise ConfigError(
      f"{key}: expected text ops without random numbers, got {pp!r}."
    )
  labels = []
  for text in texts:
    try:
      features = op.fn({"text": text}, np.zeros(0, np.float32))
    except DataError as e:
      raise ConfigError(f"{key}: {text!r}: {e}") from e
    if "labels" not in features:
      raise ConfigError(f"{key}: the ops make no 'labels': {pp!r}.")
    labels.append(np.asarray(features["labels"]))
  return np.stack(labels)


def of_feature(
  ops: Sequence[Op], source_names: Mapping[str, Sequence[str]], feature: str
) -> list[str] | None:
  """Returns the class names of a feature after the ops; None if unknown.

  Args:
    source_names: {feature of the source: its class names}.
  """
  # From the last op back to the source, to the feature that held the classes.
  for op in reversed(ops):
    if op.origins is None:  # An op of the user's does not say what it makes.
      return None
    if feature not in op.origins:  # The op leaves the feature as it is.
      continue
    if feature in op.class_names:
      return list(op.class_names[feature])
    if len(op.reads) != 1:
      return None
    (feature,) = op.reads
  names = source_names.get(feature)
  return None if names is None else list(names)


def of_source(
  data: Mapping[str, Any],
  pp: str,
  pp_modules: Sequence[str],
  feature: str,
  key: str,
) -> list[str] | None:
  """Like `of_feature`, for a source in the config, which is not opened."""
  module, arguments = sources.find_source(data, f"{key}.data")
  read_names: Any = getattr(module.Source, "read_class_names", lambda **_: {})
  with sources.at(f"{key}.data"):
    source_names = read_names(**arguments)
  ops = sources.parse_ops(pp, pp_modules, f"{key}.pp")
  return of_feature(ops, source_names, feature)


def check_order(names: Sequence[str], own: Sequence[str], key: str) -> None:
  """Checks that a user's names are in the same order as the data's.

  The names may differ: "Egyptian Mau", or a longer description, can stand for
  the class that the data call "egyptian_mau". But the same names in a different
  order are a mistake.
  """
  if len(names) != len(own):
    raise ConfigError(f"{key}: {len(names)} names for {len(own)} classes.")
  ours = [_normalized(name) for name in names]
  theirs = [_normalized(name) for name in own]
  if ours != theirs and sorted(ours) == sorted(theirs):
    i = [a == b for a, b in zip(ours, theirs)].index(False)
    raise ConfigError(
      f"{key}: class {i} is {names[i]!r} here and {own[i]!r} in the data."
    )


def _normalized(name: str) -> str:
  return name.lower().replace("_", " ")


def check_same(names: Sequence[str], training: Sequence[str], key: str) -> None:
  """Checks that class numbers mean the same in an evaluation as in training."""
  if list(names) == list(training):
    return
  sides = {
    "only config.input has": sorted({*training} - {*names}),
    f"only {key} has": sorted({*names} - {*training}),
  }
  parts = [f"{side} {_listed(only)}" for side, only in sides.items() if only]
  if not parts:
    parts = [f"{key} has {len(names)} names, config.input {len(training)}"]
    for i, (own, other) in enumerate(zip(names, training)):
      if own != other:
        parts = [f"class {i} is {own!r} here and {other!r} there"]
        break
  raise ConfigError(
    f"{key}.data: its classes differ from the classes of config.input: "
    f"{'; '.join(parts)}. The same number would mean different classes. Give "
    "both the same classes (for image_folder: data.classes, a file with their "
    f"names), or set {key}.trust_class_numbers=True if the numbers agree and "
    "only the names differ."
  )


def _listed(names: Sequence[str]) -> str:
  shown = ", ".join(map(repr, names[:_NUM_SHOWN]))
  more = len(names) - _NUM_SHOWN
  return f"{shown} and {more} more" if more > 0 else shown
