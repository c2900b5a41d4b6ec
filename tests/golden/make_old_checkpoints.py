"""Makes old_checkpoints.tar.gz: checkpoints as T5X and big_vision write them.

  python tests/golden/make_old_checkpoints.py t5x big_vision

The arguments are checkouts of github.com/google-research/t5x (cc342d4) and
github.com/google-research/big_vision (0127fb6). Their own code defines the
parameters, computes the outputs and writes the files: T5X's Checkpointer the
folder t5x/checkpoint_1000, big_vision's save_checkpoint_ts the folder
big_vision.bv-000000012. What they import beyond that is replaced by mocks.

t5x.npz and big_vision.npz in the archive have inputs and outputs. Needs jax,
flax, orbax, tensorflow, einops and ml_collections; jax 0.10 made the file.
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
import numpy as np

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


def write_t5x(root, out):
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
  logits = model.apply({"params": params}, *inputs, enable_dropout=False)

  axes = jax.tree.map(lambda x: jax.P(), params)
  # Small arrays that no rule partitions lie in the msgpack file itself.
  axes["encoder"]["encoder_norm"]["scale"] = None
  moments = jax.tree.map(lambda x: jnp.full(x.shape, 0.5), params)
  state = {
    "target": params,
    "state": {"step": jnp.int32(STEP), "param_states": {"v": moments}},
  }
  state_axes = {
    "target": axes,
    "state": {"step": None, "param_states": {"v": axes}},
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
  np.savez(
    out / "t5x.npz",
    source=source,
    target=target,
    decoder_input=decoder_input,
    logits=logits,
  )


def write_big_vision(root, out):
  sys.modules.setdefault("ml_collections", mock.MagicMock())
  package("big_vision", root / "big_vision")
  package("big_vision.pp", root / "big_vision" / "pp")
  package("big_vision.models", root / "big_vision" / "models")
  utils = importlib.import_module("big_vision.utils")
  vit = importlib.import_module("big_vision.models.vit")

  image = np.random.default_rng(0).uniform(-1, 1, (2, 8, 8, 3))
  image = image.astype("float32")
  model = vit.Model(**VIT, rep_size=True, pool_type="tok")
  params = flax.core.unfreeze(model.init(jax.random.key(0), image)["params"])
  params = jax.tree.map(perturbed, params)
  logits, _ = model.apply({"params": params}, image)
  moments = jax.tree.map(lambda x: x.astype(jnp.bfloat16) / 2, params)
  checkpoint = {
    "params": params,
    "opt": ({"mu": moments}, {"count": jnp.int32(BV_STEP)}),
    "chrono": {"accum_examples_seen": np.float64(3.0)},
  }
  path = str(out / "big_vision.bv")
  manager = utils.array_serial.GlobalAsyncCheckpointManager()
  arrays = jax.tree.map(jnp.asarray, checkpoint)
  utils.save_checkpoint_ts(manager, arrays, path, BV_STEP, keep=True)
  manager.wait_until_finished()
  np.savez(out / "big_vision.npz", image=image, logits=logits)


if __name__ == "__main__":
  t5x, big_vision = map(pathlib.Path, sys.argv[1:])
  with tempfile.TemporaryDirectory() as name:
    write_t5x(t5x, pathlib.Path(name))
    write_big_vision(big_vision, pathlib.Path(name))
    with tarfile.open(FILE, "w:gz") as archive:
      archive.add(name, arcname=".")
