"""The experts of a layer, and the experts of its tokens.

Axes: B batch, L length, D model width, F hidden width, J experts of a token.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bigtrain.models.layers import dropout, mlp


class Routing(NamedTuple):
  """The experts of each token.

  Attributes:
    expert_BLJ: int32 numbers of the experts, best first.
    weight_BLJ: float32 weights of their outputs.
  """

  expert_BLJ: jax.Array
  weight_BLJ: jax.Array


class Experts(NamedTuple):
  """The experts' MLPs.

  Attributes:
    kind: a name in mlp.KINDS.
    dim: F.
    rate: rate of dropout.
    key: key of dropout; None for none.
  """

  kind: str
  dim: int
  rate: jax.Array | float
  key: jax.Array | None

  def keep(self, *shape: int) -> jax.Array | None:
    """Returns dropout's bool mask (*shape, F); None for no dropout."""
    if self.key is None:
      return None
    return dropout.keep(self.key, self.rate, (*shape, self.dim))

  def run(
    self,
    x: jax.Array,
    weights: Mapping[str, jax.Array],
    times: Callable[[jax.Array, jax.Array], jax.Array],
    keep: jax.Array | None,
  ) -> jax.Array:
    """Applies the experts to their tokens.

    Args:
      x: tokens (..., D).

    Returns:
      (..., D).
    """
    activation, gated = mlp.KINDS[self.kind]
    h = times(x, weights["up"])
    if gated:
      h = activation(times(x, weights["gate"])) * h
    else:
      h = activation(h)
    if keep is not None:
      h = jnp.where(keep, dropout.scaled(h, self.rate), 0)
    return times(h, weights["down"])
