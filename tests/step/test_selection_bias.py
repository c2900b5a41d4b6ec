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
from bigtrain.models.layers import moe

RATE, STEPS = 0.25, any_mesh.STEPS
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


def updated(bias, counts):
  state = {moe.STATE: {"selection_bias": jnp.asarray(bias, jnp.float32)}}
  sums = {"selection_bias": jnp.asarray(counts, jnp.int32)}
  new = moe.end_of_step(state, sums, RATE)
  return np.asarray(new[moe.STATE]["selection_bias"])


def test_it_moves_against_the_sign_of_the_surplus():
  bias = updated([0.5, 0, 0, -1], [5, 1, 2, 0])  # The mean is 2.
  steps = np.float32([-RATE, RATE, 0, RATE])
  np.testing.assert_allclose(bias, [0.5, 0, 0, -1] + steps - steps.mean())


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


def config_of(**changes):
  config = any_mesh.load("pydoc_lm:moe,runlocal", packed=True, dropout=0.0)
  changes = MODEL | dict(vocab_size=264) | changes
  return config | {"model": config["model"] | changes}


@functools.cache
def biases(text, microbatches=1, **sizes):
  sizes = dict(replica=1, fsdp=1, sequence=1, tensor=1) | sizes
  config = config_of(**json.loads(text))
  *_, state = any_mesh.train(config, sizes, microbatches)
  assert set(state["mutable"]) == {moe.STATE}
  return dict(trees.flatten_with_names(state["mutable"][moe.STATE]))


def same(**sizes):
  got, want = biases("{}", **sizes), biases("{}")
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
def test_microbatches_do_not_change_it():
  same(microbatches=4)


@pytest.mark.parametrize(
  "sizes",
  [
    dict(fsdp=8),
    pytest.param(dict(fsdp=2, sequence=2, tensor=2), marks=pytest.mark.slow),
    pytest.param(dict(replica=2, fsdp=2, pipeline=2), marks=pytest.mark.slow),
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
  config = config_of(**SMALL) | dict(total_steps=4, ckpt_steps=2, log_steps=2)
  main.train(config, str(tmp_path / "whole"))
  want = read(tmp_path / "whole")
  (bias,) = want.values()
  assert np.abs(bias).max() > 0
  main.train(config | {"stop_at_steps": 2}, str(tmp_path / "parts"))
  (half,) = read(tmp_path / "parts").values()
  assert (half != bias).any()
  main.train(config, str(tmp_path / "parts"))
  np.testing.assert_equal(read(tmp_path / "parts"), want)
  model = config["model"] | {"moe": EXPERTS | {"bias_rate": 0.0}}
  config |= dict(model=model, model_init=str(tmp_path / "whole"))
  main.train(config, str(tmp_path / "tuned"))
  np.testing.assert_equal(read(tmp_path / "tuned"), want)
