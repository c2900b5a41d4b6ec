"""Names of classes: of sources, in prompts, and as tokens.

A source that numbers its classes itself may number them unlike training. So
the names of both are compared, or an evaluation would be wrong without error.
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

# Number of names that a message lists.
_NUM_SHOWN = 5


def read(
  names: Sequence[str] | str, key: str, kind: str = "class_names"
) -> list[str]:
  """Names, or prompts (`kind`), of a list, a published set or a text file."""
  if isinstance(names, str):
    facts = pathlib.Path(__file__).with_name(f"{kind}.json")
    known = json.loads(facts.read_text(encoding="utf-8"))
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
  """Returns the tokens that `pp` makes of texts, [len(texts), ...]."""
  op = registry.compose(parse.parse(pp, pp_modules))
  checks.check_sizes(op.vocab_sizes, vocab_sizes, key)
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
    if "labels" not in features:
      raise ConfigError(f"{key}: the ops make no 'labels': {pp!r}.")
    rows.append(np.asarray(features["labels"]))
  return np.stack(rows)


def of_feature(
  ops: Sequence[Op], source_names: Mapping[str, Sequence[str]], feature: str
) -> list[str] | None:
  for op in reversed(ops):
    if op.origins is None:
      return None
    if feature not in op.origins:
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
  module, arguments = sources.find_source(data, f"{key}.data")
  read_names: Any = getattr(module.Source, "read_class_names", lambda **_: {})
  with sources.at(f"{key}.data"):
    source_names = read_names(**arguments)
  ops = sources.parse_ops(pp, pp_modules, f"{key}.pp")
  return of_feature(ops, source_names, feature)


def check_order(names: Sequence[str], own: Sequence[str], key: str) -> None:
  """Checks names for classes that the data calls `own`, "egyptian_mau"."""
  if len(names) != len(own):
    raise ConfigError(f"{key}: {len(names)} names for {len(own)} classes.")
  first, second = (
    [name.lower().replace("_", " ") for name in some] for some in (names, own)
  )
  if first != second and sorted(first) == sorted(second):
    i = [a == b for a, b in zip(first, second)].index(False)
    raise ConfigError(
      f"{key}: class {i} is {names[i]!r} here and {own[i]!r} in the data."
    )


def check_same(names: Sequence[str], training: Sequence[str], key: str) -> None:
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
    f"{'; '.join(parts)}. Class numbers then mean other classes. Give both "
    "the same classes (for image_folder: data.classes, a file with their "
    f"names), or set {key}.trust_class_numbers=True if the numbers hold and "
    "only the names differ."
  )


def _listed(names: Sequence[str]) -> str:
  shown = ", ".join(map(repr, names[:_NUM_SHOWN]))
  more = len(names) - _NUM_SHOWN
  return f"{shown} and {more} more" if more > 0 else shown
