"""Gradients of a task's loss over the whole batch, in one or more microbatches.

The loss is the mean over the global batch: sum of all microbatches' sums over
sum of all their weights. So padding that is spread unevenly, and the number of
microbatches and devices, change the result by rounding only.

A loss that holds each example against all others is no such mean. A task that
has one says how it is made of embeddings, which are of each example alone; then
microbatches give the same gradient in two passes, see `TwoPasses`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bigtrain import metrics as metrics_lib
from bigtrain import sharding, trees
from bigtrain.settings import Config, ConfigError

LossFn = Callable[..., tuple[metrics_lib.Pairs, Any]]


class TwoPasses(NamedTuple):
  """A loss of the whole batch at once, by way of each example's embeddings.

  The first pass embeds all microbatches and keeps nothing but the embeddings,
  of which the loss gives the gradients; the second pass embeds each microbatch
  again and takes its embeddings' gradients back through the model. As in
  "Combined Scaling for Zero-shot Transfer Learning" (Pham et al. 2021) and
  "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"
  (arXiv 2101.06983).

  Attributes:
    embed_fn: (variables, batch, rng) -> (tree of [B, ...], new mutable).
    loss_fn: (params, embeddings, batch) -> pairs with "loss", which needs of
      the parameters only those outside of what embeds.
  """

  embed_fn: Callable[..., tuple[Any, Any]]
  loss_fn: Callable[..., metrics_lib.Pairs]


def two_passes(
  task: Any, model: Any, loss_options: Mapping[str, Any]
) -> TwoPasses | None:
  """How a task's loss is made of embeddings, if it says so."""
  if not hasattr(task, "embed_fn"):
    return None
  return TwoPasses(
    functools.partial(task.embed_fn, model=model, train=True),
    functools.partial(task.embeddings_loss_fn, **loss_options),
  )


def read_microbatches(config: Config, batch_size: int, mesh: Mesh) -> int:
  """Reads config.microbatches, or config.microbatch_examples.

  Args:
    config: the whole config; `microbatches` is a number of parts,
      `microbatch_examples` the size of each, all devices together.
    batch_size: of a step, all devices together.
    mesh: mesh over which the batch is split.

  Raises:
    ConfigError: both are given, or they do not divide the batch.
  """
  number = config.get("microbatches")
  examples = config.get("microbatch_examples")
  if examples is None:
    number = 1 if number is None else number
  elif number is not None:
    raise ConfigError(
      "config.microbatches and config.microbatch_examples: give one of them."
    )
  else:
    key = "config.microbatch_examples"
    sharding.check_batch(examples, mesh, key)
    if batch_size % examples:
      raise ConfigError(
        f"{key}={examples} does not divide the batch of {batch_size}."
      )
    number = batch_size // examples
  check_microbatches(batch_size, number, mesh)
  return number


def check_microbatches(batch_size: int, number: int, mesh: Mesh) -> None:
  """Raises ConfigError unless every device gets equal whole microbatches."""
  if not isinstance(number, int) or number < 1:
    raise ConfigError(
      f"config.microbatches: expected a positive whole number, got {number!r}."
    )
  if batch_size % (number * mesh.size):
    fitting = [
      n
      for n in range(1, batch_size // mesh.size + 1)
      if batch_size % (n * mesh.size) == 0
    ]
    nearest = min(fitting, key=lambda n: abs(n - number), default=1)
    raise ConfigError(
      f"config.microbatches={number}: a batch of {batch_size} on {mesh.size} "
      f"devices does not divide into that many; the nearest number that does "
      f"is {nearest}."
    )


def split(batch: Any, number: int, mesh: Mesh) -> Any:
  """[B, ...] arrays as [number, B / number, ...], example i in i % number.

  Interleaving keeps each device's examples on that device, so splitting needs
  no communication; contiguous slices would.
  """
  layout = NamedSharding(mesh, PartitionSpec(None, sharding.AXES))

  def cut(x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0] // number, number, *x.shape[1:]).swapaxes(0, 1)
    return jax.lax.with_sharding_constraint(x, layout)

  return jax.tree.map(cut, batch)


def join(parts: Any, mesh: Mesh) -> Any:
  """The reverse of `split`, which needs no communication either."""

  def uncut(x: jax.Array) -> jax.Array:
    x = x.swapaxes(0, 1)
    x = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return jax.lax.with_sharding_constraint(x, sharding.batch(mesh))

  return jax.tree.map(uncut, parts)


def with_keys(batch: dict[str, Any], rng: jax.Array) -> dict[str, Any]:
  """The batch and "_keys" [B], a key for each example.

  What a task draws by example must not depend on the microbatch it is in.
  """
  number = jnp.arange(jax.tree.leaves(batch)[0].shape[0])
  keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, number)
  return {**batch, "_keys": keys}


def loss_args(
  state: Any, batch: dict[str, Any], mesh: Mesh
) -> tuple[Any, Any, Any]:
  """What `gradients` calls a loss_fn with, (variables, batch, rng), as specs.

  To jax these are the same, so that a jitted loss_fn is traced only once.
  """
  rng = jax.eval_shape(lambda: jax.random.key(0))
  batch = sharding.batch_spec(jax.eval_shape(with_keys, batch, rng), mesh)
  layout = sharding.replicated(mesh)
  rng = jax.ShapeDtypeStruct(rng.shape, rng.dtype, sharding=layout)
  return {"params": state["params"], **state.get("mutable", {})}, batch, rng


def gradients(
  loss_fn: LossFn,
  params: Any,
  mutable: Any,
  batch: Any,
  rng: jax.Array,
  *,
  trainable: Any,
  microbatches: int,
  mesh: Mesh,
  loss_scale: jax.Array | None = None,
  in_two: TwoPasses | None = None,
) -> tuple[Any, metrics_lib.Pairs, Any]:
  """Gradients of the mean loss of a batch with respect to trainable params.

  Args:
    loss_fn: (variables, batch, rng) -> (pairs with "loss", new mutable).
    params: all parameters.
    mutable: flax's mutable collections by name, {} if there are none.
    batch: dict of [B, ...] arrays.
    rng: key of this step; each microbatch gets one of its own, and each
      example too: loss_fn finds them in the batch as "_keys" [B].
    trainable: tree of bools like `params`; the others cost no gradient.
    microbatches: into how many parts the batch is cut, one after the other.
    mesh: mesh over which the batch is split.
    loss_scale: what the loss is multiplied by on its way back through the
      model (loss_scale.py); the result does not have it.
    in_two: the same loss for several microbatches, where it is one of the
      whole batch at once.

  Returns:
    (gradients of the trainable parameters in float32, summed pairs, mutable
    after the last microbatch).
  """
  chosen, frozen = trees.partition(params, trainable)
  batch = with_keys(batch, rng)

  def summed(chosen: Any, mutable: Any, batch: Any, rng: jax.Array) -> Any:
    variables = {"params": trees.merge(chosen, frozen), **mutable}
    pairs, mutable = loss_fn(variables, batch, rng)
    return pairs["loss"][0] * _factor(loss_scale, pairs), (pairs, mutable)

  def one(mutable: Any, batch: Any, rng: jax.Array) -> Any:
    grads, (pairs, mutable) = jax.grad(summed, has_aux=True)(
      chosen, mutable, batch, rng
    )
    return _unscaled(grads, _factor(loss_scale, pairs)), pairs, mutable

  if microbatches == 1:
    grads, pairs, mutable = one(mutable, batch, rng)
  elif in_two is not None:
    grads, pairs, mutable = _in_two_passes(
      in_two,
      chosen,
      frozen,
      mutable,
      batch,
      rng,
      microbatches,
      mesh,
      loss_scale,
    )
  else:

    def step(carry: Any, i_and_part: Any) -> Any:
      grads, pairs, mutable = carry
      i, part = i_and_part
      g, p, mutable = one(mutable, part, jax.random.fold_in(rng, i))
      grads = jax.tree.map(jnp.add, grads, g)
      return (grads, metrics_lib.add(pairs, p), mutable), None

    parts = split(batch, microbatches, mesh)
    first = jax.tree.map(lambda x: x[0], parts)
    shapes = jax.eval_shape(one, mutable, first, rng)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[:2])
    carry, _ = jax.lax.scan(
      step, (*zeros, mutable), (jnp.arange(microbatches), parts)
    )
    grads, pairs, mutable = carry

  weight = pairs["loss"][1]
  return jax.tree.map(lambda g: g / weight, grads), pairs, mutable


def _in_two_passes(
  in_two: TwoPasses,
  chosen: Any,
  frozen: Any,
  mutable: Any,
  batch: Any,
  rng: jax.Array,
  microbatches: int,
  mesh: Mesh,
  loss_scale: jax.Array | None,
) -> tuple[Any, metrics_lib.Pairs, Any]:
  """(gradients of the loss's sum, pairs, mutable) of the whole batch."""
  xs = jnp.arange(microbatches), split(batch, microbatches, mesh)

  def embed(chosen: Any, mutable: Any, i_and_part: Any) -> Any:
    i, part = i_and_part
    variables = {"params": trees.merge(chosen, frozen), **mutable}
    return in_two.embed_fn(variables, part, jax.random.fold_in(rng, i))

  def first_pass(mutable: Any, i_and_part: Any) -> Any:
    embeddings, mutable = embed(chosen, mutable, i_and_part)
    return mutable, embeddings

  def loss(chosen: Any, embeddings: Any) -> Any:
    pairs = in_two.loss_fn(trees.merge(chosen, frozen), embeddings, batch)
    return pairs["loss"][0] * _factor(loss_scale, pairs), pairs

  _, embeddings = jax.lax.scan(first_pass, mutable, xs)
  (grads, backs), pairs = jax.grad(loss, argnums=(0, 1), has_aux=True)(
    chosen, join(embeddings, mesh)
  )
  factor = _factor(loss_scale, pairs)

  def second_pass(carry: Any, xs: Any) -> Any:
    grads, mutable = carry
    i_and_part, back = xs
    _, pull, mutable = jax.vjp(
      lambda chosen: embed(chosen, mutable, i_and_part), chosen, has_aux=True
    )
    (g,) = pull(back)
    return (jax.tree.map(jnp.add, grads, _unscaled(g, factor)), mutable), None

  (grads, mutable), _ = jax.lax.scan(
    second_pass,
    (_unscaled(grads, factor), mutable),
    (xs, split(backs, microbatches, mesh)),
  )
  return grads, pairs, mutable


def _factor(
  loss_scale: jax.Array | None, pairs: metrics_lib.Pairs
) -> jax.Array | float:
  """What the loss is multiplied by before it goes back."""
  if loss_scale is None:
    return 1.0
  # The scale is for gradients of a mean, however large the batch is.
  weight = jnp.asarray(pairs["loss"][1], jnp.float32)
  return jax.lax.stop_gradient(loss_scale / jnp.maximum(weight, 1.0))


def _unscaled(grads: Any, factor: jax.Array | float) -> Any:
  grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
  if isinstance(factor, float):  # It is 1.
    return grads
  return jax.tree.map(lambda g: g / factor, grads)
