"""Rollouts: batches that are made with the weights of the step.

A task may have `rollout(variables, batch, rng, *, model, eos_ids, **options)`,
which makes the batch of an update from the input's batch, on all devices; its
options are those of config.loss. For reinforcement learning it writes several
answers to each prompt. Then the sources judge the answers, on the host that has
read their prompts: `judge(indices, batch)` returns float32 [B, G] for the names
JUDGED. If a function answers the model's tool calls, answers have several turns
(turns.py).

With config.rollouts, several updates share a set of rollouts. A set has the
answers to the prompts of `minibatches` batches of the input, written with the
weights at the start of the set. Each update uses one of these batches, in
order, and together they go through all of them `iterations` times. Their
batches have the feature "old_log_probs", which the task's `score` computes when
the answers are written. Checkpoints contain the set, because the weights that
wrote it are gone.

Random numbers depend only on the seed and the step, so a resumed run makes the
same batches.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import picture_features
from bigtrain.arrays.types import Batch, TrainState, Variables
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.config.settings import Config
from bigtrain.inputs.engine import Part
from bigtrain.inputs.named_features import Features
from bigtrain.inputs.pipeline import TrainInput
from bigtrain.inputs.transfer import JoinedBatches, Prefetch
from bigtrain.objective import (
  logical_axes,
  microbatching,
  reward_report,
  shared_rows,
  turns,
)

JUDGED = ("reward", "failed_rewards")
# Entry of a checkpoint with the set.
_ENTRY = "rollouts"
# Features for a task's `score`, if it has one.
_SCORED = ("tokens", "targets", "loss_mask", *picture_features.OF_PROMPTS)


class Rollout:
  """Makes the batches of updates; without a task's rollout, the input's.

  Steps count the batches of updates, including those that rollbacks skip.

  Attributes:
    exists: whether the task has a rollout.
    drawn: (spec, share of the steps) of each batch size that steps draw.
    spec: the largest of these specs.
    saved_spec: entries of checkpoints besides the train state; {} unless
      several updates share a set.
  """

  def __init__(
    self,
    config: Config,
    task: Any,
    model: Any,
    train_input: TrainInput,
    variables_spec: Variables,
    mesh: Mesh,
  ):
    self.exists = hasattr(task, "rollout")
    self.spec = sharding.batch_spec(train_input.spec, mesh)
    self.drawn = [
      (sharding.batch_spec(spec, mesh), share)
      for spec, share in train_input.drawn
    ]
    self.saved_spec: dict[str, Any] = {}
    self._input = train_input
    self._minibatches = 1  # Of one set.
    self._updates = 1  # With one set.
    # The batch of the last update, and the number of its input batch.
    self._newest: tuple[Batch, int] | None = None
    if not self.exists:
      return
    if len(self.drawn) > 1:
      raise ConfigError(
        f"config.input.flexi: not with config.task={config.task!r}, whose "
        "batches have one size."
      )
    self._mesh = mesh
    self._replicated = sharding.replicated(mesh)
    self._report = reward_report.RewardReport(train_input, mesh)
    self._shared_rows = shared_rows.SharedRows(train_input.placement)
    bind = functools.partial(_bind, config, model, train_input)
    self._make = bind(task.rollout)
    step = jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated)
    self._specs = (variables_spec, self.spec, step)
    # `made` becomes the shapes of the update's batch: what the task's rollout
    # makes, the sources' rewards, and what turns and sets add.
    made = jax.eval_shape(self._make, *self._specs)
    judged = jax.ShapeDtypeStruct(made["tokens"].shape[:2], jnp.float32)
    made |= dict.fromkeys(JUDGED, judged)

    self._turns: turns.Turns | None = None
    if any(_toolbox(part) for part in train_input.engine.parts):
      prompt_length = train_input.spec["prompt"].shape[1]
      self._turns = turns.Turns(
        bind(task.next_turn),
        train_input,
        mesh,
        made,
        max_new=made["tokens"].shape[2] + 1 - prompt_length,
        eos_ids=_eos_ids(train_input),
        shared=self._shared_rows,
      )
      made |= dict.fromkeys(turns.COUNTS, judged)

    self._read_sets(config)
    if self._updates > 1:
      made["old_log_probs"] = made["log_probs"]
      number = microbatching.read(config, train_input.batch_size, mesh)
      self._score = _in_microbatches(bind(task.score), number, mesh)
    self.spec = sharding.batch_spec(made, mesh)
    self.drawn = [(self.spec, 1.0)]
    if self._updates > 1:
      batches = {str(i): self.spec for i in range(self._minibatches)}
      self.saved_spec = {_ENTRY: {"number": step, **batches}}

  def _read_sets(self, config: Config) -> None:
    options = config.get("rollouts", Config({}, "config.rollouts"))
    self._minibatches = settings.whole_number(options, "minibatches", 1, 1)
    iterations = settings.whole_number(options, "iterations", 1, 1)
    self._updates = self._minibatches * iterations
    self._number = -1  # Of the current set; -1 before the first.
    self._set: list[Batch] = []

  def compile(self, programs: Any) -> None:
    if self.exists:
      self._make = programs.compile(
        "rollout",
        self._make,
        *self._specs,
        out_shardings=sharding.batch(self._mesh),
      )
      if self._turns:
        self._turns.compile(programs, self._specs[0])
      if self._updates > 1:
        variables_spec, _, step = self._specs
        self._score = programs.compile(
          "score",
          self._score,
          variables_spec,
          {name: self.spec[name] for name in _SCORED if name in self.spec},
          step,
          out_shardings=sharding.batch(self._mesh),
        )

  def report(self) -> Callable[[], dict[str, Any]]:
    """Returns a function that reports the newest step's rewards."""
    if self._newest is None:
      return dict
    return self._report(*self._newest)

  # The set, as a part of checkpoints.

  def no_set(self) -> dict[str, Any]:
    """The entries of a checkpoint, besides the train state, without a set."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.saved_spec)
    if zeros:
      zeros[_ENTRY]["number"] -= 1
    return zeros

  def restore(self, state: TrainState) -> TrainState:
    """Takes the set out of a restored state; returns the train state."""
    state = dict(state)
    if self.saved_spec:
      saved = dict(state.pop(_ENTRY))
      self._number = int(jax.device_get(saved.pop("number")))
      self._set = [saved[str(i)] for i in range(self._minibatches)]
    return state

  @property
  def saved(self) -> dict[str, Any]:
    """The entries of the current set in a checkpoint; see `saved_spec`."""
    if not self.saved_spec:
      return {}
    number = jax.device_put(np.int32(self._number), self._replicated)
    batches = {str(i): batch for i, batch in enumerate(self._set)}
    return {_ENTRY: {"number": number, **batches}}

  # The batches of updates.

  def input_step(self, step: int) -> int:
    """The number of the input batch that a step uses."""
    number, update = divmod(step, self._updates)
    return number * self._minibatches + update % self._minibatches

  def start(
    self, first_step: int, last_step: int, ahead: int = 0
  ) -> Prefetch | JoinedBatches:
    """Starts the input of batches [first_step, last_step), for `__call__`.

    `ahead` is the number of batches that rollbacks have skipped.
    """
    if self.exists and first_step:
      self._warn_of_calls()
    if self._updates == 1:
      return self._input.start(first_step, last_step, ahead)
    # Batches of prompts are read only when their set is written; the current
    # set, which may come from a checkpoint, has been.
    first_set = first_step // self._updates
    if first_set == self._number:
      first_set += 1
    last_set = -(-last_step // self._updates)
    size = self._minibatches
    return self._input.start(first_set * size, max(first_set, last_set) * size)

  def _warn_of_calls(self) -> None:
    """Warns of judges and tools that may answer differently after a restart."""
    names = [
      name
      for part in self._input.engine.parts
      for name in getattr(part.source, "outside_calls", ())
    ]
    if names:
      logging.warning(
        "The answers since the checkpoint are written again, and judged again "
        "by %s. If it returns the same rewards for the same answers, this run "
        "ends with the same result as without the interruption; otherwise it "
        "cannot be reproduced exactly.",
        ", ".join(dict.fromkeys(names)),
      )

  def writes(self, step: int) -> bool:
    """Whether a step needs new rollouts."""
    return self.exists and (
      self._updates == 1 or step // self._updates != self._number
    )

  def __call__(
    self, variables: Variables, batches: Iterator[Batch], step: int
  ) -> Batch:
    """Makes the batch of a step; needs `compile`.

    Args:
      batches: the iterator from `start`, of which a set takes several.
    """
    if not self.exists:
      return next(batches)
    if self._updates == 1:
      batch = self._write(variables, next(batches), step)
    else:
      number, update = divmod(step, self._updates)
      if number != self._number:
        self._set = self._write_set(variables, batches, number)
        self._number = number
      batch = self._of_set(self._set, update)
    self._newest = (batch, self.input_step(step))
    return batch

  def again(
    self, variables: Variables, step: int, ahead: int = 0
  ) -> Iterator[Batch]:
    """Makes the batches of a step and the next one, to look for an error.

    If the set is no longer available, the current weights write its answers.
    """
    for each in (step, step + 1):
      number, update = divmod(each, self._updates)
      if self._updates > 1 and number == self._number:
        yield self._of_set(self._set, update)
        continue
      first = number * self._minibatches
      batches = self._input.start(first, first + self._minibatches, ahead)
      with contextlib.closing(batches):
        if self._updates > 1:
          written = self._write_set(variables, batches, number)
          yield self._of_set(written, update)
        elif self.exists:
          yield self._write(variables, next(batches), each)
        else:
          yield next(batches)

  def _write_set(
    self, variables: Variables, batches: Iterator[Batch], number: int
  ) -> list[Batch]:
    first = number * self._minibatches
    return [
      self._write(variables, next(batches), first + i)
      for i in range(self._minibatches)
    ]

  def _of_set(self, batches: list[Batch], update: int) -> Batch:
    return batches[update % self._minibatches]

  def _write(self, variables: Variables, batch: Batch, step: int) -> Batch:
    """Writes and judges the answers to the input batch with this number."""
    number = jax.device_put(np.int32(step), self._replicated)
    made = self._make(variables, batch, number)
    messages = None
    if self._turns:
      made, messages = self._turns(variables, made, step)
    written = {**made, **self._judge(made, messages, step)}
    if self._updates > 1:
      texts = {name: made[name] for name in _SCORED if name in made}
      written["old_log_probs"] = self._score(variables, texts, number)
    return written

  def _judge(
    self, made: Batch, messages: turns.Messages | None, step: int
  ) -> dict[str, Any]:
    """Lets the source of each example judge its answers; global arrays."""
    engine, placement = self._input.engine, self._input.placement
    local = {
      name: placement.get(x)
      for name, x in made.items()
      if name not in picture_features.OF_PROMPTS  # The host needs none.
    }
    shape = local["targets"].shape[:2]
    own_rows = self._shared_rows.own
    judged = {name: np.zeros(shape, np.float32) for name in JUDGED}
    order = engine.row_order(step, 0, engine.num_rows)
    for i, part in enumerate(engine.parts):
      places = np.flatnonzero((order.source == i) & own_rows)
      own = {name: x[places] for name, x in local.items()}
      options = {}
      if messages is not None and _toolbox(part):
        options["messages"] = [messages[place] for place in places.tolist()]
      indices = order.index[places]
      for name, x in part.source.judge(indices, own, **options).items():
        judged[name][places] = x
    return placement.put(self._shared_rows.exchange(judged))


def _in_microbatches(fn: Any, number: int, mesh: Mesh) -> Any:
  """A function of (variables, batch, step) that needs less memory."""
  if number == 1:
    return fn

  def in_parts(variables: Any, batch: Batch, step: jax.Array) -> jax.Array:
    parts = microbatching.split(batch, number, mesh)
    results = jax.lax.map(lambda part: fn(variables, part, step), parts)
    return microbatching.join(results, mesh)

  return in_parts


def _toolbox(part: Part) -> Any:
  return getattr(part.source, "toolbox", None)


def _eos_ids(train_input: TrainInput) -> tuple[int, ...]:
  return tuple(train_input.saved["data"].get("end_ids", ()))


def _bind(config: Config, model: Any, train_input: TrainInput, fn: Any) -> Any:
  """A task's function as one of (variables, batch, step and other numbers)."""
  seed = np.uint32(config.get("seed", 0) % 2**32)
  parameters = inspect.signature(fn).parameters
  options: dict[str, Any] = {
    name: value
    for name, value in config.kwargs("loss").items()
    if name in parameters
  }

  def make(variables: Any, batch: Batch, *numbers: jax.Array) -> Any:
    # The first two of the three keys are for initialisation and losses.
    _, _, key = jax.random.split(jax.random.key(seed), 3)
    for number in numbers:
      key = jax.random.fold_in(key, number)
    with logical_axes.no_logical_axes():
      return fn(
        variables,
        Features(batch, "config.input"),
        key,
        model=model,
        eos_ids=_eos_ids(train_input),
        **options,
      )

  return make
