"""How the benchmarks measure, and what they print.

What is compared takes turns, A B A B, so that both see the same machine; each
pair gives a ratio, and the median of the ratios is the figure, with the least
and the largest beside it. Seconds alone mean nothing on a shared machine.

This module loads neither jax nor bigtrain: some benchmarks measure how long
that takes, or set the environment first.
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
  """The command line of a benchmark: --quick, --repeats, and `flags`.

  Args:
    about: one line for --help.
    **flags: names of further flags, with their help.

  Returns:
    quick (tiny sizes and one repeat, to see that it runs), repeats, and the
    flags, None where not given.
  """
  parser = argparse.ArgumentParser(description=about)
  parser.add_argument(
    "--quick", action="store_true", help="tiny sizes: only to see that it runs"
  )
  parser.add_argument("--repeats", type=int, help=f"at least {REPEATS}")
  for name, text in flags.items():
    parser.add_argument(f"--{name}", help=text)
  found = parser.parse_args()
  found.repeats = found.repeats or (1 if found.quick else REPEATS)
  return found


def cores() -> int:
  """The cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def machine() -> dict[str, Any]:
  """What the figures depend on. `load` is of the minute before."""
  found = {
    "cpu": _cpu(),
    "cores": cores(),
    "python": platform.python_version(),
    "jax": importlib.metadata.version("jax"),
    "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
  }
  if "jax" in sys.modules:
    devices = sys.modules["jax"].devices()
    found["devices"] = f"{len(devices)} x {devices[0].device_kind}"
  return found


def _cpu() -> str:
  with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
    for line in file:
      if line.startswith("model name"):
        return line.split(":", 1)[1].strip()
  return platform.machine()


def timed(call: Callable[[], Any]) -> float:
  """Seconds that a call takes."""
  began = time.perf_counter()
  call()
  return time.perf_counter() - began


def interleave(
  calls: Mapping[str, Callable[[], T]], repeats: int, warm_ups: int = 1
) -> dict[str, list[T]]:
  """Lets calls take turns.

  Args:
    calls: by name; each returns what it measured.
    repeats: of all of them.
    warm_ups: turns before that do not count.

  Returns:
    What each measured, in order.
  """
  results: dict[str, list[T]] = {name: [] for name in calls}
  for repeat in range(warm_ups + repeats):
    for name, call in calls.items():
      value = call()
      if repeat >= warm_ups:
        results[name].append(value)
  return results


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
  """The ratio of each pair."""
  return [a / b for a, b in zip(above, below)]


def report(
  benchmark: int,
  name: str,
  values: Sequence[float],
  *,
  unit: str = "ratio",
  target: str | None = None,
) -> None:
  """Prints a figure as one line of JSON: the median, least and largest.

  Args:
    benchmark: number of its row in docs/benchmarks.md; 0 for limits.
    name: what is compared with what.
    values: one for each repeat.
    unit: "ratio", or what the values are measured in.
    target: such as "<= 1.02".
  """
  _print(
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


def skip(benchmark: int, name: str, reason: str) -> None:
  """Prints that a figure was not measured, and why."""
  _print({"benchmark": benchmark, "name": name, "skipped": reason})


def _print(line: Mapping[str, Any]) -> None:
  print(json.dumps(line), flush=True)


def _short(value: float) -> float:
  return float(f"{value:.4g}")


def meets(value: float, target: str) -> bool:
  """Whether a value is what a target such as "<= 1.02" asks for.

  >>> meets(1.01, "<= 1.02"), meets(0.8, ">= 0.85")
  (True, False)
  """
  sign, _, limit = target.partition(" ")
  return value <= float(limit) if sign == "<=" else value >= float(limit)


def missing(*modules: str) -> str:
  """Why these cannot be measured: which of them are not installed, or ""."""
  absent = [m for m in modules if importlib.util.find_spec(m) is None]
  return f"not installed: {', '.join(absent)}" if absent else ""


def simulate_devices(number: int) -> None:
  """Makes jax, which must not be loaded yet, see so many CPU devices."""
  os.environ.update(environment(number))


def environment(devices: int | None = None) -> dict[str, str]:
  """Environment of a process that finds this repository's modules.

  Args:
    devices: how many CPU devices jax simulates there; None for one real one.
  """
  flags = os.environ.get("XLA_FLAGS", "").split()
  flags = [flag for flag in flags if not flag.startswith(_DEVICE_COUNT)]
  if devices:
    flags.append(f"{_DEVICE_COUNT}={devices}")
  path = os.environ.get("PYTHONPATH")
  return {
    **os.environ,
    "XLA_FLAGS": " ".join(flags),
    "PYTHONPATH": os.pathsep.join([ROOT, path] if path else [ROOT]),
  }


def lines(
  *command: str, env: Mapping[str, str] | None = None
) -> Generator[str, None, None]:
  """The lines that a fresh Python process prints, as they come.

  Args:
    *command: arguments of the interpreter.
    env: its environment, `environment()` unless given.

  Raises:
    RuntimeError: it failed; with the end of what it said. Not if this is
      closed before its end: the process is ended then.
  """
  process = subprocess.Popen(
    [sys.executable, *command],
    env=dict(env or environment()),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  said: collections.deque[str] = collections.deque(maxlen=20)
  try:
    for line in process.stdout:
      said.append(line)
      yield line.rstrip("\n")
  except GeneratorExit:
    process.kill()
    raise
  finally:
    process.stdout.close()
    process.wait()
  if process.returncode:
    raise RuntimeError(
      f"{' '.join(command)}: exit code {process.returncode}: {''.join(said)}"
    )
