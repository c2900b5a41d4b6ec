"""One of two processes that save, restore and fail together.

  python save_together.py WORKDIR INDEX ADDRESS

It prints a line for each thing that happened.
"""

import os
import sys

import jax

from bigtrain.checkpoints import checkpointer, manifest, restore


def report(what):
  print(what, flush=True)


def run(workdir, index):
  import saved_states

  like = saved_states.like(2, 4)
  values = saved_states.make_values(like, 1)
  state = jax.tree.map(
    lambda x, v: jax.make_array_from_callback(
      v.shape, x.sharding, lambda place: v[place]
    ),
    like,
    values,
  )
  saver = checkpointer.Checkpointer(workdir)
  saver.save(1, state, {"at": 1})
  saver.wait()
  assert checkpointer.newest(workdir) == 1
  report("saved")

  # Another layout, in which each process reads other parts.
  other = saved_states.like(1, 8)
  found, told = checkpointer.resume(workdir, other)
  saved_states.same(found, 1)
  report(f"restored {told.step}")

  # What one finds damaged, all refuse.
  load = restore.load
  if index == 1:

    def damaged(*args):
      raise manifest.DamagedError("array 'x' is damaged")

    restore.load = damaged
  try:
    checkpointer.resume(workdir, other)
  except manifest.DamagedError as e:
    report(f"refused {e}")
  restore.load = load

  # What one fails to write, all hear of.
  if index == 1:

    def fail(name):
      if name == "data written":
        raise OSError(28, "No space left on device", "/a/chunk")

    checkpointer._point = fail
  saver.save(2, state)
  try:
    saver.wait()
  except manifest.CheckpointError as e:
    report(f"failed {e}")


if __name__ == "__main__":
  jax.distributed.initialize(sys.argv[3], 2, int(sys.argv[2]))
  run(sys.argv[1], int(sys.argv[2]))
  os._exit(0)
