"""What the command prints: a table with one column per mesh, and a choice."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bigtrain import sharding
from bigtrain.tools.plan import hardware, hlo
from bigtrain.tools.plan.search import Choice, gb

_Row = Mapping[str, Any]
# A line of the table: its name, and the text of a row. None for a heading.
_Line = tuple[str, Callable[[_Row], str] | None]

_EMPTY: _Line = ("", None)
# Of all bytes that are sent; less is not worth a line.
_LEAST_SENT = 1e-3


def text(
  config: str, hardware_name: str, rows: Sequence[_Row], efficiency: float
) -> str:
  first = rows[0]
  first_lines = (_mesh_lines(rows), _memory_lines(rows), _traffic_lines(rows))
  lines = [line for lines in first_lines for line in (*lines, _EMPTY)]
  lines += _time_lines(rows, efficiency)
  names = max(len(name) for name, _ in lines)
  cells = [[of(row) if of else "" for row in rows] for _, of in lines]
  width = max(len(cell) for line in cells for cell in line) + 2
  head = (
    f"{config} on {hardware_name}: {first['parameters']:,} parameters, "
    f"{gb(first['parameter_bytes'])} GB (1 GB is 1e9 bytes)."
  )
  table = [
    (name.ljust(names) + "".join(c.rjust(width) for c in line)).rstrip()
    for (name, _), line in zip(lines, cells)
  ]
  return "\n".join([head, "", *table, "", *_notes(hardware_name, rows)])


def _mesh_lines(rows: Sequence[_Row]) -> Iterator[_Line]:
  axes = list(sharding.BATCH_AXES)
  if not all(r["sequence"] == r["tensor"] == 1 for r in rows):
    axes += ["sequence", "tensor"]
  if any(r["pipeline"] > 1 for r in rows):
    axes.insert(1, "pipeline")
  yield "devices", lambda r: f"{r['devices']:,}"
  sizes = lambda r: " x ".join(str(r[axis]) for axis in axes)
  yield f"mesh, {' x '.join(axes)}", sizes
  yield "figures", lambda r: r["figures"]
  yield "examples per step", lambda r: f"{r['batch_size']:,}"
  yield "microbatches", lambda r: f"{r['microbatches']:,}"
  yield "remat policy", lambda r: r["remat_policy"].removesuffix("_saveable")
  if any(r["opt_sharding"] != "fsdp" for r in rows):
    yield "optimizer's state over", lambda r: r["opt_sharding"]


def _memory_lines(rows: Sequence[_Row]) -> Iterator[_Line]:
  first = rows[0]
  yield "GB per device", None
  for name in first["state_bytes"]:
    if name != "step":
      yield f"  {name}", _gb_of("state_bytes", name)
  if any(row["host_state_bytes"] for row in rows):
    yield "  in host memory", lambda r: gb(r["host_state_bytes"])
  yield "  batch", lambda r: gb(r["batch_bytes"])
  yield "  temporary", lambda r: gb(r["memory"]["temporary_bytes"])
  yield "  peak", lambda r: gb(r["peak_bytes"])
  capacity = first["peak_bytes"] / first["memory_fraction"]
  yield (
    f"  of {gb(capacity)}",
    lambda r: f"{r['memory_fraction']:.0%}{'' if r['fits'] else ': too large'}",
  )


def _traffic_lines(rows: Sequence[_Row]) -> Iterator[_Line]:
  yield "GB sent per device and step", None
  for kind in hlo.KINDS:
    if any(r["sent_bytes"][kind] or r["formula"].get(kind) for r in rows):
      yield f"  {kind}", _gb_of("sent_bytes", kind)
      if any(kind in r["formula"] for r in rows):
        yield "    by formula", _gb_of("formula", kind)
  groups = ("sent_by_axis", "formula_by_axis")
  least = _LEAST_SENT * max(sum(r["sent_bytes"].values()) for r in rows)
  names = {
    name
    for row in rows
    for group in groups
    for name, nbytes in row[group].items()
    if nbytes > least
  }
  for name in sorted(names, key=lambda n: (n.count(","), n)):
    yield f"  over {name}", _gb_of("sent_by_axis", name)
    if any(name in r["formula_by_axis"] for r in rows):
      yield "    by formula", _gb_of("formula_by_axis", name)


def _time_lines(rows: Sequence[_Row], efficiency: float) -> Iterator[_Line]:
  yield "PFLOP per step, model", lambda r: _pflop(r["model_flops"])
  yield "PFLOP per step, executed", lambda r: _pflop(r["executed_flops"])
  if any(row["products"] for row in rows):
    products = lambda r: _pflop(r["product_flops"])
    yield "PFLOP per step, products as compiled", products
    yield "  runs of attention kernels, not counted", _kernels("products")
  yield "seconds per step", None
  yield f"  compute, {efficiency:.0%} of peak", _secs("secs", "compute")
  yield "  links within a domain", _secs("secs", "link")
  yield "  network between domains", _secs("secs", "network")
  yield "  total, overlapping", _secs("secs", "overlapped")
  yield "  total, in turn", _secs("secs", "in_turn")
  has_cycles = any(row["cycles"] for row in rows)
  if has_cycles:
    yield "  by the compiler's cycles", _secs("cycles", "compute_secs")
    yield "    waiting for transfers", _secs("cycles", "exposed_secs")
    yield "    total", lambda r: _number(r["compiler_secs"], ".3g")
    yield "    runs of kernels, not counted", _kernels("cycles")
  what = "examples" if rows[0]["tokens_per_sec"] is None else "tokens"
  yield f"{what} per second", lambda r: f"{r[f'{what}_per_sec']:,.0f}"
  yield "MFU", lambda r: f"{r['mfu']:.0%}"
  if has_cycles:
    mfu = lambda r: _number(r["compiler_mfu"], ".0%")
    yield "  by the compiler's cycles", mfu
  if any("extrapolated" in row for row in rows):
    yield _EMPTY
    yield "error if extrapolated from fewer devices", None
    for name in ("memory", "sent"):
      yield f"  {name}", _deviation(name)


def _notes(hardware_name: str, rows: Sequence[_Row]) -> list[str]:
  target = hardware.find(hardware_name)
  beyond = ""
  if target.network_bandwidth:
    beyond = f", {target.network_bandwidth / 1e9:g} GB/s to other domains"
  notes = [
    f"A domain is {target.domain} devices. Bandwidth of a device: "
    f"{target.link_bandwidth / 1e9:g} GB/s within its domain{beyond}. "
    f"Peak: {target.peak_flops / 1e12:g} TFLOP/s. Source: {target.source}."
  ]
  others = {
    "The compiler's cycles leave out kernels (Pallas). Transfers take their "
    "bytes at the bandwidth above.": any(row["cycles"] for row in rows),
    "The GPU's compiler estimates no times: the seconds follow from the "
    "executed FLOPs, or from its products if they are more.": any(
      row["products"] for row in rows
    ),
    "Temporary memory is planned by XLA's CPU compiler; compilers for "
    "accelerators plan it differently.": all(
      row["compiler"] == "cpu" for row in rows
    ),
    "Figures 'from N' are extrapolated from a program that was compiled for "
    "N devices.": any(row["figures"].startswith("from") for row in rows),
    "The trip count of some loops is unknown: their traffic counts once.": any(
      row["unknown_loops"] for row in rows
    ),
  }
  return notes + [note for note, applies in others.items() if applies]


def _gb_of(group: str, name: str) -> Callable[[_Row], str]:
  return lambda row: gb(row[group].get(name, 0.0))


def _pflop(flops: float | None) -> str:
  return f"{flops / 1e15:,.4g}" if flops else "-"


def _number(value: float | None, spec: str) -> str:
  return "-" if value is None else format(value, spec)


def _secs(group: str, name: str) -> Callable[[_Row], str]:
  return lambda row: _number(row[group] and row[group][name], ".3g")


def _kernels(group: str) -> Callable[[_Row], str]:
  return lambda row: (
    f"{sum(row[group]['kernels'].values()):,}" if row[group] else "-"
  )


def _deviation(name: str) -> Callable[[_Row], str]:
  return lambda row: (
    f"{row['extrapolated'][name]:+.1%}" if "extrapolated" in row else "-"
  )


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
