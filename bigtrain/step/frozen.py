"""Variables that steps use and never train: a teacher's, and adapters' base."""

from collections.abc import Mapping
from typing import Any

from bigtrain.arrays.types import Variables

NAMES = ("teacher", "base")


def variables(state: Mapping[str, Any]) -> dict[str, Variables]:
  """The frozen variables of a state, by NAMES.

  A teacher can be the moving average of the trained model itself. Its entry in
  the state is then empty, and this fills it with the state's "ema".
  """
  result = {name: state[name] for name in NAMES if name in state}
  if "teacher" in result and "ema" in state:
    average = {**result, **state.get("mutable", {}), "params": state["ema"]}
    teachers = average.pop("teacher")
    filled = {name: given or average for name, given in teachers.items()}
    result["teacher"] = filled or average
  return result
