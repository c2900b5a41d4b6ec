"""The task of preferences against plain gradients of its losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cases, rounding

from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.losses import preferences
from bigtrain.models import decoder
from bigtrain.objective import building
from bigtrain.tasks import preference

B, L, V = 4, 10, 31
_MODEL = dict(
  variant="llama", vocab_size=V, width=16, mlp_dim=24, num_heads=2, depth=2
)


@functools.cache
def batch_of(seed=0):
  rng = np.random.default_rng(seed)
  texts = rng.integers(1, V, (B, 2, L + 1)).astype(np.int32)
  texts[:, 1, :4] = texts[:, 0, :4]
  place = np.arange(L)
  ends = rng.integers(5, L + 1, (B, 2, 1))
  mask = (place >= rng.integers(2, 4, (B, 1, 1))) & (place < ends)
  return {
    "tokens": texts[..., :-1],
    "targets": texts[..., 1:],
    "loss_mask": mask.astype(np.float32),
  }


@functools.cache
def params_of(seed):
  model = decoder.Model(**_MODEL, init_std=0.3)
  tokens = np.zeros((1, 4), np.int32)
  return model.init(jax.random.key(seed), tokens)["params"]


MODEL = decoder.Model(**_MODEL, init_std=0.3)
REFERENCE = {"params": params_of(1)}


def sums_of(variables, batch):
  flat = lambda x: x.reshape(-1, L)
  logits = MODEL.apply(variables, flat(batch["tokens"]))[0]
  by_class = jax.nn.log_softmax(logits)
  targets = flat(batch["targets"])[..., None]
  log_probs = jnp.take_along_axis(by_class, targets, axis=-1)[..., 0]
  return jnp.sum(log_probs * flat(batch["loss_mask"]), axis=1).reshape(B, 2)


@pytest.mark.parametrize(
  "kind", cases.quick(preferences.KINDS, "ipo", "kto", "orpo")
)
def test_gradients_are_those_of_all_logits(kind):
  batch = batch_of()
  options = preferences.read_options(kind, "", None, beta=0.3)

  def ours(params):
    variables = {"params": params, "teacher": REFERENCE}
    metrics, _ = preference.loss_fn(
      variables,
      batch,
      None,
      model=MODEL,
      teacher=MODEL,
      train=True,
      kind=kind,
      beta=0.3,
      chunk=3,
    )
    return metrics["loss"][0] / metrics["loss"][1]

  def plain(params):
    reference, drift = None, 0.0
    if kind in preferences.WITH_REFERENCE:
      reference = sums_of(REFERENCE, batch)
    if kind == "kto":
      other = preference._mismatched(batch)
      mine = jax.lax.stop_gradient(sums_of({"params": params}, other))
      drift = jnp.mean(mine - sums_of(REFERENCE, other))
    tokens = jnp.sum(batch["loss_mask"], axis=2)
    pairs = preferences.Pairs(
      sums_of({"params": params}, batch), tokens, reference, drift
    )
    loss = jnp.sum(preferences.losses(kind, pairs, options))
    return loss / (2 * B if kind == "kto" else B)

  params = params_of(0)
  want, expected = jax.jit(jax.value_and_grad(plain))(params)
  assert max(np.abs(x).max() for x in jax.tree.leaves(expected)) > 1e-4
  run = jax.jit(jax.value_and_grad(ours))
  rounding.assert_close(run, params, (want, expected))


def test_the_base_of_adapters_is_the_reference():
  config = settings.Config(
    {
      "model_name": "decoder",
      "model": _MODEL,
      "adapters": dict(targets=".*query/kernel", rank=2),
    }
  )
  _, model = building.model(config)
  init = jax.jit(model.init)
  variables = init(jax.random.key(0), np.zeros((1, 4), np.int32))
  run = lambda variables: preference.loss_fn(
    variables, batch_of(), None, model=model, train=True
  )[0]
  loss, number = run(variables)["loss"]
  np.testing.assert_allclose(loss / number, np.log(2), rtol=1e-6)
  moved = jax.tree.map(lambda x: x + 0.5, variables["params"])
  metrics = run({**variables, "params": moved})
  assert abs(metrics["loss"][0] / number - np.log(2)) > 1e-5
  # The same with the column of the reference, computed before.
  column = preference._scores(
    model, {**variables, "params": {}}, batch_of(), chunk=None
  )
  batch = {**batch_of(), "reference": column}
  given = preference.loss_fn(
    {**variables, "params": moved}, batch, None, model=model, train=True
  )[0]
  np.testing.assert_array_equal(given["loss"][0], metrics["loss"][0])


def test_a_missing_reference_is_named():
  with pytest.raises(ConfigError, match="config.teacher"):
    preference.loss_fn(
      {"params": params_of(0)}, batch_of(), None, model=MODEL, train=True
    )


def test_mismatched_answers_are_of_the_example_before():
  prompt = [[1, 2, 3], [4, 5]]
  answer = [[7, 8], [9, 10, 11]]
  tokens = np.zeros((2, 1, 6), np.int32)
  targets, mask = np.zeros_like(tokens), np.zeros((2, 1, 6), np.float32)
  for i, (p, a) in enumerate(zip(prompt, answer)):
    text = (p + a + [0] * 7)[:7]
    tokens[i, 0], targets[i, 0] = text[:-1], text[1:]
    mask[i, 0, len(p) - 1 : len(p) + len(a) - 1] = 1
  batch = {"tokens": tokens, "targets": targets, "loss_mask": mask}
  other = preference._mismatched(batch)
  np.testing.assert_array_equal(other["tokens"][0, 0], [1, 2, 3, 9, 10, 11])
  np.testing.assert_array_equal(other["loss_mask"][0, 0], [0, 0, 1, 1, 1, 0])
  np.testing.assert_array_equal(other["tokens"][1, 0], [4, 5, 7, 8, 0, 0])
  np.testing.assert_array_equal(other["targets"][1, 0], [5, 7, 8, 0, 0, 0])
  np.testing.assert_array_equal(other["loss_mask"][1, 0], [0, 1, 1, 0, 0, 0])


def test_rewards_are_those_of_whole_texts():
  model = decoder.Model(**_MODEL, num_classes=1, init_std=0.3)
  init = jax.jit(model.init)
  params = init(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
  batch = batch_of()
  rewards = jax.jit(functools.partial(preference.rewards, model=model))(
    {"params": params}, batch
  )
  apply = jax.jit(model.apply)
  for b, k in np.ndindex(B, 2):
    last = np.flatnonzero(batch["loss_mask"][b, k])[-1]
    first, rest = batch["tokens"][b, k, :1], batch["targets"][b, k, : last + 1]
    text = np.concatenate([first, rest])[None]
    alone = apply({"params": params}, text)[0]
    np.testing.assert_allclose(rewards[b, k], alone[0, 0], rtol=1e-5)
  loss_fn = functools.partial(
    preference.loss_fn, model=model, train=True, kind="reward"
  )
  metrics, _ = jax.jit(lambda v, b: loss_fn(v, b, None))(
    {"params": params}, batch
  )
  right = np.mean(rewards[:, 0] > rewards[:, 1])
  np.testing.assert_allclose(metrics["accuracy"][0] / B, right)
  with pytest.raises(ConfigError, match="num_classes=1"):
    preference.rewards({"params": params_of(0)}, batch, model=MODEL)


def test_weights_of_rows_multiply_their_losses():
  batch, kind = batch_of(), "orpo"
  options = preferences.read_options(kind, "", None)
  weight_B = np.array([1, 2, 0, 0.5], np.float32)
  mask = batch["loss_mask"]
  weighted = {**batch, "loss_mask": mask * weight_B[:, None, None]}

  def ours(params):
    total, number = preference.loss_fn(
      {"params": params}, weighted, None, model=MODEL, train=True, kind=kind
    )[0]["loss"]
    return total / number

  def plain(params):
    sums_B2 = sums_of({"params": params}, batch)
    pairs = preferences.Pairs(sums_B2, mask.sum(2))
    loss_B = preferences.losses(kind, pairs, options)
    return jnp.sum(weight_B * loss_B) / weight_B.sum()

  params = params_of(0)
  expected = jax.jit(jax.value_and_grad(plain))(params)
  rounding.assert_close(jax.jit(jax.value_and_grad(ours)), params, expected)


def test_losses_add_up_over_microbatches():
  batch = {k: np.asarray(x) for k, x in batch_of().items()}
  variables = {"params": params_of(0), "teacher": REFERENCE}
  run = lambda batch: preference.loss_fn(
    variables, batch, None, model=MODEL, teacher=MODEL, train=True
  )[0]["loss"]
  halves = [run({k: x[i : i + 2] for k, x in batch.items()}) for i in (0, 2)]
  whole = run(batch)
  total = jax.tree.map(lambda a, b: a + b, *halves)
  # Of log-probabilities of whole answers, which are tens of times the loss.
  np.testing.assert_allclose(total, whole, rtol=1e-5)
