"""config.resume with others' states: the next step is theirs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoints.test_jax_folders import T5, VIT, arrays_of
from support import cases, mesh_tensorflow

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import foreign_state, warm_start
from bigtrain.config.errors import ConfigError
from bigtrain.config.lengths import Units
from bigtrain.config.settings import Config
from bigtrain.models import t5, vit
from bigtrain.optim import chain, views

# What tests/golden/make_old_checkpoints.py trained with.
MIN_SIZE = dict(min_dim_size_to_factor=4)
T5X_CONFIG = dict(
  lr=0.01,
  schedule=dict(decay_type="constant"),
  optimizer=dict(name="adafactor", momentum=0.9, lr_inside=True, **MIN_SIZE),
)
BV_CONFIG = dict(
  lr=0.01,
  wd=0.01,
  schedule=[("head/bias", None), (".*", dict(decay_type="cosine"))],
)
STORED = dict(moment_arithmetic="stored")
ADAFACTOR = dict(name="big_vision_adafactor", **MIN_SIZE, **STORED)
ADAM = dict(name="scale_by_adam", mu_dtype="bfloat16", **STORED)


def of_t5(scan, sizes=T5, **changes):
  inputs = np.ones((1, 3), int), np.ones((1, 2), int)
  return _run(t5, t5.Model(**sizes, scan=scan), inputs, T5X_CONFIG, changes)


def of_vit(optimizer, scan, **changes):
  model = vit.Model(**VIT, rep_size=True, pool_type="tok", scan=scan)
  image = np.zeros((1, 8, 8, 3), "float32")
  config = BV_CONFIG | dict(optimizer=optimizer)
  return _run(vit, model, (image,), config, changes)


def _run(module, model, inputs, config, changes):
  """Returns (the module, the optimizer, the spec of its state)."""
  init = functools.partial(model.init, jax.random.key(0), *inputs)
  params = jax.eval_shape(init)["params"]
  config = Config(config | changes)
  units = Units(batch_size=1, examples_per_epoch=1, total_steps=24)
  seen = views.of_model(module, model, params)
  optimizer = chain.make(config, params, units, seen)

  def state():
    params = init()["params"]
    trained, _ = trees.partition(params, optimizer.trainable)
    opt = optimizer.tx.init(trained)
    return {"params": params, "opt": opt, "step": jnp.int32(0)}

  rules = [(".*", "fsdp(min_size=1)")]
  mesh = sharding.make_mesh(fsdp=-1)
  spec = sharding.state_spec(jax.eval_shape(state), mesh, rules)
  return module, optimizer, spec


def assert_close(after, expected):
  for name, value in after.items():
    np.testing.assert_allclose(
      value, expected[name], rtol=1e-6, atol=1e-7, err_msg=name
    )


def load(path, run, **optimizer):
  """The parameters, the optimizer's state and the step."""
  module, _, spec = run
  source = foreign_state.find(str(path))
  convert = module.from_published
  params, _ = warm_start.load_params(source, spec["params"], convert=convert)
  state = {"params": params}
  optimizer = T5X_CONFIG["optimizer"] | optimizer
  foreign_state.load(state, source, spec, module, optimizer)
  return state


def gradient(name, shape, step):
  rng = np.random.default_rng([step, *name.encode()])
  return rng.normal(size=shape).astype(np.float32)


def next_params(path, run, golden):
  """Ours and theirs after the next step, by our names."""
  module, optimizer, spec = run
  state = load(path, run)
  step = int(state["step"])
  like = dict(trees.flatten_with_names(spec["params"]))

  def ours(flat):
    flat = module.from_published(flat, like)
    return {n: flat[n][(slice(None),) * x.ndim] for n, x in like.items()}

  theirs = {n[5:]: golden[n] for n in golden if n.startswith("next/")}
  grads = {name: gradient(name, x.shape, step) for name, x in theirs.items()}
  grads, _ = trees.partition(trees.from_flat(ours(grads)), optimizer.trainable)
  trained, _ = trees.partition(state["params"], optimizer.trainable)
  hparams = optimizer.hparams(step)
  update = functools.partial(optimizer.tx.update, step=step, hparams=hparams)
  updates, opt = jax.jit(update)(grads, state["opt"], trained)
  assert {
    int(x) for n, x in trees.flatten_with_names(opt) if x.shape == ()
  } == {step + 1}
  after = dict(trees.flatten_with_names(optax.apply_updates(trained, updates)))
  return after, ours(theirs), step


@pytest.mark.parametrize("scan", cases.quick([False, True], True))
def test_the_next_step_of_t5x(old_runs, scan):
  golden = np.load(old_runs / "t5x.npz")
  after, expected, step = next_params(old_runs / "t5x", of_t5(scan), golden)
  assert step == 1000
  assert_close(after, expected)


@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_a_state_in_orbax_folders_is_the_same(old_runs, tmp_path, use_ocdbt):
  """T5X gives Orbax this tree of its state, see checkpoints.py there."""
  flat = arrays_of(old_runs / "t5x")
  tree = trees.from_flat({name: x[...] for name, x in flat.items()})
  tree["state"]["step"] = np.int32(1000)
  handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(tmp_path / "checkpoint_1000" / "state", tree)
  run = of_t5(False)
  state, expected = load(tmp_path, run), load(old_runs / "t5x", run)
  jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_the_next_step_of_mesh_tensorflow(tmp_path):
  """Its T5 has square matrices, where rows and columns could be exchanged."""
  sizes = T5 | dict(head_dim=4, depth=1, decoder_depth=1)
  least, step = MIN_SIZE["min_dim_size_to_factor"], 1000
  optimizer = dict(name="adafactor", **MIN_SIZE)
  run = of_t5(False, sizes, optimizer=optimizer)
  arrays, golden = {}, {}
  for name, shape in mesh_tensorflow.shapes(**sizes).items():
    arrays[name] = gradient(name, shape, 0)
    square = gradient(name, shape, 1) ** 2
    arrays |= mesh_tensorflow.slots(name, square, least)
    grad = gradient(name, shape, step)
    golden[f"next/{name}"] = mesh_tensorflow.next_value(
      name, arrays, grad, step, T5X_CONFIG["lr"], least
    )
  path = tmp_path / f"model.ckpt-{step}"
  mesh_tensorflow.write(path, arrays, step)
  assert_close(*next_params(path, run, golden)[:2])


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
  "where, optimizer", [("big_vision", ADAFACTOR), ("big_vision_adam", ADAM)]
)
def test_the_next_step_of_big_vision(old_runs, where, optimizer, scan):
  golden = np.load(old_runs / f"{where}.npz")
  run = of_vit(optimizer, scan)
  after, expected, step = next_params(old_runs / f"{where}.bv", run, golden)
  assert step == 12
  assert "head/bias" not in after  # Frozen.
  assert_close(after, expected)


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(name="adafactor", **MIN_SIZE), "expected 3 moments.*found 4"),
    (dict(name="adam"), "expected 2 moments, 0/mu, 0/nu .*found 4"),
    (T5X_CONFIG["optimizer"] | dict(min_dim_size_to_factor=8), "it has no 0/v"),
    (T5X_CONFIG["optimizer"] | dict(lr_inside=False), "lr_inside=True"),
  ],
)
def test_other_optimizers_are_refused(old_runs, changes, message):
  run = of_t5(False, optimizer=changes)
  with pytest.raises(ConfigError, match=f"config.resume: .*{message}"):
    load(old_runs / "t5x", run, **changes)


def test_other_parameters_are_refused(old_runs):
  """A frozen parameter has no moments."""
  run = of_vit(ADAM, False, schedule=dict(decay_type="cosine"))
  with pytest.raises(ConfigError, match="it has no 0/mu/head/bias"):
    load(old_runs / "big_vision_adam.bv", run)
