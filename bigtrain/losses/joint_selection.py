"""Joint selection of pairs of images and texts (JEST, arXiv 2406.17711).

From a large batch, algorithm 1 of the paper chooses the pairs to learn from.
The score of a set of pairs is a sum over all its pairs of an image and a text,
matching or not, because the sigmoid loss is such a sum:

  learnability     the learner's loss minus that of a frozen reference model
  easy_reference   minus the reference's loss

The set grows in chunks. The score of a further pair is what it would add to the
set's score: its own term, and its terms with all pairs already chosen. A chunk
is drawn without replacement, with probabilities proportional to exp(score).

Axes: B large batch, E embedding, c pairs of a chunk, n chosen pairs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from bigtrain import sharding

SCORES = ("learnability", "easy_reference")
# Score of padding. Finite, so that it comes after all real pairs, but before
# those that are already chosen.
_PADDING_SCORE = -1e30


class Pairs(NamedTuple):
  """Embeddings of pairs, and how a model makes logits of them."""

  image_BE: jax.Array
  text_BE: jax.Array
  scale: jax.Array
  bias: jax.Array


def select(
  reference: Pairs,
  learner: Pairs | None,
  weight_B: jax.Array,
  key: jax.Array,
  *,
  number: int,
  chunks: int,
) -> tuple[jax.Array, jax.Array]:
  """Chooses `number` pairs. The result is the same on every mesh.

  Args:
    learner: the model that learns; None for the score "easy_reference".
    weight_B: 0 for padding, which is chosen only if nothing else is left.
    number: number of pairs, a multiple of `chunks`.

  Returns:
    (chosen_n, the sorted numbers of the chosen pairs; score_B, the score of
    each pair alone).
  """
  B = len(weight_B)
  own_B = -_own_losses(reference)
  if learner is not None:
    own_B += _own_losses(learner)

  def add_chunk(
    carry: tuple[jax.Array, jax.Array], i: jax.Array
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    score_B, is_chosen_B = carry
    score_c = jnp.where(weight_B > 0, score_B, _PADDING_SCORE)
    # The largest sums of scores and Gumbel noise are a draw without
    # replacement, of probabilities proportional to exp(score).
    noise_B = jax.random.gumbel(jax.random.fold_in(key, i), (B,))
    rank_B = jnp.where(is_chosen_B, -jnp.inf, score_c + noise_B)
    _, new_c = jax.lax.top_k(_replicated(rank_B), number // chunks)
    score_B = score_B - _losses_with(reference, new_c)
    if learner is not None:
      score_B += _losses_with(learner, new_c)
    return (score_B, is_chosen_B.at[new_c].set(True)), new_c

  start = own_B, jnp.zeros(B, bool)
  _, chosen = jax.lax.scan(add_chunk, start, jnp.arange(chunks))
  return jnp.sort(chosen.reshape(-1)), own_B


def _own_losses(pairs: Pairs) -> jax.Array:
  """Loss of each pair of an image and its own text, [B]."""
  cosine_B = jnp.einsum(
    "be,be->b",
    pairs.image_BE,
    pairs.text_BE,
    precision=jax.lax.Precision.HIGHEST,
  )
  return jax.nn.softplus(-(pairs.bias + pairs.scale * cosine_B))


def _losses_with(pairs: Pairs, chosen_c: jax.Array) -> jax.Array:
  """Loss of each pair with the chosen ones, which it does not match, [B].

  That is of its image with their texts, and of its text with their images.
  """
  image_cE = sharding.take_everywhere(pairs.image_BE, chosen_c)
  text_cE = sharding.take_everywhere(pairs.text_BE, chosen_c)
  total_B = jnp.zeros(len(pairs.image_BE))
  for own_BE, other_cE in (
    (pairs.image_BE, text_cE),
    (pairs.text_BE, image_cE),
  ):
    # The scale, 10 to 100, multiplies rounding errors of the product.
    logits_Bc = pairs.bias + pairs.scale * jnp.einsum(
      "be,ce->bc", own_BE, other_cE, precision=jax.lax.Precision.HIGHEST
    )
    total_B += jnp.sum(jax.nn.softplus(logits_Bc), axis=1)
  return total_B


def _replicated(x_B: jax.Array) -> jax.Array:
  """Every device sorts all scores: B numbers."""
  if sharding.ambient(len(x_B)) is None:
    return x_B
  return jax.lax.with_sharding_constraint(x_B, jax.sharding.PartitionSpec())
