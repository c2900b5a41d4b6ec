"""Running metrics: metrics merged on the device between two log steps.

They pass through every update beside the state, so the loop waits for none of
them. Checkpoints store them, so a resumed run logs the same as an
uninterrupted one.
"""

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
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  number = jax.ShapeDtypeStruct((), jnp.int32)
  step_metrics = metrics.checked(step_metrics, "config.task: loss_fn")
  sums = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.float32), step_metrics
  )
  names = ("loss_last", "grad_norm_last", *last)
  log_norms = log_norms or norms.LogNorms("none", ())
  return {
    # The key "pairs" is the name in checkpoints.
    "sums": {"steps": scalar, "grad_norm": scalar, "pairs": sums},
    "last": dict.fromkeys(names, scalar),
    "norms": jax.eval_shape(log_norms.zeros),
    "bad_step": number,
    "skipped": number,
    **({"spikes": run_spikes.spec()} if run_spikes else {}),
  }


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
  """Adds the step `step` (from 1), which follows a log step if `after_log`.

  A log step reports the newest value of scalars in `last`. `log_norms` says
  whether `step_norms` were computed, if the step is good.
  """
  # Tasks may give a weight as a Python float.
  as_float = lambda x: jnp.asarray(x, jnp.float32)
  step_metrics = jax.tree.map(as_float, step_metrics)
  count = jnp.ones((), jnp.float32)
  one = {"steps": count, "grad_norm": grad_norm, "pairs": step_metrics}
  # A skipped step must not make the means of a whole log step NaN.
  one = jax.tree.map(lambda new: jnp.where(verdict.good, new, 0.0), one)
  kept = lambda old: jnp.where(after_log, 0.0, old)
  old = jax.tree.map(kept, running["sums"])
  loss = step_metrics["loss"][0] / step_metrics["loss"][1]
  newest = {
    name: jnp.where(verdict.good, value, running["last"][name])
    for name, value in (("loss_last", loss), ("grad_norm_last", grad_norm))
  }
  first_bad = verdict.bad & (running["bad_step"] == 0)
  bad_step = jnp.where(first_bad, step, running["bad_step"])
  return {
    "sums": {
      "steps": old["steps"] + one["steps"],
      "grad_norm": old["grad_norm"] + one["grad_norm"],
      "pairs": metrics.merge(old["pairs"], one["pairs"]),
    },
    "last": {**newest, **last},
    "norms": _newest_norms(
      running["norms"], step_norms, verdict.good & log_norms, after_log
    ),
    "bad_step": bad_step.astype(jnp.int32),
    "skipped": running["skipped"] + verdict.bad.astype(jnp.int32),
    **({"spikes": verdict.spikes} if verdict.spikes else {}),
  }


def _newest_norms(
  old: norms.NamedScalars,
  new: norms.NamedScalars | None,
  computed: jax.Array,
  after_log: jax.Array,
) -> norms.NamedScalars:
  if new is None:
    return old
  if not new.of_each_step:
    return jax.tree.map(lambda n, o: jnp.where(computed, n, o), new, old)
  kept = lambda n, o: jnp.where(after_log, 0.0, o) + jnp.where(computed, n, 0.0)
  return jax.tree.map(kept, new, old)


def row(running: RunningMetrics) -> dict[str, Any]:
  """What a log step reports; without metrics if all its steps were skipped."""
  sums = running["sums"]
  values: dict[str, Any] = {}
  if steps := float(sums["steps"]):
    values = metrics.host_values([sums["pairs"]])
    values["grad_norm"] = float(sums["grad_norm"]) / steps
  values |= {name: float(value) for name, value in running["last"].items()}
  values |= running["norms"].row(steps)
  if int(running["skipped"]):
    values["skipped_steps"] = int(running["skipped"])
  if "spikes" in running:
    values |= spikes.row(running["spikes"])
  return values


def step_values(running: RunningMetrics) -> dict[str, Any]:
  """`row` without the norms, which only log steps have."""
  names = running["norms"].row(1.0)
  return {name: x for name, x in row(running).items() if name not in names}


def to_host(running: RunningMetrics) -> dict[str, Any]:
  named = trees.flatten_with_names(running)
  return {name: value.tolist() for name, value in named}


def from_host(
  saved: Mapping[str, Any], spec: RunningMetrics, mesh: Mesh
) -> RunningMetrics:
  """What `to_host` stored; the state that is saved with it has no bad step."""
  saved = {**saved, "bad_step": 0}

  def value(name: str, x: Any) -> np.ndarray:
    stored = np.asarray(saved.get(name, 0), x.dtype)
    return stored if stored.shape == x.shape else np.zeros(x.shape, x.dtype)

  values = trees.map_with_names(value, spec)
  return jax.device_put(values, sharding.replicated(mesh))
