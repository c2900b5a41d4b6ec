"""A user's model whose variables and activations name their axes."""

import flax.linen as nn
import jax.numpy as jnp


class Model(nn.Module):
  """tiny.net with both of flax's ways to name the axes of a parameter.

  Attributes:
    num_classes: number of logits.
    width: number of hidden features.
    named: False for the same model without names.
    rows: name of the batch's axis.
    in_training: constrains the features in training, even without names.
  """

  num_classes: int
  width: int = 32
  named: bool = True
  rows: str = "rows"
  in_training: bool = False

  @nn.compact
  def __call__(self, image, *, train=False):
    init = nn.initializers.lecun_normal()
    logical, direct = init, init
    if self.named:
      logical = nn.with_logical_partitioning(init, ("pixels", "hidden"))
      direct = nn.with_partitioning(init, ("hidden", "classes"))
    x = nn.Dense(self.width, kernel_init=logical, name="first")(
      image.reshape(image.shape[0], -1)
    )
    mean = self.variable(
      "running",
      "mean",
      nn.with_logical_partitioning(jnp.zeros, ("hidden",))
      if self.named
      else jnp.zeros,
      (self.width,),
    )
    if train:
      mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
    x = nn.relu(x - mean.value)
    if self.named or (self.in_training and train):
      x = nn.with_logical_constraint(x, (self.rows, "hidden"))
    return nn.Dense(self.num_classes, kernel_init=direct, name="head")(x), {}
