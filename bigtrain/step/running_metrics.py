"""Running metrics: metrics merged on the device between two log steps.

They pass through every update together with the state, so the loop never waits
for a step's metrics: `add_step` merges those of one step on the device, and
`log_values` makes the values of a log entry on the host. Checkpoints store them
(`to_host` and `from_host`), so a resumed run logs the same as an uninterrupted
one.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bigtrain import metrics, sharding
from bigtrain.arrays import trees
from bigtrain.arrays.types import Metrics
from bigtrain.step import norms, spikes
from bigtrain.step.guard import Verdict

RunningMetrics = dict[str, Any]


def spec(
  step_metrics: Metrics,
  last: Iterable[str],
  log_norms: norms.LogNorms | None = None,
  run_spikes: spikes.Spikes | None = None,
) -> RunningMetrics:
  """Shapes and dtypes of the running metrics.

  Args:
    step_metrics: shapes of a step's (sum, weight) pairs.
    last: names of scalars of which a log step reports the newest value.
    log_norms: norms that log steps report.
    run_spikes: settings of config.spikes.
  """
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  integer = jax.ShapeDtypeStruct((), jnp.int32)
  step_metrics = metrics.checked(step_metrics, "config.task: loss_fn")
  sums = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.float32), step_metrics
  )
  names = ("loss_last", "grad_norm_last", *last)
  log_norms = log_norms or norms.LogNorms("none", ())
  # Checkpoints contain these names.
  result = {
    "sums": {"steps": scalar, "grad_norm": scalar, "pairs": sums},
    "last": dict.fromkeys(names, scalar),
    "norms": jax.eval_shape(log_norms.zeros),
    "bad_step": integer,  # The first bad step; 0 for none.
    "skipped": integer,  # Number of bad steps.
  }
  if run_spikes:
    result["spikes"] = run_spikes.spec()
  return result


def zeros(spec: RunningMetrics) -> RunningMetrics:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec)


def add_step(
  running: RunningMetrics,
  verdict: Verdict,
  *,
  step: jax.Array,
  after_log: jax.Array,
  step_metrics: Metrics,
  grad_norm: jax.Array,
  last: Mapping[str, jax.Array],
  log_norms: jax.Array | bool = False,
  step_norms: norms.NamedScalars | None = None,
) -> RunningMetrics:
  """Adds one step.

  Args:
    running: the running metrics before the step.
    verdict: the guard's judgement of the step.
    step: number of the step, from 1.
    after_log: whether the previous step was a log step, after which the sums
      start from zero.
    step_metrics: (sum, weight) pairs of the step.
    grad_norm: norm of its gradients.
    last: scalars of which a log step reports the newest value.
    log_norms: whether `step_norms` were computed, if the step is good.
    step_norms: norms of the step.
  """
  # Tasks may give a weight as a Python float.
  step_metrics = jax.tree.map(
    lambda x: jnp.asarray(x, jnp.float32), step_metrics
  )
  new = {
    "steps": jnp.ones((), jnp.float32),
    "grad_norm": grad_norm,
    "pairs": step_metrics,
  }
  # A skipped step must not make the means of a whole log step NaN.
  new = jax.tree.map(lambda x: jnp.where(verdict.good, x, 0.0), new)
  old = jax.tree.map(lambda x: jnp.where(after_log, 0.0, x), running["sums"])
  sums = {
    "steps": old["steps"] + new["steps"],
    "grad_norm": old["grad_norm"] + new["grad_norm"],
    "pairs": metrics.merge(old["pairs"], new["pairs"]),
  }

  loss = step_metrics["loss"][0] / step_metrics["loss"][1]
  newest = {
    name: jnp.where(verdict.good, value, running["last"][name])
    for name, value in (("loss_last", loss), ("grad_norm_last", grad_norm))
  }
  is_first_bad = verdict.bad & (running["bad_step"] == 0)
  bad_step = jnp.where(is_first_bad, step, running["bad_step"])
  result = {
    "sums": sums,
    "last": {**newest, **last},
    "norms": _newest_norms(
      running["norms"], step_norms, verdict.good & log_norms, after_log
    ),
    "bad_step": bad_step.astype(jnp.int32),
    "skipped": running["skipped"] + verdict.bad.astype(jnp.int32),
  }
  if verdict.spikes:
    result["spikes"] = verdict.spikes
  return result


def _newest_norms(
  old: norms.NamedScalars,
  new: norms.NamedScalars | None,
  computed: jax.Array,
  after_log: jax.Array,
) -> norms.NamedScalars:
  """The norms of the newest log step, or their sums since the last one."""
  if new is None:
    return old
  if not new.of_each_step:
    return jax.tree.map(functools.partial(jnp.where, computed), new, old)

  def add(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(after_log, 0.0, old) + jnp.where(computed, new, 0.0)

  return jax.tree.map(add, new, old)


def log_values(running: RunningMetrics) -> dict[str, Any]:
  """Values of a log entry about the steps so far.

  There are no means if all steps were skipped.
  """
  sums = running["sums"]
  values: dict[str, Any] = {}
  steps = float(sums["steps"])
  if steps:
    values = metrics.host_values([sums["pairs"]])
    values["grad_norm"] = float(sums["grad_norm"]) / steps
  values |= {name: float(value) for name, value in running["last"].items()}
  values |= running["norms"].log_values(steps)
  if int(running["skipped"]):
    values["skipped_steps"] = int(running["skipped"])
  if "spikes" in running:
    values |= spikes.log_values(running["spikes"])
  return values


def step_values(running: RunningMetrics) -> dict[str, Any]:
  """`log_values` without the norms, which only log steps compute."""
  norm_names = running["norms"].log_values(1.0)
  values = log_values(running)
  return {name: x for name, x in values.items() if name not in norm_names}


def to_host(running: RunningMetrics) -> dict[str, Any]:
  named = trees.flatten_with_names(running)
  return {name: value.tolist() for name, value in named}


def from_host(
  saved: Mapping[str, Any], spec: RunningMetrics, mesh: Mesh
) -> RunningMetrics:
  """Restores what `to_host` returned; a metric that is new starts at 0."""
  # The state that is saved with them contains no bad step.
  saved = {**saved, "bad_step": 0}

  def value(name: str, x: Any) -> np.ndarray:
    stored = np.asarray(saved.get(name, 0), x.dtype)
    if stored.shape != x.shape:  # config.weight_stats may have changed.
      return np.zeros(x.shape, x.dtype)
    return stored

  values = trees.map_with_names(value, spec)
  return jax.device_put(values, sharding.replicated(mesh))
