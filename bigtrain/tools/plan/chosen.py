"""What tools.plan --choose prints: reasons, and lines for a config."""

from collections.abc import Mapping
from typing import Any

from bigtrain import sharding
from bigtrain.tools.plan import choose


def lines(row: Mapping[str, Any]) -> list[str]:
  """Returns the lines of a config that choose a row of `search`."""
  sizes = ", ".join(
    f"{axis}={row[axis]}"
    for axis in sharding.AXES
    if axis in sharding.BATCH_AXES or row[axis] > 1
  )
  result = [
    f"config.mesh = dict({sizes})",
    f"config.microbatches = {row['microbatches']}",
  ]
  if row["has_policy"]:
    result.append(f'config.model.remat_policy = "{row["remat_policy"]}"')
  return result


def text(choice: choose.Choice, minutes: float) -> str:
  """Returns what follows the table: reasons, and lines to paste."""
  result = []
  for number, row in enumerate(choice.best, 1):
    result += [f"{number}. {' '.join(row['reasons'])}", ""]
    result += [*(f"     {line}" for line in lines(row)), ""]
  for row in choice.too_large:
    size = f"{row['peak_bytes'] / 1e9:,.3g} GB ({row['figures']})"
    result.append(f"Does not fit: {size}: {'; '.join(lines(row))}")
  numbers = [
    str(n)
    for n, row in enumerate(choice.best, 1)
    if row["figures"] == "formula"
  ]
  if numbers:
    why = f"the {minutes:g} minutes were up"
    if not choice.out_of_time:
      why = "this number of devices cannot be simulated"
    result.append(f"By formula only, because {why}: {', '.join(numbers)}.")
  return "\n".join(result)
