"""Benchmark 16: a sweep of six learning rates, compared with a single run.

`tools.sweep` trains short runs of digits one after the other, each in its own
process. Learning rates, decays and seeds are arguments of the compiled update,
so the variants share one program. Both sides begin with an empty compile cache.
The last variant of a sweep must compile nothing.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile

from benchmarks import measure

_RATES = ("1e-3", "2e-3", "3e-3", "4e-3", "5e-3", "6e-3")
_STEPS = 200


def main() -> None:
  """Prints the ratios."""
  args = measure.arguments(__doc__)
  with tempfile.TemporaryDirectory() as folder:
    number = 2 if args.quick else len(_RATES)
    sides = {"sweep": _RATES[:number], "one": _RATES[:1]}
    cpu_secs = measure.interleave(
      {
        side: lambda rates=rates: _sweep(folder, rates, args.quick)
        for side, rates in sides.items()
      },
      args.repeats,
      warm_ups=0,
    )
  measure.report(
    16,
    f"sweep of {number} learning rates / one run, CPU time: digits",
    measure.ratios(cpu_secs["sweep"], cpu_secs["one"]),
    target=f"<= {number * 1.05:.2g}",
  )


def _sweep(folder: str, rates: tuple[str, ...], quick: bool) -> float:
  """Returns the CPU seconds of a sweep that begins with an empty cache."""
  workdir, cache = os.path.join(folder, "sweep"), os.path.join(folder, "cache")
  for path in (workdir, cache):
    shutil.rmtree(path, ignore_errors=True)
  config = os.path.join(measure.ROOT, "configs", "digits.py")
  before = _child_secs()
  subprocess.run(
    [
      sys.executable,
      "-m",
      "bigtrain.tools.sweep",
      f"--workdir={workdir}",
      f"--config={config}{':runlocal' if quick else ''}",
      f"--grid=lr={','.join(rates)}",
      f"--config.compile_cache={cache}",
      *([] if quick else [f"--config.total_steps={_STEPS}"]),
    ],
    env=measure.environment(),
    check=True,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  secs = _child_secs() - before
  if len(rates) > 1:
    last = os.path.join(workdir, f"lr={float(rates[-1])}", "run.json")
    with open(last) as file:
      programs = json.load(file)["starts"][-1]["programs"]
    cache = programs["update"]["cache"]
    assert cache == "hit", f"the last variant has compiled: {cache}"
  return secs


def _child_secs() -> float:
  """CPU seconds of the processes that have ended."""
  times = os.times()
  return times.children_user + times.children_system


if __name__ == "__main__":
  main()
