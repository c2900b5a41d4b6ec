"""The tally: metrics summed on the device between two rows.

The tally passes through every update beside the state, so that a row covers
all steps since the previous row without the loop waiting for any of them. It
is a few scalars. A checkpoint between two rows stores them, so the row after a
resume equals that of an undisturbed run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bigtrain import metrics, sharding, trees
from bigtrain.settings import Config
from bigtrain.step import spikes as spikes_lib
from bigtrain.step.guard import Verdict

Tally = dict[str, Any]

# Scope of the branch that only the steps with a row run.
ROW_SCOPE = "row_norms"


def spec(
  pairs: Any,
  last: Iterable[str],
  norms: Iterable[str] = (),
  spikes: spikes_lib.Spikes | None = None,
) -> Tally:
  """Shapes and dtypes of a tally.

  Args:
    pairs: tree with the structure of a step's pairs.
    last: names of the scalars of which a row shows the newest value.
    norms: names of the norms, which only steps with a row compute.
    spikes: settings of spikes, if the run has them.
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
  pairs: metrics.Pairs,
  grad_norm: jax.Array,
  last: Mapping[str, jax.Array],
  norms: metrics.Named | None = None,
) -> Tally:
  """Adds one step to the tally.

  Args:
    tally: the previous step's tally.
    verdict: the guard's judgement of this step.
    step: number of this step, from 1.
    new_row: whether this is the first step after a row.
    pairs: the step's (sum, weight) metrics, "loss" among them.
    grad_norm: norm of the step's gradients.
    last: scalars of which a row shows the newest value.
    norms: the step's norms; zeros if the step has no row.
  """
  # Tasks may give a weight as a Python float.
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
    # A skipped step must not make the means of the whole row NaN.
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
    **({"spikes": verdict.spikes} if verdict.spikes else {}),
  }


class RowNorms(NamedTuple):
  """Norms that only the steps with a row compute.

  Attributes:
    detail: config.weight_stats, see `metrics.norms`.
    names: names of the norms.
  """

  detail: str
  names: Sequence[str]

  @classmethod
  def from_config(
    cls, config: Config, params: Any, trainable: Any
  ) -> "RowNorms":
    """Reads config.weight_stats.

    Args:
      config: the whole config.
      params: specs of all parameters.
      trainable: tree of bools like `params`.
    """
    trained, _ = trees.partition(params, trainable)
    detail = metrics.read_norm_detail(config)
    return cls(detail, metrics.norm_names(params, trained, detail))

  def compute_if(
    self,
    makes_row: jax.Array,
    verdict: Verdict,
    params: Any,
    grads: Any,
    advance: Callable[[], tuple[Any, Any]],
  ) -> tuple[metrics.Named, Verdict]:
    """Computes the norms if the step has a row, else zeros.

    Norms need a pass over all parameters, and for them the optimizer runs
    twice in steps with a row. In all other steps the updates then need no
    memory of their own. The norms of a bad step are zero, not NaN.

    Args:
      makes_row: whether the step has a row.
      verdict: the guard's judgement of the step.
      params: parameters before the step.
      grads: gradients of the trainable parameters.
      advance: returns (state after the step, updates).

    Returns:
      (norms, the same verdict). Anything that depends on this verdict runs
      after the norms, so that the state may change in place.
    """

    def norms() -> dict[str, jax.Array]:
      new_state, updates = advance()
      new_params = verdict.if_good(new_state["params"], params)
      g, u = verdict.zero_unless_good((grads, updates))
      return metrics.norms(params, new_params, g, u, self.detail)

    with jax.named_scope(ROW_SCOPE):  # tools.plan counts the branch apart.
      values, good = metrics.only_if(
        makes_row, self.names, norms, before=verdict.good
      )
    return values, verdict._replace(good=good)


def row(tally: Tally) -> dict[str, float]:
  """A row's metrics from a fetched tally: means, and the newest values.

  Skipped steps are in neither. A row with only skipped steps has no means.
  """
  sums, values = tally["sums"], {}
  if steps := float(sums["steps"]):
    values = metrics.host_means([sums["pairs"]])
    values["grad_norm"] = float(sums["grad_norm"]) / steps
  for newest in (tally["last"], tally["norms"]):
    values |= {name: float(value) for name, value in newest.items()}
  if int(tally["skipped"]):
    values["skipped_steps"] = int(tally["skipped"])
  if "spikes" in tally:
    values |= spikes_lib.row(tally["spikes"])
  return values


def step_values(tally: Tally) -> dict[str, float]:
  """`row` without the norms, which only steps with a row have."""
  norms = tally["norms"].names
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
