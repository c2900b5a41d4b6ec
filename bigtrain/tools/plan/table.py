"""What the command prints: a table with one column per mesh, and a choice.

The lines of the table are in table.jinja, the notes below it in notes.jinja.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from bigtrain import sharding
from bigtrain.tools.plan import collectives, hardware
from bigtrain.tools.plan.search import Choice, gb

# A result of estimate.from_facts.
_Estimate = Mapping[str, Any]

# Groups of axes over which a mesh sends less than this share of its traffic are
# not worth a line.
_MIN_SHARE = 1e-3


def text(
  config: str,
  hardware_name: str,
  estimates: Sequence[_Estimate],
  efficiency: float,
) -> str:
  first = estimates[0]
  lines = [line.split("\t") for line in _lines(estimates, efficiency)]
  name_width = max(len(name) for name, *_ in lines)
  width = max(len(cell) for _, *cells in lines for cell in cells) + 2
  head = (
    f"{config} on {hardware_name}: {first['parameters']:,} parameters, "
    f"{gb(first['parameter_bytes'])} GB (1 GB is 1e9 bytes)."
  )
  table = []
  for name, *cells in lines:
    line = name.ljust(name_width) + "".join(cell.rjust(width) for cell in cells)
    table.append(line.rstrip())
  target = hardware.find(hardware_name)
  notes = _filled("notes.jinja", estimates=estimates, target=target)
  return "\n".join([head, "", *table, "", *notes])


def _lines(estimates: Sequence[_Estimate], efficiency: float) -> list[str]:
  axes = list(sharding.BATCH_AXES)
  if any(one["sequence"] > 1 or one["tensor"] > 1 for one in estimates):
    axes += ["sequence", "tensor"]
  if any(one["pipeline"] > 1 for one in estimates):
    axes.insert(1, "pipeline")

  def is_sent(kind: str) -> bool:
    return any(
      one["sent_bytes"][kind] or one["formula"].get(kind) for one in estimates
    )

  def has_formula(field: str, key: str) -> bool:
    return any(key in one[field] for one in estimates)

  return _filled(
    "table.jinja",
    estimates=estimates,
    axes=axes,
    efficiency=efficiency,
    kinds=[kind for kind in collectives.KINDS if is_sent(kind)],
    groups=_groups(estimates),
    has_formula=has_formula,
    has_cycles=any(one["cycles"] for one in estimates),
  )


def _filled(name: str, **values: Any) -> list[str]:
  """The lines of a template beside this module."""
  environment = jinja2.Environment(trim_blocks=True)
  environment.filters |= {"gb": gb, "number": _number, "pflop": _pflop}
  path = pathlib.Path(__file__).with_name(name)
  return environment.from_string(path.read_text()).render(values).splitlines()


def _groups(estimates: Sequence[_Estimate]) -> list[str]:
  """Axes worth a line, such as "replica, sequence"; single ones come first."""
  most = max(sum(one["sent_bytes"].values()) for one in estimates)
  result = set()
  for one in estimates:
    for sent in (one["sent_by_axis"], one["formula_by_axis"]):
      for axes, nbytes in sent.items():
        if nbytes > _MIN_SHARE * most:
          result.add(axes)
  return sorted(result, key=lambda axes: (axes.count(","), axes))


def _pflop(flops: float | None) -> str:
  return f"{flops / 1e15:,.4g}" if flops else "-"


def _number(value: float | None, spec: str = ".3g") -> str:
  return "-" if value is None else format(value, spec)


def choice_text(choice: Choice, minutes: float) -> str:
  """Text after the table of --choose: reasons, and lines to paste."""
  lines = []
  by_formula = []
  for number, one in enumerate(choice.best, 1):
    if one["figures"] == "formula":
      by_formula.append(str(number))
    lines += [f"{number}. {' '.join(one['reasons'])}", ""]
    lines += [f"     {line}" for line in config_lines(one)]
    lines.append("")
  for one in choice.too_large:
    size = f"{gb(one['peak_bytes'])} GB ({one['figures']})"
    lines.append(f"Does not fit: {size}: {'; '.join(config_lines(one))}")
  if by_formula:
    if choice.out_of_time:
      why = f"the {minutes:g} minutes were up"
    else:
      why = "this number of devices cannot be simulated"
    lines.append(f"By formula only, because {why}: {', '.join(by_formula)}.")
  return "\n".join(lines)


def config_lines(one: _Estimate) -> list[str]:
  """The lines of a config for an estimated mesh."""
  sizes = sharding.in_words(one).replace(" x ", ", ")
  if one["pipeline"] > 1:
    sizes += f", pipeline_rounds={one['pipeline_rounds']}"
  lines = [
    f"config.mesh = dict({sizes})",
    f"config.microbatches = {one['microbatches']}",
  ]
  if one["has_policy"]:
    lines.append(f'config.model.remat_policy = "{one["remat_policy"]}"')
  return lines
