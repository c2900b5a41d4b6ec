"""Saves checkpoints in processes that are killed at a chosen moment.

  python save_and_die.py WORKDIR MOMENT [MOMENT ...]

For each moment a process of its own saves steps 10 and 20 into
WORKDIR/MOMENT, starts to save step 30, and gets SIGKILL there. One line
"MOMENT SIGNAL" is printed for each. Importing this gives the same states.
"""

import os
import pathlib
import shutil
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain import checkpoint, sharding, storage, trees

# Moments of a save that have a name, in their order.
POINTS = (
  "begin",
  "metadata written",
  "data written",
  "manifest written",
  "committed",
  "renamed for removal",
)
IN_A_CHUNK = "in a chunk"
IN_REMOVAL = "in removal"


def spec(mesh):
  """ShapeDtypeStructs of a state with every kind of array."""
  shapes = {
    "params/dense/kernel": ((16, 24), jnp.float32, PartitionSpec("fsdp")),
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


def values(like, step):
  """The arrays of a state at `step`, in numpy; other steps have others."""

  def make(name, x):
    rng = np.random.default_rng([step, *name.encode()])
    bits = rng.integers(0, 2**16, x.shape)
    if x.dtype == jnp.bool_:
      return bits % 2 == 0
    return np.asarray(bits / 7, jnp.float32).astype(x.dtype)

  return trees.map_with_names(make, like)


def state(like, step):
  """The same on the devices that `like` says."""
  return jax.tree.map(
    lambda x, v: jax.device_put(v, x.sharding), like, values(like, step)
  )


def large_state(step):
  """One that takes a while to write."""
  rows = np.full((64, 2**17), step, np.float32)
  return {f"params/{i}": jnp.asarray(rows) for i in range(4)}


def _die():
  os.kill(os.getpid(), signal.SIGKILL)
  time.sleep(60)


def _die_in_a_chunk(folder):
  """Waits for a file that is partly written."""
  while True:
    for path in folder.rglob("*__lock"):
      if "/c/" in str(path) and path.exists() and path.stat().st_size:
        _die()


def _run(workdir, moment):
  mesh = sharding.make_mesh(2, 4)
  like = spec(mesh)
  saver = checkpoint.Checkpointer(workdir, keep=2)
  saver.save(10, state(like, 10), {"at": 10}, block=True)
  saver.save(20, state(like, 20), {"at": 20}, block=True)
  last = state(like, 30)
  if moment in POINTS:
    checkpoint._point = lambda name: _die() if name == moment else None
  elif moment == IN_REMOVAL:
    whole = shutil.rmtree

    def half(path):
      whole(os.path.join(path, "params"))
      _die()

    storage.shutil.rmtree = half
  elif moment == IN_A_CHUNK:
    last = large_state(30)
    folder = pathlib.Path(storage.folder(workdir))
    threading.Thread(target=_die_in_a_chunk, args=(folder,)).start()
  saver.save(30, last, {"at": 30})
  saver.close()
  os._exit(1)  # It should not have come this far.


if __name__ == "__main__":
  for each in sys.argv[2:]:
    # Forked before jax has devices and threads: an import costs seconds.
    child = os.fork()
    if not child:
      _run(os.path.join(sys.argv[1], each), each)
    _, status = os.waitpid(child, 0)
    print(each, os.WTERMSIG(status), flush=True)
