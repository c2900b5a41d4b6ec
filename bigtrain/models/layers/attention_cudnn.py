"""Attention by cuDNN's fused kernels, for NVIDIA GPUs.

Axes: B batch, L length, S length attended to, H heads, G heads of keys and
values, K head width.
"""

import jax
import jax.extend
import jax.numpy as jnp

from bigtrain import model_flops
from bigtrain.models.layers import attention_backends, masks

# Largest matrix of a mask: 128 MiB an example, as the bias that cuDNN takes.
# For packed documents and the attention of llama_8b, forward and backward, the
# GPU compiler counts 135 MB of temporary memory with 4,096 positions and 404 MB
# with 8,192; blockwise attention takes 250 and 381 MB. cuDNN's offsets of
# documents would need their largest number in a row, and room for the
# statistics of all positions for each of them.
_MAX_MASK = 8192 * 8192


def unsupported_because(case: attention_backends.Case) -> str:
  """Returns why the kernels cannot serve a case, or ""."""
  if case.platform != "gpu":
    return f"it needs an NVIDIA GPU, not a {case.platform}"
  if reason := _lacks_cudnn(case.device_kind):
    return reason
  if case.dtype not in ("bfloat16", "float16"):
    return f"it computes in bfloat16 or float16, not {case.dtype}"
  if case.width % 8 or case.width > 128:
    return f"heads need a multiple of 8 up to 128 as width, not {case.width}"
  if case.bias:
    return "its bias is a matrix of all scores"
  if case.softcap:
    return "it caps no scores"
  if case.causal and case.sequence > 1:
    return "its causal order begins with the first position of an example"
  masked = case.prefix or case.documents or case.padding
  if masked and case.queries * case.positions > _MAX_MASK:
    return "its mask would be a matrix of more than 128 MiB an example"
  return ""


def _lacks_cudnn(device_kind: str) -> str:
  """Returns why a GPU does not have these kernels, or ""."""
  if jax.default_backend() == "gpu":
    backend = jax.extend.backend.get_backend()
    if "cuda" not in backend.platform_version:
      return "it needs an NVIDIA GPU"
    capability = jax.devices()[0].compute_capability
    if float(capability) < 8.0:
      return f"it needs compute capability 8.0, not {capability}"
  elif "AMD" in device_kind or "Radeon" in device_kind:
    return "it needs an NVIDIA GPU"
  return ""


def best_because(case: attention_backends.Case) -> str:
  """Returns why the kernels are best for a case that they serve, or ""."""
  del case
  return "the fastest on an NVIDIA GPU"


def attend(
  q_BLHK: jax.Array,
  k_BSGK: jax.Array,
  v_BSGK: jax.Array,
  mask: masks.Mask,
  *,
  scale: float,
) -> jax.Array:
  """Returns the output, of the shape and dtype of the queries.

  Args:
    sees: what a query sees. All but the causal order and a window becomes a
      matrix of L x S booleans.
  """
  B, L, *_ = q_BLHK.shape
  S = k_BSGK.shape[1]
  mask_BLS = mask.matrix(L, S) if mask.selects else None
  if mask_BLS is not None:
    mask_BLS = jnp.broadcast_to(mask_BLS, (len(mask_BLS), L, S))
  causal = mask.causal and mask_BLS is None
  # Some versions of jax and cuDNN refuse odd lengths, such as the 197 tokens of
  # a ViT with a class token.
  lengths = None
  if L % 2 or S % 2:
    even = lambda x: jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))
    q_BLHK, k_BSGK, v_BSGK = even(q_BLHK), even(k_BSGK), even(v_BSGK)
    if mask_BLS is None:
      lengths = [jnp.full(B, n, jnp.int32) for n in (L, S)]
    else:
      mask_BLS = jnp.pad(mask_BLS, ((0, 0), (0, L % 2), (0, S % 2)))
  computed = q_BLHK.shape[1] * k_BSGK.shape[1]
  with model_flops.counts_as(L * mask.reach(S), computed):
    o_BLHK = jax.nn.dot_product_attention(
      q_BLHK,
      k_BSGK,
      v_BSGK,
      mask=None if mask_BLS is None else mask_BLS[:, None],
      scale=scale,
      is_causal=causal,
      local_window_size=(mask.window - 1, 0)
      if causal and mask.window
      else None,
      query_seq_lengths=lengths[0] if lengths else None,
      key_value_seq_lengths=lengths[1] if lengths else None,
      implementation="cudnn",
    )
  return o_BLHK[:, :L]
