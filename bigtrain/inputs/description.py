"""Describes the input for inference: features, class names, tokenizer.

The description is in every checkpoint (`HostState.data`) and beside exports.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from bigtrain.arrays import hashing
from bigtrain.config.errors import DataError
from bigtrain.inputs import labels
from bigtrain.inputs.checks import Spec
from bigtrain.inputs.engine import Part
from bigtrain.pp import registry

# Number of pictures whose smallest and largest values are measured.
_NUM_MEASURED = 64


def describe(parts: Sequence[Part], spec: Spec) -> dict[str, Any]:
  """Returns the description as JSON.

  - "features": {feature: [dtype, shape]} of an example after all ops.
  - "raw": the same before them; for pictures, with the smallest and the largest
    value of a sample.

  And the following where known. If several sources know, the first one counts.

  - "class_names": {feature: names by number}.
  - "tokenizer": its name and fingerprint.
  - "first_example": pieces of a text, each with a flag for whether it has a
    loss.
  - "end_ids": ids that end an answer.
  - "prompts": how to write a prompt as in training.
  """
  result: dict[str, Any] = {
    "features": {
      name: [str(dtype), list(shape)] for name, (dtype, shape) in spec.items()
    },
    "raw": _raw(parts[0].source),
  }
  # Each part adds only what earlier ones did not know.
  for part in parts:
    for name, value in _of_part(part).items():
      result.setdefault(name, value)
  class_names = _class_names(parts, spec)
  if class_names:
    result["class_names"] = class_names
  return result


def _of_part(part: Part) -> dict[str, Any]:
  """What the ops and the source of one part know, apart from class names."""
  result: dict[str, Any] = {}
  tokenizer = registry.tokenizer(part.ops)
  if tokenizer is None:
    tokenizer = getattr(part.source, "tokenizer", None)
  if tokenizer:
    name, fingerprint = tokenizer
    result["tokenizer"] = dict(name=name, fingerprint=fingerprint)
  if hasattr(part.source, "first_example"):
    result["first_example"] = part.source.first_example()
  for name in ("end_ids", "prompts"):
    value = getattr(part.source, name, None)
    if value:
      result[name] = value
  return result


def _class_names(parts: Sequence[Part], spec: Spec) -> dict[str, list[str]]:
  """{feature: names by number}, each from the first part that knows them."""
  class_names: dict[str, list[str]] = {}
  for part in parts:
    source_names = getattr(part.source, "class_names", {})
    for feature in spec:
      names = labels.of_feature(part.ops, source_names, feature)
      if names:
        class_names.setdefault(feature, names)
  return class_names


def _raw(source: Any) -> dict[str, list[Any]]:
  if hasattr(source, "parse"):
    return {}  # Its records have other features after tensorflow parsed them.
  result: dict[str, list[Any]] = {}
  for name, (dtype, shape) in getattr(source, "spec", {}).items():
    kind = "bytes" if dtype is bytes else str(np.dtype(dtype))
    result[name] = [kind, list(shape)]
    if len(shape) == 3 and dtype is not bytes:
      sample = np.arange(min(_NUM_MEASURED, len(source)))
      sample = np.sort(hashing.permute(sample, len(source), seed=0))
      # A damaged example is not an error here: the engine may skip it.
      with contextlib.suppress(DataError, OSError, ValueError):
        pictures = [np.asarray(x) for x in source.read(sample)[name]]
        lowest = min(picture.min() for picture in pictures)
        highest = max(picture.max() for picture in pictures)
        result[name] += [float(lowest), float(highest)]
  return result
