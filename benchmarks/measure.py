"""Measures and reports figures of benchmarks.

Both sides of a comparison take turns, A B A B, under the same conditions. Each
pair gives a ratio; the figure is the median of the ratios, with the smallest
and the largest. Absolute times mean little on a shared machine.

This module imports neither jax nor bigtrain: some benchmarks time these
imports, or set the environment before them.
"""

import argparse
import collections
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

ROOT = str(pathlib.Path(__file__).resolve().parent.parent)
REPEATS = 5
_DEVICE_COUNT = "--xla_force_host_platform_device_count"

T = TypeVar("T")


def arguments(about: str, **flags: str) -> argparse.Namespace:
  """Parses the command line of a benchmark.

  Args:
    about: description for --help.
    **flags: {name: help} of further flags.

  Returns:
    quick: whether to use tiny sizes and one repeat, to check that it runs;
    repeats: number of measurements;
    and the further flags, None unless given.
  """
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument(
    "--quick", action="store_true", help="tiny sizes, to check that it runs"
  )
  parser.add_argument(
    "--repeats",
    type=int,
    help=f"number of measurements (default: {REPEATS}, or 1 with --quick)",
  )
  for name, text in flags.items():
    parser.add_argument(f"--{name}", help=text)
  args = parser.parse_args()
  args.repeats = args.repeats or (1 if args.quick else REPEATS)
  return args


def part(names: Sequence[str], which: str | None) -> Sequence[str]:
  """Returns the names of a part such as "2/3", the second of three.

  >>> part("abcde", "1/2"), part("abcde", "2/2"), part("abcde", None)
  ('ace', 'bd', 'abcde')
  """
  number, _, total = (which or "1/1").partition("/")
  return names[int(number) - 1 :: int(total)]


def cores() -> int:
  """Returns the number of cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def machine() -> dict[str, Any]:
  """Returns facts about the machine; `load` is the average of a minute."""
  facts = {
    "cpu": _cpu(),
    "cores": cores(),
    "python": platform.python_version(),
    "jax": importlib.metadata.version("jax"),
    "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
  }
  if "jax" in sys.modules:
    devices = sys.modules["jax"].devices()
    facts["devices"] = f"{len(devices)} x {devices[0].device_kind}"
  return facts


def _cpu() -> str:
  with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
    for line in file:
      if line.startswith("model name"):
        return line.split(":", 1)[1].strip()
  return platform.machine()


def timed(call: Callable[[], Any]) -> float:
  """Returns the seconds that a call takes."""
  start_secs = time.perf_counter()
  call()
  return time.perf_counter() - start_secs


def timed_with_cpu(
  run: Callable[[int], Any], steps: int
) -> tuple[float, float]:
  """Returns the seconds that `run` reports, and this process's CPU seconds.

  Other programs on the machine change the CPU seconds less.
  """
  cpu_secs = time.process_time()
  secs = run(steps)
  return secs, time.process_time() - cpu_secs


def interleave(
  calls: Mapping[str, Callable[[], T]], repeats: int, warm_ups: int = 1
) -> dict[str, list[T]]:
  """Makes calls in turns.

  Args:
    calls: {name: function that returns a measurement}.
    repeats: number of measurements of each.
    warm_ups: number of earlier turns that do not count.

  Returns:
    {name: measurements in order}.
  """
  results: dict[str, list[T]] = {name: [] for name in calls}
  for repeat in range(warm_ups + repeats):
    for name, call in calls.items():
      value = call()
      if repeat >= warm_ups:
        results[name].append(value)
  return results


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
  """Returns the ratio of each pair."""
  return [a / b for a, b in zip(above, below)]


def report(
  benchmark: int,
  name: str,
  values: Sequence[float],
  *,
  unit: str = "ratio",
  target: str | None = None,
) -> dict[str, Any]:
  """Prints a figure as one line of JSON, with median and spread; returns it.

  Args:
    benchmark: its number in docs/benchmarks.md; 0 for limits.
    name: name of the figure.
    values: measurements.
    unit: unit of the values, or "ratio".
    target: bound such as "<= 1.02", if any.
  """
  return _print(
    {
      "benchmark": benchmark,
      "name": name,
      "value": _short(statistics.median(values)),
      "unit": unit,
      "spread": [_short(min(values)), _short(max(values))],
      "repeats": len(values),
      "target": target,
      "machine": machine(),
    }
  )


def skip(benchmark: int, name: str, reason: str) -> dict[str, Any]:
  """Prints a figure that was not measured, with the reason; returns it."""
  return _print({"benchmark": benchmark, "name": name, "skipped": reason})


def _print(line: dict[str, Any]) -> dict[str, Any]:
  print(json.dumps(line), flush=True)
  return line


def _short(value: float) -> float:
  return float(f"{value:.4g}")


def meets(value: float, target: str) -> bool:
  """Whether a value meets a target such as "<= 1.02".

  >>> meets(1.01, "<= 1.02"), meets(0.8, ">= 0.85")
  (True, False)
  """
  sign, _, limit = target.partition(" ")
  return value <= float(limit) if sign == "<=" else value >= float(limit)


def missing(*modules: str) -> str:
  """Returns "" or "not installed: ..." with the missing modules."""
  absent = [m for m in modules if importlib.util.find_spec(m) is None]
  return f"not installed: {', '.join(absent)}" if absent else ""


def simulate_devices(number: int) -> None:
  """Simulates CPU devices in this process; call it before importing jax."""
  os.environ.update(environment(number))


def environment(devices: int | None = None) -> dict[str, str]:
  """Returns the environment for a process that imports this repository.

  Args:
    devices: number of CPU devices to simulate; None for the real ones.
  """
  flags = os.environ.get("XLA_FLAGS", "").split()
  flags = [flag for flag in flags if not flag.startswith(_DEVICE_COUNT)]
  if devices:
    flags.append(f"{_DEVICE_COUNT}={devices}")
  path = os.environ.get("PYTHONPATH")
  # Python keeps bytecode by default. Without it, each start would compile our
  # modules, but not those of the libraries, which pip has compiled.
  own = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
  return {
    **own,
    "XLA_FLAGS": " ".join(flags),
    "PYTHONPATH": os.pathsep.join([ROOT, path] if path else [ROOT]),
  }


def lines(
  *command: str, env: Mapping[str, str] | None = None
) -> Generator[str, None, None]:
  """Runs a new Python process; yields its output line by line.

  Closing the generator ends the process.

  Args:
    *command: arguments of the interpreter.
    env: environment; `environment()` unless given.

  Raises:
    RuntimeError: the process failed; the message has its last lines.
  """
  process = subprocess.Popen(
    [sys.executable, *command],
    env=dict(env or environment()),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  last_lines: collections.deque[str] = collections.deque(maxlen=20)
  try:
    for line in process.stdout:
      last_lines.append(line)
      yield line.rstrip("\n")
  except GeneratorExit:
    process.kill()
    raise
  finally:
    process.stdout.close()
    process.wait()
  if process.returncode:
    raise RuntimeError(
      f"{' '.join(command)}: exit code {process.returncode}: "
      f"{''.join(last_lines)}"
    )
