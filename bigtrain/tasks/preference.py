"""Learns which answers are preferred, from pairs or judgements: DPO and others.

The losses are in losses/preferences.py. If a loss needs a reference model, it
is the first of these that exists: the feature "reference", config.teacher, the
base of config.adapters. Dropout is off, so that both models agree at the start.
With kind="reward", a model with config.model.num_classes=1 learns rewards.

Axes: B batch, L length; 2 for the chosen and the rejected answer; K answers per
example, 2 in pairs and 1 in judgements.

A batch of pairs has
  "tokens", "targets": int [B, 2, L], prompt and answer; the token after each.
  "loss_mask": [B, 2, L], for the targets in the answer the weight of the pair.
    KTO's answers may be absent, with a mask of 0.
  "reference": optional float [B, 2], log-probabilities of the answers under a
    reference model, computed in advance.
  "margin": optional float [B], smallest difference of the rewards.
  "image", "shapes", "prefix": optional, see losses/answers.py.
A batch of judgements, for kind="kto", has
  "tokens", "targets", "loss_mask": as above, [B, 1, L].
  "label": int [B], 1 if the answer is wanted, and 0 if it is not.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import model_flops, picture_features
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.config.errors import ConfigError
from bigtrain.losses import answers, forward, preferences, token_losses

_FROZEN = ("teacher", "base")


def inputs(batch: Batch) -> Batch:
  return answers.inputs(batch)


def vocab_sizes(model: Any) -> dict[str, int]:
  number = getattr(model, "num_ids", model.vocab_size)
  return {"tokens": number, "targets": number}


def loss_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  teacher: Any = None,
  kind: str | None = None,
  beta: float = 0.1,
  label_smoothing: float = 0.0,
  gamma: float = 0.5,
  sft: float | None = None,
  desirable: float = 1.0,
  undesirable: float = 1.0,
  center: float = 0.0,
  chunk: int | None = None,
) -> tuple[Metrics, Variables]:
  """Computes a loss of losses/preferences.py, where the options are described.

  Args:
    kind: a name in preferences.KINDS, or "reward"; by default "sigmoid" (DPO),
      and for judgements "kto".
    sft: 1 by default for cpo and orpo, else 0.
    center: of "reward": weight of the squared sum of a pair's rewards.
    chunk: positions of each example at a time, see losses.linear_xent.

  Returns:
    (means over pairs: "loss", "accuracy" (whether the chosen answer has the
    larger reward), "margin" and rewards, or `_judged_metrics`; the
    mutable collections).
  """
  del rng, train
  kind = _checked_kind(kind, batch)
  options = preferences.read_options(
    kind,
    "config.loss",
    sft,
    beta=beta,
    gamma=gamma,
    label_smoothing=label_smoothing,
    desirable=desirable,
    undesirable=undesirable,
  )
  own = {name: x for name, x in variables.items() if name != "teacher"}
  weight_B = metrics.example_weights(batch, batch["tokens"])
  weight_B *= jnp.max(batch["loss_mask"], axis=(1, 2))
  mutable = {n: x for n, x in own.items() if n not in ("params", *_FROZEN)}
  if kind == "reward":
    reward_B2, collected = _rewards(own, batch, model)
    return _reward_loss(reward_B2, batch, weight_B, center), mutable | collected
  reference_B2, drift = _by_reference(
    kind, variables, batch, model=model, teacher=teacher, chunk=chunk
  )
  tokens_BK = jnp.sum(batch["loss_mask"] != 0, axis=2)
  tokens_B2 = _as_pairs(tokens_BK.astype(jnp.float32), batch)

  def total(sums_BK: jax.Array) -> tuple[jax.Array, preferences.Pairs]:
    sums_B2 = _as_pairs(sums_BK, batch)
    pairs = preferences.Pairs(sums_B2, tokens_B2, reference_B2, drift)
    loss_B = preferences.losses(kind, pairs, options)
    return jnp.sum(jnp.where(weight_B == 0, 0.0, loss_B * weight_B)), pairs

  log_probs = answers.log_probs(model, own, batch, chunk)
  mutable |= log_probs.collected
  sums_BK = jnp.sum(log_probs.log_prob_BKL, axis=2)
  (loss, pairs), grad_BK = jax.value_and_grad(total, has_aux=True)(sums_BK)
  loss = log_probs.with_gradient(loss, grad_BK[..., None])
  number = jnp.sum(weight_B)
  if kind == "kto":  # A mean over answers, as in TRL.
    number = jnp.sum((tokens_B2 > 0) * weight_B[:, None])
  reward_B2 = options.beta * _implicit_rewards(kind, pairs)
  names = "log_prob/chosen", "log_prob/rejected"
  args = dict(zip(names, pairs.sums_B2.T)), weight_B
  if "label" in batch:
    judged = _judged_metrics(reward_B2, options.beta, drift, *args, batch)
    return {"loss": (loss, number), **judged}, mutable
  return _metrics((loss, number), reward_B2, *args), mutable


def _checked_kind(kind: str | None, batch: Batch) -> str:
  if "label" not in batch:
    return "sigmoid" if kind is None else kind
  if kind not in (None, "kto"):
    raise ConfigError(
      f"config.loss.kind={kind!r} compares two answers, and rows with a label "
      "have one; expected kind='kto'."
    )
  if len(batch["tokens"]) < 2:
    raise ConfigError(
      "config.loss.kind='kto' compares answers with those to other prompts: "
      "expected at least two examples in a microbatch."
    )
  return "kto"


def _as_pairs(x_BK: jax.Array, batch: Batch) -> jax.Array:
  """Values of answers as [B, 2]; judgements have 0 in the other column."""
  if "label" not in batch:
    return x_BK
  is_own_B2 = batch["label"][:, None] == jnp.array([1, 0])
  return jnp.where(is_own_B2, x_BK, 0.0)


def _by_reference(
  kind: str,
  variables: Variables,
  batch: Batch,
  *,
  model: Any,
  teacher: Any,
  chunk: int | None,
) -> tuple[jax.Array | None, jax.Array]:
  """Log-probabilities [B, 2] by the reference, and KTO's drift.

  They are None and 0 for methods without a reference.
  """
  drift = jnp.zeros(())
  if kind not in preferences.WITH_REFERENCE:
    return None, drift
  own = {name: x for name, x in variables.items() if name != "teacher"}
  score = functools.partial(_scores, chunk=chunk)
  given = "reference" in batch and kind != "kto"
  reference = answers.reference(
    variables, model, teacher, f"kind={kind!r}", given
  )
  with model_flops.share(1, 3):  # It needs no backward pass.
    reference_BK = batch.get("reference")
    if reference_BK is None:
      reference_BK = score(*reference, batch)
    if kind == "kto":
      drift = _drift(score, (model, own), reference, batch)
  return _as_pairs(reference_BK, batch), drift


def _implicit_rewards(kind: str, pairs: preferences.Pairs) -> jax.Array:
  """The scores [B, 2] of both answers that the loss compares, before beta."""
  if kind in preferences.WITH_REFERENCE:
    return pairs.ratio_B2
  return pairs.sums_B2 if kind == "cpo" else pairs.mean(pairs.sums_B2)


def _reward_loss(
  reward_B2: jax.Array, batch: Batch, weight_B: jax.Array, center: float
) -> Metrics:
  loss_B = preferences.reward_losses(reward_B2, batch.get("margin", 0), center)
  loss = metrics.pair(loss_B, weight_B)
  return _metrics(loss, reward_B2, {}, weight_B)


def _metrics(
  loss: metrics.Pair,
  reward_B2: jax.Array,
  others: dict[str, jax.Array],
  weight_B: jax.Array,
) -> Metrics:
  margin_B = reward_B2[:, 0] - reward_B2[:, 1]
  by_pair = {
    "accuracy": (margin_B > 0).astype(jnp.float32),
    "margin": margin_B,
    "reward/chosen": reward_B2[:, 0],
    "reward/rejected": reward_B2[:, 1],
    **others,
  }
  return {
    "loss": loss,
    **{name: metrics.pair(x_B, weight_B) for name, x_B in by_pair.items()},
  }


def _judged_metrics(
  reward_B2: jax.Array,
  beta: float,
  drift: jax.Array,
  log_probs: dict[str, jax.Array],
  weight_B: jax.Array,
  batch: Batch,
) -> Metrics:
  """Metrics of judgements, means over the wanted or the unwanted answers.

  "kl" is KTO's reference point, as a log-ratio. For "accuracy", the reward of a
  wanted answer should be above this point, and that of an unwanted one below.
  """
  kl = jnp.maximum(drift, 0.0)
  point = beta * kl
  is_wanted_B = batch["label"] == 1
  reward_B = jnp.sum(reward_B2, axis=1)  # The other column is 0.
  is_right_B = jnp.where(is_wanted_B, reward_B > point, reward_B < point)
  by_label = {
    "reward/chosen": reward_B2[:, 0],
    "reward/rejected": reward_B2[:, 1],
    **log_probs,
  }
  result: Metrics = {
    "accuracy": metrics.pair(is_right_B.astype(jnp.float32), weight_B),
    "kl": metrics.pair(jnp.broadcast_to(kl, weight_B.shape), weight_B),
  }
  for name, x_B in by_label.items():
    is_own_B = is_wanted_B if name.endswith("chosen") else ~is_wanted_B
    own_weight_B = weight_B * is_own_B
    # A log step or a small data set may have only wanted answers, or none.
    count = jnp.any(own_weight_B > 0).astype(jnp.float32)
    result[name] = metrics.Occasional(metrics.pair(x_B, own_weight_B), count)
  return result


def rewards(variables: Variables, batch: Batch, *, model: Any) -> jax.Array:
  """Rewards of all answers, float32 [B, K], computed from their whole texts."""
  return _rewards(variables, batch, model)[0]


def _rewards(
  variables: Variables, batch: Batch, model: Any
) -> tuple[jax.Array, Variables]:
  """The rewards, and what forward.apply_unchanged returns beside them."""
  if getattr(model, "num_classes", None) != 1:
    raise ConfigError(
      "config.loss.kind='reward': expected config.model.num_classes=1."
    )
  tokens = batch["tokens"][..., :1]
  texts_XL = answers.flat(jnp.concatenate([tokens, batch["targets"]], axis=-1))
  real_XL = token_losses.real_positions(answers.flat(batch["loss_mask"]))
  real_XL = jnp.pad(real_XL, ((0, 0), (1, 0)), constant_values=True)
  (logits_X1, _), collected = forward.apply_unchanged(
    model,
    variables,
    texts_XL,
    real=real_XL,
    **answers.prompts(batch),
    train=False,
  )
  return logits_X1.reshape(batch["targets"].shape[:2]), collected


def _scores(
  model: Any, variables: Variables, batch: Batch, *, chunk: int | None
) -> jax.Array:
  """Log-probabilities [B, K] of the answers, without a gradient."""
  variables = jax.lax.stop_gradient(variables)
  log_probs = answers.log_probs(model, variables, batch, chunk)
  return jnp.sum(log_probs.log_prob_BKL, axis=2)


def _drift(
  score: Any,
  own: tuple[Any, Variables],
  reference: tuple[Any, Variables],
  batch: Batch,
) -> jax.Array:
  """KTO's estimate of the divergence, from answers to other prompts."""
  other = _mismatched(batch)
  ratio_B2 = score(*own, other) - score(*reference, other)
  present_B2 = jnp.any(other["loss_mask"] != 0, axis=2)
  present_B2 &= metrics.example_weights(batch, batch["tokens"])[:, None] != 0
  total = jnp.sum(jnp.where(present_B2, ratio_B2, 0.0))
  return total / jnp.maximum(jnp.sum(present_B2), 1)


def _mismatched(batch: Batch) -> dict[str, jax.Array]:
  """Pairs each prompt with the answer of the previous example."""
  tokens, mask = batch["tokens"], batch["loss_mask"] != 0
  L = tokens.shape[-1]
  texts = jnp.concatenate([tokens, batch["targets"][..., -1:]], axis=-1)
  # An answer is at positions first <= i < last of its text.
  place = jnp.arange(L)
  first = jnp.min(jnp.where(mask, place, L), axis=-1, keepdims=True) + 1
  last = jnp.max(jnp.where(mask, place + 1, 0), axis=-1, keepdims=True) + 1
  number = jnp.roll(jnp.maximum(last - first, 0), 1, axis=0)
  index = jnp.arange(L + 1) - first  # In the answer; negative in the prompt.
  others = jnp.take_along_axis(
    jnp.roll(texts, 1, axis=0),
    jnp.clip(index + jnp.roll(first, 1, axis=0), 0, L),
    axis=-1,
  )
  within = (index >= 0) & (index < number)
  texts = jnp.where(index < 0, texts, jnp.where(within, others, 0))
  return {
    **picture_features.of_prompts(batch),
    "tokens": texts[..., :-1],
    "targets": texts[..., 1:],
    "loss_mask": within[..., 1:].astype(jnp.float32),
  }


def predict_fns(model: Any, teacher: Any = None) -> dict[str, PredictFn]:
  """Functions for evaluators: metrics, rewards, and the reference's feature."""

  def reference(
    variables: Variables, batch: Batch, chunk: int | None = None
  ) -> dict[str, jax.Array]:
    frozen_model, frozen = answers.reference(
      variables, model, teacher, "kind='sigmoid'"
    )
    return {"reference": _scores(frozen_model, frozen, batch, chunk=chunk)}

  return {
    "preference": forward.metrics_fn(loss_fn, model=model, teacher=teacher),
    "rewards": functools.partial(rewards, model=model),
    "reference": reference,
  }
