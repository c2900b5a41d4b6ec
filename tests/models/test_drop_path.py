"""Stochastic depth (https://arxiv.org/abs/1603.09382) in every model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models import (
  convnext,
  decoder,
  resnet,
  swin,
  t5,
  text_transformer,
  vit,
)
from bigtrain.models.layers import encoder

B, R = 16, 0.6
_TEXT = dict(vocab_size=11, width=16, depth=3, num_heads=2, mlp_dim=16)
_VIT = dict(num_classes=3, width=16, depth=3, mlp_dim=16, patch_size=8)
_SWIN = dict(window=2, num_heads=(1, 2), patch_size=4)
_IMAGE = dict(image=np.random.default_rng(0).normal(size=(B, 16, 16, 3)))
_TOKENS = np.random.default_rng(1).integers(1, 11, (B, 6))
_GROWING = [0.0, R / 2, R]  # Of three blocks.

# Model, inputs, and rates of the branches in their order.
_CASES = {
  "vit": (vit.Model, dict(_VIT, num_heads=2), _IMAGE, np.repeat(_GROWING, 2)),
  "mixer": (
    vit.Model,
    dict(_VIT, num_heads=1, posemb="none", token_mlp_dim=8, pool_type="gap"),
    _IMAGE,
    np.repeat(_GROWING, 2),
  ),
  "resnet": (
    resnet.Model,
    dict(num_classes=3, depth=(1, 1, 1, 0), width=0.125),
    _IMAGE,
    _GROWING[1:],
  ),
  "bit": (
    resnet.Model,
    dict(
      num_classes=3,
      depth=(1, 1, 1, 0),
      width=0.125,
      version=2,
      norm="bit_torch",
      groups=4,
    ),
    _IMAGE,
    _GROWING[1:],
  ),
  "convnext": (
    convnext.Model,
    dict(num_classes=3, depths=(1, 1, 1, 0), widths=(4, 4, 4, 4)),
    dict(image=np.repeat(np.repeat(_IMAGE["image"], 2, 1), 2, 2)),
    _GROWING[1:],
  ),
  "swin": (
    swin.Model,
    dict(num_classes=3, width=8, depths=(2, 1), **_SWIN),
    _IMAGE,
    np.repeat(_GROWING[1:], 2),
  ),
  "text": (
    text_transformer.Model,
    dict(_TEXT, num_classes=3),
    dict(text=_TOKENS),
    np.repeat(_GROWING, 2),
  ),
  "decoder": (
    decoder.Model,
    dict(_TEXT, variant="llama"),
    dict(tokens=_TOKENS),
    np.repeat(_GROWING, 2),
  ),
  "t5": (
    t5.Model,
    dict(_TEXT, decoder_depth=2),
    dict(inputs=_TOKENS, targets=_TOKENS),
    [*np.repeat(_GROWING, 2), *np.repeat([0.0, R], 3)],
  ),
}


def outputs(model, inputs):
  """Variables of random numbers, and a function of them in training."""
  init = lambda key: model.init(key, **inputs)
  variables = jax.eval_shape(init, jax.random.key(0))
  leaves, treedef = jax.tree.flatten(variables)
  rng = np.random.default_rng(0)
  variables = treedef.unflatten(
    [0.5 * rng.normal(size=x.shape).astype(np.float32) ** 2 for x in leaves]
  )

  def run(variables, inputs, train=True):
    keys = {"dropout": jax.random.key(2)}
    mutable = ["batch_stats", "step_sums"] if train else False
    out = model.apply(
      variables, **inputs, train=train, rngs=keys, mutable=mutable
    )
    return (out[0] if train else out)[0]

  return variables, run


@pytest.mark.parametrize("name", cases.quick(_CASES, "resnet"))
def test_rates_grow_and_branches_keep_their_mean(name, monkeypatch):
  cls, fields, inputs, expected = _CASES[name]
  plain = cls(**fields)
  model = plain.clone(drop_path=R)
  variables, run = outputs(model, inputs)
  off = jax.jit(outputs(plain, inputs)[1])(variables, inputs)
  dropped = jax.jit(run)(variables, inputs)
  rates = []

  def mean(y, rate, key, rescale=True):
    jax.debug.callback(lambda x: rates.append(float(x)), rate, ordered=True)
    return y  # The mean of what drop_path returns, see test_encoder.py.

  if fields.get("token_mlp_dim") is None:
    differs = np.abs(dropped - off).reshape(B, -1).max(1) > 1e-4
    assert differs.sum() > B / 2
  monkeypatch.setattr(encoder, "drop_path", mean)
  kept = jax.jit(lambda *args: run(*args))(variables, inputs)
  np.testing.assert_array_equal(kept, off)
  jax.effects_barrier()
  drawn, expected = ([x for x in each if x] for each in (rates, expected))
  np.testing.assert_allclose(drawn, expected, rtol=1e-6)
  evaluate = lambda *args: run(*args, train=False)
  traced = jax.make_jaxpr(evaluate)(variables, inputs)
  assert "callback" not in str(traced)


@pytest.mark.parametrize("name", _CASES)
def test_a_rate_of_one_is_refused(name):
  with pytest.raises(ConfigError, match="config.model.drop_path: .*1.0"):
    _CASES[name][0](**_CASES[name][1], drop_path=1.0)


@pytest.mark.parametrize("name", cases.quick(_CASES, "decoder"))
def test_any_mesh_drops_the_same(name):
  cls, fields, inputs, _ = _CASES[name]
  more = {"scan": True} if "scan" in cls.__dataclass_fields__ else {}
  variables, run = outputs(cls(**fields, **more, drop_path=R), inputs)
  one = jax.jit(run)(variables, inputs)
  mesh = sharding.make_mesh(replica=2, fsdp=4)
  with jax.set_mesh(mesh):
    placed = jax.device_put(inputs, sharding.batch(mesh))
    other = jax.jit(run)(variables, placed)
  np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)
  assert jnp.isfinite(one).all()
