"""Divergences of a student's next-token predictions from its teachers'.

Logits exist only for a chunk of positions at a time, so a Teacher is a pair:
arrays [B, L, ...], and a function that maps a chunk of them to logits.

Axes: B batch, L length, K chunk of L, D width, V vocabulary, k likely tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain.config.errors import ConfigError, check_number
from bigtrain.losses import cross_entropy, linear_xent
from bigtrain.losses.teachers import weights_of

Teacher = tuple[Any, Callable[[Any], jax.Array]]
# Logit of a token that is not among the k likeliest. Finite, so that 0 times a
# difference of two of them is not NaN.
_NEVER = -1e30


def from_file(ids_BLk: Any, logits_BLk: Any, vocab_size: int) -> Teacher:
  """A teacher of which only the k likeliest tokens are known."""

  def logits(ids_and_values: tuple[jax.Array, jax.Array]) -> jax.Array:
    never = jnp.full((*ids_and_values[0].shape[:-1], vocab_size), _NEVER)
    return jnp.put_along_axis(never, *ids_and_values, axis=-1, inplace=False)

  return (ids_BLk, logits_BLk), logits


def divergence(
  student: jax.Array, teacher: jax.Array, beta: float, temperature: float
) -> jax.Array:
  """Generalized Jensen-Shannon divergence of logits [..., V], in nats.

  arXiv 2306.13649: beta 0 gives the forward and 1 the reverse Kullback-Leibler
  divergence. It is not multiplied by the squared temperature.
  """
  s = jax.nn.log_softmax(student / temperature)
  t = jax.nn.log_softmax(teacher / temperature)

  def kl(p: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

  if beta == 0:
    return kl(t, s)
  if beta == 1:
    return kl(s, t)
  mixture = jnp.logaddexp(s + jnp.log1p(-beta), t + jnp.log(beta))
  return beta * kl(t, mixture) + (1 - beta) * kl(s, mixture)


def taught(
  head: Callable[[jax.Array], jax.Array],
  teachers: Mapping[str, Teacher],
  vocab_size: int,
  chunk: int | None,
  /,
  *,
  beta: float = 0.0,
  temperature: float = 1.0,
  nll: float = 0.0,
  weights: Mapping[str, float] | None = None,
) -> Callable[..., linear_xent.TokenLosses]:
  """The loss of (hidden states, targets, weights), see losses/linear_xent.py.

  Args:
    nll: weight of the cross-entropy. Whatever the weight, the cross-entropy is
      `loss_BL` of the result.
    weights: the teachers' weights by name; by default all are equal.
  """
  key = "config.loss.distill"
  check_number(f"{key}.beta", beta, least=0, most=1)
  check_number(f"{key}.temperature", temperature, above=0)
  check_number(f"{key}.nll", nll, least=0)
  weights = weights_of(teachers, weights, f"{key}.weights")
  if beta == 1 and "file" in teachers:
    raise ConfigError(
      f"{key}.beta={beta}: expected less than 1 with a file of likely tokens."
    )

  def of_chunk(total: jax.Array, xs: Any) -> Any:
    hidden_BKD, targets_BK, weight_BK, arrays = xs
    student_BKV = head(hidden_BKD)
    xent_BK = cross_entropy.softmax_xent(student_BKV, targets_BK)
    loss_BK = nll * xent_BK
    for name, (_, logits_of) in teachers.items():
      teacher_BKV = jax.lax.stop_gradient(logits_of(arrays[name]))
      loss_BK += weights[name] * divergence(
        student_BKV, teacher_BKV, beta, temperature
      )
    # The loss of a token of weight 0 may be NaN.
    total += jnp.sum(jnp.where(weight_BK == 0, 0.0, loss_BK * weight_BK))
    right_BK = jnp.argmax(student_BKV, axis=-1) == targets_BK
    return total, jax.lax.stop_gradient((xent_BK, right_BK * 1.0))

  def losses(hidden_BLD: jax.Array, *others: jax.Array) -> Any:
    B, L, _ = hidden_BLD.shape
    num_logits = B * (1 + len(teachers))  # Of a position, by V.
    size = min(L, chunk or linear_xent.default_chunk(num_logits, L, vocab_size))

    def split(x: jax.Array) -> jax.Array:
      x = jnp.pad(x, [(0, 0), (0, -L % size)] + [(0, 0)] * (x.ndim - 2))
      return x.reshape(B, -1, size, *x.shape[2:]).swapaxes(0, 1)

    arrays = {name: arrays for name, (arrays, _) in teachers.items()}
    xs = jax.tree.map(split, (hidden_BLD, *others, arrays))
    total, by_token = jax.lax.scan(jax.checkpoint(of_chunk), jnp.zeros(()), xs)

    def join(x: jax.Array) -> jax.Array:
      return x.swapaxes(0, 1).reshape(B, -1)[:, :L]

    loss_BL, correct_BL = jax.tree.map(join, by_token)
    return linear_xent.TokenLosses(total, loss_BL, correct_BL)

  return losses
