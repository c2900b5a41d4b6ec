"""Optimizers around others: against optax, and their evaluation form."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.small_training import LOSS, assert_close, make, train, tree

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import averages, folders, start
from bigtrain.checkpoints.checkpointer import Checkpointer
from bigtrain.checkpoints.foreign import parameter_files
from bigtrain.checkpoints.manifest import HostState
from bigtrain.config.errors import ConfigError
from bigtrain.inference import saved
from bigtrain.tools import checkpoint_export

NUM_STEPS = 4
SCHEDULE = dict(decay_type="constant", warmup_steps=2)


def learning_rate(step):
  return 0.05 * jnp.minimum(step / SCHEDULE["warmup_steps"], 1.0)


def schedule_free(base):
  return optax.contrib.schedule_free(base, learning_rate, b1=0.8)


def decayed(direction):
  """The base optimizer of the recipe: decay of kernels, times the rate."""
  kernels = trees.map_with_names(lambda n, _: n.endswith("kernel"), tree(0))
  return optax.chain(
    direction,
    optax.add_decayed_weights(0.1, kernels),
    optax.scale_by_learning_rate(learning_rate),
  )


ADAM = optax.scale_by_adam(b1=0.0, b2=0.9)
RMS = optax.scale_by_rms(
  decay=0.9, eps=1e-6, eps_in_sqrt=False, bias_correction=True
)
BASE = dict(name="adam", b1=0.0, b2=0.9)
CASES = {
  "schedule_free": (
    dict(name="schedule_free", base_optimizer=BASE, b1=0.8),
    lambda: schedule_free(decayed(ADAM)),
  ),
  "schedule_free_adamw": (
    dict(name="schedule_free_adamw", b1=0.8, b2=0.9, eps=1e-6),
    lambda: schedule_free(decayed(RMS)),
  ),
  "schedule_free_sgd": (
    dict(name="schedule_free_sgd", b1=0.8),
    lambda: schedule_free(decayed(optax.identity())),
  ),
  "mechanize": (
    dict(name="mechanize", base_optimizer=BASE, s_init=1e-2),
    lambda: optax.contrib.mechanize(decayed(ADAM), s_init=1e-2),
  ),
  "reduce_on_plateau": (
    dict(name="reduce_on_plateau", base_optimizer=BASE, patience=1),
    lambda: optax.chain(
      decayed(ADAM), optax.contrib.reduce_on_plateau(patience=1)
    ),
  ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrappers_train_as_in_optax(name):
  """With learning rate, schedule and weight decay inside, as published."""
  options, expected_tx = CASES[name]
  optimizer = make(
    lr=0.05, wd=0.1, wd_coupling="lr", schedule=SCHEDULE, optimizer=options
  )
  trained, state = train(optimizer, tree(0), NUM_STEPS, jit=True)
  tx = optax.with_extra_args_support(expected_tx())
  expected, expected_state = tree(0), tx.init(tree(0))
  update = jax.jit(tx.update)
  for step in range(NUM_STEPS):
    updates, expected_state = update(
      tree(step + 1), expected_state, expected, value=jnp.float32(LOSS)
    )
    expected = optax.apply_updates(expected, updates)
  assert_close(trained, expected, rtol=1e-5, atol=1e-6)
  evaluated = averages.evaluation_form(trained, state)
  if not name.startswith("schedule_free"):
    assert evaluated is trained
    return
  average = optax.contrib.schedule_free_eval_params(expected_state, expected)
  assert_close(evaluated, average, rtol=1e-5, atol=1e-5)
  assert np.any(np.abs(evaluated["embedding"] - trained["embedding"]) > 1e-3)


def test_other_programs_get_the_average_of_a_checkpoint(tmp_path):
  """model_init, export and generation read it in place of the parameters."""
  optimizer = make(
    lr=0.05,
    optimizer=CASES["schedule_free"][0],
    schedule=[
      ("head/.*", None),
      (".*", dict(decay_type="constant")),
    ],
  )
  params, opt = train(optimizer, tree(0), 3, jit=True)
  state = {"params": params, "opt": opt, "step": jnp.int32(3)}
  checkpointer = Checkpointer(str(tmp_path))
  checkpointer.save(3, state, HostState())
  checkpointer.wait()
  checkpointer.close()
  expected = start.evaluated(state)["params"]["params"]
  open_file = lambda prefix: parameter_files.open_file(
    str(tmp_path), step=None, prefix=prefix, key="config.model_init"
  )
  file = open_file(None)
  loaded = trees.from_flat(file.read(list(file.specs)))
  assert_close(loaded, expected, rtol=1e-6, atol=1e-6)
  assert np.any(loaded["embedding"] != params["embedding"])
  np.testing.assert_array_equal(  # Frozen.
    loaded["head"]["kernel"], params["head"]["kernel"]
  )
  out = str(tmp_path / "params.npz")
  checkpoint_export.to_file(str(tmp_path), out, "params")
  with np.load(out) as exported:
    np.testing.assert_allclose(
      exported["params/embedding"], expected["embedding"], rtol=1e-6, atol=1e-6
    )
  mesh = sharding.make_mesh()
  directory = folders.find(str(tmp_path))
  manifest = folders.read_manifest(directory)
  found = saved.Saved(directory, manifest.step, {}, {}, {}, manifest)
  variables = saved.variables(found, "params", mesh)
  assert_close(variables["params"], expected, rtol=1e-6, atol=1e-6)
  # A copy of the whole state is as stored.
  whole = open_file("").read(["params/embedding"])
  np.testing.assert_array_equal(whole["params/embedding"], params["embedding"])


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(name="mechanize"), "base_optimizer: expected the dict of an optim"),
    (
      dict(name="schedule_free", base_optimizer=BASE, b1=0.0),
      "config.optimizer.b1: expected a number at most 1 and above 0",
    ),
    (
      dict(name="schedule_free", base_optimizer=BASE, b3=1),
      "config.optimizer.b3: unknown key",
    ),
    (dict(name="schedule_free_sgd", warmup_steps=3), "warmup_steps: unknown"),
    (
      dict(name="reduce_on_plateau", base_optimizer=BASE, factor=2.0),
      "reduce_on_plateau rejects",
    ),
    (dict(name="sophia"), "'sophia' is not supported: it needs the Hessian"),
    (dict(name="sam"), "'sam' is not supported: a task's gradients_fn"),
    (dict(name="dpsgd"), "it needs a gradient for each example"),
  ],
)
def test_mistakes_are_explained(options, message):
  with pytest.raises(ConfigError) as e:
    make(optimizer=options)
  assert message in str(e.value)
