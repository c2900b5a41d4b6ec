"""Softmax cross-entropy from hidden states, without storing all logits.

`linear_softmax_xent` splits the batch over a mesh (`_over_mesh`), and on each
device the positions into chunks (`_in_chunks`). A chunk's logits are computed
only once, in the forward pass, which also computes the gradients
(`_one_chunk`).

Axes: B batch, L length, D width, V vocabulary, K chunk of L.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from bigtrain import sharding
from bigtrain.arrays import model_flops
from bigtrain.config.errors import check_number
from bigtrain.losses import cross_entropy

# Most logits of a chunk: 256 MiB in float32. With fewer, products are smaller
# and more often read the kernel; with more, they need more memory.
_LOGITS_AT_A_TIME = 2**26
# Most elements of a kernel's gradient that are added at a time: 256 MiB too.
_PRODUCT_AT_A_TIME = 2**26


class TokenLosses(NamedTuple):
  """Result of `linear_softmax_xent`."""

  total: jax.Array  # Sum of loss_BL * weight_BL. Only this has a gradient.
  loss_BL: jax.Array  # float32 losses in nats, unweighted.
  correct_BL: jax.Array  # float32, 1 where the target has the largest logit.


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
  label_smoothing_over: str = "all",
  z_loss: float = 0.0,
  softcap: float | None = None,
  only_weighted: bool = False,
  mesh: Mesh | AbstractMesh | None = None,
) -> TokenLosses:
  """Computes softmax_xent(hidden @ kernel + bias, targets) in chunks of L.

  The forward pass knows the weights, so it also computes a chunk's gradients
  while its logits exist; the backward pass needs no logits.

  Args:
    targets_BL: token ids, valid in padding too, where the weight is 0.
    chunk: positions of each example at a time, which need not divide L. 0 means
      all of them, None means `default_chunk`.
    dtype: dtype of the products' operands; by default the hidden states'.
      Results are float32; devices sum the kernel's gradient in this dtype.
    softcap: logits x become softcap * tanh(x / softcap).
    only_weighted: whether to skip tokens of weight 0 if there are gradients, so
      that the time depends on the number of the others. `loss_BL` and
      `correct_BL` of those that are skipped are 0.
    mesh: the mesh that the batch is split over, evenly; by default that of
      jax.set_mesh. The kernel is gathered once, and its gradient summed over
      devices once; left to itself, XLA would do both for each chunk.
  """
  if chunk is not None:
    check_number("config.loss.chunk", chunk, least=0, whole=True)
  options = _Options(
    chunk=chunk,
    dtype=dtype or hidden_BLD.dtype,
    label_smoothing=label_smoothing,
    label_smoothing_over=label_smoothing_over,
    z_loss=z_loss,
    softcap=softcap,
    only_weighted=only_weighted,
  )
  if weight_BL is None:
    weight_BL = jnp.ones(targets_BL.shape, jnp.float32)
  args = _Args(
    hidden_BLD,
    targets_BL,
    jax.lax.stop_gradient(weight_BL.astype(jnp.float32)),
    kernel_DV.astype(jnp.float32),
    None if bias_V is None else bias_V.astype(jnp.float32),
  )
  if mesh is None:
    ambient = jax.sharding.get_abstract_mesh()
    # Inside a shard_map the arguments are one device's share already.
    batch_axes = set(sharding.BATCH_AXES)
    if batch_axes <= set(ambient.axis_names) and not ambient.manual_axes:
      mesh = ambient
  # XLA would copy the kernel's gradient to sum it over a single device.
  if mesh is None or mesh.size == 1:
    hidden_BLD = hidden_BLD.astype(jnp.float32)
    return _token_losses(options, args._replace(hidden_BLD=hidden_BLD))
  return _over_mesh(options, args, mesh)


class _Args(NamedTuple):
  hidden_BLD: jax.Array
  targets_BL: jax.Array
  weight_BL: jax.Array
  kernel_DV: jax.Array
  bias_V: jax.Array | None


def _over_mesh(
  options: "_Options", args: _Args, mesh: Mesh | AbstractMesh
) -> TokenLosses:
  """The loss of a batch that is split over a mesh."""
  D, V = args.kernel_DV.shape
  tensor, fsdp = mesh.shape.get("tensor", 1), mesh.shape["fsdp"]
  if tensor == 1:
    hidden_BLD = args.hidden_BLD.astype(jnp.float32)
    args = args._replace(hidden_BLD=hidden_BLD)
  by_class = tensor > 1 and V % tensor == 0
  if by_class:
    options = options._replace(axis_name="tensor")

  # Devices that share an example split its positions, if evenly. With
  # `by_class`, devices along `tensor` have the same positions instead, and each
  # of them a part of the vocabulary.
  stream = sharding.stream_spec(mesh, args.hidden_BLD)
  shared = sharding.axes_of_length(stream)
  if by_class:
    shared = tuple(axis for axis in shared if axis != "tensor")
  batch_axes = sharding.batch_axes(mesh)
  by_token: Any = PartitionSpec(batch_axes)
  if shared:
    by_token = PartitionSpec(batch_axes, shared)
  summed = (*batch_axes, *shared)  # Axes over which losses are summed.
  copied = tuple(axis for axis in summed if axis != "fsdp")

  # The dimension of the kernel that fsdp splits, if it divides one.
  dim = None
  if fsdp > 1 and V % fsdp == 0 and not by_class:
    dim = 1
  elif fsdp > 1 and D % fsdp == 0:
    dim = 0

  def on_device(args: _Args) -> TokenLosses:
    # From here on each device uses its own copy; the transposes sum the
    # copies' gradients over the devices, once, and in the dtype of the products
    # as for other weights.
    kernel_DV = args.kernel_DV.astype(options.dtype)
    if dim is None:
      kernel_DV = jax.lax.pcast(kernel_DV, summed, to="varying")
    else:
      kernel_DV = jax.lax.pcast(kernel_DV, copied, to="varying")
      kernel_DV = jax.lax.all_gather(kernel_DV, "fsdp", axis=dim, tiled=True)
    bias_V, hidden_BLD = args.bias_V, args.hidden_BLD
    if bias_V is not None:
      bias_V = jax.lax.pcast(bias_V, summed, to="varying")
    if by_class:
      hidden_BLD = sharding.gathered(hidden_BLD, stream)
    args = args._replace(
      hidden_BLD=hidden_BLD.astype(jnp.float32),
      kernel_DV=kernel_DV.astype(jnp.float32),
      bias_V=bias_V,
    )
    local = _token_losses(options, args)
    return local._replace(total=jax.lax.psum(local.total, summed))

  class_axis = None
  if by_class:
    class_axis = "tensor"
  elif dim == 1:
    class_axis = "fsdp"
  # Trees of specs, in place of the arrays.
  in_specs: Any = _Args
  in_specs = in_specs(
    hidden_BLD=stream if by_class else by_token,
    targets_BL=by_token,
    weight_BL=by_token,
    kernel_DV=PartitionSpec("fsdp" if dim == 0 else None, class_axis),
    bias_V=PartitionSpec("tensor") if by_class else PartitionSpec(),
  )
  out_specs: Any = TokenLosses
  out_specs = out_specs(
    total=PartitionSpec(), loss_BL=by_token, correct_BL=by_token
  )
  return jax.shard_map(
    on_device, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs
  )(args)


def default_chunk(batch_size: int, length: int, vocab_size: int) -> int:
  """Positions per chunk, so that a chunk has at most 2 ** 26 logits (256 MiB).

  >>> default_chunk(8, 64, 32_000), default_chunk(64, 64, 262_144)
  (64, 4)
  """
  most = max(1, _LOGITS_AT_A_TIME // (batch_size * vocab_size))
  num_chunks = math.ceil(length / most)
  return math.ceil(length / num_chunks)


class _Options(NamedTuple):
  """The options of `linear_softmax_xent`."""

  chunk: int | None
  dtype: Any
  label_smoothing: float
  label_smoothing_over: str
  z_loss: float
  softcap: float | None
  only_weighted: bool
  axis_name: str | None = None  # Mesh axis that splits the vocabulary, if any.

  def losses(
    self, logits: jax.Array, targets: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens' losses, and whether each target is the likeliest."""
    if self.softcap is not None:
      logits = self.softcap * jnp.tanh(logits / self.softcap)
    loss = cross_entropy.softmax_xent(
      logits,
      targets,
      label_smoothing=self.label_smoothing,
      label_smoothing_over=self.label_smoothing_over,
      z_loss=self.z_loss,
      axis_name=self.axis_name,
    )
    logits = jax.lax.stop_gradient(logits)
    correct = _is_largest(logits, targets, self.axis_name)
    return loss, correct.astype(jnp.float32)


def _is_largest(
  logits: jax.Array, classes: jax.Array, axis_name: str | None
) -> jax.Array:
  """Returns argmax(logits) == classes, or False where a logit is NaN.

  Of equal logits, the first counts as the largest. On TPUs, XLA needs another
  pass over the logits for an argmax, but not for these sums.
  """
  top = cross_entropy.largest(logits, axis_name)[..., None]
  earlier = cross_entropy.class_numbers(logits, axis_name) < classes[..., None]
  tied = jnp.where(earlier & (logits == top), 1.0, 0.0)
  mask = cross_entropy.label_mask(logits, classes, axis_name)
  above = jnp.sum(jnp.where(mask, top - logits, tied), axis=-1)
  return cross_entropy.total_of(above, axis_name) == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(options: _Options, args: _Args) -> TokenLosses:
  """`linear_softmax_xent` on one device; all float arrays are float32."""
  return _in_chunks(options, args, gradients=False)[0]


def _forward(options: _Options, args: _Args) -> tuple[TokenLosses, Any]:
  return _in_chunks(options, args, gradients=True)


def _backward(options: _Options, grads: Any, cotangents: TokenLosses) -> Any:
  hidden, kernel, bias = jax.tree.map(lambda g: g * cotangents.total, grads)
  no_gradient: Any = None  # Targets and weights have none.
  return (_Args(hidden, no_gradient, no_gradient, kernel, bias),)


_token_losses.defvjp(_forward, _backward)


def _untransposed_on_cpu(product_DV: jax.Array, dtype: Any) -> jax.Array:
  """Stops XLA from transposing a float32 product of bfloat16 operands.

  XLA on CPUs cannot compute (X @ Y).T, a tied head's gradient, as Y.T @ X.T.
  """
  if jax.default_backend() == "cpu" and jnp.dtype(dtype) == jnp.bfloat16:
    return jax.lax.optimization_barrier(product_DV)
  return product_DV


def _add_by_columns(
  sum_DV: jax.Array,
  product: Callable[[jax.Array], jax.Array],
  operand_BKV: jax.Array,
) -> jax.Array:
  """Returns sum + product(operand), in place, with a small temporary."""
  D, V = sum_DV.shape
  num_slices = math.ceil(V / max(1, _PRODUCT_AT_A_TIME // D))
  size = math.ceil(V / num_slices)

  def add(i: Any, sum_DV: jax.Array) -> jax.Array:
    columns = jax.lax.dynamic_slice_in_dim(operand_BKV, i * size, size, 2)
    old = jax.lax.dynamic_slice_in_dim(sum_DV, i * size, size, 1)
    new = old + product(columns)
    return jax.lax.dynamic_update_slice_in_dim(sum_DV, new, i * size, 1)

  if num_slices == 1:
    return sum_DV + product(operand_BKV)
  num_whole = V // size
  sum_DV = jax.lax.fori_loop(0, num_whole, add, sum_DV)
  if V % size:
    rest = product(operand_BKV[..., num_whole * size :])
    sum_DV = sum_DV.at[:, num_whole * size :].add(rest)
  return sum_DV


def _in_chunks(
  options: _Options, args: _Args, *, gradients: bool
) -> tuple[TokenLosses, Any]:
  """Returns the losses, and with `gradients` those of hidden, kernel, bias."""
  B, L = args.targets_BL.shape
  V = args.kernel_DV.shape[1]
  size = options.chunk
  if size is None:
    size = default_chunk(B, L, V)
  if size == 0 or size > L:
    size = L
  if options.only_weighted and gradients and size < L:
    return _weighted_in_chunks(options, args, B * size)

  def split(x: jax.Array) -> jax.Array:
    x = jnp.pad(x, [(0, 0), (0, -L % size)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return jnp.swapaxes(x, 0, 1)

  def join(x: jax.Array) -> jax.Array:
    x = jnp.swapaxes(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :L]

  kernel_DV = args.kernel_DV.astype(options.dtype)
  one_chunk = functools.partial(
    _one_chunk, options, kernel_DV, args.bias_V, gradients
  )
  xs = (args.hidden_BLD, args.targets_BL, args.weight_BL)
  if size == L:
    sums, by_token = one_chunk(None, xs)
  else:
    zeros = None
    if gradients:
      zeros = jax.tree.map(jnp.zeros_like, (args.kernel_DV, args.bias_V))
    with model_flops.share(L, L + -L % size):
      sums, by_chunk = jax.lax.scan(one_chunk, zeros, jax.tree.map(split, xs))
    by_token = jax.tree.map(join, by_chunk)
  loss_BL, correct_BL, hidden_grad_BLD = by_token
  # The loss of a token of weight 0 may be NaN.
  counted_BL = jnp.where(args.weight_BL == 0, 0.0, loss_BL * args.weight_BL)
  result = TokenLosses(jnp.sum(counted_BL), loss_BL, correct_BL)
  return result, (hidden_grad_BLD, *sums) if gradients else None


def _weighted_in_chunks(
  options: _Options, args: _Args, size: int
) -> tuple[TokenLosses, Any]:
  """The results of `_in_chunks` for the tokens that have a weight.

  They are gathered, wherever they are in the batch, `size` of them at a time.
  For a question about a picture, these are few of a row's tokens.

  N tokens of the batch.
  """
  kernel_DV = args.kernel_DV.astype(options.dtype)
  hidden_ND = args.hidden_BLD.reshape(-1, args.hidden_BLD.shape[-1])
  targets_N, weight_N = args.targets_BL.ravel(), args.weight_BL.ravel()
  (N,) = weight_N.shape
  # Then N, which is no token, up to whole chunks.
  (order,) = jnp.nonzero(weight_N, size=N + -N % size, fill_value=N)
  num_chunks = (jnp.count_nonzero(weight_N) + size - 1) // size

  def add(i: Any, carry: Any) -> Any:
    sums, by_token = carry
    place_K = jax.lax.dynamic_slice_in_dim(order, i * size, size)

    def rows(x: jax.Array) -> jax.Array:
      return x.at[place_K].get(mode="fill", fill_value=0)[None]

    xs = rows(hidden_ND), rows(targets_N), rows(weight_N)
    sums, by_place = _one_chunk(options, kernel_DV, args.bias_V, True, sums, xs)
    by_token = tuple(
      x.at[place_K].set(new[0], mode="drop")
      for x, new in zip(by_token, by_place, strict=True)
    )
    return sums, by_token

  zeros = jax.tree.map(
    jnp.zeros_like,
    ((args.kernel_DV, args.bias_V), (weight_N, weight_N, hidden_ND)),
  )
  with model_flops.at_most(-(-N // size)):
    sums, by_token = jax.lax.fori_loop(0, num_chunks, add, zeros)
  loss_N, correct_N, hidden_grad_ND = by_token
  shape = args.weight_BL.shape
  result = TokenLosses(
    jnp.sum(loss_N * weight_N), loss_N.reshape(shape), correct_N.reshape(shape)
  )
  return result, (hidden_grad_ND.reshape(args.hidden_BLD.shape), *sums)


def _one_chunk(
  options: _Options,
  kernel_DV: jax.Array,
  bias_V: jax.Array | None,
  gradients: bool,
  sums: Any,
  xs: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[Any, Any]:
  """One step of the scan over chunks.

  Returns:
    (sums of the gradients of kernel and bias, (losses, whether targets are the
    likeliest tokens, gradient of the hidden states)).
  """
  hidden_BKD, targets_BK, weight_BK = xs
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  # Without this factor, small gradients would underflow in float16.
  factor = 2.0**10 if jnp.dtype(options.dtype) == jnp.float16 else 1.0
  hidden_BKD = hidden_BKD.astype(options.dtype)
  logits_BKV = product("bkd,dv->bkv", hidden_BKD, kernel_DV)
  if bias_V is not None:
    logits_BKV += bias_V
  if not gradients:
    return None, (*options.losses(logits_BKV, targets_BK), None)

  def losses(logits_BKV: jax.Array) -> tuple[jax.Array, jax.Array]:
    return options.losses(logits_BKV, targets_BK)

  loss_BK, vjp, correct_BK = jax.vjp(losses, logits_BKV, has_aux=True)
  (grad_BKV,) = vjp(weight_BK)
  operand_BKV = (factor * grad_BKV).astype(options.dtype)
  hidden_grad_BKD = product("bkv,dv->bkd", operand_BKV, kernel_DV) / factor
  bias_grad_V = None if bias_V is None else jnp.sum(grad_BKV, axis=(0, 1))

  def kernel_grad(columns_BKV: jax.Array) -> jax.Array:
    return product("bkd,bkv->dv", hidden_BKD, columns_BKV) / factor

  if sums is None:
    kernel_grad_DV = kernel_grad(operand_BKV)
    sums = _untransposed_on_cpu(kernel_grad_DV, options.dtype), bias_grad_V
  else:
    kernel_sum_DV, bias_sum_V = sums
    bias_sum_V = None if bias_grad_V is None else bias_sum_V + bias_grad_V
    kernel_sum_DV = _add_by_columns(kernel_sum_DV, kernel_grad, operand_BKV)
    sums = kernel_sum_DV, bias_sum_V
  return sums, (loss_BK, correct_BK, hidden_grad_BKD)
