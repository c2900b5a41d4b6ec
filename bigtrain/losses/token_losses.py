"""Losses of a language model's predictions, for tasks on text.

`model_losses` applies a model and its head to a batch. TokenTask has the loss
and the predict functions that tasks on text share, and adds teachers and the
losses of experts.

Axes: B batch, L length.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import model_flops, packed, trees
from bigtrain.arrays.types import Batch, Metrics, Variables
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_kwargs,
  check_number,
)
from bigtrain.losses import forward, linear_xent, teachers, token_divergences

# Weights that may follow a schedule, with limits of their values.
LIMITS = dict(
  load_balance=dict(least=0),
  router_z=dict(least=0),
  mtp_weight=dict(least=0),
)


class ModelLosses(NamedTuple):
  """Result of `model_losses`."""

  metrics: Metrics  # "loss" in nats and "accuracy", means over tokens.
  loss_BL: jax.Array  # float32 losses in nats, unweighted, without gradient.
  correct_BL: jax.Array  # float32, 1 where the target is the likeliest token.
  # Means over the layers with experts, see layers/moe.py.
  expert_stats: dict[str, Any] | None
  mutable: Variables  # The model's new mutable collections.
  # Losses and hits of modules that predict further tokens, see
  # models/layers/multi_token.py; in training only.
  further: Sequence[Metrics] = ()

  def with_further(self, metrics: Metrics, weight: float) -> Metrics:
    """Adds the mean loss of the modules, times a weight, to metrics.

    It is divided by the number of next-token targets, as in equation 24 of
    DeepSeek V3 (arXiv 2412.19437), although a module has no targets at the end
    of a document.
    """
    if not self.further:
      return metrics
    loss, total_weight = metrics["loss"]
    result = {"nll": metrics["loss"], **metrics}
    for number, own in enumerate(self.further, 1):
      loss += weight / len(self.further) * own["loss"][0]
      result |= {f"mtp_{name}/{number}": x for name, x in own.items()}
    return result | {"loss": (loss, total_weight)}

  def with_experts(
    self,
    load_balance: float,
    router_z: float,
    load_balance_over: str = "layers",
  ) -> Metrics:
    """Returns the metrics, with the losses and statistics of any experts.

    Two terms are added to "loss", and "nll" is the loss without them:
    "load_balance", the loss of Switch Transformers (arXiv 2101.03961, equation
    4), either averaged over the "layers" or computed from "all" layers' tokens
    together; and "router_z", the loss of ST-MoE (arXiv 2202.08906, equation 5).
    The first is a product of two means, so it depends on the number of
    microbatches.
    """
    key = "config.loss.load_balance_over"
    check_choice(key, load_balance_over, ("layers", "all"))
    if self.expert_stats is None:
      return self.metrics
    nll, weight = self.metrics["loss"]
    stats = dict(self.expert_stats)
    by_layer = stats.pop("by_layer")
    load_E, score_E = stats["load"], stats.pop("score")
    if load_balance_over == "all":
      stats["load_balance"] = len(load_E) * jnp.sum(load_E * score_E)
    extra = load_balance * stats["load_balance"]
    extra += router_z * stats["router_z"]
    loss = (nll + extra * weight, weight)
    result = self.metrics | {"nll": (nll, weight), "loss": loss}
    for name, value in stats.items():
      if name == "load":
        for e, load in enumerate(value):
          result[f"expert_load/{e}"] = (load * weight, weight)
      else:
        result[f"experts/{name}"] = (value * weight, weight)
    loads = jnp.stack([layer["load"] for layer in by_layer.values()])
    result["experts/peak"] = metrics.Loads(loads * weight, tuple(by_layer))
    for name in ("bias", "rounds"):
      of_layers = [layer[name] for layer in by_layer.values() if name in layer]
      if of_layers:
        largest = metrics.Max.of(jnp.stack(of_layers))
        result[f"experts/max_{name}"] = largest
    return result


def model_losses(
  variables: Variables,
  inputs: Batch,
  targets_BL: jax.Array,
  weight_BL: jax.Array,
  rng: jax.Array | None = None,
  *,
  model: Any,
  train: bool = False,
  head: Callable[..., linear_xent.TokenLosses] | None = None,
  **options: Any,
) -> ModelLosses:
  """Applies a model without its head, and then the loss of a head.

  Args:
    head: the loss; by default `head_losses`, which gets the options.
  """
  (_, out), mutable = forward.apply(
    model, variables, rng, train, **inputs, head=False, collect=("step_sums",)
  )
  own_head = head_losses(variables, model, **options)
  head = head or own_head
  total, loss_BL, correct_BL = head(out["pre_logits"], targets_BL, weight_BL)
  by_token: Metrics = {
    "loss": (total, jnp.sum(weight_BL)),
    "accuracy": metrics.pair(correct_BL, weight_BL),
  }
  further = [
    _losses_ahead(own_head, x_BLD, inputs, targets_BL, weight_BL, number)
    for number, x_BLD in enumerate(out.get("mtp", ()), 1)
  ]
  return ModelLosses(
    by_token, loss_BL, correct_BL, out.get("moe"), mutable, further
  )


def _losses_ahead(
  head: Callable[..., linear_xent.TokenLosses],
  x_BLD: jax.Array,
  inputs: Batch,
  targets_BL: jax.Array,
  weight_BL: jax.Array,
  number: int,
) -> Metrics:
  """Losses of the targets `number` positions ahead in the same document."""
  segments_BL = inputs.get("segments")
  targets_BL = packed.ahead(targets_BL, segments_BL, number)
  weight_BL = packed.ahead(weight_BL, segments_BL, number)
  total, _, correct_BL = head(x_BLD, targets_BL, weight_BL)
  return {
    "loss": (total, jnp.sum(weight_BL)),
    "accuracy": metrics.pair(correct_BL, weight_BL),
  }


class TokenTask(NamedTuple):
  """The functions that tasks on text have in common."""

  inputs: Callable[[Batch], Batch]  # The model's arguments.
  weights: Callable[[Batch], jax.Array]  # The targets', [B, L].

  def loss_fn(
    self,
    variables: Variables,
    batch: Batch,
    rng: jax.Array | None,
    *,
    model: Any,
    train: bool,
    teacher: Any = None,
    distill: Mapping[str, Any] | None = None,
    label_smoothing: float = 0.0,
    label_smoothing_over: str = "all",
    z_loss: float = 0.0,
    load_balance: float = 0.01,
    router_z: float = 0.001,
    load_balance_over: str = "layers",
    mtp_weight: float = 0.3,
    chunk: int | None = None,
    only_weighted: bool = False,
  ) -> tuple[Metrics, Variables]:
    """Computes cross-entropy and accuracy of the targets, by token.

    Args:
      distill: beta, temperature, nll and weights of token_divergences.taught,
        whose loss replaces the cross-entropy if there is a teacher.
      label_smoothing: share of a target that is spread over the vocabulary.
      label_smoothing_over: "all" of it or the "others".
      z_loss: weight of the squared log of the softmax's denominator, see
        losses.cross_entropy.softmax_xent; 1e-4 is usual.
      load_balance: weight of Switch Transformers' load-balancing loss.
      load_balance_over: "layers" for the mean over the layers, or "all" for all
        layers' tokens together.
      router_z: weight of the loss that keeps the routers' logits small.
      mtp_weight: weight of the losses of config.model.mtp.
      chunk: positions of each example at a time, see losses.linear_xent.
      only_weighted: whether to compute logits only for targets with a loss,
        which pays if they are few, as in answers about pictures.

    Returns:
      (metrics "loss" in nats and "accuracy", with "loss_mask" the number of
      "supervised_tokens", with a teacher "cross_entropy", with experts those of
      ModelLosses.with_experts; the new mutable collections).
    """
    own = {name: x for name, x in variables.items() if name != "teacher"}
    known_teachers = self._teachers(variables, batch, model, teacher)
    has_other_losses = bool(label_smoothing or z_loss)
    if has_other_losses if known_teachers else distill is not None:
      raise ConfigError(
        "config.loss.distill: expected config.teacher, or teacher_ids and "
        "teacher_logits in the data, and neither label_smoothing nor z_loss."
      )
    head = None
    if known_teachers:
      head = _taught_head(own, model, known_teachers, chunk, distill or {})
    losses = self.losses(
      own,
      batch,
      rng=rng,
      model=model,
      train=train,
      head=head,
      chunk=chunk,
      label_smoothing=label_smoothing,
      label_smoothing_over=label_smoothing_over,
      z_loss=z_loss,
      only_weighted=only_weighted,
    )
    result = losses.with_experts(load_balance, router_z, load_balance_over)
    result = losses.with_further(result, mtp_weight)
    if "loss_mask" in batch:
      count = jnp.sum(self.weights(batch) != 0, dtype=jnp.float32)
      result = result | {"supervised_tokens": metrics.Sum(count)}
    if known_teachers:
      xent = metrics.pair(losses.loss_BL, self.weights(batch))
      result = result | {"cross_entropy": xent}
    return result, losses.mutable

  def _teachers(
    self, variables: Variables, batch: Batch, model: Any, teacher: Any
  ) -> dict[str, token_divergences.Teacher]:
    """The teachers of a batch by name; "file" for a file of likely tokens."""
    result: dict[str, token_divergences.Teacher] = {}
    for name, their_model, fixed in teachers.by_name(teacher, variables):
      check_number(
        f"config.teacher: vocab_size of {name!r}",
        their_model.vocab_size,
        least=model.vocab_size,
        most=model.vocab_size,
      )
      with model_flops.share(1, 3):  # Without a backward pass.
        _, out = their_model.apply(fixed, **self.inputs(batch), head=False)
      result[name] = out["pre_logits"], _head_logits(fixed, their_model)
    if "teacher_ids" in batch:
      result["file"] = token_divergences.from_file(
        batch["teacher_ids"], batch["teacher_logits"], model.vocab_size
      )
    return result

  def losses(
    self, variables: Variables, batch: Batch, **options: Any
  ) -> ModelLosses:
    weight_BL = self.weights(batch)
    targets_BL = known_targets(options["model"], batch["targets"])
    return model_losses(
      variables, self.inputs(batch), targets_BL, weight_BL, **options
    )

  def logits(
    self, variables: Variables, batch: Batch, *, model: Any
  ) -> jax.Array:
    """Returns float32 [B, L, V], each target's logits given those before it."""
    return model.apply(variables, **self.inputs(batch), train=False)[0]

  def score(
    self,
    variables: Variables,
    batch: Batch,
    *,
    model: Any,
    chunk: int | None = None,
  ) -> dict[str, jax.Array]:
    """Scores the targets that have a loss, such as those of an answer.

    Returns:
      A dict of "log_likelihood", float32 [B], their sum in nats; "tokens",
      float32 [B], their number; and "greedy", bool [B], whether greedy decoding
      gives all of them.
    """
    losses = self.losses(variables, batch, model=model, chunk=chunk)
    selected_BL = self.weights(batch) != 0
    loss_BL = jnp.where(selected_BL, losses.loss_BL, 0.0)
    return {
      "log_likelihood": -jnp.sum(loss_BL, axis=1),
      "tokens": jnp.sum(selected_BL.astype(jnp.float32), axis=1),
      "greedy": jnp.all((losses.correct_BL == 1) | ~selected_BL, axis=1),
    }

  def perplexity(
    self,
    variables: Variables,
    batch: Batch,
    *,
    model: Any,
    chunk: int | None = None,
  ) -> Metrics:
    """Computes "loss" in nats, "accuracy" and, with "num_bytes", "bytes"."""
    result = self.losses(variables, batch, model=model, chunk=chunk).metrics
    if "num_bytes" not in batch:
      return result
    num_bytes = batch["num_bytes"]
    real_B = metrics.example_weights(batch, num_bytes)
    total, _ = metrics.pair(num_bytes, real_B)
    return result | {"bytes": (total, jnp.ones(()))}


def known_targets(model: Any, targets_BL: jax.Array) -> jax.Array:
  """Targets that the head knows, where those without a loss may be others."""
  if hasattr(model, "known_targets"):
    return model.known_targets(targets_BL)
  return targets_BL


def head_losses(
  variables: Variables, model: Any, temperature: float = 1.0, **options: Any
) -> Callable[..., linear_xent.TokenLosses]:
  """linear_softmax_xent of a model's head: (hidden, targets, weights)."""
  kernel_DV, bias_V, softcap = _head(variables, model)

  # The logits are hidden @ kernel + bias, capped. Dividing hidden states, bias
  # and cap divides the logits.
  def divided(x: Any) -> Any:
    return x if x is None or temperature == 1 else x / temperature

  def losses(hidden_BLD: jax.Array, *args: Any) -> linear_xent.TokenLosses:
    return linear_xent.linear_softmax_xent(
      divided(hidden_BLD),
      kernel_DV,
      *args,
      bias_V=divided(bias_V),
      softcap=divided(softcap),
      dtype=model.dtype,
      **options,
    )

  return losses


def _taught_head(
  variables: Variables,
  model: Any,
  known_teachers: dict[str, token_divergences.Teacher],
  chunk: int | None,
  distill: Mapping[str, Any],
) -> Callable[..., linear_xent.TokenLosses]:
  """The loss that replaces the cross-entropy if there are teachers."""
  check_kwargs(token_divergences.taught, distill, "config.loss.distill")
  return token_divergences.taught(
    _head_logits(variables, model),
    known_teachers,
    model.vocab_size,
    chunk,
    **distill,
  )


def _head_logits(
  variables: Variables, model: Any
) -> Callable[[jax.Array], jax.Array]:
  """The function from hidden states to logits in float32."""
  kernel_DV, bias_V, softcap = _head(variables, model)

  def logits(hidden: jax.Array) -> jax.Array:
    x = jnp.matmul(
      hidden.astype(model.dtype),
      kernel_DV.astype(model.dtype),
      preferred_element_type=jnp.float32,
    )
    if bias_V is not None:
      x = x + bias_V
    if softcap is not None:
      x = softcap * jnp.tanh(x / softcap)
    return x

  return logits


def _head(variables: Variables, model: Any) -> tuple[jax.Array, Any, Any]:
  """(kernel, bias or None, cap of the logits or None) of a model's head."""
  params = trees.merge(variables["params"], variables.get("base", {}))
  bias_V = None
  if hasattr(model, "head_bias"):
    bias_V = model.head_bias(params)
  softcap = getattr(model, "logits_softcap", None)
  return model.head_kernel(params), bias_V, softcap


def real_positions(
  weight_BL: jax.Array, segments_BL: jax.Array | None = None
) -> jax.Array:
  """Bool [B, L]: whether a document has a target with a loss here or later."""
  L = weight_BL.shape[1]
  own_BL = jnp.where(weight_BL != 0, jnp.arange(L), L)
  # Position of the next target with a loss, L if there is none.
  next_BL = jax.lax.cummin(own_BL, axis=1, reverse=True)
  real_BL = next_BL < L
  if segments_BL is not None:
    index_BL = jnp.minimum(next_BL, L - 1)
    next_segments_BL = jnp.take_along_axis(segments_BL, index_BL, axis=1)
    real_BL &= next_segments_BL == segments_BL
  return real_BL
