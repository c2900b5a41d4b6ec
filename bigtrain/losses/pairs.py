"""Losses over all pairs of a global batch of images and texts.

Each device keeps the rows (examples of one side) that it has and sees the
columns (all examples of the other side) one chunk after the other. Logits of
b x K pairs exist at a time, forward and backward, never of B x B.

Axes: B global batch, b one device's part of it, K a chunk of the columns, E
embedding.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bigtrain import sharding

# Finite, so that a chunk in which nothing counts has a gradient of 0, not NaN.
_NEVER = -1e30

# (logits [b, K], whether it is the row's own column [b, K], whether the column
# counts [K]) -> values [b] that are gathered from all chunks, [chunks, b].
_OfChunk = Callable[[jax.Array, jax.Array, jax.Array], dict[str, jax.Array]]


def sigmoid(
  image_BE: jax.Array,
  text_BE: jax.Array,
  scale: jax.Array,
  bias: jax.Array,
  *,
  weight_B: jax.Array | None = None,
  chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
  """Each pair is a binary question: do these two belong together?

  "Sigmoid Loss for Language Image Pre-Training", arXiv 2303.15343. The mean
  over the batch is the paper's loss.

  Args:
    image_BE: normalised embeddings; example i belongs to text i alone.
    text_BE: normalised embeddings.
    scale: scalar; the inverse temperature.
    bias: scalar that is added to the logits.
    weight_B: examples of weight 0 are padding, and nobody's counterpart.
    chunk: texts at a time; B need not divide by it.

  Returns:
    (loss_B float32 in nats, SUMMED over the texts; correct_B: 1.0 where no
    other text fits the image better, without gradient).
  """

  def of_chunk(
    logits_bK: jax.Array, own_bK: jax.Array, counts_K: jax.Array
  ) -> dict[str, jax.Array]:
    loss_bK = jax.nn.softplus(jnp.where(own_bK, -logits_bK, logits_bK))
    return {"loss": jnp.sum(jnp.where(counts_K, loss_bK, 0.0), axis=1)}

  found = _over_chunks(
    of_chunk, image_BE, text_BE, scale, bias, weight_B, chunk
  )
  return jnp.sum(found["loss"], axis=0), _correct(found)


def softmax(
  image_BE: jax.Array,
  text_BE: jax.Array,
  scale: jax.Array,
  *,
  weight_B: jax.Array | None = None,
  chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy of an image among texts, and of a text among images.

  As in CLIP, arXiv 2103.00020: the mean of both directions.

  Args, returns: as `sigmoid`, but each example's loss is not a sum over pairs.
  """

  def of_chunk(
    logits_bK: jax.Array, own_bK: jax.Array, counts_K: jax.Array
  ) -> dict[str, jax.Array]:
    logits_bK = jnp.where(counts_K, logits_bK, _NEVER)
    return {
      "normaliser": jax.nn.logsumexp(logits_bK, axis=1),
      "own": jnp.sum(jnp.where(own_bK, logits_bK, 0.0), axis=1),
    }

  def one_way(rows_BE: jax.Array, columns_BE: jax.Array) -> Any:
    found = _over_chunks(
      of_chunk, rows_BE, columns_BE, scale, jnp.zeros(()), weight_B, chunk
    )
    normaliser_B = jax.nn.logsumexp(found["normaliser"], axis=0)
    return normaliser_B - jnp.sum(found["own"], axis=0), _correct(found)

  image_loss_B, correct_B = one_way(image_BE, text_BE)
  text_loss_B, _ = one_way(text_BE, image_BE)
  return (image_loss_B + text_loss_B) / 2, correct_B


def _correct(found: dict[str, jax.Array]) -> jax.Array:
  best = {name: jnp.max(found[name], axis=0) for name in ("right", "wrong")}
  return (best["right"] >= best["wrong"]).astype(jnp.float32)


def _over_chunks(
  of_chunk: _OfChunk,
  rows_BE: jax.Array,
  columns_BE: jax.Array,
  scale: jax.Array,
  bias: jax.Array,
  weight_B: jax.Array | None,
  chunk: int,
) -> dict[str, jax.Array]:
  """What `of_chunk` says of each chunk of columns, [chunks, B]."""
  if chunk < 1:
    raise ValueError(f"chunk={chunk}: expected a positive number.")
  if weight_B is None:
    weight_B = jnp.ones(len(rows_BE), jnp.float32)
  body = functools.partial(_scan_chunks, of_chunk, chunk)
  mesh = jax.sharding.get_abstract_mesh()
  if not set(sharding.AXES) <= set(mesh.axis_names):
    return body(
      rows_BE, columns_BE, weight_B, jnp.arange(len(rows_BE)), scale, bias
    )

  def on_device(
    rows_bE: jax.Array,
    columns_bE: jax.Array,
    weight_b: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
  ) -> dict[str, jax.Array]:
    # One copy for each device from here on: else their gradients would be
    # summed over devices for each chunk.
    scale, bias = jax.lax.pcast((scale, bias), sharding.AXES, to="varying")
    first = jax.lax.axis_index(sharding.AXES) * len(rows_bE)
    number_b = first + jnp.arange(len(rows_bE))
    # B x E numbers, where the logits would be B x B. Their gradients come
    # back as each device's own by the transpose, a reduce-scatter.
    columns_BE, weight_B = jax.lax.all_gather(
      (columns_bE, weight_b), sharding.AXES, tiled=True
    )
    return body(rows_bE, columns_BE, weight_B, number_b, scale, bias)

  by_batch, whole = PartitionSpec(sharding.AXES), PartitionSpec()
  return jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(by_batch, by_batch, by_batch, whole, whole),
    out_specs=PartitionSpec(None, sharding.AXES),
  )(rows_BE, columns_BE, weight_B, scale, bias)


def _scan_chunks(
  of_chunk: _OfChunk,
  chunk: int,
  rows_bE: jax.Array,
  columns_BE: jax.Array,
  weight_B: jax.Array,
  number_b: jax.Array,
  scale: jax.Array,
  bias: jax.Array,
) -> dict[str, jax.Array]:
  B = len(columns_BE)
  chunk = min(chunk, B)

  # Without the checkpoint the scan would keep every chunk's logits.
  @jax.checkpoint
  def one(_: None, xs: Any) -> tuple[None, dict[str, jax.Array]]:
    columns_KE, counts_K, number_K = xs
    # An error of the product is multiplied by the scale, some 10 to 100.
    logits_bK = bias + scale * jnp.einsum(
      "be,ke->bk", rows_bE, columns_KE, precision=jax.lax.Precision.HIGHEST
    )
    own_bK = number_b[:, None] == number_K
    still_bK = jax.lax.stop_gradient(logits_bK)
    right_b = jnp.max(still_bK, axis=1, where=own_bK, initial=-jnp.inf)
    wrong_b = jnp.max(
      still_bK, axis=1, where=~own_bK & counts_K, initial=-jnp.inf
    )
    found = of_chunk(logits_bK, own_bK, counts_K)
    return None, {**found, "right": right_b, "wrong": wrong_b}

  def split(x: jax.Array) -> jax.Array:
    x = jnp.pad(x, [(0, -B % chunk)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, chunk, *x.shape[1:])

  # Padding has numbers of its own, so that it is nobody's counterpart.
  number = jnp.arange(B + -B % chunk).reshape(-1, chunk)
  xs = (split(columns_BE), split(weight_B) > 0, number)
  return jax.lax.scan(one, None, xs)[1]
