"""The features of a batch that hold pictures, for tasks, evaluators and data.

Every model of pictures reads "image". One whose pictures keep their own aspect
ratios also reads "shapes": the rows and columns of each picture's patches, or
the layout of its views.
"""

from collections.abc import Iterable, Mapping
from typing import Any

NAMES = ("image", "shapes")
# What a prompt may have besides its tokens; "prefix" counts its leading tokens
# that attend to one another.
OF_PROMPTS = (*NAMES, "prefix")


def of(batch: Mapping[str, Any]) -> dict[str, Any]:
  """The pictures of a batch, if it has any."""
  return _those(batch, NAMES)


def needed(batch: Mapping[str, Any]) -> dict[str, Any]:
  """The pictures of a batch; a missing "image" is an error."""
  return {"image": batch["image"], **of(batch)}


def of_prompts(batch: Mapping[str, Any]) -> dict[str, Any]:
  """What the prompts of a batch have besides tokens, if they have any."""
  return _those(batch, OF_PROMPTS)


def _those(batch: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
  return {name: batch[name] for name in names if name in batch}
