"""The seq2seq task: loss, packing, generation, span corruption."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import padding

from bigtrain import metrics, sharding
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.inputs.named_features import Features
from bigtrain.models import t5
from bigtrain.objective import gradients
from bigtrain.pp import parse
from bigtrain.tasks import seq2seq as task

V, S, L, B = 20, 8, 5, 8
EOS = 1


@pytest.fixture(scope="module")
def model():
  return t5.Model(
    vocab_size=V, width=16, depth=1, num_heads=4, mlp_dim=24, scan=True
  )


@pytest.fixture(scope="module")
def variables(model):
  example = jnp.zeros((1, 2), jnp.int32)
  made = jax.jit(model.init)(jax.random.key(0), example, example)
  # Larger logits, so that rounding does not change the likeliest token.
  made["params"]["head"]["kernel"] *= 4.0
  return made


def batch(rows=B, seed=0):
  """Returns random inputs and targets; the first row is shorter."""
  rng = np.random.default_rng(seed)
  inputs, targets = rng.integers(3, V, (rows, S)), rng.integers(3, V, (rows, L))
  inputs[0, 6:], targets[0, 3:] = 0, 0
  return {
    "inputs": jnp.asarray(inputs, jnp.int32),
    "targets": jnp.asarray(targets, jnp.int32),
  }


def run(model, variables, batch, **options):
  fn = functools.partial(task.loss_fn, model=model, train=False, **options)
  pairs, mutable = jax.jit(lambda v, b: fn(v, b, None))(variables, batch)
  assert mutable == {}
  return {
    name: (float(pair[0]), float(pair[1]))
    for name, pair in pairs.items()
    if not isinstance(pair, metrics.Loads)
  }


@pytest.mark.parametrize("chunk", [None, 2])
def test_loss_and_accuracy_are_sums_over_real_tokens(model, variables, chunk):
  data = batch() | {"_mask": jnp.ones(B).at[-1].set(0)}
  logits = np.asarray(
    jax.jit(task.predict_fns(model)["logits"])(variables, data), np.float64
  )
  norm = np.log(np.exp(logits).sum(-1))
  log_p = logits - norm[..., None]
  targets = np.asarray(data["targets"])
  chosen = np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
  smooth = 0.9 * chosen + 0.1 * log_p.mean(-1)
  real = (targets != 0) & (np.asarray(data["_mask"]) != 0)[:, None]
  nats = (-smooth + 1e-2 * norm**2)[real].sum()
  pairs = run(
    model, variables, data, chunk=chunk, label_smoothing=0.1, z_loss=1e-2
  )
  assert real.sum() == (B - 1) * L - 2
  assert pairs["loss"] == pytest.approx((nats, real.sum()), rel=1e-4)
  hits = (logits.argmax(-1) == targets)[real].sum()
  assert pairs["accuracy"] == pytest.approx((hits, real.sum()))


def test_packed_and_unpacked_have_the_same_loss_and_gradients(model, variables):
  data = batch(rows=2)
  segments = {
    f"{name}_segments": (data[name] != 0) * jnp.asarray([[1], [2]])
    for name in ("inputs", "targets")
  }
  packed = {n: x.reshape(1, -1) for n, x in (data | segments).items()}

  def loss_and_grads(data):
    def loss(params):
      pairs, _ = task.loss_fn(
        {"params": params}, data, None, model=model, train=False
      )
      return pairs["loss"][0]

    return jax.jit(jax.value_and_grad(loss))(variables["params"])

  apart, apart_grads = loss_and_grads(data)
  together, together_grads = loss_and_grads(packed)
  np.testing.assert_allclose(together, apart, rtol=1e-5)
  jax.tree.map(
    # Packing keeps the distances inside a document.
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
    together_grads,
    apart_grads,
  )


@functools.cache
def generator(model, **options):
  fn = task.predict_fns(model)["generate"]
  return jax.jit(functools.partial(fn, max_len=7, eos_id=EOS, **options))


def generate(model, variables, data, **options):
  return np.asarray(generator(model, **options)(variables, data))


@functools.cache
def log_likelihood(model):
  """Returns a function for the log-likelihood of all tokens, (B, L, V)."""
  fn = task.predict_fns(model)["logits"]
  return jax.jit(lambda v, b: jax.nn.log_softmax(fn(v, b)))


def test_greedy_takes_the_likeliest_tokens(model, variables):
  data = {"inputs": batch()["inputs"]}
  actual = generate(model, variables, data)
  assert actual.shape == (B, 7)
  log_p = log_likelihood(model)(
    variables, data | {"targets": jnp.asarray(actual)}
  )
  expected = np.asarray(log_p).argmax(-1)
  for row, likeliest in zip(actual, expected):
    ends = np.flatnonzero(row == EOS)
    stop = ends[0] + 1 if ends.size else len(row)
    np.testing.assert_array_equal(row[:stop], likeliest[:stop])
    assert not row[stop:].any()
  # Padding stays empty.
  masked = data | {"_mask": jnp.ones(B).at[2].set(0)}
  half = generate(model, variables, masked)
  assert not half[2].any()
  np.testing.assert_array_equal(np.delete(half, 2, 0), np.delete(actual, 2, 0))


def test_beam_search_is_at_least_as_likely_as_greedy(model, variables):
  data = {"inputs": batch()["inputs"]}

  def score(tokens):
    whole = data | {"targets": jnp.asarray(tokens)}
    log_p = np.asarray(log_likelihood(model)(variables, whole))
    taken = np.take_along_axis(log_p, tokens[..., None], -1)[..., 0]
    return (taken * (tokens != 0)).sum(-1)

  beams = generate(model, variables, data, num_beams=4)
  greedy = generate(model, variables, data)
  # A beam may drop the greedy sequence, so only the sum is compared.
  assert score(beams).sum() >= score(greedy).sum() - 1e-3


@pytest.mark.slow
def test_samples_do_not_depend_on_the_batch_or_the_devices(model, variables):
  data = {"inputs": batch()["inputs"]}
  sample = functools.partial(
    generate, model, variables, temperature=1.5, top_p=0.9, seed=3
  )
  actual = sample(data)
  assert (actual != generate(model, variables, data)).any()
  turned = sample({"inputs": data["inputs"][::-1]})
  np.testing.assert_array_equal(turned[::-1], actual)
  mesh = sharding.make_mesh(replica=2, fsdp=4)
  with jax.set_mesh(mesh):
    split = jax.device_put(data, sharding.batch(mesh))
    np.testing.assert_array_equal(sample(split), actual)


def test_invalid_batches_and_options(model, variables):
  with pytest.raises(
    ConfigError, match="no feature 'targets'.*Did you mean 'target'"
  ):
    task.inputs(Features({"inputs": 0, "target": 0}, "config.input"))
  with pytest.raises(ConfigError, match="config.loss.chunk"):
    run(model, variables, batch(), chunk=-1)
  with pytest.raises(ConfigError, match="got packed inputs"):
    data = batch() | {"inputs_segments": batch()["inputs"]}
    task.generate(variables, data, model=model)
  with pytest.raises(
    ConfigError, match="expected num_beams=1 or temperature=0"
  ):
    task.generate(variables, batch(), model=model, num_beams=2, temperature=1.0)


def test_span_corruption_makes_batches_of_this_task(model, variables):
  (op,) = parse.parse(
    "span_corruption(12,sentinel=19,num_sentinels=4,eos_id=1,"
    "inputs_length=16,targets_length=8)"
  )
  rng = np.random.default_rng(0)
  windows = {
    "targets": rng.integers(3, 15, (B, 12)).astype(np.int32),
    "segments": np.repeat([[1] * 6 + [2] * 6], B, 0).astype(np.int32),
  }
  features = op.fn(windows, rng.random((B, op.draws), np.float32))
  pairs = run(
    model, variables, {n: jnp.asarray(x) for n, x in features.items()}
  )
  assert pairs["loss"][1] == (features["targets_segments"] != 0).sum() > 0


@functools.cache
def with_experts():
  """Returns (a model with experts, its variables)."""
  model = t5.Model(
    vocab_size=V,
    width=16,
    depth=2,
    num_heads=4,
    mlp_dim=24,
    moe=dict(num_experts=4, top_k=1, every=2, router_init_std=0.5),
    scan=True,
  )
  example = jnp.zeros((1, 2), jnp.int32)
  made = jax.jit(model.init)(jax.random.key(0), example, example)
  made["params"]["head"]["kernel"] *= 4.0
  return model, made


@pytest.mark.slow
def test_experts_add_losses_and_metrics():
  model, variables = with_experts()
  pairs = run(model, variables, batch(), load_balance=0.5, router_z=0.25)
  mean = {name: total / weight for name, (total, weight) in pairs.items()}
  extra = 0.5 * mean["experts/load_balance"] + 0.25 * mean["experts/router_z"]
  assert mean["loss"] == pytest.approx(mean["nll"] + extra, rel=1e-5)
  loads = [mean[f"expert_load/{e}"] for e in range(4)]
  assert sum(loads) == pytest.approx(1) and mean["experts/dropped"] == 0
  assert 0 < mean["experts/entropy"] <= np.log(4)


ROUTING = [
  (dict(top_k=1), False),
  (dict(top_k=2, shared_experts=1), False),
  (dict(top_k=1, capacity_factor=0.8), False),
  (dict(top_k=2, capacity_factor=0.8), True),
]


@pytest.mark.slow
@pytest.mark.parametrize("moe, packed", ROUTING)
def test_masked_ids_change_neither_loss_nor_gradients(moe, packed):
  moe = moe | dict(num_experts=4, jitter=0.1, router_init_std=0.5)
  model = t5.Model(
    vocab_size=V,
    width=8,
    depth=1,
    num_heads=2,
    mlp_dim=8,
    dropout=0.1,
    moe=moe,
  )
  data = batch()
  rows = np.arange(B) != 2
  data["_mask"] = jnp.asarray(rows, jnp.float32)
  real = {n: (data[n] != 0) & rows[:, None] for n in ("inputs", "targets")}
  if packed:
    for name, value in real.items():
      numbers = 1 + (jnp.arange(value.shape[1]) > 2)
      data[f"{name}_segments"] = jnp.where(data[name] != 0, numbers, 0)
  other = batch(seed=1)
  changes = {
    name: jnp.where(
      real[name] if packed else real[name] | rows[:, None], data[name], value
    )
    for name, value in other.items()
  }
  example = jnp.zeros((1, 2), jnp.int32)
  variables = jax.jit(model.init)(jax.random.key(0), example, example)
  loss_fn = functools.partial(task.loss_fn, model=model)
  padding.assert_without_effect(loss_fn, variables, data, changes)


@pytest.mark.slow
def test_only_load_balance_depends_on_microbatches():
  model, variables = with_experts()
  data = batch(rows=16)

  def gradients_of(microbatches, devices):
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])

    @jax.jit
    def run(params, batch, load_balance):
      loss_fn = functools.partial(
        task.loss_fn, model=model, train=True, load_balance=load_balance
      )
      grads, _, _ = gradients.make(
        loss_fn,
        trainable=jax.tree.map(lambda _: True, params),
        microbatches=microbatches,
        mesh=mesh,
      )({"params": params, "step": 0}, batch)
      return grads

    with jax.set_mesh(mesh):
      placed = jax.device_put(data, sharding.batch(mesh))
      grads = [run(variables["params"], placed, x) for x in (0.0, 1.0)]
    return [dict(trees.flatten_with_names(jax.device_get(x))) for x in grads]

  def largest_difference(a, b):
    """Returns it relative to the parameter's largest gradient."""
    return max(np.abs(a[n] - b[n]).max() / np.abs(a[n]).max() for n in a)

  without, balanced = gradients_of(1, 1)
  same, other = gradients_of(2, 8)
  assert largest_difference(without, same) < 1e-3
  assert largest_difference(balanced, other) > 1e-2


class Uncached:
  """A model whose cache is the texts so far, which it reads again each time."""

  def __init__(self, model):
    self._model = model

  def apply(self, variables, *args, method):
    if method == "begin":
      inputs, max_len = args
      return inputs, jnp.zeros((len(inputs), max_len), jnp.int32)
    (inputs, targets), token_B, position = args
    # The 0 at position 0 is not a target.
    before = jnp.where(position == 0, targets[:, 0], token_B)
    index = jnp.maximum(position - 1, 0)
    targets = targets.at[:, index].set(before)
    logits, _ = self._model.apply(variables, inputs, targets)
    logits = jax.lax.dynamic_slice_in_dim(logits, position, 1, axis=1)
    return logits[:, 0], (inputs, targets)


@pytest.mark.slow
def test_generation_with_experts_does_not_depend_on_devices_or_cache():
  model, variables = with_experts()
  data = {"inputs": batch()["inputs"]}

  def draw(model, data):
    fn = functools.partial(
      task.generate, model=model, max_len=7, temperature=1.5, seed=3
    )
    return np.asarray(jax.jit(fn)(variables, data))

  actual = draw(model, data)
  assert len({tuple(row) for row in actual}) > 4
  np.testing.assert_array_equal(draw(Uncached(model), data), actual)
  mesh = sharding.make_mesh(replica=2, fsdp=4)
  with jax.set_mesh(mesh):
    split = jax.device_put(data, sharding.batch(mesh))
    np.testing.assert_array_equal(draw(model, split), actual)
