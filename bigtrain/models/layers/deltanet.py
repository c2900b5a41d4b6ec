"""Gated DeltaNet: a recurrent layer in place of attention.

https://arxiv.org/abs/2412.06464, as in Qwen3-Next, Qwen 3.5 and OLMo Hybrid;
with a decay for each channel of the keys, as in Kimi Linear, arXiv 2510.26692.
Queries, keys and values pass through a short causal convolution, which is
depthwise and followed by an activation, as a rule SiLU. delta_rule.py has the
recurrence. Its output is normalized per head and multiplied by a gate. Memory
and time per token do not grow with the text.

Documents of a packed example do not affect each other: the state and the
convolution are reset at the start of each document.

Axes: B batch, L length, D model width, W positions of the convolution, G heads
of queries and keys, R heads of values for each, K width of keys, V width of
values, C = 2 K + R V channels of a head of keys.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from bigtrain import sharding
from bigtrain.config.errors import ConfigError, check_choice
from bigtrain.models.layers import (
  causal_conv,
  delta_rule,
  delta_rule_kernel,
  kernels,
  masks,
  mlp,
  options,
  recurrent_cache,
  remat,
  rms_norm,
)

_AXIS = "sequence"
_COUNT = dict(least=1, whole=True)
GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}
_ACTIVATIONS = {
  name: kind.activation for name, kind in mlp.KINDS.items() if not kind.gated
}
# Added to the square of the length of queries and keys.
_L2_EPSILON = 1e-6
# Ranges of the initial rates: A of Mamba, and the time step, in log space.
_A_RANGE = 1.0, 16.0
_TIME_STEP_RANGE = 1e-3, 1e-1


class Options(NamedTuple):
  """config.model.deltanet."""

  num_heads: int  # G R, of values.
  num_key_heads: int | None = None  # G, which divides them; as many if None.
  key_dim: int = 128  # K.
  value_dim: int = 128  # V.
  conv_width: int = 4  # W.
  # Whether the share of a value that is replaced may be up to 2, so that the
  # state's transition can have negative eigenvalues, arXiv 2411.12537.
  negative_eigenvalues: bool = False
  norm_eps: float | None = None  # Of the output's norm; the model's if None.
  # Width between the two projections that give a decay for each channel of a
  # key; None for one projection to a decay for each head.
  decay_rank: int | None = None
  gate_rank: int | None = None  # The same for the output's gate.
  gate: str = "silu"  # A name in GATES, of the output's gate.
  # Follows the convolution: the kind of an MLP without a gate, see mlp.KINDS.
  activation: str = "silu"
  # Of the recurrence, see delta_rule_kernel.choose.
  backend: str = "auto"

  @property
  def key_heads(self) -> int:
    return self.num_key_heads or self.num_heads

  @property
  def groups(self) -> int:
    """R, number of heads of values for each of the keys."""
    return self.num_heads // self.key_heads

  def cache(self) -> recurrent_cache.Kind:
    sizes = self.groups, self.key_dim, self.value_dim
    return recurrent_cache.Kind(self.key_heads, self.conv_width, sizes)


def read(given: Options | Mapping[str, Any] | None, key: str) -> Options | None:
  """Checks config.model.deltanet."""
  result = options.read_tuple(
    Options,
    given,
    key,
    num_heads=_COUNT,
    num_key_heads=_COUNT,
    key_dim=_COUNT,
    value_dim=_COUNT,
    conv_width=dict(least=2, whole=True),
    norm_eps=dict(above=0),
    decay_rank=_COUNT,
    gate_rank=_COUNT,
  )
  if result is not None:
    check_choice(f"{key}.gate", result.gate, GATES)
    check_choice(f"{key}.activation", result.activation, _ACTIVATIONS)
    check_choice(f"{key}.backend", result.backend, delta_rule_kernel.NAMES)
  if result is not None and result.num_heads % result.key_heads:
    raise ConfigError(
      f"{key}.num_key_heads: {result.num_key_heads} does not divide num_heads="
      f"{result.num_heads}."
    )
  return result


class DeltaNet(nn.Module):
  """The layer, without the norm before it.

  Parameters: query and key (D, G, K), value and gate (D, G, R, V), beta and
  decay (D, G, R), out (G, R, V, D), each a kernel; kernels of query_conv and
  key_conv (W, G, K) and value_conv (W, G, R, V); log_rate and time_step, which
  are A_log and dt_bias elsewhere, (G, R); norm/scale (V). With ranks, gate_down
  and gate_up in place of gate, and decay_down, decay_up and channel_time_step
  (G, R, K) in place of decay and time_step.
  """

  options: Options
  norm_eps: float
  init_std: float  # Of the initial kernels but `out`.
  out_init_std: float
  dtype: str

  @nn.compact
  def __call__(
    self,
    x_BLD: jax.Array,
    *,
    segments_BL: jax.Array | None = None,
    real_BL: jax.Array | None = None,
    cache: recurrent_cache.States | None = None,
    layer: jax.Array | int = 0,
    start: jax.Array | int | None = 0,
  ) -> tuple[jax.Array, recurrent_cache.States | None]:
    """Returns (output (B, L, D), new cache or None).

    Args:
      segments_BL: int, number of each position's document; not with a cache.
      real_BL: bool, False for padding, which does not change the state.
      start: number of the first position, with a cache; None for 0.
    """
    options = self.options
    B = x_BLD.shape[0]
    ways = sharding.tensor_ways(B)
    splits = ways > 1 and options.key_heads % ways == 0
    product = sharding.columns(x_BLD) if splits else None
    inputs_BLGC, gate_BLGRV, log_decay, beta = self._projections(x_BLD, product)
    kernel_WGC = self._conv_kernel()
    if real_BL is not None:
      inputs_BLGC = jnp.where(real_BL[..., None, None], inputs_BLGC, 0)
      beta = jnp.where(real_BL[..., None, None], beta, 0)
      real = real_BL.reshape(*real_BL.shape, *[1] * (log_decay.ndim - 2))
      log_decay = jnp.where(real, log_decay, 0)
    inputs_BLGC, gate_BLGRV = checkpoint_name(
      (inputs_BLGC, gate_BLGRV), remat.INNER
    )
    if cache is not None:
      o_BLGRV, cache = self._with_cache(
        inputs_BLGC, kernel_WGC, log_decay, beta, real_BL, cache, layer, start
      )
    else:
      o_BLGRV = _over_mesh(
        options, inputs_BLGC, kernel_WGC, log_decay, beta, segments_BL
      )
    o_BLGRV = checkpoint_name(o_BLGRV, remat.ATTENTION)
    eps = options.norm_eps or self.norm_eps
    norm = rms_norm.RMSNorm((options.value_dim,), eps, name="norm")
    gate = GATES[options.gate]
    o_BLGRV = norm(o_BLGRV) * gate(gate_BLGRV.astype(jnp.float32))
    out = nn.DenseGeneral(
      x_BLD.shape[-1],
      axis=(-3, -2, -1),
      use_bias=False,
      dtype=self.dtype,
      kernel_init=kernels.initializer(self.out_init_std),
      dot_general=sharding.rows(B) if splits else None,
      name="out",
    )
    return out(o_BLGRV.astype(self.dtype)), cache

  @nn.nowrap
  def _projections(self, x_BLD: jax.Array, product: Any) -> tuple[Any, ...]:
    """(inputs of the convolution, gate, logarithm of the decay, beta)."""
    options = self.options
    G, R = options.key_heads, options.groups
    K, V = options.key_dim, options.value_dim

    general = functools.partial(
      nn.DenseGeneral,
      use_bias=False,
      dtype=self.dtype,
      kernel_init=kernels.initializer(self.init_std),
    )

    def dense(features: tuple[int, ...], name: str) -> jax.Array:
      return general(features, dot_general=product, name=name)(x_BLD)

    def through(rank: int, features: tuple[int, ...], name: str) -> jax.Array:
      down_BLM = general(rank, name=f"{name}_down")(x_BLD)
      columns = None if product is None else sharding.columns(down_BLM)
      return general(features, dot_general=columns, name=f"{name}_up")(down_BLM)

    q_BLGK, k_BLGK = dense((G, K), "query"), dense((G, K), "key")
    v_BLGRV = dense((G, R, V), "value")
    v_BLGC = v_BLGRV.reshape(*v_BLGRV.shape[:3], R * V)
    inputs_BLGC = jnp.concatenate([q_BLGK, k_BLGK, v_BLGC], axis=-1)
    if options.gate_rank is None:
      gate_BLGRV = dense((G, R, V), "gate")
    else:
      gate_BLGRV = through(options.gate_rank, (G, R, V), "gate")
    beta_BLGR = jax.nn.sigmoid(dense((G, R), "beta").astype(jnp.float32))
    if options.negative_eigenvalues:
      beta_BLGR *= 2
    log_rate_GR = self.param("log_rate", _initial_log_rate, (G, R))
    rate = -jnp.exp(log_rate_GR)
    if options.decay_rank is None:
      steps = dense((G, R), "decay").astype(jnp.float32)
      steps += self.param("time_step", _initial_time_step, (G, R))
    else:
      steps = through(options.decay_rank, (G, R, K), "decay")
      shape = (G, R, K)
      bias = self.param("channel_time_step", _initial_time_step, shape)
      steps = steps.astype(jnp.float32) + bias
      rate = rate[..., None]
    return inputs_BLGC, gate_BLGRV, rate * jax.nn.softplus(steps), beta_BLGR

  @nn.nowrap
  def _conv_kernel(self) -> jax.Array:
    """The kernels of queries, keys and values as one, (W, G, C)."""
    options = self.options
    W, G, R = options.conv_width, options.key_heads, options.groups
    bound = W**-0.5

    def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
      return jax.random.uniform(key, shape, dtype, -bound, bound)

    widths = {
      "query_conv": (options.key_dim,),
      "key_conv": (options.key_dim,),
      "value_conv": (R, options.value_dim),
    }
    parts = [
      kernels.Kernel((W, G, *width), init=init, name=name)()["kernel"]
      for name, width in widths.items()
    ]
    return jnp.concatenate([x.reshape(W, G, -1) for x in parts], axis=-1)

  @nn.nowrap
  def _with_cache(
    self,
    inputs_BLGC: jax.Array,
    kernel_WGC: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    real_BL: jax.Array | None,
    cache: recurrent_cache.States,
    layer: Any,
    start: Any,
  ) -> tuple[jax.Array, recurrent_cache.States]:
    """Continues the states of a cache."""
    options = self.options
    start = 0 if start is None else start
    last_BWGC, state = cache.layer(layer)
    joined, last_BWGC, is_new_B = causal_conv.with_last_inputs(
      inputs_BLGC, last_BWGC, real_BL, cache.read_B, start
    )
    y_BLGC = _convolved(options, joined, kernel_WGC, None)
    rule = _rule_inputs(options, y_BLGC, log_decay, beta, None)
    if is_new_B is not None:
      o, state = delta_rule.step(rule, state, is_new_B)
    else:
      backend = _backend(options, rule)
      o, state = delta_rule.chunked(rule, state, backend)
    return o, cache.with_layer(layer, last_BWGC, state)


def _over_mesh(
  options: Options,
  inputs_BLGC: jax.Array,
  kernel_WGC: jax.Array,
  log_decay: jax.Array,
  beta_BLGR: jax.Array,
  segments_BL: jax.Array | None,
) -> jax.Array:
  """Convolution and delta rule of whole texts: [B, L, G, R, V]."""
  B, L, G, _ = inputs_BLGC.shape
  W = options.conv_width
  places_BL = (
    None if segments_BL is None else masks.places_in_documents(segments_BL)
  )
  ways = sharding.length_ways(B, L)
  # A device needs the last inputs of the one before it, and no others.
  if ways == 1 or -(-L // ways) < W - 1:
    empty = jnp.zeros((B, W - 1, *inputs_BLGC.shape[2:]), inputs_BLGC.dtype)
    joined = jnp.concatenate([empty, inputs_BLGC], axis=1)
    y_BLGC = _convolved(options, joined, kernel_WGC, places_BL)
    rule = _rule_inputs(options, y_BLGC, log_decay, beta_BLGR, places_BL)
    backend = _backend(options, rule)
    return delta_rule.chunked(rule, delta_rule.empty_state(rule), backend)[0]

  def on_device(
    inputs: jax.Array, kernel: jax.Array, log_decay: Any, beta: Any, places: Any
  ) -> jax.Array:
    last = inputs[:, inputs.shape[1] - (W - 1) :]
    # The first device gets zeros.
    before = jax.lax.ppermute(
      last, _AXIS, [(i, i + 1) for i in range(ways - 1)]
    )
    joined = jnp.concatenate([before, inputs], axis=1)
    y = _convolved(options, joined, kernel, places)
    rule = _rule_inputs(options, y, log_decay, beta, places)
    return delta_rule.over_devices(rule, _AXIS, _backend(options, rule))

  mesh: Any = sharding.ambient(B)
  tensor = mesh.shape.get("tensor", 1)
  heads = "tensor" if tensor > 1 and G % tensor == 0 else None
  by_position = PartitionSpec(sharding.batch_axes(), _AXIS)
  by_head = PartitionSpec(sharding.batch_axes(), _AXIS, heads)
  arrays = inputs_BLGC, log_decay, beta_BLGR, places_BL
  more = -L % ways
  inputs, log_decay, beta, places = jax.tree.map(
    lambda x: jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2))), arrays
  )
  o_BLGRV = jax.shard_map(
    on_device,
    in_specs=(
      by_head,
      PartitionSpec(None, heads),
      by_head,
      by_head,
      by_position,
    ),
    out_specs=by_head,
    check_vma=False,
  )(inputs, kernel_WGC, log_decay, beta, places)
  return o_BLGRV[:, :L]


def _backend(options: Options, rule: delta_rule.Inputs) -> str:
  """The backend of the recurrence on each device."""
  B, L, *_, V = rule.v_BLGRV.shape
  call = delta_rule_kernel.Call(
    platform=sharding.device()[0],
    splits=sharding.splits(B),
    length=L,
    key_dim=rule.k_BLGK.shape[-1],
    value_dim=V,
    dtype=rule.v_BLGRV.dtype.name,
    by_channel=options.decay_rank is not None,
  )
  return delta_rule_kernel.choose(options.backend, call)


def _convolved(
  options: Options,
  joined: jax.Array,
  kernel_WGC: jax.Array,
  places_BL: jax.Array | None,
) -> jax.Array:
  """A depthwise causal convolution, and its activation: [B, L, G, C].

  Args:
    joined: the inputs, with W - 1 that come before them.
  """
  y_BLGC = causal_conv.convolved(joined, kernel_WGC, places_BL)
  activation = _ACTIVATIONS[options.activation]
  return activation(y_BLGC).astype(joined.dtype)


def _rule_inputs(
  options: Options,
  y_BLGC: jax.Array,
  log_decay: jax.Array,
  beta_BLGR: jax.Array,
  places_BL: jax.Array | None,
) -> delta_rule.Inputs:
  """Splits the convolution's output; scales queries and keys to length 1."""
  K, V = options.key_dim, options.value_dim
  y_BLGC = y_BLGC.astype(jnp.promote_types(y_BLGC.dtype, jnp.float32))
  q, k, v = jnp.split(y_BLGC, (K, 2 * K), axis=-1)

  def normalized(x: jax.Array) -> jax.Array:
    squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(squares + _L2_EPSILON)

  return delta_rule.Inputs(
    normalized(q) * K**-0.5,
    normalized(k),
    v.reshape(*v.shape[:3], options.groups, V),
    log_decay,
    beta_BLGR,
    None if places_BL is None else places_BL == 0,
  )


def _initial_log_rate(
  key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> jax.Array:
  return jnp.log(jax.random.uniform(key, shape, dtype, *_A_RANGE))


def _initial_time_step(
  key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> jax.Array:
  """Biases whose softplus is uniform in log space."""
  low, high = map(jnp.log, _TIME_STEP_RANGE)
  steps = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
  return steps + jnp.log(-jnp.expm1(-steps))
