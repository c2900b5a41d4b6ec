"""Benchmark 16: a sweep of six learning rates over a single run.

`tools.sweep` trains short runs of digits one after the other, in processes of
their own. Learning rates are arguments of the compiled update, so the variants
share one program. Both sides begin with an empty compile cache. The last
variant of a sweep must trace and compile nothing.

It also compares a step of the program with a step of a program that has the
same numbers as constants.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any
from unittest import mock

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
  _constants(args.quick, args.repeats)


def _sweep(folder: str, rates: tuple[str, ...], quick: bool) -> float:
  """Returns the CPU seconds of a sweep that begins with an empty cache."""
  workdir, cache = os.path.join(folder, "sweep"), os.path.join(folder, "cache")
  for path in (workdir, cache):
    shutil.rmtree(path, ignore_errors=True)
  config = os.path.join(measure.ROOT, "configs", "digits.py")
  before = _child_secs()
  subprocess.run(
    [
      *(sys.executable, "-m", "bigtrain.tools.sweep", f"--workdir={workdir}"),
      f"--config={config}{':runlocal' if quick else ''}",
      *("--grid", f"lr={','.join(rates)}", f"--config.compile_cache={cache}"),
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
    assert cache == "kept", f"the last variant has traced: {cache}"
  return secs


def _child_secs() -> float:
  """CPU seconds of the processes that have ended."""
  times = os.times()
  return times.children_user + times.children_system


def _constants(quick: bool, repeats: int) -> None:
  """Compares numbers as arguments with numbers as constants."""
  import jax

  from benchmarks import program
  from bigtrain.runtime import programs
  from configs import digits

  def config() -> Any:
    result = digits.get_config("runlocal" if quick else None)
    result.evals = {}
    result.model.update(dropout=0.1, drop_path=0.1)
    result.loss.label_smoothing = 0.1
    return result

  lower = programs.Programs.lower

  def lower_constants(self: Any, name: str, fn: Any, *specs: Any, **kw: Any):
    numbers = jax.device_get(arguments.fixed)
    # Losses and models have their numbers in the config, as Python's.
    numbers["hparams"] |= {"loss": {}, "model": {}}
    return lower(
      self, name, lambda *args: fn(*args[:-1], numbers), *specs, **kw
    )

  arguments = program.build(config())
  with mock.patch.object(programs.Programs, "lower", lower_constants):
    constants = program.build(config())
  steps = 2 if quick else 50

  def cpu_secs(built: program.Program) -> float:
    begin = time.process_time()
    built.run(steps)
    return time.process_time() - begin

  secs = measure.interleave(
    {
      "arguments": lambda: cpu_secs(arguments),
      "constants": lambda: cpu_secs(constants),
    },
    repeats,
  )
  measure.report(
    16,
    "step, numbers as arguments / as constants, CPU time: digits, batch 128",
    measure.ratios(secs["arguments"], secs["constants"]),
    target="<= 1.01",
  )


if __name__ == "__main__":
  main()
