"""Attention by cuDNN is lowered; nothing of it runs without an NVIDIA GPU."""

import jax
import jax.numpy as jnp
import pytest
from support import absent_mesh

from bigtrain.models.layers import attention, masks

_B, _H, _K = 2, 4, 64


def lower(length, **conditions):
  """The text of the gradient of an attention for an H100."""

  def total(q_BLHK, k_BSHK, v_BSHK):
    mask = masks.Mask(**{"causal": True, **conditions})
    return jnp.sum(attention.attend(q_BLHK, k_BSHK, v_BSHK, mask=mask))

  qkv = [jax.ShapeDtypeStruct((_B, length, _H, _K), jnp.bfloat16)] * 3
  with absent_mesh.use("NVIDIA H100 80GB HBM3", "gpu"):
    traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(*qkv)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("length", [64, 63])
def test_documents_become_a_mask(traces_cudnn, length):
  segments_BL = jnp.zeros((_B, length), jnp.int32)
  text = lower(length, segments_BL=segments_BL, segments_BS=segments_BL)
  assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text
  assert "64x64" in text and "63x64" not in text


def test_padding_becomes_a_mask(traces_cudnn):
  text = lower(64, causal=False, real_BS=jnp.ones((_B, 64), bool))
  assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text


def test_the_order_needs_no_mask(traces_cudnn):
  text = lower(63)
  assert "__cudnn$fmhaSoftmaxBackward" in text
  assert "63x63" not in text and "fmhaScaleBias" not in text
