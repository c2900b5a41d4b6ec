"""Per-example losses in float32; the caller weights and reduces.

Axes: B batch, L length, D width, C classes, V vocabulary, K chunk of L; `...`
any leading axes. Labels are class numbers [...], which must be valid wherever
they are, padding included (any other gives NaN), or class probabilities
[..., C] such as one-hot vectors or mixtures of them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

_BATCH_AXES = ("replica", "fsdp")


def softmax_xent(
  logits: jax.Array,
  labels: jax.Array,
  *,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
) -> jax.Array:
  """Cross-entropy of softmax(logits) against the labels.

  Args:
    logits: [..., C].
    labels: class numbers [...] or probabilities [..., C].
    label_smoothing: weight of the uniform distribution that labels are mixed
      with (Szegedy et al. 2016, arxiv.org/abs/1512.00567).
    z_loss: weight of logsumexp(logits) ** 2, which keeps logits from drifting
      (Chowdhery et al. 2022, arxiv.org/abs/2204.02311, section 5).

  Returns:
    float32 [...], in nats.
  """
  logits = logits.astype(jnp.float32)
  # The loss knows only differences of logits: small ones lose no digits.
  top = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
  logits = logits - top[..., None]
  normaliser = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
  total: Any = 1.0
  if _are_classes(logits, labels):
    # A masked sum and no gather: its gradient is no scatter, and it fuses.
    picked = jnp.sum(jnp.where(_hits(logits, labels), logits, 0.0), axis=-1)
    picked += _nan_unless_valid(logits, labels)
  else:
    labels = labels.astype(jnp.float32)
    picked = jnp.sum(labels * logits, axis=-1)
    total = jnp.sum(labels, axis=-1)
  if label_smoothing:
    mean = jnp.mean(logits, axis=-1)
    picked = (1 - label_smoothing) * picked + label_smoothing * total * mean
  loss = total * normaliser - picked
  return loss + z_loss * jnp.square(normaliser + top) if z_loss else loss


def sigmoid_xent(
  logits: jax.Array, labels: jax.Array, *, label_smoothing: float = 0.0
) -> jax.Array:
  """Binary cross-entropy of each class, SUMMED over the classes.

  The published sigmoid recipes (Beyer et al. 2020, arxiv.org/abs/2006.07159)
  sum; a mean would want a learning rate that grows with C.

  Args:
    logits: [..., C].
    labels: class numbers [...], or a probability for each class [..., C],
      which need not add up to 1.
    label_smoothing: labels become (1 - s) * label + s / C.

  Returns:
    float32 [...], in nats.
  """
  logits = logits.astype(jnp.float32)
  invalid: Any = 0.0
  if _are_classes(logits, labels):
    invalid = _nan_unless_valid(logits, labels)
    labels = _hits(logits, labels)
  labels = labels.astype(jnp.float32)
  if label_smoothing:
    num_classes = logits.shape[-1]
    labels = (1 - label_smoothing) * labels + label_smoothing / num_classes
  # Not through abs(logits): its gradient is wrong at 0, where heads start.
  losses = labels * jax.nn.softplus(-logits) + (1 - labels) * jax.nn.softplus(
    logits
  )
  return jnp.sum(losses, axis=-1) + invalid


def _are_classes(logits: jax.Array, labels: jax.Array) -> bool:
  if labels.shape == logits.shape:
    return False
  if labels.shape == logits.shape[:-1] and jnp.issubdtype(
    labels.dtype, jnp.integer
  ):
    return True
  raise ValueError(
    f"labels {labels.dtype}{list(labels.shape)} are neither class numbers nor "
    f"probabilities for logits {list(logits.shape)}."
  )


def _hits(logits: jax.Array, classes: jax.Array) -> jax.Array:
  return classes[..., None] == jnp.arange(logits.shape[-1])


def _nan_unless_valid(logits: jax.Array, classes: jax.Array) -> jax.Array:
  """A bad label must not pass for one that is merely hard to predict."""
  valid = (classes >= 0) & (classes < logits.shape[-1])
  return jnp.where(valid, 0.0, jnp.nan)


def chunked_softmax_xent(
  hidden_BLD: jax.Array,
  kernel_DV: jax.Array,
  targets_BL: jax.Array,
  chunk: int,
  *,
  bias_V: jax.Array | None = None,
  dtype: Any = None,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
  softcap: float | None = None,
  mesh: Mesh | AbstractMesh | None = None,
) -> tuple[jax.Array, jax.Array]:
  """softmax_xent(hidden @ kernel + bias, targets) without all the logits.

  Logits exist for `chunk` positions of each example at a time, forward and
  backward: B * chunk * V float32 instead of B * L * V, for one more matrix
  product. Chunks are cut from L, so each device works on its own examples.

  Args:
    hidden_BLD: last hidden states.
    kernel_DV: output projection, or the transposed embedding.
    targets_BL: valid token ids; padding is weighted by the caller.
    chunk: positions at a time; L need not divide by it.
    bias_V: optional.
    dtype: of the product's operands, such as bfloat16; its result, and the sum
      of the kernel's gradient over chunks, are float32 (the kernel's dtype).
    label_smoothing: see softmax_xent.
    z_loss: see softmax_xent.
    softcap: logits x become softcap * tanh(x / softcap).
    mesh: the replica x fsdp mesh that the batch is split over; the one of
      jax.set_mesh if there is one. With it the kernel is gathered once and its
      gradient summed over devices once; left to XLA, both are done for each
      chunk. B must divide by the number of devices.

  Returns:
    (loss_BL float32 in nats, correct_BL float32: 1 where the target has the
    largest logit, without gradient).
  """
  length = hidden_BLD.shape[1]
  chunk = min(chunk, length)
  if chunk < 1:
    raise ValueError(f"chunk={chunk}: expected a positive number.")
  body = functools.partial(
    _scan_chunks,
    chunk=chunk,
    dtype=dtype,
    label_smoothing=label_smoothing,
    z_loss=z_loss,
    softcap=softcap,
  )
  if bias_V is None:
    bias_V = jnp.zeros(kernel_DV.shape[1], kernel_DV.dtype)
  args = (hidden_BLD, kernel_DV, bias_V, targets_BL)
  if mesh is None:
    ambient = jax.sharding.get_abstract_mesh()
    # Inside of somebody's shard_map this is one device's share already.
    if not set(_BATCH_AXES) <= set(ambient.axis_names) or ambient.manual_axes:
      return body(*args)
    mesh = ambient

  def on_device(
    hidden_BLD: jax.Array, *whole: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    # Each device's own copy from here on: without this their gradients would
    # be summed over devices inside of the scan, once for each chunk.
    kernel_DV, bias_V = jax.lax.pcast(whole[:2], _BATCH_AXES, to="varying")
    return body(hidden_BLD, kernel_DV, bias_V, whole[2])

  by_batch, whole = PartitionSpec(_BATCH_AXES), PartitionSpec()
  return jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(by_batch, whole, whole, by_batch),
    out_specs=(by_batch, by_batch),
  )(*args)


def _scan_chunks(
  hidden_BLD: jax.Array,
  kernel_DV: jax.Array,
  bias_V: jax.Array,
  targets_BL: jax.Array,
  *,
  chunk: int,
  dtype: Any,
  label_smoothing: float,
  z_loss: float,
  softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
  length = hidden_BLD.shape[1]
  padding = -length % chunk

  # Without the checkpoint the scan would keep every chunk's logits.
  @jax.checkpoint
  def one(
    _: None, xs: tuple[jax.Array, jax.Array]
  ) -> tuple[None, tuple[jax.Array, jax.Array]]:
    hidden_BKD, targets_BK = xs
    logits_BKV = jnp.einsum(
      "bkd,dv->bkv",
      hidden_BKD.astype(dtype or hidden_BKD.dtype),
      kernel_DV.astype(dtype or kernel_DV.dtype),
      preferred_element_type=jnp.float32,
    ) + bias_V.astype(jnp.float32)
    if softcap is not None:
      logits_BKV = softcap * jnp.tanh(logits_BKV / softcap)
    loss_BK = softmax_xent(
      logits_BKV, targets_BK, label_smoothing=label_smoothing, z_loss=z_loss
    )
    correct_BK = jnp.argmax(logits_BKV, axis=-1) == targets_BK
    return None, (loss_BK, correct_BK.astype(jnp.float32))

  def split(x: jax.Array) -> jax.Array:
    x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.swapaxes(x, 0, 1)

  def join(x: jax.Array) -> jax.Array:
    x = jnp.swapaxes(x, 0, 1)
    return x.reshape(x.shape[0], -1)[:, :length]

  _, parts = jax.lax.scan(one, None, (split(hidden_BLD), split(targets_BL)))
  return join(parts[0]), join(parts[1])
