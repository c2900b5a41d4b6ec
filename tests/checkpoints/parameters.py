"""Parameters of a small model, and files of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import checkpointer

SHAPES = {
  "encoder/kernel": (8, 16),
  "encoder/bias": (16,),
  "pos_embedding": (1, 4, 8),
  "head/kernel": (16, 4),
}


def model(mesh_size=(2, 4), dtype=jnp.float32, **shapes):
  """ShapeDtypeStructs of a model's parameters."""
  mesh = sharding.make_mesh(*mesh_size)

  def spec(shape):
    spec = PartitionSpec("fsdp" if shape[0] % 8 == 0 else None)
    return jax.ShapeDtypeStruct(
      shape, dtype, sharding=NamedSharding(mesh, spec)
    )

  flat = {name: spec(shape) for name, shape in (SHAPES | shapes).items()}
  return trees.from_flat(flat)


def arrays(prefix="", **shapes):
  """Random values for the parameters, by name."""
  rng = np.random.default_rng(0)
  return {
    prefix + name: rng.standard_normal(shape).astype(np.float32)
    for name, shape in (SHAPES | shapes).items()
  }


def write_npz(path, flat):
  """Writes an .npz and returns its path."""
  np.savez(path, **flat)
  return str(path)


def write_workdir(path):
  """Writes checkpoints 1 and 2 with parameters, EMA and step."""
  saver = checkpointer.Checkpointer(str(path))
  for step in (1, 2):
    params = jax.tree.map(
      lambda x, s, step=step: jax.device_put(x + step, s.sharding),
      trees.from_flat(arrays()),
      model((1, 8)),
    )
    ema = jax.tree.map(lambda x: (2 * x).astype(jnp.bfloat16), params)
    saver.save(step, {"params": params, "ema": ema, "step": jnp.int32(step)})
  saver.close()
  return str(path)


def statuses(lines):
  """{name: status} of the table's lines."""
  return {line.name: line.status for line in lines}


def check(tree, expected):
  """Asserts that a tree has exactly these arrays."""
  flat = dict(trees.flatten_with_names(tree))
  assert sorted(flat) == sorted(expected)
  for name, x in flat.items():
    np.testing.assert_array_equal(x, expected[name], name)
