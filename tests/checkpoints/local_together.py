"""Two processes keep local checkpoints, and one of them loses its own.

A part of a shared job, see support/two_processes.py.
"""

import os
import shutil

import jax
from support import saved_states

from bigtrain.checkpoints import checkpointer, local_checkpoints
from bigtrain.cluster import process, transfers


def run(folder):
  """Returns a line for each event."""
  is_second = jax.process_index() == 1
  workdir = str(folder / "run")
  os.makedirs(workdir, exist_ok=True)
  new_tier = lambda: local_checkpoints.LocalCheckpoints(
    str(folder / "local"), 1, workdir, "c"
  )
  everything = saved_states.like(2, 4)
  # All arrays but one have all their shards on each of the two processes.
  alike = {**everything, "params": {**everything["params"]}}
  del alike["params"]["wide"]
  events = []

  def save(tier, like, *steps):
    tier.begin(0, None)
    saver = checkpointer.Checkpointer(workdir, local=tier)
    for step in steps:
      state = jax.tree.map(
        lambda x, v: jax.make_array_from_callback(
          v.shape, x.sharding, lambda index: v[index]
        ),
        like,
        saved_states.make_values(like, step),
      )
      saver.save(step, state, saved_states.host_state(step), shared=False)
    saver.close()

  def lose(tier, *steps):
    process.gather(None)  # All processes have written.
    own = os.path.join(tier._root, "1/checkpoints")
    for name in os.listdir(own) if is_second else ():
      if not steps or int(name) in steps:
        shutil.rmtree(os.path.join(own, name))

  def restored(like):
    process.gather(None)
    result = new_tier().restore(None, like)
    if result is None:
      return "none"
    state, manifest = result
    saved_states.same(state, manifest.step)
    assert manifest.host_state == saved_states.host_state(manifest.step)
    return f"step {manifest.step}"

  tier = new_tier()
  save(tier, everything, 1, 2)
  events.append(restored(everything))
  lose(tier, 2)
  events.append(restored(everything))  # The newest that both have.

  tier = new_tier()
  save(tier, alike, 3, 4)
  lose(tier)
  sent = []
  fetch = transfers.fetch
  transfers.fetch = lambda *args: (sent.append(len(args[1])), fetch(*args))
  events.append(restored(alike))
  transfers.fetch = fetch
  events.append(sum(sent))

  # Now process 1 has its shards again.
  transfers.fetch = None
  events.append(restored(alike))
  transfers.fetch = fetch

  # Nobody serves to strangers, and a failure to receive is no end.
  lose(tier)
  if is_second:
    process.job.secret = "guessed"
  events.append(restored(alike))
  process.gather(None)
  return events
