"""Variables that steps use but never train: of a teacher and of a base."""

from collections.abc import Mapping
from typing import Any

from bigtrain.arrays.types import Variables

NAMES = ("teacher", "base")


def variables(state: Mapping[str, Any]) -> dict[str, Variables]:
  """The entries NAMES of a state; a teacher without variables is its "ema"."""
  result = {name: state[name] for name in NAMES if name in state}
  if "teacher" in result and "ema" in state:
    own = {**result, **state.get("mutable", {}), "params": state["ema"]}
    teachers = own.pop("teacher")
    filled = {name: each or own for name, each in teachers.items()}
    result["teacher"] = filled or own
  return result
