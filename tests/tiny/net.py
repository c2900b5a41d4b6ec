"""A user's model: two dense layers, dropout, running statistics.

Axes: B batch, D features, C classes.
"""

import flax.linen as nn
import jax.numpy as jnp


class Model(nn.Module):
  """Dense net on flattened images.

  Attributes:
    num_classes: C.
    width: D; the first kernel is then large enough for fsdp to split it.
    dropout: rate.
    statistics: whether a running mean, which is mutable state, centres the
      features.
  """

  num_classes: int
  width: int = 32
  dropout: float = 0.0
  statistics: bool = False

  @nn.compact
  def __call__(self, image, *, train=False):
    x_BD = nn.Dense(self.width, name="first")(image.reshape(image.shape[0], -1))
    if self.statistics:
      mean_D = self.variable("running", "mean", jnp.zeros, (self.width,))
      x_BD -= mean_D.value
      if train:
        mean_D.value = 0.9 * mean_D.value + 0.1 * x_BD.mean(0)
    x_BD = nn.Dropout(self.dropout, deterministic=not train)(nn.relu(x_BD))
    return nn.Dense(self.num_classes, name="head")(x_BD), {"pre_logits": x_BD}
