"""Norms and statistics of parameters, gradients and updates, for rows."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain import metrics, trees
from bigtrain.settings import Config, ConfigError, did_you_mean
from bigtrain.step import joined
from bigtrain.step.guard import Verdict

# Scope of the branch that only the steps with a row run.
ROW_SCOPE = "row_norms"


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("values",),
  meta_fields=("names", "of_each_step"),
)
@dataclasses.dataclass(frozen=True)
class Named:
  """Scalars by name, in one array.

  A compiled step takes microseconds for each output array, which adds up for
  hundreds of scalars.

  Attributes:
    names: names of the scalars.
    values: float32 [number of names].
    of_each_step: whether each good step has them, and not only those with a
      row. In a tally the values are then sums over the row's steps.
  """

  names: tuple[str, ...]
  values: Any
  of_each_step: bool = False

  def row(self, steps: float) -> dict[str, float]:
    """The scalars of a row from a fetched array, by name.

    With statistics of single parameters also "stats_steps", the number of steps
    whose mean the scalars are.
    """
    if self.of_each_step and not steps:
      return {}
    number = steps if self.of_each_step else 1.0
    values = {k: float(x) / number for k, x in zip(self.names, self.values)}
    if any("/" in name for name in self.names):
      values["stats_steps"] = number
    return values


def only_if(
  flag: jax.Array, names: Iterable[str], fn: Callable[[], Any], before: Any
) -> tuple[Named, Any]:
  """Runs `fn` on the device if the flag is set, else returns zeros.

  Args:
    flag: bool scalar.
    names: names of the float32 scalars that `fn` returns.
    fn: () -> {name: scalar}.
    before: arrays that must not be used before `fn` has run.

  Returns:
    (result of `fn`, `before`). Operations on the returned `before` run after
    `fn`.
  """
  names = tuple(names)

  if not names:
    return Named(names, jnp.zeros(0, jnp.float32)), before

  def stacked() -> tuple[jax.Array, Any]:
    values = fn()
    # jax.lax and not jax.numpy, as in metrics.global_norm.
    rows = [jax.lax.reshape(values[name], (1,)) for name in names]
    # cond forwards operands that every branch returns unchanged; the barrier
    # keeps the dependency.
    return jax.lax.concatenate(rows, 0), jax.lax.optimization_barrier(before)

  def zeros() -> tuple[jax.Array, Any]:
    return jnp.zeros(len(names), jnp.float32), before

  values, after = jax.lax.cond(flag, stacked, zeros)
  return Named(names, values), after


_DETAILS = ("none", "global", "per_param", "per_param_mean")


def read_norm_detail(config: Config) -> str:
  """Reads config.weight_stats: the `detail` of `norms`, "global" by default."""
  detail = config.get("weight_stats", "global")
  if detail not in _DETAILS:
    hint = did_you_mean(detail, _DETAILS)
    raise ConfigError(f"config.weight_stats: unknown {detail!r}.{hint}")
  return detail


def norm_names(params: Any, trained: Any, detail: str) -> list[str]:
  """Names of the scalars that `norms` returns for such trees."""
  if detail == "none":
    return []
  if detail == "global":
    return ["param_norm", "update_norm"]
  return list(
    jax.eval_shape(lambda p, t: norms(p, p, t, t, detail), params, trained)
  )


def norms(
  before: Any, params: Any, grads: Any, updates: Any, detail: str
) -> dict[str, Any]:
  """Norms for a row.

  Args:
    detail: "none", "global" (norms over all parameters), "per_param" or
      "per_param_mean" (also statistics of every parameter).

  Returns:
    {name: float32 scalar}.
  """
  if detail == "none":
    return {}
  values = {
    "param_norm": metrics.global_norm(params),
    "update_norm": metrics.global_norm(updates),
  }
  if detail.startswith("per_param"):
    values |= weight_stats(before, *map(joined.split, (params, grads, updates)))
  return values


def weight_stats(
  before: Any, params: Any, grads: Any, updates: Any
) -> dict[str, Any]:
  """Statistics of every parameter, the same as in T5X.

  Returns:
    {"weight_rms/<name>", "weight_max/<name>", "grad_rms/<name>",
    "grad_norm/<name>", "update_rms/<name>",
    "weight_update_divided_by_weight_rms/<name>"}: float32 scalars. The last is
    of each element's update over its value before the step, infinite where that
    is 0.
  """

  def rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))

  stats, weights = {}, dict(trees.flatten_with_names(before))
  for name, leaf in trees.flatten_with_names(params):
    stats[f"weight_rms/{name}"] = rms(leaf)
    stats[f"weight_max/{name}"] = jnp.max(jnp.abs(leaf)).astype(jnp.float32)
  for name, leaf in trees.flatten_with_names(grads):
    stats[f"grad_rms/{name}"] = rms(leaf)
    stats[f"grad_norm/{name}"] = metrics.global_norm(leaf)
  for name, leaf in trees.flatten_with_names(updates):
    stats[f"update_rms/{name}"] = rms(leaf)
    old = weights[name].astype(jnp.float32)
    ratio = jnp.where(leaf == 0, 0.0, leaf / old)
    stats[f"weight_update_divided_by_weight_rms/{name}"] = rms(ratio)
  return stats


class RowNorms(NamedTuple):
  """Norms of rows.

  Attributes:
    detail: config.weight_stats, see `norms`. With "per_param_mean" every good
      step computes them, otherwise only the steps with a row.
    names: names of the norms.
  """

  detail: str
  names: Sequence[str]

  @property
  def of_each_step(self) -> bool:
    """Whether every good step computes the norms."""
    return self.detail == "per_param_mean"

  def spec(self) -> Named:
    """Shape and dtype of the norms."""
    values = jax.ShapeDtypeStruct((len(self.names),), jnp.float32)
    return Named(tuple(self.names), values, self.of_each_step)

  def compute_if(
    self,
    makes_row: jax.Array,
    verdict: Verdict,
    params: Any,
    grads: Any,
    advance: Callable[[], tuple[Any, Any]],
  ) -> tuple[Named, Verdict]:
    """Computes the norms if the step needs them, else zeros.

    Norms need a pass over all parameters, and for them the optimizer runs
    twice. In steps without norms the updates then need no memory of their own.
    The norms of a bad step are zero, not NaN.

    Args:
      makes_row: whether the step has a row.
      advance: returns (state after the step, updates); trees may be
        `joined.Joined`.

    Returns:
      (norms, the same verdict). Anything that depends on this verdict runs
      after the norms, so that the state may change in place.
    """

    def compute() -> dict[str, jax.Array]:
      new_state, updates = advance()
      new = new_state["params"]
      new = verdict.if_good(new, joined.like(new, params))
      g, u = verdict.zero_unless_good((joined.like(updates, grads), updates))
      return norms(params, new, g, u, self.detail)

    flag = verdict.good if self.of_each_step else makes_row
    # tools.plan counts the branch apart that only steps with a row run.
    scope = "norms" if self.of_each_step else ROW_SCOPE
    with jax.named_scope(scope):
      values, good = only_if(flag, self.names, compute, before=verdict.good)
    values = dataclasses.replace(values, of_each_step=self.of_each_step)
    return values, verdict._replace(good=good)


def from_config(config: Config, params: Any, trainable: Any) -> RowNorms:
  """Reads config.weight_stats.

  Args:
    trainable: tree of bools like `params`.

  Raises:
    ConfigError: an unknown detail.
  """
  trained, _ = trees.partition(params, trainable)
  detail = read_norm_detail(config)
  return RowNorms(detail, norm_names(params, trained, detail))
