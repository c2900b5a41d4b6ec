"""Metrics summed on the device between rows, and the guard of the state.

The tally goes through every update beside the state, so a row can speak of
all steps since the row before it without the loop ever waiting for one of
them. It is a few scalars; a checkpoint between two rows keeps them, and the
row after a resume is the one that an undisturbed run writes.

The guard looks at the loss and the gradients' norm of each step. If one is not
finite, the state stays as it was, by selection and not by multiplication, and:

  "stop"  no later step changes the state either; the run ends with an error
          as soon as the host sees the tally, at the next row or save.
  "rollback"  the same, and then the run goes back to the last checkpoint and
          passes over the batches between it and the bad one, at most
          config.max_nonfinite times (Chowdhery et al. 2022, arXiv 2204.02311,
          section 5.1).
  "skip"  the step is counted as skipped and training goes on, until more than
          config.max_nonfinite were.

A step whose gradients overflow under a loss scale (loss_scale.py) that can
still shrink is none of these: it changes only the scale, whatever the policy.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import metrics, trees
from bigtrain.settings import Config, ConfigError, did_you_mean
from bigtrain.step import loss_scale as loss_scale_lib

Tally = dict[str, Any]

POLICIES = ("stop", "skip", "rollback")


def check_policy(policy: str) -> None:
  """Raises ConfigError unless `policy` is one of the guard's."""
  if policy not in POLICIES:
    hint = did_you_mean(policy, POLICIES)
    raise ConfigError(f"config.nonfinite: no policy {policy!r}.{hint}")


def spec(pairs: Any, last: Iterable[str], norms: Iterable[str] = ()) -> Tally:
  """Shapes of a tally.

  Args:
    pairs: tree like that of a step's pairs.
    last: names of which rows show the newest value.
    norms: names of what only steps with a row compute.
  """
  norms = tuple(norms)
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  number = jax.ShapeDtypeStruct((), jnp.int32)
  pairs = jax.tree.map(lambda _: scalar, pairs)
  names = ("loss_last", "grad_norm_last", *last)
  return {
    "sums": {"steps": scalar, "grad_norm": scalar, "pairs": pairs},
    "last": dict.fromkeys(names, scalar),
    "norms": metrics.Named(
      norms, jax.ShapeDtypeStruct((len(norms),), jnp.float32)
    ),
    "bad_step": number,
    "skipped": number,
  }


def zeros(like: Tally) -> Tally:
  """A tally of no steps."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


class Verdict(NamedTuple):
  """What the guard says of a step: bool scalars, at most one of them set.

  Attributes:
    good: the state may take it.
    bad: its loss or its gradients are not finite.
    overflow: its gradients are not, but a smaller loss scale may help.
  """

  good: jax.Array
  bad: jax.Array
  overflow: jax.Array


def judge(
  tally: Tally,
  loss: metrics.Pair,
  grad_norm: jax.Array,
  policy: str,
  may_shrink: jax.Array | bool = False,
) -> Verdict:
  """Looks at a step.

  Args:
    tally: what the step before returned.
    loss: (sum, weight).
    grad_norm: norm of its gradients.
    policy: of the guard.
    may_shrink: whether there is a loss scale that can still shrink.
  """
  finite_loss = jnp.isfinite(loss[0] / loss[1])
  finite = finite_loss & jnp.isfinite(grad_norm)
  overflow = finite_loss & ~finite & may_shrink
  going_on = (tally["bad_step"] == 0) | (policy == "skip")
  return Verdict(
    finite & going_on, ~finite & ~overflow & going_on, overflow & going_on
  )


def count(
  tally: Tally,
  verdict: Verdict,
  *,
  step: jax.Array,
  new_row: jax.Array,
  pairs: metrics.Pairs,
  grad_norm: jax.Array,
  last: dict[str, jax.Array],
  norms: metrics.Named | None = None,
) -> Tally:
  """Adds one step.

  Args:
    tally: what the step before returned.
    verdict: of the guard, on this step.
    step: number of this step, from 1.
    new_row: whether this is the first step after a row.
    pairs: the step's (sum, weight) metrics, "loss" among them.
    grad_norm: norm of its gradients.
    last: scalars of which rows show the newest value.
    norms: those of this step, zeros if it has no row.
  """
  # A task may well give a weight as Python's 1.0.
  pairs = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), pairs)
  one = {
    "steps": jnp.ones((), jnp.float32),
    "grad_norm": grad_norm,
    "pairs": pairs,
  }
  of_good_steps = {
    "loss_last": pairs["loss"][0] / pairs["loss"][1],
    "grad_norm_last": grad_norm,
  }

  def add(old: jax.Array, new: jax.Array) -> jax.Array:
    # A skipped step would make the means of the whole row not finite.
    new = jnp.where(verdict.good, new, 0.0)
    return new + jnp.where(new_row, 0.0, old)

  newest = {
    name: jnp.where(verdict.good, value, tally["last"][name])
    for name, value in of_good_steps.items()
  }
  first_bad = verdict.bad & (tally["bad_step"] == 0)
  bad_step = jnp.where(first_bad, step, tally["bad_step"])
  return {
    "sums": jax.tree.map(add, tally["sums"], one),
    "last": {**newest, **last},
    "norms": norms or tally["norms"],
    "bad_step": bad_step.astype(jnp.int32),
    "skipped": tally["skipped"] + verdict.bad.astype(jnp.int32),
  }


def select(
  verdict: Verdict,
  take: Callable[[], Any],
  keep: Callable[[], Any],
  policy: str,
  loss_scale: tuple[Any, Any] | None = None,
) -> Any:
  """The new state after a good step; else the old one.

  Under "skip", and after an overflow, the old state still takes the new step
  number, so that the next batch follows, and the new loss scale.

  One of the two functions runs, which is decided on the device: what a choice
  for each array would need, the old and the new one side by side, costs a copy
  of the optimizer's state.

  Args:
    verdict: on the step.
    take: makes the new state, of arrays that `keep` does not change.
    keep: the old state; with the same names, "step" among them.
    policy: of the guard.
    loss_scale: the old one and the new one, if there is one.
  """
  chosen = dict(jax.lax.cond(verdict.good, take, keep))
  old_step = keep()["step"]
  if policy == "skip":
    chosen["step"] = old_step + 1
  if loss_scale is not None:
    moves = verdict.good | verdict.overflow
    choose = functools.partial(jnp.where, moves)
    chosen["step"] = choose(old_step + 1, chosen["step"])
    old_scale, new_scale = loss_scale
    chosen["loss_scale"] = jax.tree.map(choose, new_scale, old_scale)
  return chosen


class Rules(NamedTuple):
  """How the steps of a run are guarded and counted.

  Attributes:
    makes_row: step -> whether there is a row after it, also on the device.
    policy: of the guard.
    most_bad: skipped steps, or rollbacks, after which the run fails.
    norms: which norms rows have, see metrics.norms.
    loss_scale: None for none.
  """

  makes_row: Callable[[Any], Any]
  policy: str
  most_bad: int
  norms: str
  loss_scale: loss_scale_lib.LossScale | None

  def settle(
    self,
    old: Any,
    advance: Callable[[], tuple[Any, Any]],
    tally: Tally,
    grads: Any,
    *,
    pairs: metrics.Pairs,
    rates: Mapping[str, jax.Array],
  ) -> tuple[Any, Tally]:
    """The end of a step: which state it leaves, and the tally with it.

    Args:
      old: the state before it.
      advance: returns the state with the step's update, without a loss scale,
        and what the optimizer has added to the trainable parameters; runs on
        the device only if the step is good.
      tally: what the step before returned.
      grads: of the trainable parameters.
      pairs: the step's (sum, weight) metrics.
      rates: learning rates by name.
    """
    done = old["step"]
    grad_norm = metrics.global_norm(grads)
    scale = self.loss_scale
    may_shrink = scale.may_shrink(old["loss_scale"]) if scale else False
    verdict = judge(tally, pairs["loss"], grad_norm, self.policy, may_shrink)
    advance = jax.jit(advance)  # Traced once for the two calls.

    # Norms of everything cost a pass over it, so only rows have them; and for
    # these the optimizer computes its step twice. In all others the updates
    # then need no place in memory: they are intermediate results of the loop
    # that changes the state.
    def norms_of_step() -> Any:
      # Those of a step that is not taken are zero, and not NaN.
      new, updates = advance()
      take = functools.partial(jax.lax.select, verdict.good)
      params = jax.tree.map(take, new["params"], old["params"])
      g, u = jax.tree.map(
        lambda x: take(x, jax.lax.full_like(x, 0)), (grads, updates)
      )
      return metrics.norms(params, g, u, self.norms)

    norms, good = metrics.only_if(
      self.makes_row(done + 1),
      metrics.norm_names(old["params"], grads, self.norms),
      norms_of_step,
      # The state changes in place, so they have to come first.
      before=verdict.good,
    )
    verdict = verdict._replace(good=good)

    def take() -> Any:
      return advance()[0]

    def keep() -> Any:
      return {k: v for k, v in old.items() if k != "loss_scale"}

    scales = None
    if scale:
      changed = scale.update(old["loss_scale"], verdict.overflow)
      scales = old["loss_scale"], changed
    state = select(verdict, take, keep, self.policy, scales)
    tally = count(
      tally,
      verdict,
      step=done + 1,
      new_row=self.makes_row(done),
      pairs=pairs,
      grad_norm=grad_norm,
      last={**rates, **loss_scale_lib.row(state)},
      norms=norms,
    )
    return state, tally

  def spec(
    self, state: Any, trained: Any, *, pairs: Any, rates: Iterable[str]
  ) -> Tally:
    """Shapes of the tally, given those of what `settle` gets."""
    norms = metrics.norm_names(state["params"], trained, self.norms)
    return spec(pairs, [*rates, *loss_scale_lib.row(state)], norms)


def from_config(config: Config, makes_row: Callable[[Any], Any]) -> Rules:
  """Reads nonfinite, max_nonfinite, weight_stats and loss_scale.

  Raises:
    ConfigError: an unknown policy or statistic.
  """
  policy = config.get("nonfinite", "stop")
  check_policy(policy)
  norms = config.get("weight_stats", "global")
  metrics.check_detail(norms)
  return Rules(
    makes_row,
    policy,
    config.get("max_nonfinite", 100 if policy == "skip" else 3),
    norms,
    loss_scale_lib.from_config(config),
  )


def row(tally: Tally) -> dict[str, float]:
  """Metrics of a row from a fetched tally: means, and the newest values.

  Steps that were skipped are in neither; a row of such steps alone has no
  means.
  """
  sums, values = tally["sums"], {}
  if steps := float(sums["steps"]):
    values = metrics.host_means([sums["pairs"]])
    values["grad_norm"] = float(sums["grad_norm"]) / steps
  for newest in (tally["last"], tally["norms"]):
    values |= {name: float(value) for name, value in newest.items()}
  if int(tally["skipped"]):
    values["skipped_steps"] = int(tally["skipped"])
  return values


def to_host(tally: Tally) -> dict[str, Any]:
  """A fetched tally as JSON that keeps every bit of its float32 numbers."""
  named = trees.flatten_with_names(tally)
  return {name: value.tolist() for name, value in named}


def from_host(saved: Mapping[str, Any], like: Tally) -> Tally:
  """The tally that `to_host` saw, without its bad step.

  The state that was saved with it is good, whatever the guard's policy is now.
  Metrics that are new since start at zero.
  """
  saved = {**saved, "bad_step": 0}

  def value(name: str, x: Any) -> np.ndarray:
    found = np.asarray(saved.get(name, 0), x.dtype)
    return found if found.shape == x.shape else np.zeros(x.shape, x.dtype)

  return trees.map_with_names(value, like)
