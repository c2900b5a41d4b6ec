"""Benchmark 7, second part: time to recover from the loss of a host.

Four processes on one machine, started by launch/local.sh under tools.supervise
with local checkpoints, stand for four hosts. One of them is killed with
SIGKILL, and its local checkpoints are removed. The figure is the time from the
kill to the end of the next new step, including the steps that are computed
again, divided by the time from the command to the first step of the same job in
a new workdir.
"""

import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

from benchmarks import measure, startup

_LOCAL_STEPS = 5  # Steps between two local checkpoints.
_KILL_STEP = 14  # The step before which a process is killed.
_LOST = 1  # Index of the process that is killed.
_NEXT, _RESUMED = "benchmark: next step", "benchmark: resumed at step"
# Names a file with the time of the kill. Not in the config, so that starts
# share the config.
_VARIABLE = "BENCHMARK_KILLED_AT"


class Kill:
  """A hook that kills a process once, and prints a line after the next step.

  Without the environment variable, it only prints `startup.MARK` after the
  first step.
  """

  def __init__(self, context: Any):
    self._context = context
    self._steps = 0

  def before_step(self, step: int) -> None:
    """Kills this process, or prints where the run is."""
    import jax

    self._steps += 1
    path = os.environ.get(_VARIABLE, "")
    index = jax.process_index()
    if self._steps == 2 and index == 0 and not path:
      jax.block_until_ready(self._context.state)
      print(startup.MARK, flush=True)
    if not path:
      return
    if not os.path.exists(path):
      if step == _KILL_STEP and index == _LOST:
        self._die(pathlib.Path(path))
    elif index == 0:
      if self._steps == 1:
        print(f"{_RESUMED} {step}", flush=True)
      if step == _KILL_STEP + 1:
        jax.block_until_ready(self._context.state)
        print(_NEXT, flush=True)

  def _die(self, path: pathlib.Path) -> None:
    import jax

    hosts = pathlib.Path(self._context.config["local_ckpt_dir"])
    saved = (_KILL_STEP - 1) // _LOCAL_STEPS * _LOCAL_STEPS
    committed = f"*/*/checkpoints/{saved:08d}/manifest.json"
    while len([*hosts.glob(committed)]) < jax.process_count():
      time.sleep(0.01)
    (own,) = hosts.glob(f"*/{_LOST}")
    shutil.rmtree(own)
    path.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
  """Prints the ratio, and the number of steps that are computed again."""
  args = measure.arguments(__doc__)
  path = ("configs", "digits.py")
  model, number = "digits", 4
  if args.quick:
    path = ("benchmarks", "synthetic.py:mu/16,size=16,batch_size=8")
    model, number = "mu/16", 2
  config = os.path.join(measure.ROOT, *path)
  with tempfile.TemporaryDirectory() as folder:
    jobs = _Jobs(folder, config, number)
    if not args.quick:
      jobs.start()  # Fills the caches.
    secs = measure.interleave(
      {"warm": jobs.start, "recovery": jobs.recover}, args.repeats, warm_ups=0
    )
  name = f"{model}, {number} processes"
  measure.report(
    7,
    f"from the loss of a host to the next step / warm start: {name}",
    measure.ratios(secs["recovery"], secs["warm"]),
    target="<= 3",
  )
  for kind in ("warm", "recovery"):
    measure.report(7, f"{kind}: {name}", secs[kind], unit="s")
  measure.report(
    7,
    f"steps computed again, of {_LOCAL_STEPS} between checkpoints: {name}",
    jobs.repeated,
    unit="steps",
    target=f"<= {_LOCAL_STEPS}",
  )


class _Jobs:
  """Jobs, each in a new workdir.

  Attributes:
    repeated: number of steps that each recovery computed again.
  """

  def __init__(self, folder: str, config: str, number: int):
    self._processes = number
    self._folder = folder
    self._config = config
    self._started = 0
    self.repeated: list[float] = []

  def start(self) -> float:
    """Returns the seconds from the command to the end of the first step."""
    began = time.time()
    return self._until(startup.MARK, {}) - began

  def recover(self) -> float:
    """Returns the seconds from a kill to the end of the next step."""
    killed = os.path.join(self._folder, f"killed-{self._started}")
    ended = self._until(_NEXT, {_VARIABLE: killed})
    return ended - float(pathlib.Path(killed).read_text())

  def _until(self, mark: str, variables: dict[str, str]) -> float:
    """Runs a job to its end; returns the time of a line of its output."""
    self._started += 1
    path = os.path.join(self._folder, f"run-{self._started}")
    options = {
      "stop_at_steps": _KILL_STEP + 2,
      "ckpt_steps": 1000,
      "compile_cache": os.path.join(self._folder, "cache"),
      "mesh": dict(replica=2, fsdp=self._processes // 2),
      "local_ckpt_dir": os.path.join(self._folder, "hosts"),
      "local_ckpt_steps": _LOCAL_STEPS,
      "hooks": {"kill": {"type": "benchmarks.recovery.Kill"}},
    }
    command = [
      "bash",
      os.path.join(measure.ROOT, "launch", "local.sh"),
      str(self._processes),
      f"--config={self._config}",
      f"--workdir={path}",
      *(f"--config.{key}={value}" for key, value in options.items()),
    ]
    env = measure.environment() | variables
    env |= {"PYTHON": sys.executable, "LOGS": f"{path}-logs"}
    lines = measure.lines(
      "-m", "bigtrain.tools.supervise", "--", *command, env=env
    )
    ended = 0.0
    for line in lines:  # To the end of the run, which is near.
      if line.startswith(_RESUMED):
        step = int(line.removeprefix(_RESUMED))
        self.repeated.append(_KILL_STEP - step)
      if line == mark:
        ended = time.time()
    if not ended:
      raise RuntimeError(f"the job ended without {mark!r}.")
    return ended


if __name__ == "__main__":
  main()
