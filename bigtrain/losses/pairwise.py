"""Losses over all pairs in a global batch: of images and texts, or of views.

The logits of all pairs form a matrix. A device computes the rows of its own
examples (embeddings of one side). It goes through the columns (all embeddings
of the other side) in chunks, so that only b x K logits exist at a time.

Axes: B global batch, b examples of one device, m columns of an example, C all
columns, K columns of a chunk, E embedding.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bigtrain import sharding
from bigtrain.arrays import model_flops
from bigtrain.config.errors import check_number

# Logit of padding. Finite, so that gradients of padding alone are 0, not NaN.
_PADDING_LOGIT = -1e30

# (logits [b, K], whether the column matches the row [b, K], whether the column
# counts [K] or [b, K]) -> {name: values [b]}, which are stacked over chunks.
_ChunkFn = Callable[[jax.Array, jax.Array, jax.Array], dict[str, jax.Array]]


def sigmoid(
  image_BE: jax.Array,
  text_BE: jax.Array,
  scale: jax.Array,
  bias: jax.Array,
  *,
  weight_B: jax.Array | None = None,
  chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
  """Computes a binary cross-entropy for each pair: do image and text match?

  arXiv 2303.15343. Examples of weight 0 are padding, in rows and columns.

  Returns:
    (loss_B float32 in nats, SUMMED over the texts; correct_B: 1.0 where no
    other text scores higher than the image's own, without gradient).
  """

  def chunk_fn(
    logits_bK: jax.Array, match_bK: jax.Array, real_K: jax.Array
  ) -> dict[str, jax.Array]:
    loss_bK = jax.nn.softplus(jnp.where(match_bK, -logits_bK, logits_bK))
    return {"loss": jnp.sum(jnp.where(real_K, loss_bK, 0.0), axis=1)}

  values = _over_chunks(
    chunk_fn, image_BE, text_BE[:, None], scale, bias, weight_B, chunk
  )
  return jnp.sum(values["loss"], axis=0), _correct(values)


def softmax(
  image_BE: jax.Array,
  text_BE: jax.Array,
  scale: jax.Array,
  *,
  negatives_BnE: jax.Array | None = None,
  weight_B: jax.Array | None = None,
  chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
  """Computes CLIP's loss of each example, arXiv 2103.00020.

  The mean of two cross-entropies: of the image among all texts, and of the text
  among all images. Negatives are texts that belong to no image. The other
  arguments and the results are those of `sigmoid`.
  """

  def one_direction(rows_BE: jax.Array, *columns: jax.Array) -> Any:
    columns_BmE = jnp.concatenate(columns, axis=1)
    return cross_entropy(
      rows_BE, columns_BmE, scale, weight_B=weight_B, chunk=chunk
    )

  texts = [text_BE[:, None]]
  if negatives_BnE is not None:
    texts.append(negatives_BnE)
  # Both directions have the same logits, and each computes them.
  with model_flops.share(1, 2):
    image_loss_B, correct_B = one_direction(image_BE, *texts)
    text_loss_B, _ = one_direction(text_BE, image_BE[:, None])
  return (image_loss_B + text_loss_B) / 2, correct_B


def cross_entropy(
  rows_BE: jax.Array,
  columns_BmE: jax.Array,
  scale: jax.Array,
  *,
  weight_B: jax.Array | None = None,
  chunk: int = 1024,
  without_own: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy of each row over all columns, one of which matches it.

  Args:
    columns_BmE: m columns of each example, the first of which matches its row.
    without_own: whether the other columns of a row's own example are left out.

  Returns:
    (loss_B, correct_B), like `sigmoid`.
  """

  def chunk_fn(
    logits_bK: jax.Array, match_bK: jax.Array, real: jax.Array
  ) -> dict[str, jax.Array]:
    logits_bK = jnp.where(real, logits_bK, _PADDING_LOGIT)
    return {
      "normaliser": jax.nn.logsumexp(logits_bK, axis=1),
      "match": jnp.sum(jnp.where(match_bK, logits_bK, 0.0), axis=1),
    }

  values = _over_chunks(
    chunk_fn,
    rows_BE,
    columns_BmE,
    scale,
    jnp.zeros(()),
    weight_B,
    chunk,
    without_own,
  )
  normaliser_B = jax.nn.logsumexp(values["normaliser"], axis=0)
  return normaliser_B - jnp.sum(values["match"], axis=0), _correct(values)


def nt_xent(
  first_BE: jax.Array,
  second_BE: jax.Array,
  scale: jax.Array,
  *,
  weight_B: jax.Array | None = None,
  chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
  """SimCLR's loss of each example, arXiv 2002.05709.

  The mean of the cross-entropies of both views. A view has to find the other
  view of its image among both views of all images, excluding itself. The
  results are those of `sigmoid`.
  """

  def of_view(view_BE: jax.Array, other_BE: jax.Array) -> Any:
    columns_B2E = jnp.stack([other_BE, view_BE], axis=1)
    return cross_entropy(
      view_BE,
      columns_B2E,
      scale,
      weight_B=weight_B,
      chunk=chunk,
      without_own=True,
    )

  first_loss_B, first_correct_B = of_view(first_BE, second_BE)
  second_loss_B, second_correct_B = of_view(second_BE, first_BE)
  return (
    (first_loss_B + second_loss_B) / 2,
    (first_correct_B + second_correct_B) / 2,
  )


def distance(
  image_BE: jax.Array,
  text_BE: jax.Array,
  teacher_image_BE: jax.Array,
  teacher_text_BE: jax.Array,
  *,
  weight_B: jax.Array | None = None,
  chunk: int = 1024,
) -> jax.Array:
  """Cross-entropy of a student's choices with a teacher's as targets, [B].

  A choice is the softmax of an image's products with all texts, and of a text's
  with all images; the result is the mean of both (arXiv 2411.18674, equation
  3). A scale of the logits has to be part of the images. The teacher, whose
  embeddings may have another size, has no gradient.
  """
  teacher_image_BE, teacher_text_BE = jax.lax.stop_gradient(
    (teacher_image_BE, teacher_text_BE)
  )

  def chunk_fn(
    logits_bK: jax.Array, match_bK: jax.Array, real_K: jax.Array
  ) -> dict[str, jax.Array]:
    del match_bK
    logits_bK = jnp.where(real_K, logits_bK, _PADDING_LOGIT)
    student, teacher = logits_bK[:, 0::2], logits_bK[:, 1::2]
    return {
      "student": jax.nn.logsumexp(student, axis=1),
      "teacher": jax.nn.logsumexp(teacher, axis=1),
      "product": jnp.sum(jax.nn.softmax(teacher) * student, axis=1),
    }

  def one_direction(
    rows_BE: jax.Array,
    columns_BE: jax.Array,
    teacher_rows_BE: jax.Array,
    teacher_columns_BE: jax.Array,
  ) -> jax.Array:
    # An example has two columns: one that is zero for the teacher's part of a
    # row, and one that is zero for the student's.
    columns_B2E = jnp.stack(
      [
        jnp.pad(columns_BE, [(0, 0), (0, teacher_columns_BE.shape[1])]),
        jnp.pad(teacher_columns_BE, [(0, 0), (columns_BE.shape[1], 0)]),
      ],
      axis=1,
    )
    values = _over_chunks(
      chunk_fn,
      jnp.concatenate([rows_BE, teacher_rows_BE], axis=1),
      columns_B2E,
      jnp.ones(()),
      jnp.zeros(()),
      weight_B,
      2 * chunk,
    )
    # The teacher's share of each chunk of columns.
    share = jax.nn.softmax(values["teacher"], axis=0)
    product_B = jnp.sum(share * values["product"], axis=0)
    return jax.nn.logsumexp(values["student"], axis=0) - product_B

  # Both directions have the same logits, and half of each product is zeros.
  with model_flops.share(1, 4):
    of_images_B = one_direction(
      image_BE, text_BE, teacher_image_BE, teacher_text_BE
    )
    of_texts_B = one_direction(
      text_BE, image_BE, teacher_text_BE, teacher_image_BE
    )
  return (of_images_B + of_texts_B) / 2


def _correct(values: dict[str, jax.Array]) -> jax.Array:
  """1.0 where no other column has a larger logit than the matching one."""
  right_B = jnp.max(values["right"], axis=0)
  wrong_B = jnp.max(values["wrong"], axis=0)
  is_best_B = right_B >= wrong_B  # False for NaN.
  return (is_best_B & jnp.isfinite(right_B)).astype(jnp.float32)


def _over_chunks(
  chunk_fn: _ChunkFn,
  rows_BE: jax.Array,
  columns_BmE: jax.Array,
  scale: jax.Array,
  bias: jax.Array,
  weight_B: jax.Array | None,
  chunk: int,
  without_own: bool = False,
) -> dict[str, jax.Array]:
  """Returns the values of `chunk_fn` for each chunk of columns, [chunks, B].

  A row has m columns, the first of which matches it. Adds "right" and "wrong",
  the largest logits of matching and of other columns.
  """
  check_number("config.loss.chunk", chunk, least=1, whole=True)
  if weight_B is None:
    weight_B = jnp.ones(len(rows_BE), jnp.float32)
  body = functools.partial(_scan_chunks, chunk_fn, chunk, without_own)
  mesh = jax.sharding.get_abstract_mesh()
  if not set(sharding.BATCH_AXES) <= set(mesh.axis_names):
    number_B = jnp.arange(len(rows_BE))
    return body(rows_BE, columns_BmE, weight_B, number_B, scale, bias)
  axes = sharding.batch_axes(mesh)

  def on_device(
    rows_bE: jax.Array,
    columns_bmE: jax.Array,
    weight_b: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
  ) -> dict[str, jax.Array]:
    # Per-device copies: gradients are summed over devices once, not for each
    # chunk.
    scale, bias = jax.lax.pcast((scale, bias), axes, to="varying")
    first = jax.lax.axis_index(axes) * len(rows_bE)
    number_b = first + jnp.arange(len(rows_bE))
    # B x E numbers, compared to B x B logits. The transpose, a
    # reduce-scatter, returns each device's share of their gradients.
    columns_BmE, weight_B = jax.lax.all_gather(
      (columns_bmE, weight_b), axes, tiled=True
    )
    return body(rows_bE, columns_BmE, weight_B, number_b, scale, bias)

  by_example, replicated = PartitionSpec(axes), PartitionSpec()
  return jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(by_example, by_example, by_example, replicated, replicated),
    out_specs=PartitionSpec(None, axes),
  )(rows_BE, columns_BmE, weight_B, scale, bias)


def _scan_chunks(
  chunk_fn: _ChunkFn,
  chunk: int,
  without_own: bool,
  rows_bE: jax.Array,
  columns_BmE: jax.Array,
  weight_B: jax.Array,
  number_b: jax.Array,
  scale: jax.Array,
  bias: jax.Array,
) -> dict[str, jax.Array]:
  """The values of this device's rows; rows are numbered by their example."""
  m = columns_BmE.shape[1]
  columns_CE = columns_BmE.reshape(-1, columns_BmE.shape[-1])
  C = len(columns_CE)
  chunk = min(chunk, C)

  # Without the checkpoint the scan would keep every chunk's logits.
  @jax.checkpoint
  def one_chunk(_: None, xs: Any) -> tuple[None, dict[str, jax.Array]]:
    columns_KE, real_K, number_K = xs
    # The scale, 10 to 100, multiplies rounding errors of the product.
    logits_bK = bias + scale * jnp.einsum(
      "be,ke->bk", rows_bE, columns_KE, precision=jax.lax.Precision.HIGHEST
    )
    match_bK = m * number_b[:, None] == number_K
    fixed_bK = jax.lax.stop_gradient(logits_bK)
    right_b = jnp.max(fixed_bK, axis=1, where=match_bK, initial=-jnp.inf)
    real: jax.Array = real_K
    if without_own:
      own_bK = number_b[:, None] == number_K // m
      real = real_K & (match_bK | ~own_bK)
    others_bK = ~match_bK & real
    wrong_b = jnp.max(fixed_bK, axis=1, where=others_bK, initial=-jnp.inf)
    values = chunk_fn(logits_bK, match_bK, real)
    return None, {**values, "right": right_b, "wrong": wrong_b}

  def split(x: jax.Array) -> jax.Array:
    x = jnp.pad(x, [(0, -C % chunk)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, chunk, *x.shape[1:])

  # Columns of padding have numbers that match no row.
  number = jnp.arange(C + -C % chunk).reshape(-1, chunk)
  xs = (split(columns_CE), split(jnp.repeat(weight_B, m)) > 0, number)
  with model_flops.share(C, C + -C % chunk):
    return jax.lax.scan(one_chunk, None, xs)[1]
