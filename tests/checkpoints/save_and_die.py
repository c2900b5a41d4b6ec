"""Saves checkpoints in processes that are killed at a given moment.

  python save_and_die.py WORKDIR MOMENT [MOMENT ...]

For each moment, a separate process saves steps 10 and 20 to WORKDIR/MOMENT,
starts to save step 30 and gets SIGKILL at that moment. Prints one line
"MOMENT SIGNAL" for each.
"""

import os
import pathlib
import shutil
import signal
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
from support import saved_states

from bigtrain.checkpoints import checkpointer, folders

# Named moments of a save, in order.
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


def large_state(step):
  """A state that takes a while to write."""
  rows = np.full((64, 2**17), step, np.float32)
  return {f"params/{i}": jnp.asarray(rows) for i in range(4)}


def _die():
  os.kill(os.getpid(), signal.SIGKILL)
  time.sleep(60)


def _die_in_a_chunk(folder):
  """Waits until a file is partly written."""
  while True:
    for path in folder.rglob("*__lock"):
      if path.name.startswith("c.") and path.exists() and path.stat().st_size:
        _die()


def _run(workdir, moment):
  like = saved_states.like()
  saver = checkpointer.Checkpointer(workdir, keep=2)
  saver.save(
    10,
    saved_states.make_state(like, 10),
    saved_states.host_state(10),
    block=True,
  )
  saver.save(
    20,
    saved_states.make_state(like, 20),
    saved_states.host_state(20),
    block=True,
  )
  last = saved_states.make_state(like, 30)
  if moment in POINTS:
    checkpointer._point = lambda name: _die() if name == moment else None
  elif moment == IN_REMOVAL:
    rmtree = shutil.rmtree

    def remove_half(path):
      rmtree(os.path.join(path, "params"))
      _die()

    folders.shutil.rmtree = remove_half
  elif moment == IN_A_CHUNK:
    last = large_state(30)
    folder = pathlib.Path(folders.folder(workdir))
    threading.Thread(target=_die_in_a_chunk, args=(folder,)).start()
  saver.save(30, last, saved_states.host_state(30))
  saver.close()
  os._exit(1)  # The process should be dead by now.


if __name__ == "__main__":
  for each in sys.argv[2:]:
    # Forked before jax has devices and threads, to save the import.
    child = os.fork()
    if not child:
      _run(os.path.join(sys.argv[1], each), each)
    _, status = os.waitpid(child, 0)
    print(each, os.WTERMSIG(status), flush=True)
