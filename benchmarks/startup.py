"""Benchmark 4: time from the command to the end of the first step.

New processes run the command line with an empty and with a filled compile
cache. The lower bound is a new process that imports jax and runs a trivial
program.

BIG_VISION=folder adds train.py of a checkout of big_vision, on the same JPEGs.
"""

import contextlib
import os
import shutil
import tempfile
import time

from benchmarks import measure

MARK = "benchmark: done"
_FLOOR = (
  "import jax; jax.jit(lambda x: x + 1)(1.0).block_until_ready(); "
  f"print('{MARK}', flush=True)"
)
_BENCHMARKS = os.path.join(measure.ROOT, "benchmarks")


class FirstStep:
  """A hook that prints a line after the first step and ends the process."""

  def __init__(self) -> None:
    self._steps = 0

  def before_step(self, step: int) -> None:
    """Called by the loop, which waits for its first step."""
    del step  # A resumed run can start at any step.
    self._steps += 1
    if self._steps == 2:
      print(MARK, flush=True)
      os._exit(0)


def main() -> None:
  """Prints the ratios of each config."""
  args = measure.arguments(__doc__)
  synthetic = os.path.join(_BENCHMARKS, "synthetic.py")
  if args.quick:
    configs = {"mu/16": f"{synthetic}:mu/16,size=16"}
  else:
    configs = {
      "digits": os.path.join(measure.ROOT, "configs", "digits.py"),
      "ViT-S/16, 12 layers": f"{synthetic}:S/16,size=64",
    }
  for i, (name, config) in enumerate(configs.items()):
    # The warm-up of the first config reads the files of all into memory.
    _ours(name, config, args.repeats, warm_ups=i == 0 and not args.quick)
  _big_vision(args.quick, args.repeats)


def _ours(name: str, config: str, repeats: int, warm_ups: int) -> None:
  with tempfile.TemporaryDirectory() as folder:
    runs = Runs(folder)
    secs = measure.interleave(
      {
        "cold": lambda: runs.ours(config, cold=True),
        "warm": lambda: runs.ours(config, cold=False),
        "floor": lambda: secs_to_line(MARK, "-c", _FLOOR),
      },
      repeats,
      warm_ups,
    )
  measure.report(
    4,
    f"first step, warm / cold cache: {name}",
    measure.ratios(secs["warm"], secs["cold"]),
    target="<= 0.25" if name == "digits" else None,
  )
  measure.report(
    4,
    f"first step, warm cache / (import jax + a trivial jit): {name}",
    measure.ratios(secs["warm"], secs["floor"]),
    target="<= 2.5" if name == "digits" else None,
  )
  for kind in ("cold", "warm"):
    measure.report(4, f"first step, {kind} cache: {name}", secs[kind], unit="s")


def _big_vision(quick: bool, repeats: int) -> None:
  names = {
    "cold": "first step, empty caches, big_vision / ours: ViT-S/16 on JPEGs",
    "warm": "first step, warm caches, big_vision / ours: ViT-S/16 on JPEGs",
  }
  checkout, reason = big_vision_checkout(quick)
  if reason:
    for name in names.values():
      measure.skip(4, name, reason)
    return
  with tempfile.TemporaryDirectory() as folder:
    runs = Runs(folder)
    config, peer = configs_with_big_vision(folder)
    secs = measure.interleave(
      {
        "cold, peer": lambda: runs.big_vision(peer, checkout, cold=True),
        "cold, ours": lambda: runs.ours(config, cold=True),
        "warm, peer": lambda: runs.big_vision(peer, checkout, cold=False),
        "warm, ours": lambda: runs.ours(config, cold=False),
      },
      repeats,
    )
  for kind, name in names.items():
    pairs = measure.ratios(secs[f"{kind}, peer"], secs[f"{kind}, ours"])
    measure.report(4, name, pairs)


def big_vision_checkout(quick: bool) -> tuple[str, str]:
  """Returns (folder of the checkout, "" or the reason to skip it)."""
  checkout = os.environ.get("BIG_VISION", "")
  reason = "" if checkout else "BIG_VISION is not set"
  reason = reason or measure.missing("einops", "overrides")
  return checkout, reason or ("not in --quick" if quick else "")


def configs_with_big_vision(folder: str) -> tuple[str, str]:
  """Writes small JPEGs; returns (our config, big_vision's config) for them."""
  from benchmarks import jpegs

  images = os.path.join(folder, "images")
  os.makedirs(images)
  jpegs.write(images, 64, 64, 64, 3_000)
  config = os.path.join(_BENCHMARKS, "jpegs.py")
  config += f":folder={images},variant=S/16,size=64,batch_size=8"
  peer = os.path.join(_BENCHMARKS, "peer_big_vision.py")
  peer += f":{os.path.join(images, 'index.jsonl')},S/16,64,8"
  return config, peer


class Runs:
  """New processes, each with a new workdir.

  A cold run starts with an empty compile cache and fills it; a warm run uses
  the cache of the last cold run.

  Args:
    folder: parent of workdirs and caches.
  """

  def __init__(self, folder: str):
    self._folder = folder
    self._number = 0

  def _paths(self, program: str, cold: bool) -> tuple[str, str]:
    self._number += 1
    cache = os.path.join(self._folder, f"cache-{program}")
    if cold:
      shutil.rmtree(cache, ignore_errors=True)
    return os.path.join(self._folder, f"run-{self._number}"), cache

  def ours(self, config: str, *, cold: bool) -> float:
    """Returns the seconds to the end of the first step."""
    return first_step_secs(config, *self._paths("ours", cold))

  def big_vision(self, config: str, checkout: str, *, cold: bool) -> float:
    """Returns the same of unmodified big_vision, with jax's defaults."""
    workdir, cache = self._paths("big_vision", cold)
    return big_vision_first_step_secs(config, workdir, cache, checkout)


def first_step_secs(config: str, workdir: str, cache: str) -> float:
  """Returns the seconds to the end of our first step in a workdir."""
  return secs_to_line(
    MARK,
    "-m",
    "bigtrain.main",
    f"--config={config}",
    f"--workdir={workdir}",
    f"--config.compile_cache={cache}",
    "--config.hooks.first_step.type=benchmarks.startup.FirstStep",
  )


def big_vision_first_step_secs(
  config: str, workdir: str, cache: str, checkout: str
) -> float:
  """Returns the same of unmodified big_vision, with jax's defaults."""
  return secs_to_line(
    "training_loss",  # Logged after the first step.
    "-m",
    "big_vision.train",
    f"--config={config}",
    f"--workdir={workdir}",
    env=big_vision_environment(cache, checkout),
  )


def big_vision_environment(cache: str, checkout: str) -> dict[str, str]:
  """Returns the environment for a checkout of big_vision."""
  env = measure.environment()
  return env | {
    "PYTHONPATH": os.pathsep.join([checkout, env["PYTHONPATH"]]),
    "JAX_COMPILATION_CACHE_DIR": cache,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }


def secs_to_line(
  mark: str, *command: str, env: dict[str, str] | None = None
) -> float:
  """Returns the seconds from a process's start to a line with `mark`."""
  start_secs = time.perf_counter()
  with contextlib.closing(measure.lines(*command, env=env)) as lines:
    for line in lines:
      if mark in line:
        return time.perf_counter() - start_secs
  raise RuntimeError(f"{' '.join(command)}: never printed {mark!r}.")


if __name__ == "__main__":
  main()
