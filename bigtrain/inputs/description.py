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
  class_names: dict[str, list[str]] = {}
  for part in parts:
    source_names = getattr(part.source, "class_names", {})
    for feature in spec:
      if names := labels.of_feature(part.ops, source_names, feature):
        class_names.setdefault(feature, names)
    source_tokenizer = getattr(part.source, "tokenizer", None)
    if tokenizer := registry.tokenizer(part.ops) or source_tokenizer:
      name, fingerprint = tokenizer
      result.setdefault("tokenizer", dict(name=name, fingerprint=fingerprint))
    if hasattr(part.source, "first_example"):
      result.setdefault("first_example", part.source.first_example())
    for name in ("end_ids", "prompts"):
      if value := getattr(part.source, name, None):
        result.setdefault(name, value)
  if class_names:
    result["class_names"] = class_names
  return result


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
        values = [np.asarray(x) for x in source.read(sample)[name]]
        lowest = float(min(x.min() for x in values))
        result[name] += [lowest, float(max(x.max() for x in values))]
  return result
