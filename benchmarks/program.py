"""Times the update and the loop of main.py.

This is not a copy of the program: main.train itself compiles, trains and logs.
A few functions that it calls in other modules are replaced while it runs.
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
from bigtrain.step import hparams

# Steps of the loop before a timed block: more than the steps that main queues
# on the device, and more than the batches that wait.
_LEAD_IN_STEPS = 10

# As in main.
_STEPS_IN_FLIGHT = 4

# As in main, before the first use of a device.
host_memory.keep_freed()

_spec = hparams.Hparams.spec
_start_run = start.start
_make_train = pipeline.make_train


@dataclasses.dataclass
class Program:
  """The compiled update of a config, and arguments for it on the device.

  Attributes:
    update: compiled (state, tally, batch, fixed) -> (state, tally).
    compile_secs: seconds to trace, lower and compile it, with nothing in
      parallel; None in `train`, where the state is made at the same time.
    state: train state.
    tally: sums of metrics.
    batch: batch of the first step.
    fixed: arguments beside the state: the config's numbers.
  """

  update: Any = None
  compile_secs: float | None = None
  state: Any = None
  tally: Any = None
  batch: Any = None
  fixed: Any = None

  def run(self, steps: int) -> float:
    """Returns the seconds of `steps` updates on the same batch."""
    if self.tally is None:
      (_, specs, *_), _ = self.update.args_info
      (_, shardings, *_), _ = self.update.input_shardings
      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), specs)
      self.tally = jax.device_put(zeros, shardings)
    jax.block_until_ready((self.state, self.tally, self.batch))
    start_secs = time.perf_counter()
    in_flight: collections.deque[Any] = collections.deque()
    for _ in range(steps):
      self.state, self.tally = self.update(
        self.state, self.tally, self.batch, self.fixed
      )
      # Each queued step has its own buffers.
      in_flight.append(self.tally)
      if len(in_flight) > _STEPS_IN_FLIGHT:
        jax.block_until_ready(in_flight.popleft())
    jax.block_until_ready((self.state, self.tally))
    return time.perf_counter() - start_secs


class Between:
  """A hook that calls `before_step` of `train`."""

  def before_step(self, step: int) -> None:
    """Replaced in `train`."""


class _EndRun(BaseException):
  """Ends main.train, which does not catch it."""


class _Lazy:
  """Like process.Background, but runs when the result is requested."""

  def __init__(self, fn: Callable[[], Any], name: str = ""):
    self.result = fn


def build(config: Any, *, state: bool = True, update: bool = True) -> Program:
  """Runs main.train up to the start of its loop, without a compile cache.

  Args:
    config: config of the run.
    state: whether to make the state and a batch.
    update: whether to compile the update, after everything else.
  """
  program = Program()
  started: list[_Lazy] = []

  def background(fn: Callable[[], Any], name: str = "") -> _Lazy:
    started.append(_Lazy(fn, name))
    return started[-1]

  def start_run(*args: Any, **kwargs: Any) -> Any:
    (compiling,) = started
    if state:
      program.state = jax.block_until_ready(_start_run(*args, **kwargs).state)
    if update:
      start_secs = time.perf_counter()
      program.update = compiling.result()
      program.compile_secs = time.perf_counter() - start_secs
    raise _EndRun

  with contextlib.ExitStack() as patches:
    if state:
      _replace(patches, pipeline, "make_train", _with_batch(program))
    _replace(patches, process, "Background", background)
    _replace(patches, start, "start", start_run)
    _replace(patches, hparams.Hparams, "spec", _with_fixed(program))
    _train(config)
  return program


def train(config: Any, before_step: Callable[[Program, int], bool]) -> None:
  """Runs main.train with a function between its steps.

  Args:
    config: config of the run.
    before_step: (program, step) -> whether to continue; called before each
      step, counted from 1. The program's state is a copy of the initial one.
  """
  program = Program()

  class Background(process.Background):
    def result(self) -> Any:
      value = super().result()
      if isinstance(value, jax.stages.Compiled):
        program.update = value
      return value

  def start_run(*args: Any, **kwargs: Any) -> Any:
    result = _start_run(*args, **kwargs)
    program.state = jax.tree.map(jnp.copy, result.state)
    return result

  def between(self: Any, step: int) -> None:
    if not before_step(program, step):
      raise _EndRun

  config["hooks"] = {
    **config.get("hooks", {}),
    "benchmark": {"type": f"{__name__}.Between"},
  }
  with contextlib.ExitStack() as patches:
    _replace(patches, pipeline, "make_train", _with_batch(program))
    _replace(patches, process, "Background", Background)
    _replace(patches, start, "start", start_run)
    _replace(patches, hparams.Hparams, "spec", _with_fixed(program))
    _replace(patches, Between, "before_step", between)
    _train(config)


def loop_ratios(config: Any, steps: int, repeats: int) -> list[float]:
  """Returns ratios: time of steps in the loop / of steps on a resident batch.

  Blocks of both kinds take turns in one process, with the same compiled update.
  The loop queues a few steps ahead, so each of its blocks is timed between two
  moments with a full queue.

  Args:
    config: config of the run.
    steps: steps per block; a multiple of the steps between two rows, so that
      all blocks write the same number of rows.
    repeats: number of ratios, each of a block and its two neighbours.
  """
  resident: list[float] = []
  loop: list[float] = []
  period = _LEAD_IN_STEPS + steps
  start_secs = 0.0

  def before_step(program: Program, step: int) -> bool:
    nonlocal start_secs
    if step <= period:  # Skips one-off work of the first steps.
      return True
    position = (step - period - 1) % period
    if position == _LEAD_IN_STEPS:
      start_secs = time.perf_counter()
    elif position == 0:
      if resident:
        loop.append(time.perf_counter() - start_secs)
      program.run(_LEAD_IN_STEPS)  # Drains the queue of the loop.
      resident.append(program.run(steps))
    return len(loop) < repeats

  train(config, before_step)
  neighbours = [(a + b) / 2 for a, b in zip(resident, resident[1:])]
  return [a / b for a, b in zip(loop, neighbours)]


def _with_batch(program: Program) -> Callable[..., Any]:
  """Returns a make_train that stores the batch of step 0 in the program."""

  def make_train(*args: Any, **kwargs: Any) -> Any:
    train_input = _make_train(*args, **kwargs)
    batches = train_input.start(0, 1)
    program.batch = next(batches)
    batches.close()
    return train_input

  return make_train


def _with_fixed(program: Program) -> Callable[..., Any]:
  """Returns an Hparams.spec that stores the arrays in the program."""

  def spec(self: hparams.Hparams, mesh: Any) -> Any:
    program.fixed = self.arrays(mesh)
    return _spec(self, mesh)

  return spec


def _replace(
  patches: contextlib.ExitStack, owner: Any, name: str, new: Any
) -> None:
  patches.enter_context(mock.patch.object(owner, name, new))


def _train(config: Any) -> None:
  """Runs main.train in a temporary workdir until _EndRun."""
  config["compile_cache"] = False
  with tempfile.TemporaryDirectory() as workdir:
    with contextlib.suppress(_EndRun):
      main.train(config, workdir)
      raise RuntimeError("the run ended before it was measured.")
