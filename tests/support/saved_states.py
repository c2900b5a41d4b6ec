"""Train states for tests of checkpoints: makes, saves and compares them."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import checkpointer
from bigtrain.checkpoints.manifest import HostState

# replica, fsdp, sequence, tensor.
MESHES = ((8, 1), (2, 4), (1, 8), (1, 2, 1, 4))


def spec(mesh):
  """ShapeDtypeStructs of a state with every kind of array."""
  by_tensor = ("tensor",) if mesh.shape["tensor"] > 1 else ()
  kernel = PartitionSpec("fsdp", *by_tensor)
  shapes = {
    "params/dense/kernel": ((16, 24), jnp.float32, kernel),
    "params/dense/bias": ((24,), jnp.bfloat16, PartitionSpec(None)),
    "params/wide": (
      (8, 40),
      jnp.float32,
      PartitionSpec(("replica", "fsdp"), None),
    ),
    "opt/mu/dense": ((3, 32), jnp.float16, PartitionSpec(None, "fsdp")),
    "opt/mask": ((16,), jnp.bool_, PartitionSpec("fsdp")),
    "opt/seen": ((), jnp.uint32, PartitionSpec()),
    "opt/none": ((0, 5), jnp.float32, PartitionSpec()),
    "step": ((), jnp.int32, PartitionSpec()),
  }
  return trees.from_flat(
    {
      name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, p))
      for name, (shape, dtype, p) in shapes.items()
    }
  )


def like(replica=2, fsdp=4, sequence=1, tensor=1):
  """`spec` on a mesh of this size."""
  return spec(sharding.make_mesh(replica, fsdp, sequence, tensor))


def one_device():
  """`spec` on a single device."""
  device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like()
  )


def make_values(like, step):
  """The state of a step as numpy arrays; every step has other values."""

  def make(name, x):
    rng = np.random.default_rng([step, *name.encode()])
    bits = rng.integers(0, 2**16, x.shape)
    if x.dtype == jnp.bool_:
      return bits % 2 == 0
    return np.asarray(bits / 7, jnp.float32).astype(x.dtype)

  return trees.map_with_names(make, like)


def make_state(like, step):
  """The state of a step as arrays with the shardings of `like`."""
  return jax.tree.map(
    lambda x, v: jax.device_put(v, x.sharding), like, make_values(like, step)
  )


def host_state(step):
  """The host state of a step."""
  return HostState(hooks={"at": step})


def save(workdir, *steps, like=None, **kwargs):
  """Saves the states of some steps."""
  state_spec = like or spec(sharding.make_mesh(2, 4))
  saver = checkpointer.Checkpointer(workdir, **kwargs)
  for step in steps:
    saver.save(step, make_state(state_spec, step), host_state(step))
  saver.close()


def same(state, step):
  """Asserts that a state is bit-equal to the state of a step."""
  expected = jax.tree.leaves(make_values(state, step))
  for (name, x), y in zip(trees.flatten_with_names(state), expected):
    assert x.dtype == y.dtype and x.shape == y.shape, name
    for shard in x.addressable_shards:
      value = np.asarray(shard.data)
      assert value.tobytes() == y[shard.index].tobytes(), name


def path_of(workdir, step, *parts):
  """A path in the checkpoint of a step."""
  return os.path.join(workdir, "checkpoints", f"{step:08d}", *parts)
