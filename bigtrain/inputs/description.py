"""Features, class names and tokenizer saved with the run, for inference.

They are in every checkpoint (`HostState.data`) and beside exports.
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

# Number of pictures of which the range of values is measured.
_NUM_MEASURED = 64


def describe(parts: Sequence[Part], spec: Spec) -> dict[str, Any]:
  """Returns the description as JSON; of several sources, the first counts.

  "features": {feature: [dtype, shape]} of an example after all ops; "raw": the
  same before them, for pictures with the least and the largest value; if known,
  "class_names": {feature: names by number}, "tokenizer", "first_example":
  pieces of a text, each with whether it has a loss, "end_ids": ids that end an
  answer, and "prompts": how texts begin.
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
    of_source = getattr(part.source, "tokenizer", None)
    if tokenizer := registry.tokenizer(part.ops) or of_source:
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
      rows = np.arange(min(_NUM_MEASURED, len(source)))
      rows = np.sort(hashing.permute(rows, len(source), seed=0))
      # A damaged example is the business of the engine, which may skip it.
      with contextlib.suppress(DataError, OSError, ValueError):
        values = [np.asarray(x) for x in source.read(rows)[name]]
        lowest = float(min(x.min() for x in values))
        result[name] += [lowest, float(max(x.max() for x in values))]
  return result
