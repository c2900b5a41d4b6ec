"""Variables that steps use and never train: a teacher's, and adapters' base.

They are not part of the train state, because checkpoints leave them out.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain.arrays.types import TASK, Variables

NAMES = ("teacher", "base")


def variables(state: Mapping[str, Any]) -> dict[str, Variables]:
  """The frozen variables of a state, by NAMES.

  A teacher can be the moving average of the trained model itself. Its entry in
  the state is then empty, and this function fills it with the state's "ema".
  Several teachers are a dict by name, and any of them may be the average.
  """
  names = (*NAMES, TASK)
  result = {name: state[name] for name in names if name in state}
  if "teacher" in result and "ema" in state:
    average = {**result, **state.get("mutable", {}), "params": state["ema"]}
    average.pop(TASK, None)
    teachers = average.pop("teacher")
    filled = {name: given or average for name, given in teachers.items()}
    result["teacher"] = filled or average
  return result


def model_variables(
  state: Mapping[str, Any], weights: str = "params"
) -> Variables:
  """The model's variables, from the train state and the frozen arrays.

  Args:
    weights: entry of the state with the parameters, "params" or "ema".
  """
  mutable = state.get("mutable", {})
  return {"params": state[weights], **mutable, **variables(state)}
