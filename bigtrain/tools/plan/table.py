"""Prints a plan as a table with one column per mesh."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bigtrain import sharding
from bigtrain.tools.plan import collectives
from bigtrain.tools.plan import hardware as hardware_lib

_Row = Mapping[str, Any]


def text(
  config: str, hardware_name: str, rows: Sequence[_Row], efficiency: float
) -> str:
  """Returns the table.

  Args:
    config: "FILE.py" or "FILE.py:arguments".
    efficiency: fraction of the peak that the rows assume.
  """
  hardware = hardware_lib.find(hardware_name)
  first = rows[0]
  head = [
    f"{config} on {hardware_name}: {first['parameters']:,} parameters, "
    f"{_gb(first['parameter_bytes'])} GB (1 GB is 1e9 bytes).",
    "",
  ]
  lines: list[tuple[str, list[str]]] = []

  def add(name: str, value: Callable[[_Row], str]) -> None:
    lines.append((name, [value(row) for row in rows]))

  add("devices", lambda r: f"{r['devices']:,}")
  axes: tuple[str, ...] = sharding.AXES
  if all(r["sequence"] == r["tensor"] == 1 for r in rows):
    axes = sharding.BATCH_AXES
  add(
    f"mesh, {' x '.join(axes)}",
    lambda r: " x ".join(str(r[axis]) for axis in axes),
  )
  add("figures", lambda r: r["figures"])
  add("examples per step", lambda r: f"{r['batch_size']:,}")
  add("microbatches", lambda r: f"{r['microbatches']:,}")
  add("remat policy", lambda r: r["remat_policy"].removesuffix("_saveable"))
  if any(r["opt_sharding"] != "fsdp" for r in rows):
    add("optimizer's state over", lambda r: r["opt_sharding"])
  add("", lambda r: "")
  add("GB per device", lambda r: "")
  for name in first["state_bytes"]:
    if name != "step":
      add(f"  {name}", _nested("state_bytes", name))
  if any(row["host_state_bytes"] for row in rows):
    add("  in host memory", lambda r: _gb(r["host_state_bytes"]))
  add("  batch", lambda r: _gb(r["batch_bytes"]))
  add("  temporary", lambda r: _gb(r["memory"]["temporary_bytes"]))
  add("  peak", lambda r: _gb(r["peak_bytes"]))
  capacity = _gb(hardware.memory_bytes)
  add(f"  of {capacity}", lambda r: _percent(r["memory_fraction"], r["fits"]))
  add("", lambda r: "")
  add("GB sent per device and step", lambda r: "")
  for kind in collectives.KINDS:
    if any(r["sent_bytes"][kind] or r["formula"].get(kind) for r in rows):
      add(f"  {kind}", _nested("sent_bytes", kind))
      if any(kind in r["formula"] for r in rows):
        add("    by formula", _nested("formula", kind))
  for name in _axes(rows):
    add(f"  over {name}", _nested("sent_by_axis", name))
    if any(name in r["formula_by_axis"] for r in rows):
      add("    by formula", _nested("formula_by_axis", name))
  add("", lambda r: "")
  add("PFLOP per step, model", lambda r: f"{r['model_flops'] / 1e15:,.4g}")
  add(
    "PFLOP per step, executed", lambda r: f"{r['executed_flops'] / 1e15:,.4g}"
  )
  if any(row["products"] for row in rows):
    add("PFLOP per step, products as compiled", _products)
    add("  runs of attention kernels, not counted", _attention)
  add("seconds per step", lambda r: "")
  add(f"  compute, {efficiency:.0%} of peak", _secs("compute"))
  add("  links within a domain", _secs("link"))
  add("  network between domains", _secs("network"))
  add("  total, overlapping", _secs("overlapped"))
  add("  total, in turn", _secs("in_turn"))
  if any(row["cycles"] for row in rows):
    add("  by the compiler's cycles", _cycles("compute_secs"))
    add("    waiting for transfers", _cycles("exposed_secs"))
    add("    in a step with a row", _cycles("row_secs"))
    add("    total", lambda r: _short(r["compiler_secs"]))
    add("    runs of kernels, not counted", _kernels)
  tokens = first["tokens_per_sec"] is not None
  speed = "tokens_per_sec" if tokens else "examples_per_sec"
  add(
    "tokens per second" if tokens else "examples per second",
    lambda r: f"{r[speed]:,.0f}",
  )
  add("MFU", lambda r: f"{r['mfu']:.0%}")
  if any(row["cycles"] for row in rows):
    add("  by the compiler's cycles", _compiler_mfu)
  if any("extrapolated" in row for row in rows):
    add("", lambda r: "")
    add("error if extrapolated from fewer devices", lambda r: "")
    add("  memory", _deviation("memory"))
    add("  sent", _deviation("sent"))
  return "\n".join([*head, *_aligned(lines), "", *_notes(hardware, rows)])


def _notes(hardware: hardware_lib.Hardware, rows: Sequence[_Row]) -> list[str]:
  beyond = ""
  if hardware.network_bandwidth:
    beyond = f", {hardware.network_bandwidth / 1e9:g} GB/s to other domains"
  notes = [
    f"A domain is {hardware.domain} devices. Bandwidth of a device: "
    f"{hardware.link_bandwidth / 1e9:g} GB/s within its domain{beyond}. "
    f"Peak: {hardware.peak_flops / 1e12:g} TFLOP/s. Source: {hardware.source}.",
  ]
  if any(row["cycles"] for row in rows):
    notes.append(
      "The compiler's cycles leave out kernels (Pallas). Transfers take their "
      "bytes at the bandwidth above."
    )
  if any(row["products"] for row in rows):
    notes.append(
      "The GPU's compiler estimates no times: the seconds follow from the "
      "executed FLOPs, or from its products if they are more."
    )
  if all(row["compiler"] == "cpu" for row in rows):
    notes.append(
      "Temporary memory is planned by XLA's CPU compiler; compilers for "
      "accelerators plan it differently."
    )
  if any(row["figures"].startswith("from") for row in rows):
    notes.append(
      "Figures 'from N' are extrapolated from a program that was compiled for "
      "N devices."
    )
  if any(row["unknown_loops"] for row in rows):
    notes.append(
      "The trip count of some loops is unknown: their traffic counts once."
    )
  return notes


def _aligned(lines: Sequence[tuple[str, list[str]]]) -> list[str]:
  first = max(len(name) for name, _ in lines)
  width = max(len(cell) for _, cells in lines for cell in cells) + 2
  return [
    (name.ljust(first) + "".join(c.rjust(width) for c in cells)).rstrip()
    for name, cells in lines
  ]


def _gb(nbytes: float) -> str:
  value = nbytes / 1e9
  return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _percent(fraction: float, fits: bool) -> str:
  return f"{fraction:.0%}" + ("" if fits else ": too large")


def _nested(group: str, name: str) -> Callable[[_Row], str]:
  return lambda row: _gb(row[group].get(name, 0.0))


def _axes(rows: Sequence[_Row]) -> list[str]:
  """The axes over which something is sent, those with fewest names first."""
  names = {n for r in rows for n in (*r["sent_by_axis"], *r["formula_by_axis"])}
  least = 1e-3  # Of all bytes; less is not worth a line.
  total = max(sum(r["sent_bytes"].values()) for r in rows)
  large = [
    n
    for n in names
    if any(
      r[of].get(n, 0) > least * total
      for r in rows
      for of in ("sent_by_axis", "formula_by_axis")
    )
  ]
  return sorted(large, key=lambda n: (n.count(","), n))


def _deviation(name: str) -> Callable[[_Row], str]:
  return lambda row: (
    f"{row['extrapolated'][name]:+.1%}" if "extrapolated" in row else "-"
  )


def _secs(name: str) -> Callable[[_Row], str]:
  return lambda row: f"{row['secs'][name]:.3g}"


def _cycles(name: str) -> Callable[[_Row], str]:
  return lambda row: _short(row["cycles"] and row["cycles"][name])


def _kernels(row: _Row) -> str:
  return f"{sum(row['cycles']['kernels'].values()):,}" if row["cycles"] else "-"


def _products(row: _Row) -> str:
  flops = row["product_flops"]
  return f"{flops / 1e15:,.4g}" if flops else "-"


def _attention(row: _Row) -> str:
  products = row["products"]
  return f"{sum(products['kernels'].values()):,}" if products else "-"


def _compiler_mfu(row: _Row) -> str:
  return f"{row['compiler_mfu']:.0%}" if row["cycles"] else "-"


def _short(secs: float | None) -> str:
  return "-" if secs is None else f"{secs:.3g}"
