"""A user's model of images and texts; transformers take longer to compile.

Axes: B batch, E embedding.
"""

import flax.linen as nn
import jax.numpy as jnp

from bigtrain.models.layers import pooling


class Model(nn.Module):
  """A dense layer for images, and a bag of words for texts."""

  vocab_size: int = 11
  width: int = 8  # E of images.
  text_width: int | None = None  # E of texts; None for that of images.
  with_bias: bool = True  # Of the logits.
  dropout: float = 0.0
  dtype: str = "float32"

  @nn.compact
  def __call__(self, image=None, text=None, *, train=False):
    image_BE = text_BE = None
    options = dict(dtype=self.dtype, param_dtype=self.dtype)
    if image is not None:
      x = image.reshape(len(image), -1)
      x = nn.Dropout(self.dropout, deterministic=not train)(x)
      x_BE = nn.Dense(self.width, name="img", **options)(x)
      image_BE = pooling.normalise(x_BE)
    if text is not None:
      width = self.text_width or self.width
      rows = nn.Embed(self.vocab_size, width, name="txt", **options)(text)
      text_BE = pooling.normalise(jnp.tanh(rows).sum(1))
    self.param("t", nn.initializers.constant(jnp.log(4.0)), (1,))
    if self.with_bias:
      self.param("b", nn.initializers.constant(-2.0), (1,))
    return image_BE, text_BE, {}
