"""Linear layers that clip their inputs and outputs, as in Gemma 4's tower.

The bounds come with a published model, where they were determined for
quantisation. They are parameters so that files contain them, but they are not
trained.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Bounds(nn.Module):
  """The four bounds of a linear layer, each (1,); initially infinite."""

  @nn.compact
  def __call__(self) -> dict[str, jax.Array]:
    values = {
      "input_min": -jnp.inf,
      "input_max": jnp.inf,
      "output_min": -jnp.inf,
      "output_max": jnp.inf,
    }
    return {
      name: jax.lax.stop_gradient(
        self.param(name, nn.initializers.constant(value), (1,))
      )
      for name, value in values.items()
    }


def apply(layer: nn.Module, x: jax.Array, is_clipped: bool) -> jax.Array:
  """Applies a layer of the calling module to x, with bounds if it has any.

  Args:
    is_clipped: whether the layer has bounds, in the module {its name}_bounds.
  """
  if not is_clipped:
    return layer(x)
  bounds = Bounds(name=f"{layer.name}_bounds")()
  bounds = {name: bound.astype(x.dtype) for name, bound in bounds.items()}
  x = jnp.clip(x, bounds["input_min"], bounds["input_max"])
  return jnp.clip(layer(x), bounds["output_min"], bounds["output_max"])
