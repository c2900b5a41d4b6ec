"""Latent attention: its cache, and generation with latents alone.

tests/models/published compares it with transformers, and test_decoder_options
computes with it on meshes, with packed texts and windows.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import random_variables

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder

V, B, L = 31, 2, 12
LATENTS = dict(q_rank=7, kv_rank=9, nope_dim=6, rope_dim=4, v_dim=5)


def model_of(**changes):
  options = dict(
    variant="llama",
    vocab_size=V,
    width=16,
    depth=2,
    num_heads=4,
    mlp_dim=12,
    mla=LATENTS,
    rope_interleaved=True,
  )
  return decoder.Model(**options | changes)


def cached_numbers(model, length):
  cache = jax.eval_shape(lambda: model.init_cache(1, length))
  return sum(math.prod(x.shape) for x in jax.tree.leaves(cache))


@pytest.mark.parametrize("variant", ["deepseek_v3", "kimi_k2"])
def test_the_cache_has_576_numbers_per_token_and_layer(variant):
  model = decoder.Model(variant=variant)
  assert model.mla.kv_rank + model.mla.rope_dim == 576
  assert cached_numbers(model, 4096) == 576 * 4096 * model.depth
  # With keys and values of all heads it would be 71 times as much in V3.
  plain = 2 * 128 * 160
  assert variant != "deepseek_v3" or plain / 576 > 71


CASES = {
  "plain": {},
  "no latent of queries": dict(mla=LATENTS | dict(q_rank=None)),
  "window": dict(window=4),
  "sinks": dict(sinks=True, use_bias=("qkv", "out"), attention_softcap=2.0),
  "yarn": dict(
    rope_scaling=dict(
      type="yarn",
      factor=4.0,
      original_len=4,
      mscale=0.7,
      mscale_all_dim=0.4,
    ),
    query_scale=dict(beta=0.3, original_len=4),
  ),
  "no positions": dict(posemb="none"),
}


@pytest.mark.parametrize("case", CASES)
def test_generation_with_latents_gives_the_logits_of_keys_and_values(case):
  model = model_of(**CASES[case])
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, V, (B, L))
  variables = random_variables.of(model, tokens)
  whole, _ = jax.jit(model.apply)(variables, tokens)
  assert np.std(whole) > 0.1
  step = jax.jit(lambda t, c, i: model.apply(variables, t, cache=c, start=i))
  cache = model.init_cache(B, L)
  # A prompt, several further tokens in one call, then one by one.
  parts, start = [], 0
  for size in (4, 4, *[1] * 4):
    logits, out = step(tokens[:, start : start + size], cache, start)
    cache, start = out["cache"], start + size
    parts.append(logits)
  np.testing.assert_allclose(
    np.concatenate(parts, axis=1), whole, atol=1e-5 * np.abs(whole).max()
  )


def test_the_scale_has_the_square_of_yarns_mscale():
  scaling = dict(type="yarn", factor=40.0, original_len=16, mscale_all_dim=1.0)
  scaled = model_of(rope_scaling=scaling)
  plain = model_of(rope_scaling=scaling | dict(mscale_all_dim=None))
  scale_of = lambda model: (
    decoder.layer_kinds.of_model(model).period[0].attention_scale
  )
  mscale = 0.1 * math.log(40) + 1
  np.testing.assert_allclose(scale_of(scaled), 10**-0.5 * mscale**2)
  np.testing.assert_allclose(scale_of(plain), 10**-0.5)
  assert scale_of(model_of(attention_scale=0.5)) == 0.5


def test_names_and_shapes():
  shapes = jax.eval_shape(
    model_of(use_bias=("qkv",)).init, jax.random.key(0), jnp.zeros((1, 2), int)
  )
  own = shapes["params"]["blocks_0"]["attention"]
  assert {n: x.shape for n, x in trees.flatten_with_names(own)} == {
    "query_down/kernel": (16, 7),
    "query_down/bias": (7,),
    "query_down_norm/scale": (7,),
    "query_up/kernel": (7, 4, 10),
    "kv_down/kernel": (16, 13),
    "kv_down/bias": (13,),
    "kv_down_norm/scale": (9,),
    "kv_up/kernel": (9, 4, 11),
    "out/kernel": (4, 5, 16),
  }


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(head_dim=8), "head_dim=8: expected 10 with config.model.mla"),
    (dict(num_kv_heads=2), "num_kv_heads=2: expected 4"),
    (dict(qk_norm=True), "qk_norm='head': expected None"),
    (dict(mla=LATENTS | dict(v_dim=0)), r"mla.v_dim"),
    (dict(mla=LATENTS | dict(rank=3)), r"mla.rank: unknown key. Did you"),
    (dict(mla=LATENTS | dict(rope_dim=3)), "even number of features, got 3"),
  ],
)
def test_bad_options(changes, message):
  with pytest.raises(ConfigError, match=message):
    model_of(**changes)
