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

A step whose gradients overflow under a loss scale that can still shrink only
changes the scale, whatever the policy.
"""

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

# Platforms on which the guard selects each array. TPUs fuse the selection with
# the optimizer, where a branch keeps all gradients until the verdict: an update
# of a ViT-B/16 by Adam takes 4.7 ms on a v5e, and with a branch 12.6 ms and 0.9
# GB, as the TPU's compiler estimates it. On CPUs the selection copies the
# optimizer state: a step takes 1.35 times as long.
_BY_SELECTION = ("tpu",)


class NotFinite(RuntimeError):
  """A loss or gradient was NaN or infinite."""


class Rollback(Exception):
  """The run returns to the step `restart` and skips batches up to `step`."""

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
    """Appends this one, or raises its error if there are too many like it."""
    alike = [r for r in rollbacks if type(r.error) is type(self.error)]
    if self._most is not None and len(alike) >= self._most:
      raise self.error
    rollbacks.append(self)


class Verdict(NamedTuple):
  """The guard's judgement of a step: bool scalars, at most one of them set.

  All are False once the run is to stop or to roll back. After an `overflow` a
  smaller loss scale may help.
  """

  good: jax.Array
  bad: jax.Array
  overflow: jax.Array
  skipped_spike: jax.Array | None = None
  spikes: Statistics | None = None


# with_norms -> (the state after the step without its loss scale, the norms).
Advance = Callable[[bool], tuple[TrainState, NamedScalars]]


class Guard(NamedTuple):
  """Settings of the guard."""

  policy: str
  max_nonfinite: int  # Skipped steps, or rollbacks, that the run may have.
  loss_scale: LossScale | None
  by_branch: bool = True  # Whether `run` branches, or selects each array.
  spikes: Spikes | None = None

  def judge(
    self,
    state: Mapping[str, Any],
    running: Mapping[str, Any],
    loss: metrics.Pair,
    grad_norm: jax.Array,
  ) -> Verdict:
    may_shrink: Any = False
    if self.loss_scale:
      may_shrink = self.loss_scale.may_shrink(state["loss_scale"])
    mean_loss = loss[0] / loss[1]
    finite_loss = jnp.isfinite(mean_loss)
    finite = finite_loss & jnp.isfinite(grad_norm)
    overflow = finite_loss & ~finite & may_shrink
    active = (running["bad_step"] == 0) | (self.policy == "skip")
    if self.spikes:
      active &= self.spikes.is_active(running["spikes"])
    good = finite & active
    verdict = Verdict(good, ~finite & ~overflow & active, overflow & active)
    if not self.spikes:
      return verdict
    spike, statistics = self.spikes.judge(
      running["spikes"], state["step"] + 1, mean_loss, grad_norm, good
    )
    if self.spikes.policy == "warn":
      return verdict._replace(spikes=statistics)
    skipped = None if self.spikes.rolls_back else spike
    good &= ~spike
    return verdict._replace(good=good, skipped_spike=skipped, spikes=statistics)

  def run(
    self,
    verdict: Verdict,
    state: TrainState,
    advance: Advance,
    *,
    log_norms: jax.Array | bool = False,
    no_norms: NamedScalars | None = None,
  ) -> tuple[TrainState, NamedScalars | None]:
    """The new state and norms after a good step, else the old state.

    After a step that is skipped or overflows, the old state still takes the new
    step number, so that the next batch follows, and the new loss scale. With
    `by_branch`, or with arrays in host memory, the device runs `advance` only
    for a good step; without `log_norms` the norms may be `no_norms`.
    """
    old = {k: v for k, v in state.items() if k != "loss_scale"}
    # In a branch, arrays of host memory are on the device for the update only.
    in_host = any(map(sharding.in_host, jax.tree.leaves(old)))
    if self.by_branch or in_host:
      chosen, norms = _branch(verdict.good, old, advance, log_norms, no_norms)
    else:
      new, norms = advance(log_norms is not False)
      select = functools.partial(jax.lax.select, verdict.good)
      chosen = jax.tree.map(select, new, old)
    chosen = dict(chosen)
    if self.policy == "skip":
      chosen["step"] = state["step"] + 1
    if verdict.skipped_spike is not None:
      next_step, spike = state["step"] + 1, verdict.skipped_spike
      chosen["step"] = jnp.where(spike, next_step, chosen["step"])
    if self.loss_scale:
      choose = functools.partial(jnp.where, verdict.good | verdict.overflow)
      chosen["step"] = choose(state["step"] + 1, chosen["step"])
      old_scale = state["loss_scale"]
      new_scale = self.loss_scale.update(old_scale, verdict.overflow)
      chosen["loss_scale"] = jax.tree.map(choose, new_scale, old_scale)
    return chosen, norms

  def row(self, state: Mapping[str, Any]) -> dict[str, Any]:
    return loss_scale.row(state)

  def bad_step(self, running: Mapping[str, Any]) -> int:
    """The step at which the run must stop or roll back; 0 for none."""
    if self.spikes and (spike := self.spikes.bad_step(running["spikes"])):
      return spike
    bad_step, skipped = int(running["bad_step"]), int(running["skipped"])
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
    if not (self.spikes and self.spikes.bad_step(running["spikes"])):
      return None
    what = spikes.describe(running["spikes"])
    return Spike(f"{what}, a spike. No checkpoint contains it.")

  def failure(
    self,
    error: NotFinite | Spike,
    step: int,
    saved_step: int | None,
    rollbacks: int,
  ) -> Exception:
    rolls_back, most = self.policy == "rollback", self.max_nonfinite
    if self.spikes and isinstance(error, Spike):
      rolls_back, most = self.spikes.rolls_back, self.spikes.most
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
  """Runs `advance` on the device only after a good step.

  Norms have a branch of their own, which computes the step too: then the state
  changes in place. In one branch with three arms XLA copies it, and a step of a
  ViT-S/16 on CPUs takes 1.2 times as long.
  """
  if log_norms is not False:
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
  default = 100 if policy == "skip" else 3
  return Guard(
    policy,
    settings.whole_number(config, "max_nonfinite", default, least=0),
    loss_scale.from_config(config),
    by_branch=mesh.devices.flat[0].platform not in _BY_SELECTION,
    spikes=spikes.from_config(config),
  )


def explain(
  step: int,
  index: int,
  state: Any,
  train_input: Any,
  gradients: Callable[[Any, Any], Any],
  rollout: Callable[[Any, int], Any],
) -> NotFinite:
  """Finds why a step was not finite, by computing it again.

  The next batch, on the state before the step, shows whether the cause is in
  this batch; if not, skipping would not help. Returns the error to raise.
  """

  @jax.jit
  def inspect(state: Any, batch: Any) -> Any:
    grads, step_metrics, _ = gradients(state, batch)
    finite = jax.tree.map(lambda g: jnp.isfinite(g).all(), grads)
    integers = {name: batch[name] for name in train_input.unlimited}
    ranges = {name: (x.min(), x.max()) for name, x in integers.items()}
    finite_batch = jnp.asarray([jnp.isfinite(x).all() for x in batch.values()])
    loss = step_metrics["loss"][0] / step_metrics["loss"][1]
    good = jnp.isfinite(loss) & jnp.isfinite(metrics.global_norm(grads))
    return finite, loss, finite_batch.all(), ranges, good

  batches = train_input.start(index, index + 2)
  try:
    made = (rollout(x, index + i) for i, x in enumerate(batches))
    result = jax.device_get(inspect(state, next(made)))
    next_is_good = _is_good(inspect, state, made)
  finally:
    batches.close()
  finite, loss, finite_batch, ranges, _ = result
  bad = [name for name, ok in trees.flatten_with_names(finite) if not ok]
  where = f"first of {len(bad)}: {bad[0]}" if bad else "none, only their norm"
  order = train_input.order(index)
  ids = ", ".join(map(str, order.index[:8]))
  more = ", ..." if len(order.index) > 8 else ""
  first = train_input.where(int(order.source[0]), int(order.index[0]))
  advice = {
    True: "The next batch is finite: nonfinite='skip' would skip such steps.",
    False: "The next batch is not finite either, so skipping would not help. "
    "Check the learning rate, the initial parameters and the data.",
    None: "The next batch cannot be made.",
  }[next_is_good]
  if np.isnan(loss) and finite_batch and ranges:
    # The task declares no limit for these. A number beyond the model's classes
    # is a mistake in the config or the data, which skipping would only hide.
    listed = ", ".join(f"{n!r} {x[0]} to {x[1]}" for n, x in ranges.items())
    advice = f"Check that the model can take these class numbers: {listed}."
  return NotFinite(
    f"step {step} is not finite: loss {np.float32(loss)}, gradients that are "
    f"not finite: {where}; examples {ids}{more} (the first is {first}). No "
    f"checkpoint contains this step. {advice}"
  )


def _is_good(
  inspect: Callable[[Any, Any], Any], state: Any, batches: Any
) -> bool | None:
  """Whether a step of the next batch is finite; None without a next batch."""
  try:
    batch = next(batches)
  except ConfigError:
    if jax.process_count() > 1:
      raise  # The other processes would wait for this one.
    return None
  return bool(jax.device_get(inspect(state, batch)[-1]))
