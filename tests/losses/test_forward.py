"""Features of a model's layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.losses import forward
from bigtrain.models import vit

SIZES = dict(width=8, depth=3, mlp_dim=8, num_heads=2, patch_size=2)


@pytest.mark.parametrize("policy", ["none", "nothing_saveable"])
def test_layers_of_a_vit(policy):
  """The norm of the last block's output is what the model calls encoded."""
  model = vit.Model(**SIZES, num_classes=3, remat_policy=policy)
  image = np.random.default_rng(0).normal(size=(4, 6, 4, 3)).astype(np.float32)
  variables = model.init(jax.random.key(0), image)
  fn = forward.layers_fn(model, lambda batch: {"image": batch["image"]})
  names = [f"Transformer/encoderblock_{i}" for i in range(3)]
  batch = {"image": image}
  out = jax.jit(lambda v: fn(v, batch, layer=[*names, "encoded"]))(variables)
  assert list(out) == [*names, "encoded"]
  x = out[names[2]]
  norm = variables["params"]["Transformer"]["encoder_norm"]
  x = nn.LayerNorm().apply({"params": norm}, x)
  np.testing.assert_allclose(x, out["encoded"], atol=1e-5)
  assert not np.allclose(out[names[0]], out[names[1]], atol=1e-2)
  pooled = fn(variables, batch, layer=names[1], pool=True)
  np.testing.assert_allclose(pooled, out[names[1]].mean(1), atol=1e-6)
  _, own = model.apply(variables, image)
  np.testing.assert_allclose(fn(variables, batch), own["pre_logits"], atol=1e-6)
  assert jnp.shape(fn(variables, batch)) == (4, 8)
  message = "layer: unknown 'Transformer/encoderblok_1'. Did you mean"
  with pytest.raises(ConfigError, match=message):
    fn(variables, batch, layer="Transformer/encoderblok_1")
