"""The routers' selection bias: state that changes once per optimizer step."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import any_mesh

from bigtrain import main
from bigtrain.arrays import trees
from bigtrain.checkpoints.foreign import parameter_files
from bigtrain.models import decoder
from bigtrain.models.layers import moe

RATE, STEPS = 0.25, 10
EXPERTS = dict(
  num_experts=4,
  top_k=2,
  score="sigmoid",
  selection_bias=True,
  bias_rate=RATE,
  router_init_std=1.0,
)
# A loop of two periods, and layers before it.
MODEL = dict(
  depth=6,
  scan=True,
  width=16,
  mlp_dim=8,
  moe=EXPERTS,
  kinds=dict(dense=dict(moe=None), experts={}),
  first_layers=("dense", "experts"),
  layers=("dense", "experts"),
)
# The order of sums, and so the number of devices and microbatches, changes the
# rounding of the parameters. In float64 it does not change a choice.
DOUBLE = dict(dtype="float64")


def updated(bias, counts, rate=RATE):
  state = {moe.STATE: {"selection_bias": jnp.asarray(bias, jnp.float32)}}
  sums = {"selection_bias": jnp.asarray(counts, jnp.int32)}
  new = moe.end_of_step(state, sums, rate)
  return np.asarray(new[moe.STATE]["selection_bias"])


def test_it_moves_against_the_sign_of_the_surplus():
  bias = updated([0.5, 0, 0, -1], [5, 1, 2, 0])  # The mean is 2.
  steps = np.float32([-RATE, RATE, 0, RATE])
  np.testing.assert_allclose(bias, [0.5, 0, 0, -1] + steps - steps.mean())


def test_a_bias_that_never_changes_has_a_warning(monkeypatch):
  lines = []
  log = lambda level, line, number: lines.append(line)
  monkeypatch.setattr(moe.logging, "log_first_n", log)
  updated([0.5, 0.0], [3, 1])
  assert not lines
  assert updated([0.5, 0.0], [3, 1], rate=0.0).tolist() == [0.5, 0.0]
  assert "config.model.moe.bias_rate=0: the selection bias stays" in lines[0]


def test_signs_are_exact_beyond_the_digits_of_float32():
  n = 2**24
  layers = [[n + 1, n, n, n - 1], [n, n, n + 1, n], [n] * 4]
  bias = updated(np.zeros((3, 4)), layers) / RATE
  np.testing.assert_array_equal(bias[0], [-1, 0, 0, 1])
  np.testing.assert_array_equal(bias[1], [0.5, 0.5, -1.5, 0.5])
  np.testing.assert_array_equal(bias[2], [0, 0, 0, 0])


def test_padding_is_not_counted():
  logits = jnp.asarray([[[3.0, 2, 1, 0], [0, 1, 2, 3]]])
  options = moe.Options(4, top_k=1)
  real = jnp.asarray([[True, False]])
  routing, _ = moe.route(logits, real, options)
  np.testing.assert_array_equal(moe.choices(routing, real, 4), [1, 0, 0, 0])


def config_of(packed=True, **changes):
  config = any_mesh.load("pydoc_lm:moe,runlocal", packed=packed, dropout=0.0)
  changes = MODEL | dict(vocab_size=264) | changes
  return config | {"model": config["model"] | changes}


@functools.cache
def biases(text, microbatches=1, packed=True, **sizes):
  """The selection biases after ten steps, by name."""
  sizes = dict(replica=1, fsdp=1, sequence=1, tensor=1) | sizes
  config = config_of(packed, **DOUBLE | json.loads(text))
  # This loss is a product of two means over the tokens of a microbatch.
  config |= dict(loss=dict(load_balance=0.0))
  *_, state = any_mesh.train(config, sizes, microbatches, STEPS)
  assert set(state["mutable"]) == {moe.STATE}
  return dict(trees.flatten_with_names(state["mutable"][moe.STATE]))


def same(packed=True, **sizes):
  got, want = biases("{}", packed=packed, **sizes), biases("{}", packed=packed)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_it_changes_once_per_step():
  own = biases("{}")
  assert {name: x.shape for name, x in own.items()} == {
    "blocks/1/moe/selection_bias": (2, 4),
    "blocks_1/moe/selection_bias": (4,),
  }
  bias = np.vstack([*own.values()])
  assert 0 < np.abs(bias).max() < 2 * RATE * STEPS
  np.testing.assert_allclose(bias.sum(-1), 0, atol=1e-6)
  # Thirds and quarters of the rate at most: whole steps, recentred.
  quarters = bias / RATE * 4
  np.testing.assert_allclose(quarters, np.round(quarters), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_microbatches_do_not_change_it(packed):
  same(packed, microbatches=4)


@pytest.mark.slow
def test_devices_do_not_change_it_if_rows_are_not_packed():
  same(packed=False, fsdp=4, sequence=2)


def biases_of_documents(rows):
  """The biases after ten steps on these rows of documents, padded to 12."""
  tokens, segments = np.zeros((2, len(rows), 12), np.int32)
  for row, documents in enumerate(rows):
    ids = np.concatenate(documents)
    tokens[row, : len(ids)] = ids
    numbers = range(1, len(documents) + 1)
    segments[row, : len(ids)] = np.repeat(numbers, [*map(len, documents)])
  options = MODEL | DOUBLE | dict(depth=3, num_heads=2, vocab_size=19)
  model = decoder.Model(variant="llama", init_std=0.5, **options)

  def loss(params, state):
    (logits, _), sums = model.apply(
      {"params": params, **state},
      tokens,
      segments=segments,
      train=True,
      mutable=["step_sums"],
    )
    log_probs = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(log_probs, tokens[..., None] * 5 % 19, axis=-1)
    real = segments != 0
    return -jnp.sum(own[..., 0] * real) / jnp.sum(real), sums["step_sums"]

  @jax.jit
  def step(params, state):
    grads, sums = jax.grad(loss, has_aux=True)(params, state)
    params = jax.tree.map(lambda x, g: x - 0.3 * g, params, grads)
    return params, model.end_of_step(state, sums)

  state = dict(jax.jit(model.init)(jax.random.key(0), tokens[:1]))
  params = jax.tree.map(np.float64, state.pop("params"))
  for _ in range(STEPS):
    params, state = step(params, state)
  return jax.device_get(state[moe.STATE])


@pytest.mark.slow
def test_packed_documents_change_it_as_they_do_alone():
  rng = np.random.default_rng(0)
  one, two, three = (rng.integers(1, 19, n) for n in (7, 5, 9))
  with any_mesh.precision({"model": DOUBLE}):
    packed = biases_of_documents([[one, two], [three]])
    alone = biases_of_documents([[one], [two], [three]])
  assert all(np.abs(x).max() > RATE for x in jax.tree.leaves(packed))
  jax.tree.map(np.testing.assert_array_equal, packed, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
  "sizes",
  [
    dict(fsdp=8),
    dict(fsdp=2, sequence=2, tensor=2),
    dict(replica=2, fsdp=2, pipeline=2),
  ],
)
def test_devices_do_not_change_it(sizes):
  same(microbatches=2, **sizes)


@pytest.mark.slow
def test_rematerialization_and_unrolling_do_not_change_it():
  got = biases('{"scan": false, "remat_policy": "nothing_saveable"}')
  want = biases("{}")
  own = lambda layer: got[f"blocks_{layer}/moe/selection_bias"]
  np.testing.assert_array_equal(own(1), want["blocks_1/moe/selection_bias"])
  looped = want["blocks/1/moe/selection_bias"]
  np.testing.assert_array_equal([own(3), own(5)], looped)
  # Two periods, of layers with different policies, in one turn of the loop.
  got = biases('{"remat_policy": "nothing_saveable(every=4)"}')
  jax.tree.map(np.testing.assert_array_equal, got, want)


SMALL = dict(depth=1, kinds=None, first_layers=(), layers=())


def read(workdir):
  file = parameter_files.open_file(
    str(workdir), step=None, prefix="mutable", key="workdir"
  )
  return file.read([*file.specs])


@pytest.mark.slow
def test_it_is_saved_resumed_and_kept_with_a_rate_of_zero(tmp_path):
  config = config_of(**SMALL) | dict(
    total_steps=STEPS, ckpt_steps=4, log_steps=2, microbatches=2
  )
  main.train(config, str(tmp_path / "whole"))
  want = read(tmp_path / "whole")
  (bias,) = want.values()
  assert np.abs(bias).max() > 0
  main.train(config | {"stop_at_steps": 4}, str(tmp_path / "parts"))
  (half,) = read(tmp_path / "parts").values()
  assert (half != bias).any()
  main.train(config, str(tmp_path / "parts"))
  np.testing.assert_equal(read(tmp_path / "parts"), want)
  model = config["model"] | {"moe": EXPERTS | {"bias_rate": 0.0}}
  config |= dict(model=model, model_init=str(tmp_path / "whole"))
  main.train(config, str(tmp_path / "tuned"))
  np.testing.assert_equal(read(tmp_path / "tuned"), want)
