"""Variables that steps use but never train: of a teacher, and of a base.

They are beside the train state, because checkpoints do not have them.
"""

from collections.abc import Mapping
from typing import Any

from bigtrain.arrays.types import Variables

NAMES = ("teacher", "base")


def variables(state: Mapping[str, Any]) -> dict[str, Variables]:
  """The entries NAMES of a state; a teacher without variables is its "ema".

  Several teachers are a dict by name, and each of them may be the average.
  """
  result = {name: state[name] for name in NAMES if name in state}
  if "teacher" in result and "ema" in state:
    own = {**result, **state.get("mutable", {}), "params": state["ema"]}
    teachers = own.pop("teacher")
    filled = {name: each or own for name, each in teachers.items()}
    result["teacher"] = filled or own
  return result


def model_variables(
  state: Mapping[str, Any], weights: str = "params"
) -> Variables:
  """What a model is applied to, of a state and what is frozen beside it.

  Args:
    weights: entry of the state with the parameters, "params" or "ema".
  """
  mutable = state.get("mutable", {})
  return {"params": state[weights], **mutable, **variables(state)}
