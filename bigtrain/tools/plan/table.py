"""What the command prints: a table with one column per mesh, and a choice."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2

from bigtrain import sharding
from bigtrain.tools.plan import hardware, hlo
from bigtrain.tools.plan.search import Choice, gb

_Row = Mapping[str, Any]

# Of all bytes that are sent; less is not worth a line.
_LEAST_SENT = 1e-3


def text(
  config: str, hardware_name: str, rows: Sequence[_Row], efficiency: float
) -> str:
  first = rows[0]
  lines = [line.split("\t") for line in _lines(rows, efficiency)]
  names = max(len(name) for name, *_ in lines)
  width = max(len(cell) for _, *cells in lines for cell in cells) + 2
  head = (
    f"{config} on {hardware_name}: {first['parameters']:,} parameters, "
    f"{gb(first['parameter_bytes'])} GB (1 GB is 1e9 bytes)."
  )
  table = [
    (name.ljust(names) + "".join(cell.rjust(width) for cell in cells)).rstrip()
    for name, *cells in lines
  ]
  target = hardware.find(hardware_name)
  notes = _filled("notes.jinja", rows=rows, target=target)
  return "\n".join([head, "", *table, "", *notes])


def _lines(rows: Sequence[_Row], efficiency: float) -> list[str]:
  axes = list(sharding.BATCH_AXES)
  if not all(r["sequence"] == r["tensor"] == 1 for r in rows):
    axes += ["sequence", "tensor"]
  if any(r["pipeline"] > 1 for r in rows):
    axes.insert(1, "pipeline")
  return _filled(
    "table.jinja",
    rows=rows,
    axes=axes,
    efficiency=efficiency,
    kinds=[
      kind
      for kind in hlo.KINDS
      if any(r["sent_bytes"][kind] or r["formula"].get(kind) for r in rows)
    ],
    groups=sorted({*_groups(rows)}, key=lambda n: (n.count(","), n)),
    has_formula=lambda kind, key: any(key in r[kind] for r in rows),
    has_cycles=any(r["cycles"] for r in rows),
  )


def _filled(name: str, **values: Any) -> list[str]:
  """The lines of a template beside this module."""
  environment = jinja2.Environment(trim_blocks=True)
  environment.filters |= {"gb": gb, "number": _number, "pflop": _pflop}
  path = pathlib.Path(__file__).with_name(name)
  return environment.from_string(path.read_text()).render(values).splitlines()


def _groups(rows: Sequence[_Row]) -> Iterator[str]:
  """Axes over which a mesh sends enough."""
  least = _LEAST_SENT * max(sum(r["sent_bytes"].values()) for r in rows)
  for row in rows:
    for sent in (row["sent_by_axis"], row["formula_by_axis"]):
      yield from (axes for axes, nbytes in sent.items() if nbytes > least)


def _pflop(flops: float | None) -> str:
  return f"{flops / 1e15:,.4g}" if flops else "-"


def _number(value: float | None, spec: str = ".3g") -> str:
  return "-" if value is None else format(value, spec)


def choice_text(choice: Choice, minutes: float) -> str:
  """What follows the table of --choose: reasons, and lines to paste."""
  result, by_formula = [], []
  for number, row in enumerate(choice.best, 1):
    by_formula += [str(number)] if row["figures"] == "formula" else []
    result += [f"{number}. {' '.join(row['reasons'])}", ""]
    result += [*(f"     {line}" for line in config_lines(row)), ""]
  for row in choice.too_large:
    size = f"{gb(row['peak_bytes'])} GB ({row['figures']})"
    result.append(f"Does not fit: {size}: {'; '.join(config_lines(row))}")
  if by_formula:
    why = f"the {minutes:g} minutes were up"
    if not choice.out_of_time:
      why = "this number of devices cannot be simulated"
    result.append(f"By formula only, because {why}: {', '.join(by_formula)}.")
  return "\n".join(result)


def config_lines(row: _Row) -> list[str]:
  sizes = sharding.in_words(row).replace(" x ", ", ")
  if row["pipeline"] > 1:
    sizes += f", pipeline_rounds={row['pipeline_rounds']}"
  result = [
    f"config.mesh = dict({sizes})",
    f"config.microbatches = {row['microbatches']}",
  ]
  if row["has_policy"]:
    result.append(f'config.model.remat_policy = "{row["remat_policy"]}"')
  return result
