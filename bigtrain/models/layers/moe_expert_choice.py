"""Expert choice: experts choose tokens (https://arxiv.org/abs/2202.09368).

Each expert has the tokens of an example with the largest scores, as many as its
capacity. All experts have equally many, and a token has any number of experts,
perhaps none. Which tokens are chosen depends on the whole example, so a causal
decoder cannot use it.

Tokens go to their slots, and results back, by products with zeros and ones, as
in flaxformer: a token may be in E slots, so a table of each token's slots would
be large, and adding rows at computed places is slow on TPUs and has no fixed
order on GPUs. For each example these products cost as much as those of
attention, for top_k = 2.

Axes: B batch, L length, D model width, E experts, C capacity. On a device: b
examples, l positions, c slots of each expert.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import sharding
from bigtrain.arrays import model_flops
from bigtrain.models.layers import moe_dispatch
from bigtrain.models.layers.moe_experts import Experts


class Choice(NamedTuple):
  """The tokens of each expert."""

  chosen_BLE: jax.Array  # Bool.
  token_BEC: jax.Array  # Int, best first; L in slots that stay empty.


def capacity(num_tokens: int, share: float) -> int:
  """Number of tokens that an expert chooses.

  Args:
    share: fraction of the tokens, capacity_factor * top_k / E.

  >>> capacity(512, 1.25 * 2 / 8), capacity(3, 0.5), capacity(3, 2.0)
  (160, 2, 3)
  """
  return min(num_tokens, math.ceil(num_tokens * share))


def choose(
  scores_BLE: jax.Array, real_BL: jax.Array, share: float, C: int
) -> Choice:
  """Each expert chooses among the real tokens of an example.

  Padding is never chosen, and does not change the number of chosen tokens.
  Among equal scores, earlier tokens come first.
  """
  # Each device of a group looks at whole rows: these numbers are few.
  scores_BLE, real_BL = jax.tree.map(
    sharding.over_batch, (jax.lax.stop_gradient(scores_BLE), real_BL)
  )
  L = real_BL.shape[1]
  scores_BEL = jnp.swapaxes(scores_BLE, 1, 2)
  scores_BEL = jnp.where(real_BL[:, None], scores_BEL, -jnp.inf)
  # XLA does not split jax.lax.top_k over devices.
  order_BEL = jnp.argsort(-scores_BEL, axis=2, stable=True)
  rank_BEL = jnp.argsort(order_BEL, axis=2)
  # From a table, because a float's rounding could add a token.
  limits = np.asarray([capacity(n, share) for n in range(L + 1)])
  limit_B11 = jnp.take(limits, jnp.sum(real_BL, axis=1))[:, None, None]
  most = min(C, L)
  token_BEC = jnp.pad(
    order_BEL[..., :most], ((0, 0), (0, 0), (0, C - most)), constant_values=L
  )
  token_BEC = jnp.where(jnp.arange(C) < limit_B11, token_BEC, L)
  return Choice(jnp.swapaxes(rank_BEL < limit_B11, 1, 2), token_BEC)


def serve(
  x_BLD: jax.Array,
  scores_BLE: jax.Array,
  real_BL: jax.Array,
  weights: dict[str, jax.Array],
  experts: Experts,
  *,
  share: float,
  normalize: bool,
  scale_E: jax.Array | float,
  axis: str | None,
) -> tuple[jax.Array, jax.Array]:
  """Has the chosen tokens served, and adds up each token's results.

  Args:
    share: fraction of an example's tokens that an expert chooses.
    normalize: whether the weights of a token's experts add up to 1.
    scale_E: factor of the weights, after that.

  Returns:
    ([B, L, D], bool [B, L, E]: which experts chose a token).
  """
  L, E = scores_BLE.shape[1:]
  slots = moe_dispatch.slots_of(x_BLD, experts, E, capacity(L, share), axis)
  choice = choose(scores_BLE, real_BL, share, slots.padded)
  weight_BLE = jnp.where(choice.chosen_BLE, scores_BLE, 0.0)
  if normalize:
    weight_BLE /= jnp.sum(weight_BLE, axis=-1, keepdims=True) + 1e-20
  y_BLD = slots.served(
    functools.partial(_fill, experts._replace(key=None)),
    weights,
    experts,
    x_BLD,
    (choice.token_BEC, slots.by_slot()),
    (weight_BLE * scale_E, slots.by_example()),
  )
  return y_BLD, choice.chosen_BLE


def _fill(
  experts: Experts,
  split: moe_dispatch.Split | None,
  weights: Mapping[str, jax.Array],
  x_blD: jax.Array,
  token_bEc: jax.Array,
  weight_bLE: jax.Array,
  keep: jax.Array | None,
) -> jax.Array:
  """Fills a device's slots, has them served, and adds up the results."""
  x_bLD = moe_dispatch.whole_examples(split, x_blD)
  b, L, D = x_bLD.shape
  E, c = token_bEc.shape[1:]
  marks_bEcL = token_bEc[..., None] == jnp.arange(L)
  with model_flops.share(0, 1):
    x_EbcD = jnp.einsum(
      "becl,bld->ebcd",
      marks_bEcL.astype(x_bLD.dtype),
      x_bLD,
      precision="highest",
    )
  x_ESD = x_EbcD.reshape(E, b * c, D)
  all_slots = 1, 1
  y_ESD = moe_dispatch.serve_slots(
    experts, all_slots, split, weights, x_ESD, keep
  )
  weight_bEL = jnp.swapaxes(weight_bLE, 1, 2).astype(y_ESD.dtype)
  weight_bEcL = jnp.where(marks_bEcL, weight_bEL[:, :, None], 0)
  with model_flops.share(1, L):  # Each slot has one token.
    y_bLD = jnp.einsum("becl,ebcd->bld", weight_bEcL, y_ESD.reshape(E, b, c, D))
  return moe_dispatch.own_positions(split, y_bLD)
