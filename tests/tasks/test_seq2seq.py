"""The seq2seq task: loss, packing, generation, the objective it is given."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding, trees
from bigtrain.models import t5
from bigtrain.pp import parse
from bigtrain.settings import ConfigError
from bigtrain.step import gradients as gradients_lib
from bigtrain.tasks import seq2seq as task

V, S, L, B = 20, 8, 5, 8
EOS = 1


@pytest.fixture(scope="module", autouse=True)
def compile_fast():
  """Compiling is nearly all that these tests do."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def model():
  return t5.Model(
    vocab_size=V, width=16, depth=1, num_heads=4, mlp_dim=24, scan=True
  )


@pytest.fixture(scope="module")
def variables(model):
  example = jnp.zeros((1, 2), jnp.int32)
  made = jax.jit(model.init)(jax.random.key(0), example, example)
  # Logits that differ enough for what is likeliest to be certain.
  made["params"]["head"]["kernel"] *= 4.0
  return made


def batch(rows=B, seed=0):
  """Random inputs and targets; the first of them shorter than the others."""
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
  return {k: (float(s), float(w)) for k, (s, w) in pairs.items()}


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


def test_packed_rows_are_the_same_as_rows_of_their_own(model, variables):
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
    # But for the distances: they are the same inside of a document.
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
  """Of all tokens (B, L, V)."""
  fn = task.predict_fns(model)["logits"]
  return jax.jit(lambda v, b: jax.nn.log_softmax(fn(v, b)))


def test_greedy_takes_what_is_likeliest_each_time(model, variables):
  data = {"inputs": batch()["inputs"]}
  found = generate(model, variables, data)
  assert found.shape == (B, 7)
  log_p = log_likelihood(model)(
    variables, data | {"targets": jnp.asarray(found)}
  )
  expected = np.asarray(log_p).argmax(-1)
  for row, likeliest in zip(found, expected):
    ends = np.flatnonzero(row == EOS)
    stop = ends[0] + 1 if ends.size else len(row)
    np.testing.assert_array_equal(row[:stop], likeliest[:stop])
    assert not row[stop:].any()
  # Padding is left alone; and one beam is greedy.
  masked = data | {"_mask": jnp.ones(B).at[2].set(0)}
  half = generate(model, variables, masked)
  assert not half[2].any()
  np.testing.assert_array_equal(np.delete(half, 2, 0), np.delete(found, 2, 0))


def test_beams_find_what_is_at_least_as_likely(model, variables):
  data = {"inputs": batch()["inputs"]}

  def score(tokens):
    whole = data | {"targets": jnp.asarray(tokens)}
    log_p = np.asarray(log_likelihood(model)(variables, whole))
    taken = np.take_along_axis(log_p, tokens[..., None], -1)[..., 0]
    return (taken * (tokens != 0)).sum(-1)

  beams = generate(model, variables, data, num_beams=4)
  greedy = generate(model, variables, data)
  # Greedy's own sequence may fall out of the beams, but not in all of them.
  assert score(beams).sum() >= score(greedy).sum() - 1e-3


def test_samples_do_not_depend_on_the_batch_or_the_devices(model, variables):
  data = {"inputs": batch()["inputs"]}
  sample = functools.partial(
    generate, model, variables, temperature=1.5, top_p=0.9, seed=3
  )
  found = sample(data)
  assert (found != generate(model, variables, data)).any()
  turned = sample({"inputs": data["inputs"][::-1]})
  np.testing.assert_array_equal(turned[::-1], found)
  mesh = sharding.make_mesh(replica=2, fsdp=4)
  with jax.set_mesh(mesh):
    split = jax.device_put(data, sharding.batch(mesh))
    np.testing.assert_array_equal(sample(split), found)


def test_wrong_batches_and_options_are_told(model, variables):
  with pytest.raises(ConfigError, match="no 'targets'.*Did you mean 'target'"):
    task.inputs({"inputs": 0, "target": 0})
  with pytest.raises(ConfigError, match="config.loss.chunk"):
    run(model, variables, batch(), chunk=-1)
  with pytest.raises(ConfigError, match="are packed"):
    data = batch() | {"inputs_segments": batch()["inputs"]}
    task.generate(variables, data, model=model)
  with pytest.raises(ConfigError, match="do not go together"):
    task.generate(variables, batch(), model=model, num_beams=2, temperature=1.0)


def test_the_objective_gives_what_the_task_wants(model, variables):
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
  """(a model with experts, its variables)."""
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


def test_experts_add_their_losses_and_are_reported():
  model, variables = with_experts()
  pairs = run(model, variables, batch(), load_balance=0.5, router_z=0.25)
  mean = {name: total / weight for name, (total, weight) in pairs.items()}
  extra = 0.5 * mean["experts/load_balance"] + 0.25 * mean["experts/router_z"]
  assert mean["loss"] == pytest.approx(mean["nll"] + extra, rel=1e-5)
  loads = [mean[f"expert_load/{e}"] for e in range(4)]
  assert sum(loads) == pytest.approx(1) and mean["experts/dropped"] == 0
  assert 0 < mean["experts/entropy"] <= np.log(4)


@pytest.mark.slow
def test_experts_do_not_depend_on_devices_and_but_for_balance_on_microbatches():
  model, variables = with_experts()
  data = batch(rows=16)

  def gradients(microbatches, devices):
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])

    @jax.jit
    def run(params, batch, load_balance):
      loss_fn = functools.partial(
        task.loss_fn, model=model, train=True, load_balance=load_balance
      )
      grads, _, _ = gradients_lib.gradients(
        loss_fn,
        params,
        {},
        batch,
        jax.random.key(0),
        trainable=jax.tree.map(lambda _: True, params),
        microbatches=microbatches,
        mesh=mesh,
      )
      return grads

    with jax.set_mesh(mesh):
      placed = jax.device_put(data, sharding.batch(mesh))
      found = [run(variables["params"], placed, x) for x in (0.0, 1.0)]
    return [dict(trees.flatten_with_names(jax.device_get(x))) for x in found]

  def furthest(a, b):
    """Largest difference, as a share of the largest gradient there."""
    return max(np.abs(a[n] - b[n]).max() / np.abs(a[n]).max() for n in a)

  free, balanced = gradients(1, 1)
  same, other = gradients(2, 8)
  assert furthest(free, same) < 1e-3
  assert furthest(balanced, other) > 1e-2


class Uncached:
  """A model whose cache is the texts so far, which it reads all each time."""

  def __init__(self, model):
    self._model = model

  def apply(self, variables, *args, method):
    if method == "begin":
      inputs, max_len = args
      return inputs, jnp.zeros((len(inputs), max_len), jnp.int32)
    (inputs, targets), token_B, position = args
    # The 0 that is first is none of the targets.
    before = jnp.where(position == 0, targets[:, 0], token_B)
    index = jnp.maximum(position - 1, 0)
    targets = targets.at[:, index].set(before)
    logits, _ = self._model.apply(variables, inputs, targets)
    logits = jax.lax.dynamic_slice_in_dim(logits, position, 1, axis=1)
    return logits[:, 0], (inputs, targets)


@pytest.mark.slow
def test_experts_write_the_same_on_any_devices_as_without_a_cache():
  model, variables = with_experts()
  data = {"inputs": batch()["inputs"]}

  def draw(model, data):
    fn = functools.partial(
      task.generate, model=model, max_len=7, temperature=1.5, seed=3
    )
    return np.asarray(jax.jit(fn)(variables, data))

  found = draw(model, data)
  assert len({tuple(row) for row in found}) > 4
  np.testing.assert_array_equal(draw(Uncached(model), data), found)
  mesh = sharding.make_mesh(replica=2, fsdp=4)
  with jax.set_mesh(mesh):
    split = jax.device_put(data, sharding.batch(mesh))
    np.testing.assert_array_equal(draw(model, split), found)
