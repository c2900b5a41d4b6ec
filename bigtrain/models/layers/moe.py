"""Mixture of experts: a layer in place of an MLP.

Each token goes to its best `top_k` of E experts: to one as in Switch
(https://arxiv.org/abs/2101.03961), or to several, whose outputs are weighted,
as in Mixtral (https://arxiv.org/abs/2401.04088). With a capacity each expert
takes a limited number of tokens of a row of the batch; the rest are dropped.

By default a device gathers the weights of all experts for the layer. With an
`axis` the experts stay on their devices, and tokens travel to them and back,
all to all. Either way a token's output depends neither on the devices nor on
the microbatches.

Axes: B batch, L length, D model width, F hidden width, E experts, J = top_k.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bigtrain import settings, sharding
from bigtrain.models.layers import (
  kernels,
  mlp,
  moe_dispatch,
  moe_experts,
  options,
)

SERVE = ("position", "choice")


class Options(NamedTuple):
  """config.model.moe.

  Attributes:
    num_experts: E.
    top_k: number of experts per token.
    axis: axis of the mesh that whole experts are split over; None for weights
      that each device gathers.
    every: period of the layers with experts; the last of each period has them.
    capacity_factor: an expert takes up to this times L * top_k / E tokens of a
      row, rounded up; None drops nothing.
    eval_capacity_factor: the same outside of training; capacity_factor if None.
    jitter: in training, the router's input is multiplied by noise from
      [1 - jitter, 1 + jitter].
    dropout: rate in the hidden layers of experts; the MLPs' rate if None.
    normalize: whether the weights of a token's experts add up to 1; by default
      if there are several.
    serve: order in which choices take the capacity. "position": token by token,
      so that no token depends on a later one; the default. "choice": the first
      choices of all tokens, then the second ones, as in GShard
      (https://arxiv.org/abs/2006.16668); the default in T5's encoder.
    shared_experts: size, in experts, of an MLP that every token passes as well
      (https://arxiv.org/abs/2401.06066); 0 for none.
    router_init_std: standard deviation of the router's initial kernel.
  """

  num_experts: int
  top_k: int = 2
  axis: str | None = None
  every: int = 1
  capacity_factor: float | None = None
  eval_capacity_factor: float | None = None
  serve: str | None = None
  jitter: float = 0.0
  dropout: float | None = None
  normalize: bool | None = None
  shared_experts: int = 0
  router_init_std: float = 0.02

  def in_stack(self, two_sided: bool) -> "Options":
    default = "choice" if two_sided else "position"
    return self._replace(serve=self.serve or default)

  def without_drops(self) -> "Options":
    return self._replace(capacity_factor=None, eval_capacity_factor=None)

  def factor(self, train: bool) -> float | None:
    if train or self.eval_capacity_factor is None:
      return self.capacity_factor
    return self.eval_capacity_factor

  def normalizes(self) -> bool:
    return self.top_k > 1 if self.normalize is None else self.normalize


def read(
  given: Options | Mapping[str, Any] | None, key: str, **depths: int
) -> Options | None:
  if given is None or isinstance(given, Options):
    return given
  settings.check_kwargs(Options, given, key)
  if "num_experts" not in given:
    raise settings.ConfigError(f"{key}.num_experts: missing.")
  moe = Options(**given)

  def check(name: str, **limits: Any) -> None:
    settings.check_number(f"{key}.{name}", getattr(moe, name), **limits)

  check("num_experts", least=1, whole=True)
  check("top_k", least=1, most=moe.num_experts, whole=True)
  check("every", least=1, whole=True)
  check("jitter", least=0, below=1)
  check("shared_experts", least=0, whole=True)
  check("router_init_std", least=0)
  for name in ("capacity_factor", "eval_capacity_factor"):
    if getattr(moe, name) is not None:
      check(name, above=0)
  if moe.serve is not None:
    settings.check_choice(f"{key}.serve", moe.serve, SERVE)
    if moe.capacity_factor is moe.eval_capacity_factor is None:
      raise settings.ConfigError(
        f"{key}.serve={moe.serve!r}: expected a capacity_factor; without one "
        "all choices are served."
      )
  if moe.axis is not None:
    settings.check_choice(f"{key}.axis", moe.axis, sharding.AXES)
  if moe.dropout is not None:
    options.check_rate(f"{key}.dropout", moe.dropout)
  for name, depth in depths.items():
    if depth % moe.every:
      raise settings.ConfigError(
        f"{key}.every: {moe.every!r} does not divide {name}={depth}."
      )
  return moe


def kinds(block: Any) -> list[Any]:
  """Options of a period of stack.run, from a block's with a field `moe`."""
  if block.moe is None:
    return [block]
  return [block._replace(moe=None)] * (block.moe.every - 1) + [block]


def mlp_or_experts(
  experts: Options | None,
  expert: mlp.Options,
  x_BLD: jax.Array,
  real_BL: jax.Array | None,
  train: bool,
) -> tuple[jax.Array, dict[str, jax.Array] | None]:
  if experts is None:
    return mlp.Mlp(expert, name="mlp")(x_BLD, train), None
  y_BLD, stats = Moe(experts, expert, name="moe")(x_BLD, real_BL, train)
  if experts.shared_experts:
    size = experts.shared_experts * expert.dim
    shared = mlp.Mlp(expert._replace(dim=size), name="shared_experts")
    y_BLD += shared(x_BLD, train)
  return y_BLD, stats


class Moe(nn.Module):
  """A router, which computes in float32, and its experts, without biases.

  Parameters: router/kernel (D, E); up and, if gated, gate (E, D, F), down
  (E, F, D), each a kernel.
  """

  options: Options
  expert: mlp.Options

  @nn.compact
  def __call__(
    self, x_BLD: jax.Array, real_BL: jax.Array | None, train: bool
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sends tokens through their experts.

    Padding, where `real_BL` is False, takes no capacity, has no part in the
    statistics and changes nothing of the real tokens, not even their rounding.

    Returns:
      ([B, L, D], float32 statistics over the real tokens: "load_balance" and
      "router_z", the unweighted losses of Switch and ST-MoE; "load" [E], each
      expert's share of all choices; "dropped", the share of choices beyond the
      capacity; "entropy" of the router in nats).
    """
    options, expert, D = self.options, self.expert, x_BLD.shape[-1]
    E, F = options.num_experts, expert.dim
    if real_BL is None:
      real_BL = jnp.ones(x_BLD.shape[:2], bool)
    router_input_BLD = x_BLD.astype(jnp.float32)
    if train and options.jitter:
      router_input_BLD *= jax.random.uniform(
        self.make_rng("dropout"),
        router_input_BLD.shape,
        minval=1 - options.jitter,
        maxval=1 + options.jitter,
      )
    logits_BLE = nn.Dense(
      E,
      use_bias=False,
      kernel_init=nn.initializers.normal(options.router_init_std),
      name="router",
    )(router_input_BLD)
    routing, stats = route(logits_BLE, real_BL, options)
    kernel = lambda name, shape, std: kernels.Kernel(
      shape, std, name=name
    )().astype(expert.dtype)
    weights = {"up": kernel("up", (E, D, F), expert.init_std)}
    if mlp.KINDS[expert.kind].gated:
      weights["gate"] = kernel("gate", (E, D, F), expert.init_std)
    weights["down"] = kernel("down", (E, F, D), expert.out_init_std)
    rate = expert.dropout if options.dropout is None else options.dropout
    key = self.make_rng("dropout") if train and rate else None
    experts = moe_experts.Experts(expert.kind, F, rate, key)
    x_BLD = x_BLD.astype(expert.dtype)
    factor = options.factor(train)
    if factor is None:
      dropped = jnp.zeros(())
      y_BLD = moe_dispatch.dropless(
        x_BLD, routing, weights, experts, real_BL, options.axis
      )
    else:
      y_BLD, dropped = moe_dispatch.with_capacity(
        x_BLD,
        routing,
        weights,
        experts,
        real_BL,
        factor=factor,
        serve=options.serve,
        axis=options.axis,
      )
    return y_BLD, stats | {"dropped": dropped}


def route(
  logits_BLE: jax.Array, real_BL: jax.Array, options: Options
) -> tuple[moe_experts.Routing, dict[str, jax.Array]]:
  """Each token's experts, and the statistics of Moe but "dropped"."""
  E, J = options.num_experts, options.top_k
  probs_BLE = jax.nn.softmax(logits_BLE, axis=-1)
  chosen_BLJE = _best(probs_BLE, J)
  weight_BLJ = jnp.sum(chosen_BLJE * probs_BLE[:, :, None], axis=-1)
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
  load_E = mean(jnp.sum(chosen_BLJE, axis=2)) / J
  log_sum_BL = jax.nn.logsumexp(logits_BLE, axis=-1)
  log_probs_BLE = logits_BLE - log_sum_BL[..., None]
  stats = {
    # Equation 4 of Switch Transformers (arXiv 2101.03961), with a load of all
    # top_k choices that adds up to 1: 1 if choices and probabilities are even.
    "load_balance": E * jnp.sum(load_E * mean(probs_BLE)),
    # The z-loss of ST-MoE (arXiv 2202.08906, equation 5).
    "router_z": mean(log_sum_BL**2),
    "load": load_E,
    "entropy": mean(-jnp.sum(probs_BLE * log_probs_BLE, axis=-1)),
  }
  expert_BLJ = jnp.argmax(chosen_BLJE, axis=-1).astype(jnp.int32)
  return moe_experts.Routing(expert_BLJ, weight_BLJ), stats


def _best(probs_BLE: jax.Array, J: int) -> jax.Array:
  """Ones [B, L, J, E] for the J experts of each token, best first.

  XLA does not split jax.lax.top_k over CPUs and GPUs: each device would sort
  the tokens of all.
  """
  left_BLE = jax.lax.stop_gradient(probs_BLE)
  marks = []
  for _ in range(J):
    best_BL = jnp.argmax(left_BLE, axis=-1)
    marks.append(jax.nn.one_hot(best_BL, probs_BLE.shape[-1]))
    left_BLE = jnp.where(marks[-1] > 0, -1.0, left_BLE)
  return jnp.stack(marks, axis=2)
