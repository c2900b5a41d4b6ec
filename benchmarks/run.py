"""Runs benchmarks one by one; prints JSON lines and, at the end, a table.

  python -m benchmarks.run [names...] [--quick] [--repeats=N]

A name is the name of a script (default: all scripts). Nothing is written to
the repository; copy the table to docs/benchmarks.md by hand.

BIG_VISION=folder adds a checkout of big_vision as a peer. torch and Grain are
peers if installed (make install EXTRAS=bench). TORCH_PYTHON names another
interpreter that has torch, for step_rate.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import measure

# The limits come first: the other figures depend on them.
SCRIPTS = (
  "limits",
  "step_rate",
  "step_floor",
  "adapter_step",
  "loop_overhead",
  "weight_stats",
  "startup",
  "compile_time",
  "input_rate",
  "tar_shards",
  "checkpoint_stall",
  "restart",
  "recovery",
  "loss_memory",
  "state_bytes",
  "guard_cost",
  "check_cost",
  "compilers",
  "headers",
  "sweep",
)


def main() -> None:
  """Runs the command; ends with exit code 1 if a script failed."""
  parser = argparse.ArgumentParser(
    prog="python -m benchmarks.run", description=__doc__.splitlines()[0]
  )
  parser.add_argument(
    "names",
    nargs="*",
    metavar="name",
    help=f"benchmarks to run (default: all): {', '.join(SCRIPTS)}",
  )
  parser.add_argument(
    "--quick", action="store_true", help="tiny sizes, to check that they run"
  )
  parser.add_argument(
    "--repeats",
    type=int,
    help=f"number of measurements (default: {measure.REPEATS}, or 1 with "
    "--quick)",
  )
  args = parser.parse_args()
  for name in args.names:
    if name not in SCRIPTS:
      parser.error(
        f"unknown benchmark {name!r}; expected one of {', '.join(SCRIPTS)}"
      )
  flags = ["--quick"] if args.quick else []
  flags += [f"--repeats={args.repeats}"] if args.repeats else []

  figures: list[dict[str, Any]] = []
  failed = []
  start_secs = time.monotonic()
  for name in args.names or SCRIPTS:
    try:
      for line in measure.lines("-m", f"benchmarks.{name}", *flags):
        if line.startswith('{"benchmark"'):
          print(line, flush=True)
          figures.append(json.loads(line))
    except RuntimeError as e:
      print(f"benchmarks.{name} failed: {e}", file=sys.stderr)
      failed.append(name)
  minutes = (time.monotonic() - start_secs) / 60
  command = shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]])
  print(f"\n{time.strftime('%Y-%m-%d')}, `{command}`, {minutes:.1f} minutes")
  print(f"on {describe(measure.machine())}.\n")
  print("\n".join(table(figures)))
  if failed:
    sys.exit(f"failed: {', '.join(failed)}")


def describe(machine: Mapping[str, Any]) -> str:
  """Returns a short description of the machine."""
  words = [f"{machine['cores']} cores of {machine['cpu']}"]
  words += [f"Python {machine['python']}", f"jax {machine['jax']}"]
  return ", ".join([*words, f"load {machine['load']}"])


def table(figures: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the lines of a Markdown table.

  Args:
    figures: decoded JSON lines of the scripts.
  """
  rows = ["| # | Figure | Median | Spread | Target | |", "|--|--|--|--|--|--|"]
  for figure in figures:
    number = figure["benchmark"] or ""
    if "skipped" in figure:
      cells = [figure["name"], "", "", "", f"skipped: {figure['skipped']}"]
    else:
      value, target = figure["value"], figure["target"] or ""
      unit = "" if figure["unit"] == "ratio" else f" {figure['unit']}"
      spread = (
        ""
        if figure["repeats"] == 1
        else "{} to {}".format(*map(_short, figure["spread"]))
      )
      verdict = ""
      if target:
        verdict = "met" if measure.meets(value, target) else "missed"
      cells = [figure["name"], _short(value) + unit, spread, target, verdict]
    rows.append(f"| {number} | {' | '.join(cells)} |")
  return rows


def _short(value: float) -> str:
  return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
  main()
