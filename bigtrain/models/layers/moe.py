"""Mixture of experts: a layer in place of an MLP.

Each token goes to its best `top_k` of E experts: to one as in Switch
(https://arxiv.org/abs/2101.03961), or to several, whose outputs are weighted,
as in Mixtral (https://arxiv.org/abs/2401.04088). With a capacity each expert
accepts a limited number of tokens of each example; the rest are dropped. Or
the experts choose tokens, in an encoder (moe_expert_choice.py).

A selection bias is added to the scores only to choose experts
(https://arxiv.org/abs/2408.15664). It is state, not a parameter: once per step
the bias of experts with more choices than the mean goes down.

This module has the options, the layer `Moe` with its parameters and statistics,
and `route`, which chooses. moe_dispatch.py brings tokens to their experts, and
moe_experts.py multiplies. Without an `axis`, a device gathers the weights of
all experts for the layer. With one they stay on their devices, and tokens
travel to them and back. A token's output depends neither on the devices nor on
the microbatches.

Axes: B batch, L length, D model width, F hidden width, E experts, J = top_k.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from absl import logging

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.models.layers import (
  kernels,
  mlp,
  moe_dispatch,
  moe_expert_choice,
  moe_experts,
  options,
  rms_norm,
)

ROUTINGS = ("token_choice", "expert_choice")
SERVE = ("position", "choice", "priority")
SCORES = ("softmax", "sigmoid", "softmax_of_top")
GROUP_SCORES = ("max", "top2")

# Limits of the options, as arguments of check_number.
_COUNT = dict(least=1, whole=True)
_LIMITS: dict[str, dict[str, Any]] = dict(
  num_experts=_COUNT,
  every=_COUNT,
  mlp_dim=_COUNT,
  shared_dim=_COUNT,
  shared_experts=dict(least=0, whole=True),
  jitter=dict(least=0, below=1),
  dropout=dict(least=0, below=1),
  router_init_std=dict(least=0),
  bias_rate=dict(least=0),
  buffer_factor=dict(above=0),
  capacity_factor=dict(above=0),
  eval_capacity_factor=dict(above=0),
  scale=dict(above=0),
  total_epsilon=dict(least=0),
  least_total=dict(least=0),
)

# Flax's collections: selection biases, and the numbers of choices that change
# them at the end of a step.
STATE = "router_state"
STEP_SUMS = "step_sums"


class Groups(NamedTuple):
  """Experts in `num` groups, of which a token has the `top` best by `score`."""

  num: int
  top: int
  score: str = "max"


class Options(NamedTuple):
  """config.model.moe."""

  num_experts: int  # E.
  # Number of experts per token. With expert choice, their mean number if the
  # capacity factor is 1.
  top_k: int = 2
  # Who chooses: one of ROUTINGS. The second is for encoders; a T5's decoder
  # then has the first.
  routing: str = "token_choice"
  # Axis of the mesh that whole experts are split over, if any.
  axis: str | None = None
  # With an axis and no capacity: rows of a device's buffer, as a multiple of
  # its even share of the choices. More rows take further rounds.
  buffer_factor: float = 1.5
  every: int = 1  # With 2, every second layer has experts, and so on.
  # An expert accepts up to this times L * top_k / E tokens of an example; None
  # for all. With expert choice it has exactly as many; None is 1.
  capacity_factor: float | None = None
  eval_capacity_factor: float | None = None  # Outside of training, if given.
  # Order in which choices take the capacity. "position": token by token, so
  # that no token depends on a later one; the default. "choice": the first
  # choices of all tokens, then the second ones, as in GShard
  # (https://arxiv.org/abs/2006.16668); the default in T5's encoder.
  # "priority": the same with the tokens sorted by the score of their first
  # choice, best first (Batch Prioritized Routing, arXiv 2106.05974).
  serve: str | None = None
  jitter: float = 0.0  # Largest relative noise on the router's input.
  dropout: float | None = None  # Rate in experts; None: the MLPs' rate.
  # Whether a token's weights add up to 1; by default if it has several experts
  # by token choice.
  normalize: bool | None = None
  # Whether the weights multiply the experts' inputs in place of their outputs.
  scale_input: bool = False
  router_init_std: float = 0.02  # Of the router's initial kernel.
  score: str = "softmax"  # One of SCORES; the last is over the chosen experts.
  # Added to the total of a token's weights before they are divided by it, and
  # the least number that they are divided by.
  total_epsilon: float = 1e-20
  least_total: float = 0.0
  scale: float = 1.0  # Factor of the weights.
  selection_bias: bool = False  # Added only to choose experts.
  bias_rate: float = 0.0  # Change of the selection bias per step.
  groups: Groups | None = None  # From which each token chooses first.
  # Whether the router has a norm of its input with a learned vector, and a
  # learned factor of each expert's weights, as in Gemma 4.
  scaled_router: bool = False
  # Whether there is an MLP too, as in Gemma 4. Both have their own norms, and
  # the router reads the residual stream.
  beside_mlp: bool = False
  mlp_dim: int | None = None  # Width of an expert; the model's mlp_dim if None.
  # Size, in experts, of an MLP for all tokens (arXiv 2401.06066); 0 for none.
  shared_experts: int = 0
  shared_dim: int | None = None  # Width of this MLP, in place of its size.
  shared_gate: bool = False  # Whether a sigmoid multiplies its output.

  def in_stack(self, two_sided: bool) -> "Options":
    """Fills in the default of `serve`; encoders are two-sided.

    Expert choice works only in encoders.
    """
    if two_sided:
      return self._replace(serve=self.serve or "choice")
    return self._replace(serve=self.serve or "position", routing="token_choice")

  def without_drops(self) -> "Options":
    return self._replace(capacity_factor=None, eval_capacity_factor=None)

  def factor(self, train: bool) -> float | None:
    if train or self.eval_capacity_factor is None:
      return self.capacity_factor
    return self.eval_capacity_factor

  def normalizes(self) -> bool:
    if self.normalize is None:
      return self.routing == "token_choice" and self.top_k > 1
    return self.normalize

  def width(self, mlp_dim: int) -> int:
    return self.mlp_dim or mlp_dim

  def shared_width(self, mlp_dim: int) -> int:
    return self.shared_dim or self.shared_experts * self.width(mlp_dim)


def read(
  given: Options | Mapping[str, Any] | None,
  key: str,
  *,
  has_encoder: bool = False,
  **depths: int,
) -> Options | None:
  """Checks config.model.moe.

  Args:
    has_encoder: whether the model has an encoder, where experts may choose.
    depths: what `every` has to divide.
  """
  if given is None or isinstance(given, Options):
    return given
  moe = options.read_tuple(Options, given, key, **_LIMITS)
  check_number(
    f"{key}.top_k", moe.top_k, least=1, most=moe.num_experts, whole=True
  )
  check_choice(f"{key}.score", moe.score, SCORES)
  check_choice(f"{key}.routing", moe.routing, ROUTINGS)
  if moe.routing == "expert_choice":
    _check_expert_choice(moe, key, has_encoder)
  _check_together(moe, key)
  if moe.groups is not None:
    moe = moe._replace(groups=_read_groups(moe, f"{key}.groups"))
  if moe.serve is not None:
    check_choice(f"{key}.serve", moe.serve, SERVE)
    if moe.capacity_factor is moe.eval_capacity_factor is None:
      raise ConfigError(
        f"{key}.serve={moe.serve!r}: expected a capacity_factor; without one "
        "all choices are served."
      )
    if not has_encoder and moe.serve != "position":
      logging.log_first_n(
        logging.WARNING,
        "%s.serve=%r: which choices are dropped depends on later tokens, so "
        "this decoder sees a little of the future when it trains. "
        "serve='position' does not.",
        1,
        key,
        moe.serve,
      )
  if "buffer_factor" in given:
    _check_buffers(moe, key)
  if moe.axis is not None:
    axes = [axis for axis in sharding.AXES if axis != "pipeline"]
    check_choice(f"{key}.axis", moe.axis, axes)
  for name, depth in depths.items():
    if depth % moe.every:
      raise ConfigError(
        f"{key}.every: {moe.every!r} does not divide {name}={depth}."
      )
  return moe


def _check_buffers(moe: Options, key: str) -> None:
  if moe.axis is None:
    raise ConfigError(
      f"{key}.buffer_factor={moe.buffer_factor}: expected an axis, such as "
      f"{key}.axis='fsdp'; without one no tokens are exchanged."
    )
  if moe.capacity_factor is not None:
    raise ConfigError(
      f"{key}.buffer_factor={moe.buffer_factor}: expected no capacity_factor, "
      "which already limits the tokens that devices exchange."
    )


def _check_expert_choice(moe: Options, key: str, has_encoder: bool) -> None:
  if not has_encoder:
    raise ConfigError(
      f"{key}.routing='expert_choice': expected 'token_choice' in a decoder. "
      "Experts would choose among all tokens of a text, so a token's output "
      "would depend on later tokens: the model would see what it should "
      "predict, and could not generate token by token. Encoders, such as T5's, "
      "may use it."
    )
  if moe.selection_bias or moe.groups is not None:
    name = "selection_bias" if moe.selection_bias else "groups"
    raise ConfigError(
      f"{key}.{name}: not with routing='expert_choice', where all experts have "
      "equally many tokens."
    )
  if moe.score == "softmax_of_top":
    raise ConfigError(
      f"{key}.score='softmax_of_top': expected 'softmax' or 'sigmoid' with "
      "routing='expert_choice', where tokens do not choose."
    )


def _check_together(moe: Options, key: str) -> None:
  if moe.bias_rate and not moe.selection_bias:
    raise ConfigError(
      f"{key}.bias_rate={moe.bias_rate}: expected selection_bias=True."
    )
  if moe.normalize is False and moe.score == "softmax_of_top":
    raise ConfigError(
      f"{key}.normalize=False: the weights of score='softmax_of_top' always "
      "add up to 1."
    )
  if moe.shared_dim and moe.shared_experts:
    raise ConfigError(
      f"{key}.shared_dim and {key}.shared_experts: give only one."
    )
  if moe.shared_gate and not (moe.shared_dim or moe.shared_experts):
    raise ConfigError(
      f"{key}.shared_gate: expected shared_dim or shared_experts."
    )


def _read_groups(moe: Options, key: str) -> Groups:
  groups = options.read_tuple(Groups, moe.groups, key, num=_COUNT)
  if moe.num_experts % groups.num:
    raise ConfigError(
      f"{key}.num: {groups.num} does not divide num_experts={moe.num_experts}."
    )
  own = moe.num_experts // groups.num  # Experts of a group.
  check_number(
    f"{key}.top",
    groups.top,
    least=math.ceil(moe.top_k / own),
    most=groups.num,
    whole=True,
  )
  check_choice(f"{key}.score", groups.score, GROUP_SCORES)
  if groups.score == "top2" and own < 2:
    raise ConfigError(
      f"{key}.score='top2': expected at least 2 experts in a group, got {own}."
    )
  return groups


def kinds(block: Any) -> list[Any]:
  """Options of the blocks of a period for stack.run: the last has experts."""
  if block.moe is None:
    return [block]
  return [block._replace(moe=None)] * (block.moe.every - 1) + [block]


def mlp_or_experts(
  experts: Options | None,
  dense: mlp.Options,
  x_BLD: jax.Array,
  real_BL: jax.Array | None,
  train: bool,
  use_bias: Collection[str] = (),
) -> tuple[jax.Array, dict[str, jax.Array] | None]:
  """An MLP with the options `dense`; or experts, and their shared MLP."""
  if experts is None:
    return mlp.Mlp(dense, name="mlp")(x_BLD, train), None
  expert = dense._replace(
    dim=experts.width(dense.dim), use_bias="experts" in use_bias
  )
  layer = Moe(experts, expert, "router" in use_bias, name="moe")
  y_BLD, stats = layer(x_BLD, real_BL, train)
  shared_width = experts.shared_width(dense.dim)
  if shared_width:
    shared = mlp.Mlp(dense._replace(dim=shared_width), name="shared_experts")
    z_BLD = shared(x_BLD, train)
    if experts.shared_gate:
      gate = nn.Dense(1, use_bias=False, dtype=dense.dtype, name="shared_gate")
      z_BLD *= jax.nn.sigmoid(gate(x_BLD))
    y_BLD += z_BLD
  return y_BLD, stats


class Moe(nn.Module):
  """A router, which computes in float32, and its experts.

  Parameters: router/kernel (D, E); up and, if gated, gate (E, D, F), down
  (E, F, D), each a kernel; biases (E), (E, F) and (E, D) if any; router_scale
  (D) and expert_scale (E) of a scaled router. State: selection_bias (E).
  """

  options: Options
  expert: mlp.Options
  router_bias: bool = False
  norm_eps: float = 1e-6  # Of a scaled router.

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    real_BL: jax.Array | None,
    train: bool,
    router_x_BLD: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sends tokens through their experts.

    Padding, where `real_BL` is False, uses no capacity, does not count in the
    statistics and changes nothing of the real tokens, not even their rounding.
    The router reads `router_x_BLD`, if it is given.

    Returns:
      ([B, L, D], float32 statistics over the real tokens: "load_balance" and
      "router_z", the unweighted losses of Switch and ST-MoE; "load" [E] and
      "score" [E], each expert's share of choices and mean score, which add up
      to 1; "dropped", the share of choices beyond the capacity; "entropy" in
      nats; "bias", the largest selection bias, if there are any; "rounds" of
      the exchange, if there is one without drops; with expert choice
      "left_behind", the share of tokens that no expert chose; in a stage of a
      pipeline "tokens", for `merged`).
    """
    options, expert = self.options, self.expert
    if real_BL is None:
      real_BL = jnp.ones(x_BLD.shape[:2], bool)
    router_x_BLD = x_BLD if router_x_BLD is None else router_x_BLD
    logits_BLE = self._logits(router_x_BLD, train)
    if options.routing == "expert_choice":
      return self._experts_choose(x_BLD, logits_BLE, real_BL, train)
    bias_E = None
    if options.selection_bias:
      shape = (options.num_experts,)
      bias_E = self.variable(STATE, "selection_bias", jnp.zeros, shape).value
    routing, stats = route(logits_BLE, real_BL, options, bias_E)
    if options.scaled_router:
      scaled_BLJ = routing.weight_BLJ * self._scale()[routing.expert_BLJ]
      routing = routing._replace(weight_BLJ=scaled_BLJ)
    changes_bias = options.bias_rate and train and not self.is_initializing()
    if changes_bias and self.is_mutable_collection(STEP_SUMS):
      count_E = choices(routing, real_BL, options.num_experts)
      self.put_variable(STEP_SUMS, "selection_bias", count_E)
    weights, experts = self._weights(x_BLD.shape[-1]), self._experts(train)
    x_BLD = x_BLD.astype(expert.dtype)
    if options.scale_input:
      x_BLD, routing, real_BL = _with_scaled_inputs(x_BLD, routing, real_BL)
    factor = options.factor(train)
    if factor is None:
      dropped = jnp.zeros(())
      y_BLD, rounds = moe_dispatch.dropless(
        x_BLD,
        routing,
        weights,
        experts,
        real_BL,
        axis=options.axis,
        buffer_factor=options.buffer_factor,
      )
      if rounds is not None:
        stats["rounds"] = rounds.astype(jnp.float32)
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
    if options.scale_input:
      y_BLJD = y_BLD.reshape(*logits_BLE.shape[:2], options.top_k, -1)
      y_BLD = jnp.sum(y_BLJD, axis=2)
    stats["dropped"] = dropped
    if bias_E is not None:
      stats["bias"] = jnp.max(jnp.abs(bias_E))
    if sharding.in_stage():
      stats["tokens"] = jnp.sum(real_BL, dtype=jnp.float32)
    return y_BLD, stats

  def _experts_choose(
    self,
    x_BLD: jax.Array,
    logits_BLE: jax.Array,
    real_BL: jax.Array,
    train: bool,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    options = self.options
    factor = options.factor(train) or 1.0
    scores = scores_of(logits_BLE, options)
    y_BLD, chosen_BLE = moe_expert_choice.serve(
      x_BLD.astype(self.expert.dtype),
      scores.own_BLE,
      real_BL,
      self._weights(x_BLD.shape[-1]),
      self._experts(train),
      share=factor * options.top_k / options.num_experts,
      normalize=options.normalizes(),
      scale_E=options.scale * (self._scale() if options.scaled_router else 1),
      axis=options.axis,
    )
    chosen_E = jnp.sum(chosen_BLE, axis=(0, 1))
    load_E = chosen_E / jnp.maximum(jnp.sum(chosen_E), 1)
    stats = _statistics(scores, load_E, real_BL)
    left_BL = ~jnp.any(chosen_BLE, axis=-1)
    stats["left_behind"] = _mean(left_BL, real_BL)
    stats["dropped"] = jnp.zeros(())
    if sharding.in_stage():
      stats["tokens"] = jnp.sum(real_BL, dtype=jnp.float32)
    return y_BLD, stats

  def _scale(self) -> jax.Array:
    """The learned factors of experts' weights of a scaled router, [E]."""
    ones = nn.initializers.ones
    scale_E: jax.Array = self.param(
      "expert_scale", ones, (self.options.num_experts,)
    )
    return scale_E

  def _experts(self, train: bool) -> moe_experts.Experts:
    options, expert = self.options, self.expert
    rate = expert.dropout if options.dropout is None else options.dropout
    key = self.make_rng("dropout") if train and rate else None
    return moe_experts.Experts(expert.kind, expert.dim, rate, key, expert.clip)

  def _logits(self, x_BLD: jax.Array, train: bool) -> jax.Array:
    options = self.options
    x_BLD = x_BLD.astype(jnp.float32)
    if options.scaled_router:
      D = x_BLD.shape[-1]
      scale_D = self.param("router_scale", nn.initializers.ones, (D,))
      x_BLD = rms_norm.RMSNorm((D,), self.norm_eps, scaled=False)(x_BLD)
      x_BLD *= scale_D * D**-0.5
    if train and options.jitter:
      x_BLD *= jax.random.uniform(
        self.make_rng("dropout"),
        x_BLD.shape,
        minval=1 - options.jitter,
        maxval=1 + options.jitter,
      )
    return nn.Dense(
      options.num_experts,
      use_bias=self.router_bias,
      kernel_init=nn.initializers.normal(options.router_init_std),
      name="router",
    )(x_BLD)

  def _weights(self, D: int) -> dict[str, jax.Array]:
    """Kernels, and biases with names like "up_bias", in the dtype of use."""
    E, expert = self.options.num_experts, self.expert
    shapes = {"up": (E, D, expert.dim)}
    if mlp.KINDS[expert.kind].gated:
      shapes["gate"] = (E, D, expert.dim)
    shapes["down"] = (E, expert.dim, D)
    weights = {}
    for name, shape in shapes.items():
      std = expert.out_init_std if name == "down" else expert.init_std
      bias = (E, shape[2]) if expert.use_bias else None
      init = kernels.initializer(std)
      held = kernels.Kernel(shape, bias, init, name=name)()
      weights[name] = held["kernel"].astype(expert.dtype)
      if expert.use_bias:
        weights[f"{name}_bias"] = held["bias"].astype(expert.dtype)
    return weights


def _with_scaled_inputs(
  x_BLD: jax.Array, routing: moe_experts.Routing, real_BL: jax.Array
) -> tuple[jax.Array, moe_experts.Routing, jax.Array]:
  """Each choice as a separate token, [B, L J, D], with the weight 1."""
  B, L, J = routing.expert_BLJ.shape
  x_BLJD = x_BLD[:, :, None] * routing.weight_BLJ[..., None].astype(x_BLD.dtype)
  expert = routing.expert_BLJ.reshape(B, L * J, 1)
  ones = jnp.ones(expert.shape, routing.weight_BLJ.dtype)
  real = jnp.repeat(real_BL, J, axis=1)
  return (
    x_BLJD.reshape(B, L * J, -1),
    moe_experts.Routing(expert, ones * real[..., None]),
    real,
  )


def merged(reports: Any) -> Any:
  """The statistics of a batch, from those of its microbatches (axis 0).

  Means are weighted by the microbatches' numbers of real tokens. The
  load-balance loss is a product of two means, so it is computed again from
  these.
  """

  def merge(stats: dict[str, jax.Array]) -> dict[str, jax.Array]:
    tokens = stats["tokens"]
    share = tokens / jnp.maximum(jnp.sum(tokens, axis=0), 1)
    result = {}
    for name, x in stats.items():
      if name != "tokens":
        # Transposed, because x may have more axes than the share, at the end.
        result[name] = jnp.sum((x.T * share.T).T, axis=0)
    balance = _load_balance(result["load"], result["score"])
    return result | {"load_balance": balance}

  return jax.tree.map(merge, reports, is_leaf=lambda x: isinstance(x, dict))


def of_layers(
  stats: Any, layers: Sequence[int], *, stacked: bool
) -> dict[str, dict[str, jax.Array]]:
  """{number of a layer: its "load" and, if it has them, "bias" and "rounds"}.

  Args:
    stats: statistics of these layers, or None if they have no experts.
    stacked: whether axis 0 of the statistics runs over the layers.
  """
  if stats is None:
    return {}
  names = ("load", "bias", "rounds")
  own = {name: stats[name] for name in names if name in stats}
  return {
    str(layer): {name: x[i] if stacked else x for name, x in own.items()}
    for i, layer in enumerate(layers)
  }


def _load_balance(load_E: jax.Array, score_E: jax.Array) -> jax.Array:
  """Equation 4 of Switch Transformers (arXiv 2101.03961).

  With a load of all top_k choices that adds up to 1, it is 1 if all is even.
  """
  return load_E.shape[-1] * jnp.sum(load_E * score_E, axis=-1)


def end_of_step(
  mutable: Mapping[str, Any], sums: Mapping[str, Any], rate: float
) -> dict[str, Any]:
  """The selection biases after a step with these sums of STEP_SUMS."""
  if not rate:
    logging.log_first_n(
      logging.WARNING,
      "config.model.moe.bias_rate=0: the selection bias stays as it is, and "
      "does not balance the load of the experts.",
      1,
    )
  counts = dict(trees.flatten_with_names(sums))

  def updated(name: str, bias_E: jax.Array) -> jax.Array:
    if name not in counts:
      return bias_E
    # The sign of (mean - count), from whole numbers: a float's rounding would
    # depend on the order of a sum.
    count_E, E = counts[name], bias_E.shape[-1]
    whole, rest = jnp.divmod(jnp.sum(count_E, axis=-1, keepdims=True), E)
    sign_E = jnp.sign(2 * (whole - count_E) + (rest > 0))
    change_E = rate * sign_E.astype(bias_E.dtype)
    return bias_E + change_E - jnp.mean(change_E, axis=-1, keepdims=True)

  return {**mutable, STATE: trees.map_with_names(updated, mutable[STATE])}


def route(
  logits_BLE: jax.Array,
  real_BL: jax.Array,
  options: Options,
  bias_E: jax.Array | None = None,
) -> tuple[moe_experts.Routing, dict[str, jax.Array]]:
  """Each token's experts, and the statistics of Moe except "dropped"."""
  E, J = options.num_experts, options.top_k
  scores = scores_of(logits_BLE, options)
  of_top = options.score == "softmax_of_top"
  scores_BLE = logits_BLE if of_top else scores.own_BLE

  # The choice, and the weights of the chosen experts' outputs.
  expert_BLJ = _chosen(scores_BLE, options, bias_E)
  chosen_BLJE = _marks(expert_BLJ, E)
  weight_BLJ = _of_marks(scores_BLE, chosen_BLJE)
  priority_BL = None
  if options.serve == "priority":
    first_BLE = chosen_BLJE[:, :, 0]
    priority_BL = jnp.sum(jnp.where(first_BLE, scores.own_BLE, 0.0), axis=-1)
    priority_BL = jax.lax.stop_gradient(priority_BL)
  if of_top:
    weight_BLJ = jax.nn.softmax(weight_BLJ, axis=-1)
  elif options.normalizes():
    total_BL1 = jnp.sum(weight_BLJ, axis=-1, keepdims=True)
    total_BL1 += options.total_epsilon
    if options.least_total:
      total_BL1 = jnp.maximum(total_BL1, options.least_total)
    weight_BLJ /= total_BL1
  if options.scale != 1:
    weight_BLJ *= options.scale
  weight_BLJ = jnp.where(real_BL[..., None], weight_BLJ, 0.0)

  load_E = _mean(jnp.sum(chosen_BLJE, axis=2), real_BL) / J
  stats = _statistics(scores, load_E, real_BL)
  return moe_experts.Routing(expert_BLJ, weight_BLJ, priority_BL), stats


class Scores(NamedTuple):
  """A router's scores of each token and expert."""

  own_BLE: jax.Array  # Softmax over all experts, or sigmoid.
  probs_BLE: jax.Array  # The same, adding up to 1.
  log_probs_BLE: jax.Array
  log_sum_BL: jax.Array  # Of the exponentials of the logits.


def scores_of(logits_BLE: jax.Array, options: Options) -> Scores:
  log_sum_BL = jax.nn.logsumexp(logits_BLE, axis=-1)
  if options.score == "sigmoid":
    scores_BLE = jax.nn.sigmoid(logits_BLE)
    total_BL1 = jnp.sum(scores_BLE, axis=-1, keepdims=True) + 1e-20
    log_probs_BLE = jax.nn.log_sigmoid(logits_BLE) - jnp.log(total_BL1)
    return Scores(scores_BLE, scores_BLE / total_BL1, log_probs_BLE, log_sum_BL)
  probs_BLE = jax.nn.softmax(logits_BLE, axis=-1)
  log_probs_BLE = logits_BLE - log_sum_BL[..., None]
  return Scores(probs_BLE, probs_BLE, log_probs_BLE, log_sum_BL)


def _mean(x: jax.Array, real_BL: jax.Array) -> jax.Array:
  """Mean of [B, L, ...] over the real tokens."""
  total = jnp.maximum(jnp.sum(real_BL), 1)
  real = real_BL.reshape(*real_BL.shape, *[1] * (x.ndim - 2))
  return jnp.sum(jnp.where(real, x, 0.0), axis=(0, 1)) / total


def _statistics(
  scores: Scores, load_E: jax.Array, real_BL: jax.Array
) -> dict[str, jax.Array]:
  """The statistics of Moe that all routings have, except "dropped"."""
  score_E = _mean(scores.probs_BLE, real_BL)
  entropy_BL = -jnp.sum(scores.probs_BLE * scores.log_probs_BLE, axis=-1)
  return {
    "load_balance": _load_balance(load_E, score_E),
    # The z-loss of ST-MoE (arXiv 2202.08906, equation 5).
    "router_z": _mean(scores.log_sum_BL**2, real_BL),
    "load": load_E,
    "score": score_E,
    "entropy": _mean(entropy_BL, real_BL),
  }


def choices(
  routing: moe_experts.Routing, real_BL: jax.Array, E: int
) -> jax.Array:
  """Number of real tokens' choices of each expert, int [E]."""
  expert_BLJ = jnp.where(real_BL[..., None], routing.expert_BLJ, E)
  return jnp.sum(jax.nn.one_hot(expert_BLJ, E, dtype=jnp.int32), axis=(0, 1, 2))


def _chosen(
  scores_BLE: jax.Array, options: Options, bias_E: jax.Array | None
) -> jax.Array:
  """The J experts of each token, best first."""
  left_BLE = jax.lax.stop_gradient(scores_BLE)
  if bias_E is not None:
    left_BLE += bias_E
  groups = options.groups
  if groups is not None:
    # G groups of e experts. Those outside of the best groups drop out.
    left_BLGe = left_BLE.reshape(*left_BLE.shape[:-1], groups.num, -1)
    e = left_BLGe.shape[-1]
    best = _best(left_BLGe, 2 if groups.score == "top2" else 1)
    score_BLG = jnp.sum(_of_marks(left_BLGe, _marks(best, e)), axis=-1)
    top = _marks(_best(score_BLG, groups.top), groups.num)
    inside_BLG = jnp.any(top, axis=-2)
    left_BLGe = jnp.where(inside_BLG[..., None], left_BLGe, -jnp.inf)
    left_BLE = left_BLGe.reshape(left_BLE.shape)
  return _best(left_BLE, options.top_k)


def _best(scores: jax.Array, number: int) -> jax.Array:
  """Indices of the largest. XLA does not split jax.lax.top_k over devices."""
  result = []
  for _ in range(number):
    result.append(jnp.argmax(scores, axis=-1))
    marks = _marks(result[-1], scores.shape[-1])
    scores = jnp.where(marks, -jnp.inf, scores)
  return jnp.stack(result, axis=-1)


def _marks(index: jax.Array, E: int) -> jax.Array:
  """One-hot bools [..., E]; the backward pass keeps less than with floats."""
  return index[..., None] == jnp.arange(E)


def _of_marks(x: jax.Array, marks: jax.Array) -> jax.Array:
  """The marked entries of [..., E], one for each of the marks [..., J, E]."""
  return jnp.sum(jnp.where(marks, x[..., None, :], 0.0), axis=-1)
