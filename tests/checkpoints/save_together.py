"""Two processes save, restore and fail together.

A part of a shared job, see support/two_processes.py.
"""

import jax
from support import saved_states

from bigtrain.checkpoints import checkpointer, folders, manifest, restore


def run(folder):
  """Returns a line for each event."""
  workdir = str(folder / "run")
  is_second = jax.process_index() == 1
  events = []
  like = saved_states.like(2, 4)
  values = saved_states.make_values(like, 1)
  state = jax.tree.map(
    lambda x, v: jax.make_array_from_callback(
      v.shape, x.sharding, lambda index: v[index]
    ),
    like,
    values,
  )
  saver = checkpointer.Checkpointer(workdir)
  saver.save(1, state, saved_states.host_state(1))
  saver.wait()
  assert folders.newest(workdir) == 1
  events.append("saved")

  # With another layout each process reads other parts of the arrays.
  other = saved_states.like(1, 8)
  restored, checkpoint = restore.resume(workdir, other)
  saved_states.same(restored, 1)
  events.append(f"restored {checkpoint.step}")

  # If one process finds damage, all refuse the checkpoint.
  load = restore.load
  if is_second:

    def fail_to_load(*args, **kwargs):
      raise manifest.DamagedError("array 'x' is damaged")

    restore.load = fail_to_load
  try:
    restore.resume(workdir, other)
  except manifest.DamagedError as e:
    events.append(f"refused {e}")
  restore.load = load

  # If one process fails to write, all report it.
  on_point = checkpointer._point
  if is_second:

    def fail_to_write(name):
      if name == "data written":
        raise OSError(28, "No space left on device", "/a/chunk")

    checkpointer._point = fail_to_write
  saver.save(2, state)
  try:
    saver.wait()
  except manifest.CheckpointError as e:
    events.append(f"failed {e}")
  checkpointer._point = on_point
  return events
