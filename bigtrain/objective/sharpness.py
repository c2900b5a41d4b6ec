"""Sharpness-aware minimisation, SAM and GSAM: config.gsam.

A step computes the gradients g at the parameters p and g_p at p + rho g / |g|,
both of the global batch. SAM (arXiv 2010.01412) follows g_p. GSAM (2203.08065)
also ascends along the part of g that is orthogonal to g_p, and rho follows the
learning rate.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import trees
from bigtrain.arrays.types import Batch, GradientsFn, Metrics, Params, Variables
from bigtrain.config.errors import ConfigError, check_kwargs, check_number
from bigtrain.config.settings import Config

_EPS = 1e-12


def from_config(
  config: Config, compute: GradientsFn, trainable: Any
) -> GradientsFn:
  """Returns `compute`; with config.gsam, a function that calls it twice.

  The state of that function also has the hparam "lr", see optim.recipe.
  """
  if not config.get("gsam"):
    return compute
  options = {"lr_max": config["lr"], **config.kwargs("gsam")}
  given = ("compute", "trainable")
  check_kwargs(_make, options, "config.gsam", given)
  for name, value in options.items():
    if name not in ("adaptive_perturbation", "minimize_fp"):
      check_number(f"config.gsam.{name}", value, least=0)
  return _make(compute, trainable, **options)


def _make(
  compute: GradientsFn,
  trainable: Any,
  *,
  lr_max: float,
  rho_max: float,
  rho_min: float | None = None,
  alpha: float = 0.0,
  lr_min: float = 0.0,
  adaptive_perturbation: bool = False,
  minimize_fp: bool = True,
) -> GradientsFn:
  """Builds the function of both gradients.

  Args:
    rho_max, rho_min: length of the perturbation at the learning rates lr_max
      (config.lr by default) and lr_min; one length if there is no rho_min.
    alpha: weight of the orthogonal part.
    adaptive_perturbation: whether a parameter's size scales its perturbation.
    minimize_fp: whether the perturbed loss is minimised, or the loss itself.
  """

  def gradients(state: Any, batch: Batch) -> tuple[Params, Metrics, Variables]:
    rho: Any = rho_max
    if rho_min is not None and lr_max != lr_min:
      if len(state["lr"]) > 1:
        raise ConfigError("config.gsam.rho_min: needs a single schedule.")
      (lr,) = state["lr"].values()
      share = (lr - lr_min) / (lr_max - lr_min)
      rho = rho_min + (rho_max - rho_min) * share
    grads, sums, mutable = compute(state, batch)
    scale = rho / (metrics.global_norm(grads) + _EPS)

    def perturbed(p: jax.Array, g: jax.Array) -> jax.Array:
      size = jnp.abs(p) if adaptive_perturbation else 1.0
      return (p + size * scale * g).astype(p.dtype)

    trained, others = trees.partition(state["params"], trainable)
    params = trees.merge(jax.tree.map(perturbed, trained, grads), others)
    robust, _, _ = compute({**state, "params": params}, batch)
    if not alpha:
      return (robust if minimize_fp else grads), sums, mutable
    if minimize_fp:
      return _added(robust, grads, -alpha), sums, mutable
    return _added(grads, robust, alpha), sums, mutable

  return gradients


def _added(grads: Params, others: Params, factor: float) -> Params:
  """Adds the part of `others` that is orthogonal to `grads`, times a factor."""
  products = jax.tree.map(jnp.vdot, grads, others)
  square = metrics.global_norm(grads) ** 2
  share = sum(jax.tree.leaves(products)) / (square + _EPS**2)
  update = lambda g, other: g + factor * (other - share * g)
  return jax.tree.map(update, grads, others)
