"""Compares the class numbers of training and of evaluations by their names.

A source that numbers its classes itself, such as a folder with one folder for
each class, gives other numbers to other classes. An evaluation on such numbers
would have a wrong accuracy and no error, so the names are compared before
anything compiles.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bigtrain.inputs import sources
from bigtrain.pp import dependencies
from bigtrain.settings import ConfigError

# Number of names that a message lists.
_NUM_SHOWN = 5


def of_source(
  data: Mapping[str, Any],
  pp: str,
  pp_modules: Sequence[str],
  features: Collection[str],
  key: str,
) -> dict[str, list[str]]:
  """Returns {feature: names of its classes by number}, as far as known.

  Raises:
    ConfigError: the source or its preprocessing cannot be used.
  """
  source_names = sources.class_names(data, f"{key}.data")
  ops = sources.parse_ops(pp, pp_modules, f"{key}.pp")
  names = {f: dependencies.class_names(ops, source_names, f) for f in features}
  return {feature: classes for feature, classes in names.items() if classes}


def check(names: Sequence[str], training: Sequence[str], key: str) -> None:
  """Raises ConfigError if two lists of names differ."""
  if list(names) == list(training):
    return
  sides = (
    ("only config.input has", sorted({*training} - {*names})),
    (f"only {key} has", sorted({*names} - {*training})),
  )
  parts = [f"{side} {_listed(only)}" for side, only in sides if only]
  if not parts:
    pairs = zip(names, training)
    i = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    parts = [f"{key} has {len(names)} names, config.input {len(training)}"]
    if i is not None:
      parts = [f"class {i} is {names[i]!r} here and {training[i]!r} there"]
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
