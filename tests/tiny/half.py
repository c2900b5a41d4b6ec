"""tiny.net with a dtype of the computation that is not the parameters'."""

import flax.linen as nn


class Model(nn.Module):
  """Two dense layers on flattened images.

  Attributes:
    num_classes: number of logits.
    dtype: of the computation.
  """

  num_classes: int
  dtype: str = "float16"

  @nn.compact
  def __call__(self, image, *, train=False):
    x = image.reshape(image.shape[0], -1)
    x = nn.relu(nn.Dense(32, dtype=self.dtype, name="first")(x))
    return nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x), {}
