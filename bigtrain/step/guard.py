"""The guard: keeps steps with NaN or infinite values out of the state.

If the loss or the gradient norm of a step is not finite, the state stays as it
was, and config.nonfinite decides what follows:

  "stop"  No later step changes the state either. The run ends with an error
          as soon as the host sees the metrics, at the next log step or save.
  "rollback"  The same, and then the run returns to the last checkpoint and
          skips the batches from there to the bad step, at most
          config.max_nonfinite times (Chowdhery et al. 2022, arXiv 2204.02311,
          section 5.1).
  "skip"  The step counts as skipped and training continues, until more than
          config.max_nonfinite steps were skipped.

If gradients overflow and the loss scale can still shrink, the step only changes
the scale, whatever the policy.

On the device, `Guard.judge` decides about a step, and `Guard.run` makes the new
state or keeps the old one. The host reads the running metrics some steps later:
`Guard.bad_step` and `Guard.spike` say whether the run has to stop, `explain`
finds the cause, and `Guard.failure` is the exception to raise.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bigtrain import metrics, sharding
from bigtrain.arrays import trees
from bigtrain.arrays.types import TrainState
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, check_choice
from bigtrain.step import loss_scale, spikes
from bigtrain.step.loss_scale import LossScale
from bigtrain.step.norms import NamedScalars
from bigtrain.step.spikes import Spike, Spikes, Statistics

POLICIES = ("stop", "skip", "rollback")

# Platforms on which the guard computes the new state of every step and then
# selects the new or the old array; elsewhere it branches. TPUs fuse the
# selection with the optimizer, whereas a branch keeps all gradients until the
# verdict: by the compiler's estimate, Adam's update of a ViT-B/16 takes 4.7 ms
# on a v5e, and with a branch 12.6 ms and 0.9 GB. On CPUs the selection copies
# the optimizer state, and a step takes 1.35 times as long.
_BY_SELECTION = ("tpu",)


class NotFinite(RuntimeError):
  """A loss or gradient was NaN or infinite."""


class Rollback(Exception):
  """The run returns to the step `restart` and skips batches up to `step`.

  Attributes:
    error: the reason; it ends the run if too many rollbacks have the same type.
    step: the bad step.
    restart: step of the checkpoint.
  """

  def __init__(
    self, error: Exception, step: int, restart: int, most: int | None = None
  ):
    skipped = ""
    if step > restart:
      skipped = f", skipping the batches of steps {restart + 1} to {step}"
    super().__init__(f"{error} ROLLING BACK to step {restart}{skipped}.")
    self.error = error
    self.step = step
    self.restart = restart
    self._most = most

  def add_to(self, rollbacks: "list[Rollback]") -> None:
    """Appends this one to the run's rollbacks.

    Raises its error if there have already been too many for the same reason.
    """
    same_reason = [r for r in rollbacks if type(r.error) is type(self.error)]
    if self._most is not None and len(same_reason) >= self._most:
      raise self.error
    rollbacks.append(self)


class Verdict(NamedTuple):
  """The guard's judgement of a step: bool scalars, of which at most one is set.

  All are False in steps after one at which the run has to stop or roll back.
  """

  good: jax.Array  # The state advances.
  bad: jax.Array  # Loss or gradients are not finite.
  # Gradients are not finite; a smaller loss scale may help.
  overflow: jax.Array
  skipped_spike: jax.Array | None = None
  # The new statistics, if config.spikes is set.
  spikes: Statistics | None = None


# (whether to compute the norms) -> (the state after the step without its loss
# scale, the norms).
Advance = Callable[[bool], tuple[TrainState, NamedScalars]]


class Guard(NamedTuple):
  """Settings of the guard."""

  policy: str  # One of POLICIES.
  max_nonfinite: int  # Largest number of skipped steps, or of rollbacks.
  loss_scale: LossScale | None
  by_branch: bool = True  # Whether `run` branches or selects arrays.
  spikes: Spikes | None = None

  def judge(
    self,
    state: Mapping[str, Any],
    running: Mapping[str, Any],
    loss: metrics.Pair,
    grad_norm: jax.Array,
  ) -> Verdict:
    """Judges a step by its loss, a (sum, weight), and its gradient norm.

    Args:
      state: the state before the step.
      running: the running metrics before the step.
      loss, grad_norm: those of the step.
    """
    may_shrink: Any = False
    if self.loss_scale:
      may_shrink = self.loss_scale.may_shrink(state["loss_scale"])
    mean_loss = loss[0] / loss[1]
    finite_loss = jnp.isfinite(mean_loss)
    finite = finite_loss & jnp.isfinite(grad_norm)
    overflow = finite_loss & ~finite & may_shrink
    # Whether the run is still going: no earlier step has stopped it.
    active = (running["bad_step"] == 0) | (self.policy == "skip")
    if self.spikes:
      active &= self.spikes.is_active(running["spikes"])
    good = finite & active
    verdict = Verdict(
      good=good, bad=~finite & ~overflow & active, overflow=overflow & active
    )
    if not self.spikes:
      return verdict
    spike, statistics = self.spikes.judge(
      running["spikes"], state["step"] + 1, mean_loss, grad_norm, good
    )
    verdict = verdict._replace(spikes=statistics)
    if self.spikes.policy == "warn":
      return verdict
    verdict = verdict._replace(good=good & ~spike)
    if self.spikes.rolls_back:
      return verdict
    return verdict._replace(skipped_spike=spike)

  def run(
    self,
    verdict: Verdict,
    state: TrainState,
    advance: Advance,
    *,
    log_norms: jax.Array | bool = False,
    no_norms: NamedScalars | None = None,
  ) -> tuple[TrainState, NamedScalars | None]:
    """Returns the new state and norms after a good step, else the old state.

    After a step that is skipped or overflows, the old state still gets the next
    step number, so that the next batch is used, and the new loss scale.

    Args:
      verdict: result of `judge`.
      state: the state before the step.
      advance: computes the new state. If the guard branches, the device runs it
        only for good steps.
      log_norms: whether the step reports norms.
      no_norms: placeholder for the norms in other steps.
    """
    old = {name: x for name, x in state.items() if name != "loss_scale"}
    # In a branch, arrays in host memory are on the device only for the update.
    in_host = any(sharding.in_host(x) for x in jax.tree.leaves(old))
    if self.by_branch or in_host:
      chosen, norms = _branch(verdict.good, old, advance, log_norms, no_norms)
    else:
      new, norms = advance(log_norms is not False)
      select = functools.partial(jax.lax.select, verdict.good)
      chosen = jax.tree.map(select, new, old)
    chosen = dict(chosen)
    next_step = state["step"] + 1
    if self.policy == "skip":
      chosen["step"] = next_step
    if verdict.skipped_spike is not None:
      chosen["step"] = jnp.where(
        verdict.skipped_spike, next_step, chosen["step"]
      )
    if self.loss_scale:
      choose = functools.partial(jnp.where, verdict.good | verdict.overflow)
      chosen["step"] = choose(next_step, chosen["step"])
      old_scale = state["loss_scale"]
      new_scale = self.loss_scale.update(old_scale, verdict.overflow)
      chosen["loss_scale"] = jax.tree.map(choose, new_scale, old_scale)
    return chosen, norms

  def log_values(self, state: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a log entry about the loss scale."""
    return loss_scale.log_values(state)

  def bad_step(self, running: Mapping[str, Any]) -> int:
    """The step at which the run must stop or roll back; 0 for none.

    Raises:
      NotFinite, Spike: after too many skipped steps.
    """
    if self.spikes:
      spike = self.spikes.bad_step(running["spikes"])
      if spike:
        return spike
    bad_step = int(running["bad_step"])
    skipped = int(running["skipped"])
    if self.policy != "skip":
      return bad_step
    if skipped > self.max_nonfinite:
      raise NotFinite(
        f"skipped {skipped} steps that were not finite, more than "
        f"config.max_nonfinite={self.max_nonfinite}; the first was step "
        f"{bad_step}."
      )
    return 0

  def spike(self, running: Mapping[str, Any]) -> Spike | None:
    """The spike to roll back from, if there is one."""
    if not (self.spikes and self.spikes.bad_step(running["spikes"])):
      return None
    description = spikes.describe(running["spikes"])
    return Spike(f"{description}, a spike. No checkpoint contains it.")

  def failure(
    self,
    error: NotFinite | Spike,
    step: int,
    saved_step: int | None,
    rollbacks: int,
  ) -> Exception:
    """The exception to raise for a bad step: a Rollback or the error itself.

    Args:
      error: what is wrong with the step.
      step: its number.
      saved_step: step of the last checkpoint, if there is one.
      rollbacks: number of rollbacks so far.
    """
    rolls_back = self.policy == "rollback"
    most = self.max_nonfinite
    if self.spikes and isinstance(error, Spike):
      rolls_back = self.spikes.rolls_back
      most = self.spikes.most
    if rolls_back and saved_step is not None and rollbacks < most:
      return Rollback(error, step, saved_step)
    return error


def _branch(
  good: jax.Array,
  old: TrainState,
  advance: Advance,
  log_norms: jax.Array | bool,
  norms: NamedScalars | None,
) -> tuple[TrainState, NamedScalars | None]:
  """Runs `advance` on the device for good steps only.

  Norms have a separate branch, which computes the step a second time, only in
  log steps. So the other branch can change the state in place. In one branch
  with three arms XLA copies the state, and every step of a ViT-S/16 on CPUs
  takes 1.2 times as long.
  """
  if log_norms is not False:  # False and no array: the norms are never due.
    # The barrier makes the second branch wait for the first.
    norms, good = jax.lax.cond(
      good & log_norms,
      lambda: (advance(True)[1], jax.lax.optimization_barrier(good)),
      lambda: (norms, good),
    )
  return jax.lax.cond(good, lambda: advance(False)[0], lambda: old), norms


def from_config(config: settings.Config, mesh: Mesh) -> Guard:
  policy = config.get("nonfinite", "stop")
  check_choice("config.nonfinite", policy, POLICIES)
  # A skipped step costs a batch, and a rollback everything since the
  # checkpoint.
  default = 100 if policy == "skip" else 3
  return Guard(
    policy=policy,
    max_nonfinite=settings.whole_number(
      config, "max_nonfinite", default, least=0
    ),
    loss_scale=loss_scale.from_config(config),
    by_branch=mesh.devices.flat[0].platform not in _BY_SELECTION,
    spikes=spikes.from_config(config),
  )


def explain(
  step: int,
  index: int,
  state: Any,
  train_input: Any,
  gradients: Callable[[Any, Any], Any],
  rollout: Any,
  variables: Any,
) -> NotFinite:
  """Finds why a step was not finite, by computing it again.

  It also computes a step with the next batch on the same state. If that is not
  finite either, this batch is not the cause, and skipping it would not help.

  Args:
    step: number of the bad step.
    index: number of its batch.
    state: the state before the step.
    train_input: the training data.
    gradients: (state, batch) -> gradients, metrics and mutable variables.
    rollout: the objective's, which makes the batches.
    variables: the variables with which the rollout writes answers.

  Returns: the error to raise.
  """
  # The loop's steps return sums and norms only. This one also says where values
  # are not finite: in the loss, in which gradients, or already in the batch.

  @jax.jit
  def inspect(state: Any, batch: Any) -> dict[str, Any]:
    grads, step_metrics, _ = gradients(state, batch)
    # Class numbers and the like, for which the task declares no limit. The
    # batch of a rollout lacks some features of the input.
    names = [name for name in train_input.unlimited if name in batch]
    integers = {name: batch[name] for name in names}
    finite_inputs = [jnp.isfinite(x).all() for x in batch.values()]
    loss = step_metrics["loss"][0] / step_metrics["loss"][1]
    grad_norm = metrics.global_norm(grads)
    return {
      "loss": loss,
      "finite_grads": jax.tree.map(lambda g: jnp.isfinite(g).all(), grads),
      "finite_batch": jnp.asarray(finite_inputs).all(),
      "ranges": {name: (x.min(), x.max()) for name, x in integers.items()},
      "good": jnp.isfinite(loss) & jnp.isfinite(grad_norm),
    }

  ahead = index - (step - 1)
  with contextlib.closing(rollout.again(variables, index, ahead)) as batches:
    found = jax.device_get(inspect(state, next(batches)))
    next_is_good = _is_good(inspect, state, batches)

  finite_grads = trees.flatten_with_names(found["finite_grads"])
  bad = [name for name, finite in finite_grads if not finite]
  bad_grads = (
    f"first of {len(bad)}: {bad[0]}" if bad else "none, only their norm"
  )
  order = train_input.order(rollout.input_step(index))
  examples = ", ".join(str(i) for i in order.index[:8])
  if len(order.index) > 8:
    examples += ", ..."
  first = train_input.where(int(order.source[0]), int(order.index[0]))
  return NotFinite(
    f"step {step} is not finite: loss {np.float32(found['loss'])}, gradients "
    f"that are not finite: {bad_grads}; examples {examples} (the first is "
    f"{first}). No checkpoint contains this step. "
    f"{_advice(found, next_is_good)}"
  )


def _advice(found: Mapping[str, Any], next_is_good: bool | None) -> str:
  if np.isnan(found["loss"]) and found["finite_batch"] and found["ranges"]:
    # A number beyond the model's classes is a mistake in the config or the
    # data, which skipping would only hide.
    ranges = ", ".join(
      f"{name!r} {least} to {most}"
      for name, (least, most) in found["ranges"].items()
    )
    return f"Check that the model can take these class numbers: {ranges}."
  if next_is_good is None:
    return "The next batch cannot be made."
  if next_is_good:
    return "The next batch is finite: nonfinite='skip' would skip such steps."
  return (
    "The next batch is not finite either, so skipping would not help. "
    "Check the learning rate, the initial parameters and the data."
  )


def _is_good(
  inspect: Callable[[Any, Any], Any], state: Any, batches: Any
) -> bool | None:
  """Whether a step with the next batch is finite; None if there is no batch."""
  try:
    batch = next(batches)
  except ConfigError:
    if jax.process_count() > 1:
      raise  # The other processes would wait for this one.
    return None
  return bool(jax.device_get(inspect(state, batch)["good"]))
