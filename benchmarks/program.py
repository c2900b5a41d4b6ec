"""Times the update and the loop of main.py.

This is not a copy of the program: main.train itself builds the update, trains
and logs.
"""

import collections
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import main
from bigtrain.inputs import pipeline
from bigtrain.runtime import host_memory
from bigtrain.tools.plan import program as plan_program

# Steps of the loop before a timed block: more than the steps that main queues
# on the device, and more than the batches that are prefetched.
_LEAD_IN_STEPS = 10

# As in main.
_STEPS_IN_FLIGHT = 4

# As in main, before the first use of a device.
host_memory.keep_freed()


@dataclasses.dataclass
class Program:
  """The compiled update of a config, and arguments for it on the device.

  Attributes:
    update: compiled (state, running, *others) -> (state, running).
    compile_secs: seconds to trace, lower and compile it; None in `train`.
    state: train state.
    running: running metrics.
    others: the other arguments: batch, hparams, teacher's variables.
    compile: makes `update` and `compile_secs`.
    fill: makes state, running metrics and the other arguments.
    facts: what tools.plan knows of it before it is compiled, if asked for.
  """

  update: Any = None
  compile_secs: float | None = None
  state: Any = None
  running: Any = None
  others: tuple[Any, ...] = ()
  compile: Callable[[], None] = lambda: None
  fill: Callable[[], None] = lambda: None
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def run(self, steps: int) -> float:
    """Returns the seconds of `steps` updates, the last one a log step."""
    batch, hparams, *rest = self.others
    jax.block_until_ready((self.state, self.running, self.others))
    start_secs = time.perf_counter()
    in_flight: collections.deque[Any] = collections.deque()
    for i in range(steps):
      scalars = {**hparams, "log_step": np.bool_(i == steps - 1)}
      self.state, self.running = self.update(
        self.state, self.running, batch, scalars, *rest
      )
      # Each queued step has its own buffers.
      in_flight.append(self.running)
      if len(in_flight) > _STEPS_IN_FLIGHT:
        jax.block_until_ready(in_flight.popleft())
    jax.block_until_ready((self.state, self.running))
    return time.perf_counter() - start_secs


def build(
  config: Any, *, state: bool = True, update: bool = True, facts: bool = False
) -> Program:
  """Builds the update as main.train does, without a compile cache.

  Args:
    config: config of the run.
    state: whether to make a state of random numbers and a batch of the data.
    update: whether to compile the update.
    facts: whether to count parameters and FLOPs.
  """
  program = Program()

  def on_update(run: Any, update_fn: Any, specs: Any, compile: Any) -> None:
    def compile_update() -> None:
      start_secs = time.perf_counter()
      with jax.set_mesh(run.mesh):
        program.update = compile()
      program.compile_secs = time.perf_counter() - start_secs

    def fill() -> None:
      spec, running, _, *others = specs
      program.state = _random(spec)
      program.running = _zeros(running, run.mesh)
      batch = _first_batch(run)
      program.others = (batch, *(_zeros(x, run.mesh) for x in others))

    program.compile, program.fill = compile_update, fill
    if facts:
      program.facts = plan_program.measure(run, update_fn, specs)
    if update:
      compile_update()
    if state:
      fill()

  config["compile_cache"] = False
  with tempfile.TemporaryDirectory() as workdir:
    main.train(config, workdir, on_update=on_update)
  return program


def _random(spec: Any) -> Any:
  """Small positive numbers, as moments have to be positive."""
  shardings = jax.tree.map(lambda x: x.sharding, spec)

  def make() -> Any:
    def leaf(x: Any) -> jax.Array:
      if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros(x.shape, x.dtype)
      return 0.02 * jax.random.uniform(jax.random.key(0), x.shape, x.dtype)

    return jax.tree.map(leaf, spec)

  return jax.block_until_ready(jax.jit(make, out_shardings=shardings)())


def _zeros(spec: Any, mesh: Any) -> Any:
  layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.tree.map(
    lambda x: jax.device_put(
      jnp.zeros(x.shape, x.dtype), getattr(x, "sharding", None) or layout
    ),
    spec,
  )


def _first_batch(run: Any) -> Any:
  train_input = pipeline.make_train(
    run.config.input,
    seed=run.seed,
    mesh=run.mesh,
    pp_modules=run.config.get("pp_modules", ()),
    run=run.config,
  )
  batches = train_input.start(0, 1)
  try:
    return next(batches)
  finally:
    batches.close()


class Between:
  """A hook that calls `before_step` of `train`."""

  program = Program()
  continues: Callable[[Program, int], bool]

  def around_update(
    self, step: int, update: Any, state: Any, running: Any, *others: Any
  ) -> Any:
    """Notes the arguments of the first step, and ends the run."""
    cls = type(self)
    if cls.program.update is None:
      copy = lambda tree: jax.tree.map(jnp.copy, tree)
      cls.program = Program(update, None, copy(state), copy(running), others)
    if not cls.continues(cls.program, step):
      raise _EndRun
    return update(state, running, *others)


class _EndRun(BaseException):
  """Ends main.train, which does not catch it."""


def train(config: Any, before_step: Callable[[Program, int], bool]) -> None:
  """Runs main.train with a function between its steps.

  Args:
    config: config of the run.
    before_step: (program, step) -> whether to continue; called before each
      step, counted from 1. The program's state is a copy of the initial one.
  """
  Between.program, Between.continues = Program(), staticmethod(before_step)
  config["hooks"] = {
    **config.get("hooks", {}),
    "benchmark": {"type": f"{__name__}.Between"},
  }
  config["compile_cache"] = False
  with tempfile.TemporaryDirectory() as workdir:
    with contextlib.suppress(_EndRun):
      main.train(config, workdir)
      raise RuntimeError("the run ended before it was measured.")


def loop_ratios(config: Any, steps: int, repeats: int) -> list[float]:
  """Returns ratios: time of steps in the loop / of steps on a resident batch.

  Blocks of both kinds take turns in one process, with the same compiled update.
  The loop queues a few steps ahead, so each of its blocks is timed between two
  moments with a full queue.

  Args:
    config: config of the run.
    steps: steps per block; a multiple of the steps between two log steps, so
      that all blocks log equally often.
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
