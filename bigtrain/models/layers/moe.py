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

Axes: B batch, L length, D model width, F hidden width, E experts, J = top_k.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import settings
from bigtrain.models.layers import mlp, moe_dispatch


class Options(NamedTuple):
  """config.model.moe.

  Attributes:
    num_experts: E.
    top_k: experts of a token.
    every: which layers have experts: the last of each so many.
    capacity_factor: an expert takes up to this times L * top_k / E tokens of a
      row, rounded up; None drops nothing.
    eval_capacity_factor: the same where it is not training, if it is another.
    jitter: in training, what the router sees is multiplied by noise from
      [1 - jitter, 1 + jitter].
    dropout: rate in the hidden layers of experts; that of MLPs unless given.
    normalize: whether the weights of a token's experts add up to 1; unless
      given, if there are several.
    shared_experts: how many times the size of an expert an MLP is that every
      token passes as well (https://arxiv.org/abs/2401.06066); 0 for none.
    router_init_std: of the router's initial kernel.
  """

  num_experts: int
  top_k: int = 2
  every: int = 1
  capacity_factor: float | None = None
  eval_capacity_factor: float | None = None
  jitter: float = 0.0
  dropout: float | None = None
  normalize: bool | None = None
  shared_experts: int = 0
  router_init_std: float = 0.02

  def factor(self, train: bool) -> float | None:
    """The capacity factor, or None where nothing is dropped."""
    if train or self.eval_capacity_factor is None:
      return self.capacity_factor
    return self.eval_capacity_factor

  def normalizes(self) -> bool:
    """Whether the weights of a token's experts add up to 1."""
    return self.top_k > 1 if self.normalize is None else self.normalize


def read(options: Any, key: str, **depths: int) -> Options | None:
  """Options from a config.

  Args:
    options: a dict, Options, or None.
    key: what they are called.
    **depths: numbers of layers, of which some shall have experts, by name.

  Raises:
    ConfigError: they cannot be meant.
  """
  if options is None or isinstance(options, Options):
    return options
  settings.check_kwargs(Options, options, key)
  if "num_experts" not in options:
    raise settings.ConfigError(f"{key}.num_experts: missing.")
  found = Options(**options)
  factors = (found.capacity_factor, found.eval_capacity_factor)
  numbers = dict(
    num_experts=found.num_experts > 0,
    top_k=0 < found.top_k <= found.num_experts,
    capacity_factor=factors[0] is None or factors[0] > 0,
    eval_capacity_factor=factors[1] is None or factors[1] > 0,
    jitter=0 <= found.jitter < 1,
    dropout=found.dropout is None or 0 <= found.dropout < 1,
    shared_experts=found.shared_experts >= 0,
    router_init_std=found.router_init_std >= 0,
  )
  for name, fits in numbers.items():
    if not fits:
      raise settings.ConfigError(
        f"{key}.{name}: {getattr(found, name)!r} cannot be, with "
        f"{found.num_experts} experts."
      )
  for name, depth in depths.items():
    if found.every < 1 or depth % found.every:
      raise settings.ConfigError(
        f"{key}.every: {found.every!r} does not divide {name}={depth}."
      )
  return found


def kinds(layer: Any) -> list[Any]:
  """What stack.run repeats: layers without experts, and one that has them.

  Args:
    layer: a named tuple with a field `moe`: Options or None.
  """
  if layer.moe is None:
    return [layer]
  return [layer._replace(moe=None)] * (layer.moe.every - 1) + [layer]


def mlp_or_experts(
  experts: Options | None,
  options: mlp.Options,
  x_BLD: jax.Array,
  real_BL: jax.Array | None,
  train: bool,
) -> tuple[jax.Array, dict[str, jax.Array] | None]:
  """What follows attention in a block, in whose compact method this is.

  Args:
    experts: None for an MLP.
    options: of the MLP, or of each expert.
    x_BLD: the normalised stream.
    real_BL: see Moe.
    train: see Moe.

  Returns:
    ([B, L, D], statistics as of Moe, or None).
  """
  if experts is None:
    return mlp.Mlp(options, name="mlp")(x_BLD, train), None
  y_BLD, stats = Moe(experts, options, name="moe")(x_BLD, real_BL, train)
  if experts.shared_experts:
    size = experts.shared_experts * options.dim
    shared = mlp.Mlp(options._replace(dim=size), name="shared_experts")
    y_BLD += shared(x_BLD, train)
  return y_BLD, stats


class Moe(nn.Module):
  """The layer.

  Parameters: router/kernel (D, E); up and, if gated, gate (E, D, F), down
  (E, F, D), each a kernel.

  Attributes:
    options: see there.
    expert: of each; without biases whatever it says. The router computes in
      float32.
  """

  options: Options
  expert: mlp.Options

  @nn.compact
  def __call__(
    self, x_BLD: jax.Array, real_BL: jax.Array | None, train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sends tokens through their experts.

    Args:
      x_BLD: the normalised stream.
      real_BL: bool: which tokens are no padding; all if None. Padding takes
        no capacity and counts nowhere.
      train: whether the router's input is jittered, and experts have dropout,
        with the rng "dropout".

    Returns:
      ([B, L, D], float32 statistics over the real tokens: "load_balance" and
      "router_z", the losses without their weights, "load" [E], the share of
      all choices, "dropped", that of choices which found no place, "entropy"
      of the router in nats).
    """
    options, expert, D = self.options, self.expert, x_BLD.shape[-1]
    E, F = options.num_experts, expert.dim
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
      kernel_init=nn.initializers.normal(options.router_init_std),
      name="router",
    )
    logits_BLE = router(seen_BLD)
    routing, stats = route(logits_BLE, real_BL, options)

    def kernel(name: str, shape: tuple[int, ...], std: float) -> jax.Array:
      values = mlp.Kernel(shape, std, name=name)()
      return values.astype(expert.dtype)

    weights = {"up": kernel("up", (E, D, F), expert.init_std)}
    if mlp.KINDS[expert.kind].gated:
      weights["gate"] = kernel("gate", (E, D, F), expert.init_std)
    weights["down"] = kernel("down", (E, F, D), expert.out_init_std)
    rate = expert.dropout if options.dropout is None else options.dropout
    key = self.make_rng("dropout") if train and rate else None
    experts = moe_dispatch.Experts(expert.kind, F, rate, key)
    x_BLD = x_BLD.astype(expert.dtype)
    factor = options.factor(train)
    if factor is None:
      dropped = jnp.zeros(())
      y_BLD = moe_dispatch.dropless(x_BLD, routing, weights, experts)
    else:
      y_BLD, dropped = moe_dispatch.with_capacity(
        x_BLD, routing, weights, experts, real_BL, factor
      )
    return y_BLD, stats | {"dropped": dropped}


def route(
  logits_BLE: jax.Array, real_BL: jax.Array, options: Options
) -> tuple[moe_dispatch.Routing, dict[str, jax.Array]]:
  """Chooses experts, and says how evenly.

  Returns:
    (the choices, best first; the statistics of `Moe` but "dropped").
  """
  E, J = options.num_experts, options.top_k
  probs_BLE = jax.nn.softmax(logits_BLE, axis=-1)
  weight_BLJ, expert_BLJ = jax.lax.top_k(probs_BLE, J)
  if options.normalizes():
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
  expert_BLJ = expert_BLJ.astype(jnp.int32)
  return moe_dispatch.Routing(expert_BLJ, weight_BLJ), stats
