"""Texts are classified as images are, on one device or eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models import text_transformer
from bigtrain.tasks import classification

MODEL = text_transformer.Model(
  num_classes=3, width=16, depth=1, num_heads=2, vocab_size=20, post_norm=True,
  token_types=2, pad_id=0, pool_type="first", rep_size=True, mlp="gelu_erf",
)  # fmt: skip
RNG = np.random.default_rng(0)
BATCH = dict(
  text=RNG.integers(1, 20, (8, 6)),
  types=RNG.integers(0, 2, (8, 6)),
  labels=RNG.integers(0, 3, 8),
)


def loss_and_grads(params, batch, **options):
  loss = lambda params: classification.loss_fn(
    {"params": params}, batch, jax.random.key(1), model=MODEL, train=True,
    **options,
  )[0]["loss"][0]  # fmt: skip
  return jax.jit(jax.value_and_grad(loss))(params)


def test_padding_changes_nothing_and_eight_devices_are_one():
  inputs = classification.inputs(BATCH)
  params = MODEL.init(jax.random.key(0), **inputs)["params"]
  padded = dict(BATCH, text=np.copy(BATCH["text"]))
  padded["text"][:, 4:] = 0
  short = {k: x[:, :4] if x.ndim > 1 else x for k, x in BATCH.items()}
  cut = dict(params, pos_embedding=params["pos_embedding"][:, :4])
  one, grads = loss_and_grads(params, padded)
  np.testing.assert_allclose(one, loss_and_grads(cut, short)[0], rtol=1e-5)
  for sizes in (dict(fsdp=8), dict(fsdp=4, tensor=2)):
    mesh = sharding.make_mesh(**sizes)
    with jax.set_mesh(mesh):
      rows = jax.NamedSharding(mesh, jax.P(("replica", "fsdp")))
      batch = {k: jax.device_put(x, rows) for k, x in padded.items()}
      eight, grads_8 = loss_and_grads(params, batch)
    np.testing.assert_allclose(eight, one, rtol=1e-5)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), grads_8, grads
    )


def test_texts_are_not_blended():
  params = {"params": {}}
  with pytest.raises(ConfigError, match="mixup_alpha=0.2, .*texts"):
    classification.loss_fn(
      params, {k: jnp.asarray(x) for k, x in BATCH.items()}, jax.random.key(0),
      model=MODEL, train=True, mixup_alpha=0.2,
    )  # fmt: skip
