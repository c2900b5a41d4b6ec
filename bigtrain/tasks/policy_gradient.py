"""Learns from the rewards of answers that the model writes: GRPO and others.

The losses are in losses/rewards.py. Answers are written with the weights of the
step (objective/rollouts.py). The reference model for `beta` is config.teacher
or, with config.adapters, the base. Dropout is off.

Axes: B prompts; G answers to a prompt; P, L, T tokens; X = B x G.

A batch of the input has "prompt" int [B, P], padded at the end, and
"prompt_length" int [B]. For some models it also has pictures, "image" and
"shapes", as in language modeling, and "prefix" int [B], the number of leading
tokens that see each other. From these, `rollout` makes
  "tokens", "targets": int [B, G, L], prompt and answer; the token after each.
  "loss_mask": [B, G, L], 1 for the targets in the answer.
  "log_probs": float32 [B, G, L], of these targets when they were drawn.
  "truncated": float32 [B, G], 1 for an answer without an end.
  "prefix": int [B, G].
Pictures stay in the batch. With tools, `next_turn` follows, and the batch also
has "turns", "tool_calls" and "failed_tools", float32 [B, G]; results of tools
have no loss. The source adds "reward" and "failed_rewards", float32 [B, G]. If
several updates use the same answers, `score` computes "old_log_probs" float32
[B, G, L] with the weights that wrote them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain import metrics
from bigtrain.arrays import model_flops, picture_features
from bigtrain.arrays.types import Batch, Metrics, PredictFn, Variables
from bigtrain.config.errors import ConfigError, check_choice, check_number
from bigtrain.losses import answers, rewards
from bigtrain.tasks import language_modeling


def inputs(batch: Batch) -> Batch:
  if "loss_mask" in batch:
    return answers.inputs(batch)
  # Features that the input makes, before a rollout.
  return {"tokens": batch["prompt"], **answers.prompts(batch)}


def vocab_sizes(model: Any) -> dict[str, int]:
  return {"prompt": getattr(model, "num_ids", model.vocab_size)}


def rollout(
  variables: Variables,
  batch: Batch,
  rng: jax.Array,
  *,
  model: Any,
  eos_ids: Sequence[int],
  samples: int = 8,
  max_new: int = 64,
  temperature: float = 1.0,
) -> dict[str, jax.Array]:
  """Writes `samples` answers to each prompt, of up to `max_new` tokens."""
  check_number("config.loss.samples", samples, least=2, whole=True)
  check_number("config.loss.max_new", max_new, least=1, whole=True)
  check_number("config.loss.temperature", temperature, above=0)
  B, P = batch["prompt"].shape
  G = samples
  if model.max_len is not None and P + max_new > model.max_len:
    raise ConfigError(
      f"config.loss.max_new={max_new}: expected at most {model.max_len - P}, "
      f"the model's max_len={model.max_len} without the prompts' length={P}."
    )
  place_T = jnp.arange(P + max_new)
  length_X1 = jnp.repeat(batch["prompt_length"], G, axis=0)[:, None]
  prompt_XP = jnp.repeat(batch["prompt"], G, axis=0)
  prompts = {
    "tokens": jnp.where(place_T[:P] < length_X1, prompt_XP, -1),
    "sample": jnp.arange(B * G) % G,
    **picture_features.of_prompts(batch),
  }
  text_XT, log_probs_XT = language_modeling.generate(
    variables,
    prompts,
    model=model,
    max_new=max_new,
    eos_id=eos_ids,
    pad_id=-1,
    temperature=temperature,
    seed=jax.random.bits(rng),
    whole=True,
  )
  # An answer ends after `max_new` tokens, even where there is more room.
  is_answer_XT = (place_T >= length_X1) & (place_T < length_X1 + max_new)
  new_XT = is_answer_XT & (text_XT >= 0)
  text_XT = jnp.where(new_XT | (place_T < length_X1), text_XT, 0)
  ends_XT = new_XT & jnp.isin(text_XT, jnp.asarray(eos_ids, jnp.int32))
  made = {
    "tokens": text_XT[:, :-1],
    "targets": text_XT[:, 1:],
    "loss_mask": new_XT[:, 1:].astype(jnp.float32),
    "log_probs": jnp.where(new_XT, log_probs_XT, 0.0)[:, 1:],
    "truncated": 1.0 - jnp.any(ends_XT, axis=1),
  }
  if "prefix" in batch:
    made["prefix"] = jnp.repeat(batch["prefix"], G, axis=0)
  result = {name: x.reshape(B, G, *x.shape[1:]) for name, x in made.items()}
  return result | picture_features.of(batch)


def next_turn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array,
  *,
  model: Any,
  eos_ids: Sequence[int],
  temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """Continues texts "tokens" [B, G, T], each after its first "length" [B, G].

  Returns the tokens, with -1 after an end and for texts of length 0, and the
  log-probabilities of the new ones, both [B, G, T].
  """
  B, G, T = batch["tokens"].shape
  is_given_BGT = jnp.arange(T) < batch["length"][..., None]
  prompts = {
    "tokens": jnp.where(is_given_BGT, batch["tokens"], -1).reshape(B * G, T),
    "sample": jnp.arange(B * G) % G,
    **picture_features.of_prompts(batch),
  }
  text_XT, log_probs_XT = language_modeling.generate(
    variables,
    prompts,
    model=model,
    max_new=0,  # The texts already have room for the new tokens.
    eos_id=eos_ids,
    pad_id=-1,
    temperature=temperature,
    seed=jax.random.bits(rng),
    whole=True,
  )
  return text_XT.reshape(B, G, T), log_probs_XT.reshape(B, G, T)


def score(
  variables: Variables,
  batch: Batch,
  rng: jax.Array,
  *,
  model: Any,
  eos_ids: Sequence[int],
  temperature: float = 1.0,
  chunk: int | None = None,
) -> jax.Array:
  """Log-probabilities of answers as the loss computes them, float32 [B, G, L].

  The sampler rounds differently, by more than narrow bounds of a ratio allow.
  """
  del rng, eos_ids
  own = {name: x for name, x in variables.items() if name != "teacher"}
  result = answers.log_probs(model, own, batch, chunk, temperature)
  return result.log_prob_BKL


def loss_fn(
  variables: Variables,
  batch: Batch,
  rng: jax.Array | None,
  *,
  model: Any,
  train: bool,
  teacher: Any = None,
  kind: str = "grpo",
  samples: int = 8,
  max_new: int = 64,
  temperature: float = 1.0,
  beta: float = 0.0,
  epsilon: float | None = None,
  epsilon_high: float | None = None,
  chunk: int | None = None,
) -> tuple[Metrics, Variables]:
  """Computes a loss of losses/rewards.py, which describes `kind` and `beta`.

  Metrics are means over answers and prompts, except "log_prob_difference", the
  largest difference between sampler and loss. For `chunk` see
  losses.linear_xent.

  Args:
    epsilon, epsilon_high: bounds of the ratio of probabilities if several
      updates use the same answers, see rewards.ratio_bounds.
  """
  del rng, train, samples
  check_choice("config.loss.kind", kind, rewards.KINDS)
  check_number("config.loss.beta", beta, least=0)
  bounds = rewards.ratio_bounds(kind, epsilon, epsilon_high)
  mask_BGL, reward_BG = batch["loss_mask"] != 0, batch["reward"]
  weight_B = metrics.example_weights(batch, reward_BG)
  real_BGL = mask_BGL & (weight_B[:, None, None] != 0)

  own = {name: x for name, x in variables.items() if name != "teacher"}
  log_probs_of = functools.partial(
    answers.log_probs, batch=batch, chunk=chunk, temperature=temperature
  )
  log_probs = log_probs_of(model, own)
  log_prob_BGL = log_probs.log_prob_BKL
  result: Metrics = {}
  reference_BGL = None
  if beta:
    frozen_model, frozen = answers.reference(
      variables, model, teacher, f"beta={beta}"
    )
    with model_flops.share(1, 3):  # Without a backward pass.
      reference = log_probs_of(frozen_model, frozen)
      reference_BGL = jax.lax.stop_gradient(reference.log_prob_BKL)
    kl_BGL = rewards.divergence(log_prob_BGL, reference_BGL)
    result["kl"] = metrics.pair(kl_BGL, real_BGL)

  loss_of = functools.partial(
    rewards.loss,
    kind,
    mask_BGL=mask_BGL,
    reward_BG=reward_BG,
    weight_B=weight_B,
    max_new=max_new,
    old_BGL=batch.get("old_log_probs"),
    bounds=bounds,
    reference_BGL=reference_BGL,
    beta=beta,
  )
  (total, number), grad_BGL = jax.value_and_grad(loss_of, has_aux=True)(
    log_prob_BGL
  )
  result["loss"] = (log_probs.with_gradient(total, grad_BGL), number)
  result |= _answer_metrics(batch, log_prob_BGL, real_BGL, weight_B)
  if "old_log_probs" in batch:
    if kind == "rloo" and reference_BGL is not None:
      reward_BG = rewards.with_divergence(
        reward_BG, batch["old_log_probs"], reference_BGL, beta
      )
    result |= _clipping(kind, batch, log_prob_BGL, real_BGL, reward_BG, bounds)
  mutable = {
    name: x for name, x in own.items() if name not in ("params", "base")
  }
  return result, mutable | log_probs.collected


def _answer_metrics(
  batch: Batch,
  log_prob_BGL: jax.Array,
  real_BGL: jax.Array,
  weight_B: jax.Array,
) -> Metrics:
  std_B = jnp.std(batch["reward"], axis=1, ddof=1)
  by_answer = weight_B[:, None]
  length_BG = jnp.sum(batch["loss_mask"] != 0, axis=2)
  # After the first update with a set of answers, the weights are no longer
  # those that wrote them.
  own_BGL = batch.get("old_log_probs", log_prob_BGL)
  difference_BGL = jnp.abs(own_BGL - batch["log_probs"])
  turns: Metrics = {}
  if "turns" in batch:
    turns = {
      "turns": metrics.pair(batch["turns"], by_answer),
      "tool_calls": metrics.pair(batch["tool_calls"], by_answer),
      "failed_tools": metrics.Faults.of(batch["failed_tools"], by_answer),
    }
  return turns | {
    "reward": metrics.pair(batch["reward"], by_answer),
    "reward_std": metrics.pair(std_B, weight_B),
    "zero_advantage": metrics.pair(std_B == 0, weight_B),
    "length": metrics.pair(length_BG, by_answer),
    "truncated": metrics.pair(batch["truncated"], by_answer),
    "failed_rewards": metrics.Faults.of(batch["failed_rewards"], by_answer),
    "log_prob_difference": metrics.Max.of(difference_BGL, real_BGL),
  }


def _clipping(
  kind: str,
  batch: Batch,
  log_prob_BGL: jax.Array,
  real_BGL: jax.Array,
  reward_BG: jax.Array,
  bounds: tuple[float, float],
) -> Metrics:
  """Shares of tokens, or of answers, whose ratio is clipped."""
  low, high = rewards.clipped(
    kind, log_prob_BGL, batch["old_log_probs"], real_BGL, reward_BG, bounds
  )
  if low.shape[2] == 1:  # One ratio for a whole answer.
    real_BGL = jnp.any(real_BGL, axis=2, keepdims=True)
  return {
    "clipped_low": metrics.pair(low, real_BGL),
    "clipped_high": metrics.pair(high, real_BGL),
  }


def predict_fns(model: Any, teacher: Any = None) -> dict[str, PredictFn]:
  """Predict functions of language models, for "tokens" and "targets"."""
  del teacher
  return language_modeling.predict_fns(model)
