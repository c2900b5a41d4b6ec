"""A device whose copy of the state differs."""

import jax
import pytest
import tiny
from jax.experimental import multihost_utils
from tiny import flips

from bigtrain import main
from bigtrain.runtime.hook_context import Corrupt


@pytest.mark.parametrize("every_steps, found", [(5, 5), (1000, 6)])
def test_a_differing_replica_is_named_and_never_saved(
  tiny_config, tmp_path, monkeypatch, every_steps, found
):
  monkeypatch.setattr(flips.Flips, "flipped", False)
  flip = dict(step=4, name="params/head/bias", device=6, when="after")
  hooks = dict(
    flip=dict(type="tiny.flips.Flips", **flip),
    same=dict(type="replicas", every_steps=every_steps),
  )
  # The first case finds it between two saves, the second one before a save.
  config = tiny_config(
    {"mesh": dict(replica=4), "hooks": hooks, "ckpt_steps": 3}
  )
  with pytest.raises(Corrupt) as error:
    main.train(config, str(tmp_path))
  message = str(error.value)
  assert (
    f"after step {found}, replicas of the state differ in 'params/head/bias'"
    in message
  )
  assert f"on {jax.local_devices()[6]} of host" in message
  assert tiny.checkpoint_steps(tmp_path) == [3]


def train_with_a_flip(folder):
  """A part of a shared job, see support/two_processes.py."""
  if jax.process_index() == 0:
    tiny.write_data(folder)
  multihost_utils.sync_global_devices("data")
  flip = dict(name="params/head/bias", device=1, when="after", only=1)
  results = []
  for name, policy, step in (("a", "rollback", 4), ("b", "stop", 5)):
    flips.Flips.flipped = False
    hooks = dict(
      flip=dict(type="tiny.flips.Flips", step=step, **flip),
      same=dict(type="replicas", every_steps=2, policy=policy),
      twice=dict(type="replay", every_steps=3),
    )
    config = tiny.config(folder, {"mesh": dict(replica=4), "hooks": hooks})
    try:
      main.train(config, str(folder / name))
      results.append("")
    except Corrupt as e:
      results.append(str(e))
  return results


@pytest.mark.slow
def test_two_processes_agree_on_the_replica(two_processes):
  part = two_processes("hooks.test_replicas.train_with_a_flip")
  ours, theirs = part.results
  # The first run has rolled back and finished.
  assert ours == theirs and ours[0] == ""
  assert tiny.checkpoint_steps(part.folder / "a") == [3, 6]
  assert "ROLLING BACK to step 3." in part.texts[0]
  assert "step 6, replicas of the state differ in 'params/head/bias'" in ours[1]
  assert ours[1].count(" of host ") == 1  # One of four devices.
