"""Attentions of all kinds, for tests that compare implementations."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.models.layers import attention, masks, positions


@dataclasses.dataclass(frozen=True)
class Case:
  """Lengths, heads and what a query sees; 0 and None for none."""

  L: int
  S: int = 0  # L if 0.
  heads: int = 2
  kv_heads: int = 2
  width: int = 8
  value_width: int = 0  # `width` if 0.
  causal: bool = False
  window: int | None = None
  prefix: bool = False
  documents: bool = False
  padding: bool = False
  bias: bool = False
  softcap: float | None = None
  sinks: bool = False
  scaled: bool = True
  rows: int = 2

  def mask(self) -> masks.Mask:
    """What the queries see."""
    L, S, B = self.L, self.S or self.L, self.rows
    rng = np.random.default_rng(1)
    mask = masks.Mask(causal=self.causal, window=self.window)
    if self.prefix:
      mask = dataclasses.replace(mask, prefix_B=jnp.asarray([L // 3, 0])[:B])
    if self.documents:
      ends = np.sort(rng.integers(1, L, (B, 3)), axis=1)
      number = lambda n: 1 + (np.arange(n) >= ends[..., None]).sum(1)
      mask = dataclasses.replace(
        mask,
        segments_BL=jnp.asarray(number(L)),
        segments_BS=jnp.asarray(number(S)),
      )
    if self.padding:
      real = np.arange(S) < np.asarray([[S - 3], [S // 2]])[:B]
      mask = dataclasses.replace(mask, real_BS=jnp.asarray(real))
    return mask

  def arrays(self, dtype: str = "float32") -> dict[str, Any]:
    """Queries, keys, values and the bias."""
    L, S, B = self.L, self.S or self.L, self.rows
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
      return jnp.asarray(rng.normal(size=shape), dtype)

    arrays = {
      "q": normal(B, L, self.heads, self.width),
      "k_BSGK": normal(B, S, self.kv_heads, self.width),
      "v_BSGK": normal(B, S, self.kv_heads, self.value_width or self.width),
    }
    if self.bias:
      bias = normal(self.heads, L + S - 1).astype(jnp.float32)
      arrays["bias"] = positions.BiasByDistance(bias)
    if self.sinks:
      arrays["sinks_H"] = normal(self.heads).astype(jnp.float32)
    return arrays

  def attend(self, arrays: dict[str, Any], implementation: str) -> jax.Array:
    """The output of an implementation."""
    return attention.attend(
      **arrays,
      mask=self.mask(),
      softcap=self.softcap,
      scale=None if self.scaled else 1.0,
      backend=implementation,
    )

  def results(self, arrays: dict[str, Any], implementation: str) -> Any:
    """Output, and gradients of a loss that weights all outputs differently."""
    shape = *arrays["q"].shape[:-1], arrays["v_BSGK"].shape[-1]
    weights = jnp.asarray(np.random.default_rng(2).normal(size=shape))

    @jax.jit
    def run(arrays: dict[str, Any]) -> Any:
      def loss(arrays: dict[str, Any]) -> Any:
        out = self.attend(arrays, implementation)
        return jnp.sum(out.astype(jnp.float32) * weights), out

      grads, out = jax.grad(loss, has_aux=True)(arrays)
      return {"out": out, "grads": grads}

    return run(arrays)


def check_close(
  actual: Any, expected: Any, tolerance: float, least: float = 1e-4
) -> None:
  """Asserts that two trees agree, relative to the largest entry of each array.

  An array of rounding errors, as the gradient of the keys' bias, is measured by
  the share `least` of the largest entry of the tree.
  """
  actual = dict(jax.tree_util.tree_leaves_with_path(actual))
  expected = dict(jax.tree_util.tree_leaves_with_path(expected))
  assert actual.keys() == expected.keys()
  largest = max(np.abs(np.float32(y)).max() for y in expected.values())
  for name, x in actual.items():
    x, y = np.float32(x), np.float32(expected[name])
    scale = max(np.abs(y).max(), least * largest)
    error = np.abs(x - y).max() / scale
    assert error < tolerance, f"{name}: {error}"
