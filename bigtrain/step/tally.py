"""The tally: metrics merged on the device between two rows.

The tally passes through every update beside the state, so that a row covers
all steps since the previous row without the loop waiting for any of them. It
is a few scalars. A checkpoint between two rows stores them, so a resumed run
writes the same row as an undisturbed one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bigtrain import metrics, sharding, trees
from bigtrain.step import norms as norms_lib
from bigtrain.step import spikes as spikes_lib
from bigtrain.step.guard import Verdict

Tally = dict[str, Any]


def spec(
  pairs: Any,
  last: Iterable[str],
  norms: norms_lib.Named | None = None,
  spikes: spikes_lib.Spikes | None = None,
) -> Tally:
  """Shapes and dtypes of a tally.

  Args:
    norms: spec of the norms; none by default.
    spikes: settings of spikes, if the run has them.

  Raises:
    ConfigError: the task's loss_fn returns something else than metrics.
  """
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  number = jax.ShapeDtypeStruct((), jnp.int32)
  pairs = metrics.checked(pairs, "config.task: loss_fn")
  pairs = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.float32), pairs
  )
  names = ("loss_last", "grad_norm_last", *last)
  return {
    "sums": {"steps": scalar, "grad_norm": scalar, "pairs": pairs},
    "last": dict.fromkeys(names, scalar),
    "norms": norms or norms_lib.RowNorms("none", ()).spec(),
    "bad_step": number,
    "skipped": number,
    **({"spikes": spikes.spec()} if spikes else {}),
  }


def zeros(spec: Tally) -> Tally:
  """A tally of no steps."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec)


def add_step(
  tally: Tally,
  verdict: Verdict,
  *,
  step: jax.Array,
  new_row: jax.Array,
  pairs: metrics.Metrics,
  grad_norm: jax.Array,
  last: Mapping[str, jax.Array],
  norms: norms_lib.Named | None = None,
) -> Tally:
  """Adds one step to the tally.

  Args:
    step: number of this step, from 1.
    new_row: whether this is the first step after a row.
    pairs: the step's metrics, "loss" among them.
    norms: the step's norms; zeros at a step without norms.
  """
  # Tasks may give a weight as a Python float.
  pairs = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), pairs)
  one = {
    "steps": jnp.ones((), jnp.float32),
    "grad_norm": grad_norm,
    "pairs": pairs,
  }
  # A skipped step must not make the means of the whole row NaN.
  one = jax.tree.map(lambda new: jnp.where(verdict.good, new, 0.0), one)
  old = jax.tree.map(lambda old: jnp.where(new_row, 0.0, old), tally["sums"])
  of_good_steps = {
    "loss_last": pairs["loss"][0] / pairs["loss"][1],
    "grad_norm_last": grad_norm,
  }

  if norms is None:
    norms = tally["norms"]
  elif norms.of_each_step:
    norms = jax.tree.map(
      lambda old, new: jnp.where(new_row, 0.0, old) + new, tally["norms"], norms
    )
  newest = {
    name: jnp.where(verdict.good, value, tally["last"][name])
    for name, value in of_good_steps.items()
  }
  first_bad = verdict.bad & (tally["bad_step"] == 0)
  bad_step = jnp.where(first_bad, step, tally["bad_step"])
  return {
    "sums": {
      "steps": old["steps"] + one["steps"],
      "grad_norm": old["grad_norm"] + one["grad_norm"],
      "pairs": metrics.merge(old["pairs"], one["pairs"]),
    },
    "last": {**newest, **last},
    "norms": norms,
    "bad_step": bad_step.astype(jnp.int32),
    "skipped": tally["skipped"] + verdict.bad.astype(jnp.int32),
    **({"spikes": verdict.spikes} if verdict.spikes else {}),
  }


def row(tally: Tally) -> dict[str, Any]:
  """A row's metrics from a fetched tally, and the newest values.

  A histogram is a `metrics.Histogram`, all others are numbers. Skipped steps
  count for neither. A row with only skipped steps has no metrics.
  """
  sums, values = tally["sums"], {}
  if steps := float(sums["steps"]):
    values = metrics.host_values([sums["pairs"]])
    values["grad_norm"] = float(sums["grad_norm"]) / steps
  values |= {name: float(value) for name, value in tally["last"].items()}
  values |= tally["norms"].row(steps)
  if int(tally["skipped"]):
    values["skipped_steps"] = int(tally["skipped"])
  if "spikes" in tally:
    values |= spikes_lib.row(tally["spikes"])
  return values


def step_values(tally: Tally) -> dict[str, Any]:
  """`row` without the norms, which only steps with a row have."""
  norms = tally["norms"].row(1.0)
  return {name: x for name, x in row(tally).items() if name not in norms}


def to_host(tally: Tally) -> dict[str, Any]:
  """A fetched tally as JSON values, which keep every bit of float32."""
  named = trees.flatten_with_names(tally)
  return {name: value.tolist() for name, value in named}


def from_host(saved: Mapping[str, Any], spec: Tally, mesh: Mesh) -> Tally:
  """The tally that `to_host` stored, on the devices, its bad step cleared.

  The state in the same checkpoint is good, whatever the guard's policy is now.
  Metrics that the checkpoint lacks start at zero.
  """
  saved = {**saved, "bad_step": 0}

  def value(name: str, x: Any) -> np.ndarray:
    stored = np.asarray(saved.get(name, 0), x.dtype)
    return stored if stored.shape == x.shape else np.zeros(x.shape, x.dtype)

  values = trees.map_with_names(value, spec)
  return jax.device_put(values, sharding.replicated(mesh))
