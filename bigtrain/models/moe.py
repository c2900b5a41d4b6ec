"""Mixture of experts: a layer in the place of an MLP.

Each token goes to its best `top_k` of E experts: one as in Switch
(https://arxiv.org/abs/2101.03961), or some, whose outputs are weighted, as in
Mixtral (https://arxiv.org/abs/2401.04088). Either no token is dropped: tokens
are sorted by expert and multiplied in groups, on the device they are on, with
all experts' weights gathered for the layer. Or each expert has a capacity in
each row of the batch, and what is over is dropped: then the experts stay on
their devices, if a sharding rule splits them over `fsdp`
(".*/moe/(gate|up|down)/kernel", "shard_dim(-3)"), and tokens travel to them and
back, all to all. In neither way do devices or microbatches change what a token
gets.

Axes: B batch, L length, D model width, F hidden width, E experts, J = top_k, C
capacity, T tokens.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from bigtrain import settings, sharding


class Options(NamedTuple):
  """config.model.moe.

  Attributes:
    num_experts: E.
    top_k: experts of a token.
    capacity_factor: an expert takes up to this times L * top_k / E tokens of a
      row, rounded up; None drops nothing.
    jitter: in training, what the router sees is multiplied by noise from
      [1 - jitter, 1 + jitter].
    normalize: whether the weights of a token's experts add up to 1; unless
      given, if there are several.
    shared_experts: how many times the size of an expert an MLP is that every
      token passes as well (https://arxiv.org/abs/2401.06066); 0 for none.
  """

  num_experts: int
  top_k: int = 2
  capacity_factor: float | None = None
  jitter: float = 0.0
  normalize: bool | None = None
  shared_experts: int = 0


def read(options: Any, key: str) -> Options | None:
  """Options from a config; raises ConfigError for what cannot be meant."""
  if options is None or isinstance(options, Options):
    return options
  settings.check_kwargs(Options, options, key)
  if "num_experts" not in options:
    raise settings.ConfigError(f"{key}.num_experts: missing.")
  found = Options(**options)
  numbers = dict(
    num_experts=found.num_experts > 0,
    top_k=0 < found.top_k <= found.num_experts,
    capacity_factor=found.capacity_factor is None or found.capacity_factor > 0,
    jitter=0 <= found.jitter < 1,
    shared_experts=found.shared_experts >= 0,
  )
  for name, fits in numbers.items():
    if not fits:
      raise settings.ConfigError(
        f"{key}.{name}: {getattr(found, name)!r} cannot be, with "
        f"{found.num_experts} experts."
      )
  return found


class Routing(NamedTuple):
  """Where the tokens of a batch go."""

  expert_BLJ: jax.Array  # int32
  weight_BLJ: jax.Array  # float32


class Moe(nn.Module):
  """The layer.

  Parameters: router/kernel (D, E); up and, if gated, gate (E, D, F), down
  (E, F, D), each a kernel. Shared experts are an MLP of the block's.

  Attributes:
    options: see there.
    mlp_dim: F.
    gated: whether experts are SwiGLU, else GELU.
    init_std: of the kernels; that of `down` is out_init_std.
    dtype: of the experts' computation; the router's is float32.
  """

  options: Options
  mlp_dim: int
  gated: bool
  init_std: float
  out_init_std: float
  dtype: str

  @nn.compact
  def __call__(
    self, x_BLD: jax.Array, real_BL: jax.Array | None, train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sends tokens through their experts.

    Args:
      x_BLD: the normalised stream.
      real_BL: bool: which tokens are no padding; all if None. Padding takes
        no capacity and counts nowhere.
      train: whether the router's input is jittered, with the rng "dropout".

    Returns:
      ([B, L, D], float32 statistics over the real tokens: "load_balance" and
      "router_z", the losses without their weights, "load" [E], the share of
      all choices, "dropped", that of choices which found no place, "entropy"
      of the router in nats).
    """
    options, D = self.options, x_BLD.shape[-1]
    E, F = options.num_experts, self.mlp_dim
    if real_BL is None:
      real_BL = jnp.ones(x_BLD.shape[:2], bool)
    seen_BLD = x_BLD.astype(jnp.float32)
    if train and options.jitter:
      seen_BLD *= jax.random.uniform(
        self.make_rng("dropout"),
        seen_BLD.shape,
        minval=1 - options.jitter,
        maxval=1 + options.jitter,
      )
    router = nn.Dense(
      E,
      use_bias=False,
      kernel_init=nn.initializers.normal(self.init_std),
      name="router",
    )
    logits_BLE = router(seen_BLD)
    routing, stats = route(logits_BLE, real_BL, options)

    def kernel(name: str, shape: tuple[int, ...], std: float) -> jax.Array:
      values = Kernels(shape, std, name=name)()
      return values.astype(self.dtype)

    weights = {"up": kernel("up", (E, D, F), self.init_std)}
    if self.gated:
      weights["gate"] = kernel("gate", (E, D, F), self.init_std)
    weights["down"] = kernel("down", (E, F, D), self.out_init_std)
    x_BLD = x_BLD.astype(self.dtype)
    if options.capacity_factor is None:
      y_BLD, dropped = _dropless(x_BLD, routing, weights), jnp.zeros(())
    else:
      y_BLD, dropped = _with_capacity(
        x_BLD, routing, weights, real_BL, options.capacity_factor
      )
    return y_BLD, stats | {"dropped": dropped}


class Kernels(nn.Module):
  """A parameter called "kernel", multiplied elsewhere."""

  shape: tuple[int, ...]
  init_std: float

  @nn.compact
  def __call__(self) -> jax.Array:
    init = nn.initializers.normal(self.init_std)
    return self.param("kernel", init, self.shape)


def route(
  logits_BLE: jax.Array, real_BL: jax.Array, options: Options
) -> tuple[Routing, dict[str, jax.Array]]:
  """Chooses experts, and says how evenly.

  Returns:
    (the choices, best first; the statistics of `Moe` but "dropped").
  """
  E, J = options.num_experts, options.top_k
  probs_BLE = jax.nn.softmax(logits_BLE, axis=-1)
  weight_BLJ, expert_BLJ = jax.lax.top_k(probs_BLE, J)
  if J > 1 if options.normalize is None else options.normalize:
    weight_BLJ /= jnp.sum(weight_BLJ, axis=-1, keepdims=True)
  weight_BLJ = jnp.where(real_BL[..., None], weight_BLJ, 0.0)

  total = jnp.maximum(jnp.sum(real_BL), 1)
  mean = lambda x: (
    jnp.sum(
      jnp.where(real_BL.reshape(*real_BL.shape, *[1] * (x.ndim - 2)), x, 0.0),
      axis=(0, 1),
    )
    / total
  )
  chosen_BLE = jnp.sum(jax.nn.one_hot(expert_BLJ, E), axis=2)
  load_E = mean(chosen_BLE) / J
  log_sum_BL = jax.nn.logsumexp(logits_BLE, axis=-1)
  log_probs_BLE = logits_BLE - log_sum_BL[..., None]
  stats = {
    # 1 if choices and probabilities are even (arXiv 2101.03961, equation 4).
    "load_balance": E * jnp.sum(load_E * mean(probs_BLE)),
    # arXiv 2202.08906, equation 5.
    "router_z": mean(log_sum_BL**2),
    "load": load_E,
    "entropy": mean(-jnp.sum(probs_BLE * log_probs_BLE, axis=-1)),
  }
  return Routing(expert_BLJ.astype(jnp.int32), weight_BLJ), stats


def _hidden(
  x: jax.Array,
  weights: Mapping[str, jax.Array],
  times: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
  """The experts' MLPs; `times` multiplies tokens by their expert's matrix."""
  h = times(x, weights["up"])
  if "gate" in weights:
    h = jax.nn.silu(times(x, weights["gate"])) * h
  else:
    h = jax.nn.gelu(h)
  return times(h, weights["down"])


def _dropless(
  x_BLD: jax.Array, routing: Routing, weights: Mapping[str, jax.Array]
) -> jax.Array:
  """Each device sorts its own tokens by expert and multiplies in groups."""
  mesh = sharding.ambient(len(x_BLD))
  if mesh is None:
    return _sorted(x_BLD, routing, weights)
  by_batch = PartitionSpec(sharding.AXES)
  return jax.shard_map(
    _sorted,
    mesh=mesh,
    in_specs=(by_batch, by_batch, PartitionSpec()),
    out_specs=by_batch,
  )(x_BLD, routing, dict(weights))


def _sorted(
  x_BLD: jax.Array, routing: Routing, weights: Mapping[str, jax.Array]
) -> jax.Array:
  B, L, D = x_BLD.shape
  J = routing.expert_BLJ.shape[-1]
  E = weights["up"].shape[0]
  expert = routing.expert_BLJ.reshape(-1)
  order = jnp.argsort(expert, stable=True)
  sizes_E = jnp.sum(jax.nn.one_hot(expert, E, dtype=jnp.int32), axis=0)
  x = jnp.take(x_BLD.reshape(-1, D), order // J, axis=0)
  y = _hidden(
    x, weights, functools.partial(jax.lax.ragged_dot, group_sizes=sizes_E)
  )
  y = jnp.take(y, jnp.argsort(order), axis=0).reshape(B, L, J, D)
  return jnp.einsum("bljd,blj->bld", y, routing.weight_BLJ.astype(y.dtype))


def _with_capacity(
  x_BLD: jax.Array,
  routing: Routing,
  weights: Mapping[str, jax.Array],
  real_BL: jax.Array,
  factor: float,
) -> tuple[jax.Array, jax.Array]:
  """Experts take up to C tokens of a row; (outputs, share that was dropped).

  All first choices go before all second ones, and among those the earlier
  token goes first.
  """
  B, L, D = x_BLD.shape
  J = routing.expert_BLJ.shape[-1]
  E = weights["up"].shape[0]
  C = min(L, math.ceil(factor * L * J / E))
  # Choices in the order in which they are served: [B, J * L].
  serve = lambda x: jnp.swapaxes(x, 1, 2).reshape(B, J * L)
  real = jnp.tile(real_BL, (1, J))
  expert = serve(routing.expert_BLJ)
  wants_BQE = jax.nn.one_hot(expert, E, dtype=jnp.int32) * real[..., None]
  before_BQE = jnp.cumsum(wants_BQE, axis=1) - wants_BQE
  rank = jnp.sum(before_BQE * wants_BQE, axis=-1)
  served = real & (rank < C)
  # Slot E * C is for those that have none.
  slot = jnp.where(served, expert * C + rank, E * C)
  token = jnp.broadcast_to(jnp.tile(jnp.arange(L), J), slot.shape)
  put = jax.vmap(lambda s, t: jnp.full(E * C + 1, L).at[s].set(t))
  token_of_slot = put(slot, token)[:, : E * C]
  pad = lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
  take = jax.vmap(lambda x, i: jnp.take(x, i, axis=0))
  x_BECD = take(pad(x_BLD), token_of_slot).reshape(B, E, C, D)

  by_batch, by_expert = (
    PartitionSpec(sharding.AXES),
    PartitionSpec(*sharding.AXES),
  )
  x_BECD = _laid(_laid(x_BECD, by_batch), by_expert)  # All to all, and ...
  y_BECD = _hidden(
    x_BECD, weights, lambda x, w: jnp.einsum("becd,edf->becf", x, w)
  )
  y_BECD = _laid(_laid(y_BECD, by_expert), by_batch)  # ... back.
  y = take(pad(y_BECD.reshape(B, E * C, D)), slot).reshape(B, J, L, D)
  weight_BJL = jnp.swapaxes(routing.weight_BLJ, 1, 2).astype(y.dtype)
  y_BLD = jnp.einsum("bjld,bjl->bld", y, weight_BJL)
  lost = jnp.sum(real & ~served) / jnp.maximum(jnp.sum(real), 1)
  return y_BLD, lost


def _laid(x_BECD: jax.Array, spec: PartitionSpec) -> jax.Array:
  """Lays an array out on the mesh, if there is one that it fits."""
  mesh = sharding.ambient(len(x_BECD))
  if mesh is None or x_BECD.shape[1] % mesh.shape["fsdp"]:
    return x_BECD
  return jax.lax.with_sharding_constraint(x_BECD, spec)
