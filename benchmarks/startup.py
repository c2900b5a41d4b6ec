"""Benchmark 4: from the command to the end of the first step.

Fresh processes of the real command line, with an empty and with a filled
compilation cache, beside a fresh process that imports jax and runs a trivial
program: less than that, no jax program can take.

With BIG_VISION=folder, a checkout of big_vision, its train.py takes turns with
ours, on the same JPEGs.
"""

import contextlib
import itertools
import os
import tempfile
import time

from benchmarks import measure

_MARK = "benchmark: done"
_FLOOR = (
  "import jax; jax.jit(lambda x: x + 1)(1.0).block_until_ready(); "
  f"print('{_MARK}', flush=True)"
)
_BENCHMARKS = os.path.join(measure.ROOT, "benchmarks")


class FirstStep:
  """A hook that says when the first step is done, and ends the process."""

  def before_step(self, step: int) -> None:
    """Called by the loop, which has waited for the first step."""
    if step == 2:
      print(_MARK, flush=True)
      os._exit(0)


def main() -> None:
  """Prints the ratios for each config."""
  args = measure.arguments(__doc__)
  synthetic = os.path.join(_BENCHMARKS, "synthetic.py")
  if args.quick:
    configs = {"mu/16": f"{synthetic}:mu/16,size=16"}
  else:
    configs = {
      "digits": os.path.join(measure.ROOT, "configs", "digits.py"),
      "ViT-S/16, 12 layers": f"{synthetic}:S/16,size=64",
    }
  for name, config in configs.items():
    with tempfile.TemporaryDirectory() as folder:
      runs = Runs(folder)
      runs.ours(config, "filled")
      secs = measure.interleave(
        {
          "cold": lambda: runs.ours(config),
          "warm": lambda: runs.ours(config, "filled"),
          "floor": lambda: secs_to_line(_MARK, "-c", _FLOOR),
        },
        args.repeats,
        warm_ups=0,  # Filling the cache was one.
      )
    warm = secs["warm"]
    measure.report(
      4,
      f"first step, warm / cold cache: {name}",
      measure.ratios(warm, secs["cold"]),
      target="<= 0.35",
    )
    measure.report(
      4,
      f"first step, warm cache / (import jax + a trivial jit): {name}",
      measure.ratios(warm, secs["floor"]),
      target="<= 2.5",
    )
    measure.report(4, f"first step, warm cache: {name}", warm, unit="s")
  _big_vision(args.quick, args.repeats)


def _big_vision(quick: bool, repeats: int) -> None:
  names = {
    "cold": "first step, empty caches, big_vision / ours: ViT-S/16 on JPEGs",
    "warm": "first step, warm caches, big_vision / ours: ViT-S/16 on JPEGs",
  }
  checkout = os.environ.get("BIG_VISION")
  reason = "" if checkout else "BIG_VISION does not name a checkout of it"
  reason = reason or measure.missing("einops", "overrides")
  if quick:
    reason = reason or "not in --quick"
  if reason:
    for name in names.values():
      measure.skip(4, name, reason)
    return
  from benchmarks import jpegs

  with tempfile.TemporaryDirectory() as folder:
    images = os.path.join(folder, "images")
    os.makedirs(images)
    jpegs.write(images, 64, 64, 64, 3_000)
    runs = Runs(folder)
    config = os.path.join(_BENCHMARKS, "jpegs.py")
    config += f":folder={images},variant=S/16,size=64,batch_size=8"
    peer = os.path.join(_BENCHMARKS, "peer_big_vision.py")
    peer += f":{os.path.join(images, 'index.jsonl')},S/16,64,8"
    secs = measure.interleave(
      {
        "cold, peer": lambda: runs.big_vision(peer, checkout),
        "cold, ours": lambda: runs.ours(config),
        "warm, peer": lambda: runs.big_vision(peer, checkout, "peer"),
        "warm, ours": lambda: runs.ours(config, "ours"),
      },
      repeats,
    )
  for kind, name in names.items():
    pairs = measure.ratios(secs[f"{kind}, peer"], secs[f"{kind}, ours"])
    measure.report(4, name, pairs)


class Runs:
  """Fresh processes, each in a workdir of its own.

  Args:
    folder: for workdirs and caches.
  """

  def __init__(self, folder: str):
    self._folder = folder
    self._numbers = itertools.count()

  def _paths(self, cache: str | None) -> tuple[str, str]:
    number = next(self._numbers)
    return (
      os.path.join(self._folder, f"run-{number}"),
      os.path.join(self._folder, cache or f"cache-{number}"),
    )

  def ours(self, config: str, cache: str | None = None) -> float:
    """Seconds to the first step; with an empty cache unless one is named."""
    workdir, cache = self._paths(cache)
    return secs_to_line(
      _MARK,
      *("-m", "bigtrain.main", f"--config={config}", f"--workdir={workdir}"),
      f"--config.compile_cache={cache}",
      "--config.hooks.first_step.type=benchmarks.startup.FirstStep",
    )

  def big_vision(
    self, config: str, checkout: str, cache: str | None = None
  ) -> float:
    """The same of an unmodified big_vision, by jax's own settings."""
    workdir, cache = self._paths(cache)
    env = measure.environment()
    env |= {
      "PYTHONPATH": os.pathsep.join([checkout, env["PYTHONPATH"]]),
      "JAX_COMPILATION_CACHE_DIR": cache,
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return secs_to_line(
      "training_loss",  # Logged for the first step, once it has been fetched.
      *("-m", "big_vision.train", f"--config={config}", f"--workdir={workdir}"),
      env=env,
    )


def secs_to_line(
  mark: str, *command: str, env: dict[str, str] | None = None
) -> float:
  """Seconds from the start of a Python process to a line with `mark` in it."""
  began = time.perf_counter()
  with contextlib.closing(measure.lines(*command, env=env)) as lines:
    for line in lines:
      if mark in line:
        return time.perf_counter() - began
  raise RuntimeError(f"{' '.join(command)}: never printed {mark!r}.")


if __name__ == "__main__":
  main()
