"""Models under each implementation of attention, and what remat keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.layers import attention_cases

from bigtrain import sharding
from bigtrain.config.errors import ConfigError
from bigtrain.models import cappa, decoder, t5, two_towers
from bigtrain.models.layers import attention_blockwise
from bigtrain.reports import flops

RNG = np.random.default_rng(0)
V, B, L = 30, 2, 11
SIZES = dict(vocab_size=V, width=16, depth=2, num_heads=4)
TOKENS = jnp.asarray(RNG.integers(1, V, (B, L)))
SEGMENTS = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0], [1] * L])
IMAGE = jnp.asarray(RNG.normal(size=(B, 12, 12, 3)), jnp.float32)

CASES = {
  "decoder": (
    functools.partial(
      decoder.Model, variant="llama", num_kv_heads=2, window=5, scan=True,
      **SIZES,
    ),
    (TOKENS,),
    dict(segments=SEGMENTS),
  ),
  "t5": (
    functools.partial(t5.Model, **SIZES),
    (TOKENS.at[0, 8:].set(0), TOKENS[:, :7]),
    {},
  ),
  "packed t5": (
    functools.partial(t5.Model, scan=True, **SIZES),
    (TOKENS, TOKENS),
    dict(inputs_segments=SEGMENTS, targets_segments=SEGMENTS),
  ),
  "cappa": (
    functools.partial(
      cappa.Model, max_len=L, patch_size=4, mlp_dim=16, mask_token=True,
      **SIZES,
    ),
    (IMAGE, TOKENS),
    dict(parallel_B=jnp.asarray([True, False])),
  ),
}  # fmt: skip


@pytest.fixture
def small_blocks(monkeypatch):
  monkeypatch.setattr(attention_blockwise, "_BLOCK_ON_CPU", 4)


@pytest.mark.parametrize(
  "name",
  [
    "decoder",
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ("t5", "packed t5", "cappa")
    ),
  ],
)
def test_blocks_change_neither_logits_nor_gradients(small_blocks, name):
  make, arguments, options = CASES[name]
  variables = jax.jit(make().init)(jax.random.key(0), *arguments, **options)
  # Biases by distance start small, and the captioner's head at zero.
  noise = lambda p: p + 0.1 * RNG.normal(size=p.shape).astype(np.float32)
  params = jax.tree.map(noise, variables["params"])

  def results(attention):
    model = make(attention=attention)

    def loss(params):
      logits, _ = model.apply({"params": params}, *arguments, **options)
      real = options.get("targets_segments", SEGMENTS) != 0
      logits *= real[:, : logits.shape[1], None]
      return jnp.mean(jnp.sin(logits)), logits

    return jax.jit(jax.grad(loss, has_aux=True))(params)

  attention_cases.check_close(results("blockwise"), results("xla"), 1e-4)


@pytest.mark.slow
def test_the_error_names_the_tower():
  tower = dict(width=16, depth=1, mlp_dim=16, num_heads=2)
  model = two_towers.Model(
    image=dict(tower, patch_size=4),
    text=dict(tower, vocab_size=V, attention="splash"),
    out_dim=8,
  )
  variables = model.init(jax.random.key(0), IMAGE, TOKENS)
  with pytest.raises(ConfigError, match="config.model.text.attention"):
    model.apply(variables, IMAGE, TOKENS)
  with pytest.raises(ConfigError, match="mean 'splash'"):
    decoder.Model(**SIZES, attention="splush")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["blockwise", "splash"])
def test_remat_keeps_the_results_of_attention(monkeypatch, kernel):
  monkeypatch.setattr(sharding, "device", lambda: ("tpu", "TPU v5"))
  tokens = jax.ShapeDtypeStruct((2, 512), jnp.int32)

  def executed(scan, remat_policy):
    model = decoder.Model(
      variant="llama", **SIZES, attention=kernel, scan=scan,
      remat_policy=remat_policy, dtype="bfloat16",
    )  # fmt: skip
    init = functools.partial(model.init, jax.random.key(0))
    params = jax.eval_shape(init, tokens)["params"]
    loss = lambda params, x: model.apply({"params": params}, x)[0].sum()
    return flops.executed_flops(jax.grad(loss), params, tokens)

  least = executed(False, "none")
  assert executed(True, "none") == least
  assert executed(True, "dots_saveable") == least
  assert executed(True, "projections_and_attention_saveable") == least
  everything = executed(True, "nothing_saveable")
  # Two products of 512 x 512 positions in each of two layers.
  again = 2 * 2 * 2 * 2 * 512 * 512 * 16
  assert executed(True, "attention_saveable") == everything - again
  policy = "dots_with_no_batch_dims_saveable"
  assert executed(True, policy) == least + again
  # The product after attention, 16 x 16 for each of 2 x 512 tokens. The one
  # that ends the layer is needed for no gradient.
  again = 2 * 2 * 2 * 512 * 16 * 16
  policy = "inner_projections_and_attention_saveable"
  assert executed(True, policy) == least + again
