"""The update and the loop of main.py, with a stopwatch between its parts.

There is no second copy of the program here: main looks up what it calls in
other modules at the moment when it calls it, and a few of these names are
replaced while it runs. What compiles, trains and logs is the program itself.
"""

import collections
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from bigtrain import main
from bigtrain.checkpoints import start
from bigtrain.cluster import process
from bigtrain.inputs import pipeline
from bigtrain.runtime import host_memory

# Steps of the loop that pass before one is timed: more than main queues on the
# device, and more batches than wait in front of it.
_LEAD_IN_STEPS = 10

# As many as main has on the device.
_STEPS_IN_FLIGHT = 4

# As main does, before anything here uses a device.
host_memory.keep_freed()

_begin = start.start
_make_train = pipeline.make_train


@dataclasses.dataclass
class Program:
  """A config's compiled update, and arguments for it that stay on the device.

  Attributes:
    update: the compiled update: (state, tally, batch) -> (state, tally).
    compile_secs: what it took to trace, lower and compile it, with nothing
      else going on; None in `train`, where the state is made meanwhile.
    state: the train state.
    tally: sums of metrics.
    batch: that of the first step.
  """

  update: Any = None
  compile_secs: float | None = None
  state: Any = None
  tally: Any = None
  batch: Any = None

  def run(self, steps: int) -> float:
    """Seconds of so many updates, one after the other, on the same batch."""
    if self.tally is None:
      (_, specs, _), _ = self.update.args_info
      (_, shardings, _), _ = self.update.input_shardings
      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), specs)
      self.tally = jax.device_put(zeros, shardings)
    jax.block_until_ready((self.state, self.tally, self.batch))
    began = time.perf_counter()
    in_flight: collections.deque[Any] = collections.deque()
    for _ in range(steps):
      self.state, self.tally = self.update(self.state, self.tally, self.batch)
      # Each step that is queued has buffers of its own.
      in_flight.append(self.tally)
      if len(in_flight) > _STEPS_IN_FLIGHT:
        jax.block_until_ready(in_flight.popleft())
    jax.block_until_ready((self.state, self.tally))
    return time.perf_counter() - began


class Between:
  """A hook for what `train` is asked to do between steps."""

  def before_step(self, step: int) -> None:
    """Is replaced."""


class _Enough(BaseException):
  """Leaves main.train; nothing there catches it."""


class _Later:
  """Like process.Background, but runs when its result is asked for."""

  def __init__(self, fn: Callable[[], Any], name: str = ""):
    self.result = fn


def build(config: Any, *, state: bool = True, update: bool = True) -> Program:
  """Runs main.train until its loop would begin.

  Args:
    config: as for main.train, but for the compilation cache, which is off.
    state: whether to make the state and a batch.
    update: whether to compile the update, after all else is done.
  """
  program = Program()
  started: list[_Later] = []

  def background(fn: Callable[[], Any], name: str = "") -> _Later:
    started.append(_Later(fn, name))
    return started[-1]

  def begin(*args: Any, **kwargs: Any) -> Any:
    (compiling,) = started
    if state:
      program.state = jax.block_until_ready(_begin(*args, **kwargs).state)
    if update:
      began = time.perf_counter()
      program.update = compiling.result()
      program.compile_secs = time.perf_counter() - began
    raise _Enough

  with contextlib.ExitStack() as patches:
    if state:
      _replace(patches, pipeline, "make_train", _with_batch(program))
    _replace(patches, process, "Background", background)
    _replace(patches, start, "start", begin)
    _train(config)
  return program


def train(config: Any, before_step: Callable[[Program, int], bool]) -> None:
  """Runs main.train, and something between its steps.

  Args:
    config: as for `build`.
    before_step: called before each step with the program, whose state is a
      copy of the initial one, and the number of the step, from 1. The loop
      waits for what it does, and ends when it returns False.
  """
  program = Program()

  class Background(process.Background):
    def result(self) -> Any:
      value = super().result()
      if isinstance(value, jax.stages.Compiled):
        program.update = value
      return value

  def begin(*args: Any, **kwargs: Any) -> Any:
    begun = _begin(*args, **kwargs)
    program.state = jax.tree.map(jnp.copy, begun.state)
    return begun

  def between(self: Any, step: int) -> None:
    if not before_step(program, step):
      raise _Enough

  of_config = config.get("hooks", {})
  config["hooks"] = {**of_config, "benchmark": {"type": f"{__name__}.Between"}}
  with contextlib.ExitStack() as patches:
    _replace(patches, pipeline, "make_train", _with_batch(program))
    _replace(patches, process, "Background", Background)
    _replace(patches, start, "start", begin)
    _replace(patches, Between, "before_step", between)
    _train(config)


def loop_ratios(config: Any, steps: int, repeats: int) -> list[float]:
  """Time of the loop's steps / time of as many on a resident batch.

  Both take turns in one process, with the same compiled update: a block of
  resident steps, a block of the loop's, a block of resident steps, and so on.
  The loop queues some steps ahead; each of its blocks is timed between two
  moments at which it is in full swing.

  Args:
    config: as for `build`.
    steps: of a block; a multiple of the steps between two rows, so that all
      blocks write as many rows.
    repeats: ratios to make, each of a block and the two around it.
  """
  resident: list[float] = []
  loop: list[float] = []
  period = _LEAD_IN_STEPS + steps
  began = 0.0

  def before_step(program: Program, step: int) -> bool:
    nonlocal began
    if step <= period:  # All that happens once has happened then.
      return True
    done = (step - period - 1) % period
    if done == _LEAD_IN_STEPS:
      began = time.perf_counter()
    elif done == 0:
      if resident:
        loop.append(time.perf_counter() - began)
      program.run(_LEAD_IN_STEPS)  # Until what the loop has queued is done.
      resident.append(program.run(steps))
    return len(loop) < repeats

  train(config, before_step)
  around = [(a + b) / 2 for a, b in zip(resident, resident[1:])]
  return [a / b for a, b in zip(loop, around)]


def _with_batch(program: Program) -> Callable[..., Any]:
  """make_train that also puts the batch of step 0 into the program."""

  def make_train(*args: Any, **kwargs: Any) -> Any:
    train_input = _make_train(*args, **kwargs)
    batches = train_input.start(0, 1)
    program.batch = next(batches)
    batches.close()
    return train_input

  return make_train


def _replace(
  patches: contextlib.ExitStack, owner: Any, name: str, new: Any
) -> None:
  patches.enter_context(mock.patch.object(owner, name, new))


def _train(config: Any) -> None:
  """main.train in a workdir that goes away; ends with _Enough."""
  config["compile_cache"] = False
  with tempfile.TemporaryDirectory() as workdir:
    with contextlib.suppress(_Enough):
      main.train(config, workdir)
      raise RuntimeError("the run ended before it was measured.")
