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
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import metrics, trees
from bigtrain.settings import ConfigError, did_you_mean

Tally = dict[str, Any]

POLICIES = ("stop", "skip", "rollback")


def check_policy(policy: str) -> None:
  """Raises ConfigError unless `policy` is one of the guard's."""
  if policy not in POLICIES:
    hint = did_you_mean(policy, POLICIES)
    raise ConfigError(f"config.nonfinite: no policy {policy!r}.{hint}")


def zeros(spec: Tally) -> Tally:
  """A tally of no steps, of the structure of `spec`."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec)


def count(
  tally: Tally | None,
  *,
  step: jax.Array,
  new_row: jax.Array,
  pairs: metrics.Pairs,
  grad_norm: jax.Array,
  last: dict[str, jax.Array],
  policy: str,
) -> tuple[Tally, jax.Array]:
  """Adds one step.

  Args:
    tally: what the step before returned; None for an empty one.
    step: number of this step, from 1.
    new_row: whether this is the first step after a row.
    pairs: the step's (sum, weight) metrics, "loss" among them.
    grad_norm: norm of its gradients.
    last: scalars of which rows show the newest value.
    policy: of the guard.

  Returns:
    (the new tally, whether this step may change the state).
  """
  # A task may well give a weight as Python's 1.0.
  pairs = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), pairs)
  if tally is None:
    tally = zeros(_spec(pairs, last))
  loss = pairs["loss"][0] / pairs["loss"][1]
  finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
  stopped = (tally["bad_step"] > 0) & (policy != "skip")
  good = finite & ~stopped
  bad_step = jnp.where(
    (tally["bad_step"] == 0) & ~finite, step, tally["bad_step"]
  )
  one = {
    "steps": jnp.ones((), jnp.float32),
    "grad_norm": grad_norm,
    "pairs": pairs,
  }

  def add(old: jax.Array, new: jax.Array) -> jax.Array:
    # A skipped step would make the means of the whole row not finite.
    new = jnp.where(good, new, 0.0)
    return new + jnp.where(new_row, 0.0, old)

  sums = jax.tree.map(add, tally["sums"], one)
  return {
    "sums": sums,
    "last": {"loss_last": loss, "grad_norm_last": grad_norm, **last},
    "bad_step": bad_step.astype(jnp.int32),
    "skipped": tally["skipped"] + (~finite).astype(jnp.int32),
  }, good


def _spec(pairs: metrics.Pairs, last: dict[str, Any]) -> Tally:
  """Shapes of a tally of these metrics, given theirs."""
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  number = jax.ShapeDtypeStruct((), jnp.int32)
  return {
    "sums": {"steps": scalar, "grad_norm": scalar, "pairs": pairs},
    "last": {"loss_last": scalar, "grad_norm_last": scalar, **last},
    "bad_step": number,
    "skipped": number,
  }


def select(good: jax.Array, new: Any, old: Any, policy: str) -> Any:
  """The new state after a good step; else the old one.

  Under "skip" the old state still takes the new step number, so that the next
  batch follows.
  """
  chosen = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)
  if policy == "skip":
    chosen["step"] = new["step"]
  return chosen


def row(tally: Tally) -> dict[str, float]:
  """Metrics of a row from a fetched tally: means, and the newest values."""
  sums = tally["sums"]
  steps = float(sums["steps"]) or float("nan")
  values = metrics.host_means([sums["pairs"]])
  values["grad_norm"] = float(sums["grad_norm"]) / steps
  values |= {name: float(value) for name, value in tally["last"].items()}
  if int(tally["skipped"]):
    values["skipped_steps"] = int(tally["skipped"])
  return values


def to_host(tally: Tally) -> dict[str, Any]:
  """A fetched tally as JSON that keeps every bit of its float32 numbers."""
  named = trees.flatten_with_names(tally)
  return {name: value.item() for name, value in named}


def from_host(saved: Mapping[str, Any], like: Tally) -> Tally:
  """The tally that `to_host` saw, without its bad step.

  The state that was saved with it is good, whatever the guard's policy is now.
  Metrics that are new since start at zero.
  """
  saved = {**saved, "bad_step": 0}
  return trees.map_with_names(
    lambda name, x: np.asarray(saved.get(name, 0), x.dtype), like
  )
