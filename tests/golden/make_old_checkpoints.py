"""Makes old_checkpoints.tar.gz: checkpoints as T5X and big_vision write them.

  python tests/golden/make_old_checkpoints.py t5x big_vision

The arguments are checkouts of github.com/google-research/t5x (cc342d4) and
github.com/google-research/big_vision (0127fb6). Their own code defines the
parameters, computes the outputs, updates the optimizers and writes the files:
T5X's Checkpointer the folder t5x/checkpoint_1000, its
OrbaxCheckpointManagerInterface the folders t5x_ocdbt and t5x_zarr, and
big_vision's save_checkpoint_ts the folder big_vision.bv-000000012. What they
import beyond that is replaced by mocks.

t5x.npz, big_vision.npz and big_vision_adam.npz in the archive have inputs and
outputs, and "next/...": the parameters after a further step. Needs jax, flax,
optax, orbax, tensorflow, einops and ml_collections; jax 0.10 and orbax 0.12
made the file.
"""

import importlib
import importlib.util
import pathlib
import sys
import tarfile
import tempfile
import types
from unittest import mock

import flax
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import t5x_adafactor

FILE = pathlib.Path(__file__).with_name("old_checkpoints.tar.gz")
T5 = dict(
  vocab_size=24,
  emb_dim=8,
  num_heads=2,
  num_encoder_layers=2,
  num_decoder_layers=2,
  head_dim=3,
  mlp_dim=12,
  mlp_activations=("gelu", "linear"),
  dropout_rate=0.0,
)
VIT = dict(
  num_classes=5, width=16, depth=2, mlp_dim=24, num_heads=2, patch_size=(4, 4)
)
STEP = 1000
BV_STEP = 12
# Of the optimizers, whose states the checkpoints hold.
NUM_UPDATES = 3
LR, MOMENTUM, MIN_DIM_SIZE_TO_FACTOR = 0.01, 0.9, 4
BV_OPTIMIZERS = dict(
  big_vision=dict(
    optax_name="big_vision.scale_by_adafactor",
    optax=dict(min_dim_size_to_factor=MIN_DIM_SIZE_TO_FACTOR),
  ),
  big_vision_adam=dict(
    optax_name="scale_by_adam", optax=dict(mu_dtype="bfloat16")
  ),
)


def load(name, path):
  """Imports a file of a checkout as a module of the given name."""
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


def undecorated(*args, **kwargs):
  """gin.configurable, which leaves functions as they are."""
  if args and callable(args[0]):
    return args[0]
  return lambda fn: fn


def package(name, path):
  """A package without its __init__, which would import everything."""
  module = types.ModuleType(name)
  module.__path__ = [str(path)]
  sys.modules[name] = module


def perturbed(x):
  """Parameters without zeros and ones in a row."""
  return x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape)


def gradient(name, shape, step):
  rng = np.random.default_rng([step, *name.encode()])
  return rng.normal(size=shape).astype(np.float32)


def write_t5x(root, out):
  adafactor = t5x_adafactor.load(root / "t5x" / "adafactor.py")
  gin = mock.MagicMock()
  gin.configurable = undecorated
  tensorboard = "tensorboard.backend.event_processing"
  readers = ("directory_watcher", "event_file_loader", "io_wrapper")
  for name in (
    *("clu", "clu.data", "jestimator", "seqio", "airio", "cached_property"),
    *("tensorboard", "tensorboard.backend", tensorboard),
    *(f"{tensorboard}.{reader}" for reader in readers),
  ):
    sys.modules[name] = mock.MagicMock()
  # Types for isinstance.
  iterators = sys.modules["clu"].data.dataset_iterator
  iterators.TfDatasetIterator = iterators.DatasetIterator = (
    types.SimpleNamespace
  )
  sys.modules["gin"] = gin
  package("t5x", root / "t5x")
  for name in ("partitioning", "train_state", "optimizers"):
    sys.modules[f"t5x.{name}"] = mock.MagicMock()
    setattr(sys.modules["t5x"], name, sys.modules[f"t5x.{name}"])
  network = importlib.import_module("t5x.examples.t5.network")
  checkpoints = importlib.import_module("t5x.checkpoints")

  rng = np.random.default_rng(0)
  source = rng.integers(1, T5["vocab_size"], (2, 9))
  target = rng.integers(1, T5["vocab_size"], (2, 7))
  decoder_input = np.pad(target[:, :-1], ((0, 0), (1, 0)))
  model = network.Transformer(network.T5Config(**T5))
  inputs = source, decoder_input, target
  variables = model.init(jax.random.key(0), *inputs, enable_dropout=False)
  params = jax.tree.map(perturbed, flax.core.unfreeze(variables["params"]))
  # Before set_param_axes, and after it for arrays of one or two dimensions,
  # T5X factors the two largest dimensions.
  optimizer = adafactor.Adafactor(
    LR, beta1=MOMENTUM, min_dim_size_to_factor=MIN_DIM_SIZE_TO_FACTOR
  )
  flat = flax.traverse_util.flatten_dict(params, sep="/")
  moments = {n: optimizer.init_param_state(p, n) for n, p in flat.items()}
  for step in range(STEP - NUM_UPDATES, STEP + 1):
    if step == STEP:
      params = flax.traverse_util.unflatten_dict(flat, sep="/")
      states = {
        f"{name}/{field}": getattr(moments[name], field)
        for name in flat
        for field in ("m", "v", "v_col", "v_row")
      }
    for name in flat:
      flat[name], moments[name] = optimizer.apply_param_gradient(
        step,
        optimizer.hyper_params,
        flat[name],
        moments[name],
        gradient(name, flat[name].shape, step),
        name,
      )
  logits = model.apply({"params": params}, *inputs, enable_dropout=False)

  axes = jax.tree.map(lambda x: jax.P(), params)
  # Small arrays that no rule partitions lie in the msgpack file itself.
  axes["encoder"]["encoder_norm"]["scale"] = None
  states = flax.traverse_util.unflatten_dict(states, sep="/")
  state = {
    "target": params,
    "state": {"step": jnp.int32(STEP), "param_states": states},
  }
  state_axes = {
    "target": axes,
    "state": {
      "step": None,
      "param_states": jax.tree.map(lambda x: jax.P(), states),
    },
  }
  train_state = types.SimpleNamespace(step=STEP, state_dict=lambda: state)
  partitioner = mock.MagicMock()
  partitioner.get_mesh_axes.return_value.state_dict = lambda: state_axes
  partitioner.get_data_layout.return_value = types.SimpleNamespace(
    shard_id=0, num_shards=1, is_first_host_in_replica_set=True
  )
  partitioner.get_local_chunk_info = lambda shape, axes: types.SimpleNamespace(
    slice=(slice(None),) * len(shape), replica_id=0
  )
  folder = str(out / "t5x")
  saver = checkpoints.Checkpointer(train_state, partitioner, folder)
  saver.save(train_state)
  for tree in (state, state_axes):  # To keep the file small.
    del tree["state"]["param_states"]
  write_orbax(checkpoints, train_state, partitioner, out / "t5x_ocdbt", True)
  write_orbax(checkpoints, train_state, partitioner, out / "t5x_zarr", False)
  np.savez(
    out / "t5x.npz",
    source=source,
    target=target,
    decoder_input=decoder_input,
    logits=logits,
    **{f"next/{name}": value for name, value in flat.items()},
  )


def write_orbax(checkpoints, train_state, partitioner, folder, use_ocdbt):
  """T5X's state by way of Orbax, which had no OCDBT before 2023."""
  handler = checkpoints.ocp.PyTreeCheckpointHandler
  make = lambda **_: handler(use_ocdbt=use_ocdbt)
  folder.mkdir()
  with mock.patch.object(checkpoints.ocp, "PyTreeCheckpointHandler", make):
    manager = checkpoints.OrbaxCheckpointManagerInterface(
      str(folder), train_state, partitioner
    )
  manager.save(train_state)
  manager.wait_until_finished()
  manager.close()


def write_big_vision(root, out):
  package("big_vision", root / "big_vision")
  package("big_vision.pp", root / "big_vision" / "pp")
  package("big_vision.models", root / "big_vision" / "models")
  utils = importlib.import_module("big_vision.utils")
  vit = importlib.import_module("big_vision.models.vit")
  bv_optax = importlib.import_module("big_vision.optax")

  image = np.random.default_rng(0).uniform(-1, 1, (2, 8, 8, 3))
  image = image.astype("float32")
  model = vit.Model(**VIT, rep_size=True, pool_type="tok")
  params = flax.core.unfreeze(model.init(jax.random.key(0), image)["params"])
  params = jax.tree.map(perturbed, params)
  first = params
  for name, config in BV_OPTIMIZERS.items():
    config |= dict(
      lr=LR,
      wd=LR,
      schedule=[("head/bias", None), (".*", dict(decay_type="cosine"))],
    )
    params = first
    tx, _ = bv_optax.make(
      ml_collections.ConfigDict(config),
      params,
      sched_kw=dict(total_steps=2 * BV_STEP, batch_size=1, data_size=1),
    )
    opt = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(BV_STEP + 1):
      if step == BV_STEP:
        save_big_vision(utils, params, opt, model, image, out / name)
      named, structure = utils.tree_flatten_with_names(params)
      grads = [gradient(name, value.shape, step) for name, value in named]
      updates, opt = update(structure.unflatten(grads), opt, params)
      params = optax.apply_updates(params, updates)
    golden = dict(np.load(out / f"{name}.npz"))
    for param, value in utils.tree_flatten_with_names(params)[0]:
      golden[f"next/{param}"] = value
    np.savez(out / f"{name}.npz", **golden)


def save_big_vision(utils, params, opt, model, image, path):
  logits, _ = model.apply({"params": params}, image)
  checkpoint = {
    "params": params,
    "opt": opt,
    "chrono": {"accum_examples_seen": np.float64(3.0)},
  }
  manager = utils.array_serial.GlobalAsyncCheckpointManager()
  arrays = jax.tree.map(jnp.asarray, checkpoint)
  utils.save_checkpoint_ts(manager, arrays, f"{path}.bv", BV_STEP, keep=True)
  manager.wait_until_finished()
  np.savez(f"{path}.npz", image=image, logits=logits)


if __name__ == "__main__":
  t5x, big_vision = map(pathlib.Path, sys.argv[1:])
  with tempfile.TemporaryDirectory() as name:
    write_t5x(t5x, pathlib.Path(name))
    write_big_vision(big_vision, pathlib.Path(name))
    with tarfile.open(FILE, "w:gz") as archive:
      archive.add(name, arcname=".")
