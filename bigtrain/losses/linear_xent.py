"""Cross-entropy of tokens from hidden states, without storing all logits.

Axes: B batch, L length, D width, V vocabulary, K chunk of L.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from bigtrain import sharding
from bigtrain.losses import cross_entropy
from bigtrain.settings import ConfigError

# Of tokens, on a device; and numbers of what a chunk adds to the gradient of
# the kernel. 256 MiB each, in float32.
_LOGITS_AT_A_TIME = 2**26


_PRODUCT_AT_A_TIME = 2**26


class TokenLosses(NamedTuple):
  """What `linear_softmax_xent` says.

  Attributes:
    total: float32 scalar, sum of loss_BL * weight_BL where the weight is not
      0. It alone has a gradient.
    loss_BL: float32, in nats, whatever the weight.
    correct_BL: float32, 1 where the target has the largest logit.
  """

  total: jax.Array
  loss_BL: jax.Array
  correct_BL: jax.Array


def linear_softmax_xent(
  hidden_BLD: jax.Array,
  kernel_DV: jax.Array,
  targets_BL: jax.Array,
  weight_BL: jax.Array | None = None,
  *,
  chunk: int | None = None,
  bias_V: jax.Array | None = None,
  dtype: Any = None,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
  softcap: float | None = None,
  mesh: Mesh | AbstractMesh | None = None,
) -> TokenLosses:
  """softmax_xent(hidden @ kernel + bias, targets) without all the logits.

  Logits exist for `chunk` positions of each example at a time: B * chunk * V
  float32 instead of B * L * V. As the weights are known, the gradients of the
  total are made of a chunk's logits while these are there, so that nothing is
  kept of them for the backward pass, and nothing computed again.

  Args:
    hidden_BLD: last hidden states.
    kernel_DV: output projection, or the transposed embedding.
    targets_BL: valid token ids; also of padding, whose weight is 0.
    weight_BL: what each token counts in the total; 1 unless given. They have
      no gradient.
    chunk: positions at a time; L need not divide by it. 0 for all; see
      `default_chunk` for what is done unless it is given.
    bias_V: optional.
    dtype: of the products' operands, such as bfloat16; that of the hidden
      states unless given. Results, and the sum of the kernel's gradient over
      chunks, are float32.
    label_smoothing: see softmax_xent.
    z_loss: see softmax_xent.
    softcap: logits x become softcap * tanh(x / softcap).
    mesh: the replica x fsdp mesh that the batch is split over; the one of
      jax.set_mesh if there is one. With it the kernel is gathered once and its
      gradient summed over devices once; left to XLA, both are done for each
      chunk. B must divide by the number of devices.

  Raises:
    ConfigError: `chunk` is no number of positions.
  """
  if chunk is not None and (not isinstance(chunk, int) or chunk < 0):
    raise ConfigError(
      f"config.loss.chunk: expected a number of positions, got {chunk!r}."
    )
  how = _How(chunk, dtype or hidden_BLD.dtype, label_smoothing, z_loss, softcap)
  if weight_BL is None:
    weight_BL = jnp.ones(targets_BL.shape, jnp.float32)
  args = (
    hidden_BLD.astype(jnp.float32),
    targets_BL,
    jax.lax.stop_gradient(weight_BL.astype(jnp.float32)),
    kernel_DV.astype(jnp.float32),
    None if bias_V is None else bias_V.astype(jnp.float32),
  )
  if mesh is None:
    ambient = jax.sharding.get_abstract_mesh()
    # Inside of somebody's shard_map this is one device's share already.
    if set(sharding.AXES) <= set(ambient.axis_names) and not (
      ambient.manual_axes
    ):
      mesh = ambient
  # XLA would copy the kernel's gradient to sum it over a single device.
  if mesh is None or mesh.size == 1:
    return _token_losses(how, *args)

  def on_device(
    hidden_BLD: jax.Array,
    targets_BL: jax.Array,
    weight_BL: jax.Array,
    *whole: jax.Array | None,
  ) -> TokenLosses:
    # Each device's own copy from here on, whose gradient is summed over
    # devices on its way out.
    whole = jax.tree.map(
      lambda x: jax.lax.pcast(x, sharding.AXES, to="varying"), whole
    )
    own = _token_losses(how, hidden_BLD, targets_BL, weight_BL, *whole)
    return own._replace(total=jax.lax.psum(own.total, sharding.AXES))

  by_batch: Any = PartitionSpec(sharding.AXES)
  whole: Any = PartitionSpec()
  out_specs = TokenLosses(whole, by_batch, by_batch)
  return jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=(by_batch, by_batch, by_batch, whole, whole),
    out_specs=out_specs,
  )(*args)


def default_chunk(batch_size: int, length: int, vocab_size: int) -> int:
  """Positions of each example whose logits a device holds at a time.

  So many that a batch of them has 2 ** 26 logits, 256 MiB, and at least one:
  the larger the vocabulary, the fewer. The chunks are of equal size.

  >>> default_chunk(8, 64, 32_000), default_chunk(64, 64, 262_144)
  (64, 4)

  Args:
    batch_size: examples on a device.
    length: L.
    vocab_size: V.
  """
  most = max(1, _LOGITS_AT_A_TIME // (batch_size * vocab_size))
  chunks = -(-length // most)
  return -(-length // chunks)


class _How(NamedTuple):
  """Options of `linear_softmax_xent`."""

  chunk: int | None
  dtype: Any
  label_smoothing: float
  z_loss: float
  softcap: float | None

  def of_logits(
    self, logits: jax.Array, targets: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """(losses, whether the target's logit is the largest)."""
    if self.softcap is not None:
      logits = self.softcap * jnp.tanh(logits / self.softcap)
    loss = cross_entropy.softmax_xent(
      logits,
      targets,
      label_smoothing=self.label_smoothing,
      z_loss=self.z_loss,
    )
    correct = _is_largest(jax.lax.stop_gradient(logits), targets)
    return loss, correct.astype(jnp.float32)


def _is_largest(logits: jax.Array, classes: jax.Array) -> jax.Array:
  """argmax(logits) == classes, which takes a CPU longer; NaN is never it."""
  picked = jnp.sum(
    jnp.where(cross_entropy.hits(logits, classes), logits, 0.0),
    axis=-1,
    keepdims=True,
  )
  number, own = jnp.arange(logits.shape[-1]), classes[..., None]
  below = jnp.where(number < own, logits < picked, logits <= picked)
  return jnp.all(below | (number == own), axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(how: _How, *args: Any) -> TokenLosses:
  """`linear_softmax_xent` on one device; see `_in_chunks` for `args`."""
  return _in_chunks(how, *args, gradients=False)[0]


def _forward(how: _How, *args: Any) -> tuple[TokenLosses, Any]:
  return _in_chunks(how, *args, gradients=True)


def _backward(how: _How, grads: Any, cotangents: TokenLosses) -> Any:
  scaled = jax.tree.map(lambda g: g * cotangents.total, grads)
  return scaled[0], None, None, *scaled[1:]


_token_losses.defvjp(_forward, _backward)


def _add_by_columns(
  sum_DV: jax.Array,
  product: Callable[[jax.Array], jax.Array],
  operand_BKV: jax.Array,
) -> jax.Array:
  """sum + product(operand), in place, a few columns at a time.

  With a large vocabulary the whole product beside the sum would be what a step
  needs most memory for.
  """
  D, V = sum_DV.shape
  slices = -(-V // max(1, _PRODUCT_AT_A_TIME // D))
  size = -(-V // slices)

  def add(i: Any, sum_DV: jax.Array) -> jax.Array:
    columns = jax.lax.dynamic_slice_in_dim(operand_BKV, i * size, size, 2)
    old = jax.lax.dynamic_slice_in_dim(sum_DV, i * size, size, 1)
    new = old + product(columns)
    return jax.lax.dynamic_update_slice_in_dim(sum_DV, new, i * size, 1)

  if slices == 1:
    return sum_DV + product(operand_BKV)
  whole = V // size
  sum_DV = jax.lax.fori_loop(0, whole, add, sum_DV)
  if V % size:
    rest = product(operand_BKV[..., whole * size :])
    sum_DV = sum_DV.at[:, whole * size :].add(rest)
  return sum_DV


def _in_chunks(
  how: _How,
  hidden_BLD: jax.Array,
  targets_BL: jax.Array,
  weight_BL: jax.Array,
  kernel_DV: jax.Array,
  bias_V: jax.Array | None,
  *,
  gradients: bool,
) -> tuple[TokenLosses, Any]:
  """The losses, and the gradients of their total.

  Gradients are those with respect to the hidden states, the kernel and the
  bias, or None. All that is not a whole number is float32.
  """
  (B, L), V = targets_BL.shape, kernel_DV.shape[1]
  size = L if how.chunk == 0 else how.chunk or default_chunk(B, L, V)
  size = min(size, L)
  operand_DV = kernel_DV.astype(how.dtype)
  # float16 would lose what is much smaller than 1.
  factor = 2.0**10 if jnp.dtype(how.dtype) == jnp.float16 else 1.0
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def one(sums: Any, xs: Any) -> tuple[Any, Any]:
    hidden_BKD, targets_BK, weight_BK = xs
    hidden_BKD = hidden_BKD.astype(how.dtype)
    logits_BKV = product("bkd,dv->bkv", hidden_BKD, operand_DV)
    if bias_V is not None:
      logits_BKV += bias_V
    if not gradients:
      return None, (*how.of_logits(logits_BKV, targets_BK), None)
    loss_BK, pull, correct_BK = jax.vjp(
      lambda logits: how.of_logits(logits, targets_BK), logits_BKV, has_aux=True
    )
    (back_BKV,) = pull(weight_BK)
    operand_BKV = (factor * back_BKV).astype(how.dtype)
    to_hidden = product("bkv,dv->bkd", operand_BKV, operand_DV) / factor
    to_bias = None if bias_V is None else jnp.sum(back_BKV, axis=(0, 1))

    def to_kernel(columns_BKV: jax.Array) -> jax.Array:
      return product("bkd,bkv->dv", hidden_BKD, columns_BKV) / factor

    if sums is None:
      sums = to_kernel(operand_BKV), to_bias
    else:
      to_kernel_DV, of_bias = sums
      of_bias = None if to_bias is None else of_bias + to_bias
      sums = _add_by_columns(to_kernel_DV, to_kernel, operand_BKV), of_bias
    return sums, (loss_BK, correct_BK, to_hidden)

  def split(x: jax.Array) -> jax.Array:
    x = jnp.pad(x, [(0, 0), (0, -L % size)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return jnp.swapaxes(x, 0, 1)

  def join(x: jax.Array) -> jax.Array:
    x = jnp.swapaxes(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :L]

  xs = (hidden_BLD, targets_BL, weight_BL)
  if size == L:
    sums, found = one(None, xs)
  else:
    zeros = jax.tree.map(jnp.zeros_like, (kernel_DV, bias_V))
    zeros = zeros if gradients else None
    sums, found = jax.lax.scan(one, zeros, jax.tree.map(split, xs))
    found = jax.tree.map(join, found)
  loss_BL, correct_BL, to_hidden_BLD = found
  # A loss that does not count may well be NaN.
  counted_BL = jnp.where(weight_BL == 0, 0.0, loss_BL * weight_BL)
  result = TokenLosses(jnp.sum(counted_BL), loss_BL, correct_BL)
  return result, (to_hidden_BLD, *sums) if gradients else None
