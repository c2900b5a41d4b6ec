import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.array_serialization import serialization
from saved_states import (
  MESHES,
  like,
  make_state,
  one_device,
  path_of,
  same,
  save,
)

from bigtrain import trees
from bigtrain.checkpoints import checkpointer, folders
from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.settings import ConfigError


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


# Saving and restoring.


@pytest.mark.parametrize("saved", MESHES)
def test_restores_bit_equal_under_any_mesh(workdir, saved):
  save(workdir, 7, like=like(*saved), config_digest="abc")
  for mesh in MESHES:
    found, told = checkpointer.restore(workdir, like(*mesh))
    same(found, 7)
    jax.tree.map(
      lambda x, s: x.sharding == s.sharding or 1 / 0,
      found,
      like(*mesh),
    )
  same(
    checkpointer.restore(path_of(workdir, 7), one_device())[0],
    7,
  )
  assert (told.step, told.host_state) == (7, {"at": 7})
  assert told.config_digest == "abc"
  assert checkpointer.verify(path_of(workdir, 7)) == []


def test_jax_array_serialization_reads_the_files(workdir):
  save(workdir, 7)
  names, wanted = zip(*trees.flatten_with_names(like(1, 8)))
  specs = []
  for name in names:
    spec = serialization.get_tensorstore_spec(path_of(workdir, 7, name))
    specs.append({**spec, "driver": "zarr3", "fill_missing_data_reads": False})
  found = serialization.run_deserialization([x.sharding for x in wanted], specs)
  same(trees.from_flat(dict(zip(names, found))), 7)


def test_the_step_may_overwrite_the_state_while_it_is_written(
  workdir, monkeypatch
):
  stepped = threading.Event()
  monkeypatch.setattr(
    checkpointer,
    "_point",
    lambda name: (name == "begin" and stepped.wait(30)) or None,
  )
  train = jax.jit(
    lambda s: jax.tree.map(lambda x: x + x.dtype.type(1), s), donate_argnums=0
  )
  spec = {
    "params": like()["params"],
    "step": like()["step"],
  }
  # Copied, as jax cannot overwrite what it borrowed from numpy.
  state = jax.tree.map(jnp.copy, make_state(spec, 5))
  saver = checkpointer.Checkpointer(workdir)
  saver.save(5, state)
  assert saver.in_flight and checkpointer.newest(workdir) is None
  pointers = [s.data.unsafe_buffer_pointer() for s in _shards(state)]
  state = jax.block_until_ready(train(state))
  assert pointers == [s.data.unsafe_buffer_pointer() for s in _shards(state)]
  stepped.set()
  saver.close()
  assert checkpointer.newest(workdir) == 5
  same(checkpointer.restore(workdir, spec)[0], 5)


def _shards(state):
  return state["params"]["wide"].addressable_shards


def test_one_save_in_flight_and_the_wait_is_in_the_stall(workdir, monkeypatch):
  release = threading.Event()
  monkeypatch.setattr(
    checkpointer,
    "_point",
    lambda name: (name == "data written" and release.wait(30)) or None,
  )
  saver = checkpointer.Checkpointer(workdir)
  state = make_state(like(), 1)
  saver.save(1, state)
  threading.Timer(0.5, release.set).start()
  saver.save(2, state)  # Waits for the first.
  assert saver.last_saved_step == 1
  assert saver.last_stall_secs > 0.4
  assert saver.last_write_secs > 0.4
  saver.wait()
  assert saver.last_saved_step == 2 and not saver.in_flight
  saver.close()


def test_keeps_the_newest_and_every_so_many_for_good(workdir):
  save(workdir, *range(10, 90, 10), keep=2, keep_every_steps=30)
  assert checkpointer.steps(workdir) == [30, 60, 70, 80]
  # A run that was rolled back leaves what is ahead of it alone.
  save(workdir, 50, 55, keep=1)
  assert checkpointer.steps(workdir) == [55, 60, 70, 80]
  assert checkpointer.newest(workdir) == 80
  for keep in (0, -1, 1.5, None):
    with pytest.raises(ConfigError, match=r"config\.keep_ckpts"):
      checkpointer.Checkpointer(workdir, keep=keep)


def test_a_step_saved_again_replaces_the_older(workdir):
  save(workdir, 10)
  shutil.rmtree(path_of(workdir, 10, "params"))
  save(workdir, 10, like=like(1, 8))
  same(checkpointer.restore(workdir, like())[0], 10)
  assert os.listdir(folders.folder(workdir)) == ["00000010"]
  # Killed between the two renames: the old one gets its name back.
  os.rename(
    path_of(workdir, 10),
    path_of(workdir, 10) + ".old-ab12-0",
  )
  found, _ = checkpointer.resume(workdir, like())
  same(found, 10)


def test_host_state_is_taken_at_the_call_and_must_be_json(workdir):
  saver = checkpointer.Checkpointer(workdir)
  state = make_state(like(), 1)
  host = {"loss": 0.1 + 0.2, "nan": float("inf"), "hooks": {"best": [1, None]}}
  saver.save(1, state, host)
  host["hooks"]["best"].append(2)
  saver.wait()
  read = folders.read_manifest(path_of(workdir, 1)).host_state
  assert read == {**host, "hooks": {"best": [1, None]}}
  with pytest.raises(TypeError):
    saver.save(2, state, {"loss": np.float32(1)})
  saver.close()


@pytest.mark.parametrize(
  "name, ok",
  [
    ("params/layer 0/kernel:0", True),
    ("../x", False),
    ("a/../../x", False),
    ("/etc/x", False),
    ("a//b", False),
    ("", False),
    ("a/.", False),
    ("a\\b", False),
    ("a\0b", False),
    ("manifest.json", False),
    ("a/zarr.json", False),
  ],
)
def test_names_that_lead_elsewhere_are_refused(workdir, name, ok):
  saver = checkpointer.Checkpointer(workdir)
  state = {name: jnp.zeros(2)}
  if ok:
    saver.save(1, state, block=True)
    assert checkpointer.newest(workdir) == 1
  else:
    with pytest.raises(CheckpointError, match="array name"):
      saver.save(1, state)
    assert not os.path.exists(workdir)
  saver.close()


def test_arrays_that_cannot_be_saved_are_refused(workdir):
  saver = checkpointer.Checkpointer(workdir)
  for bad in (jax.random.key(0), 3, jnp.zeros(2, jnp.int4)):
    with pytest.raises(CheckpointError, match=r"rng|int4"):
      saver.save(1, {"rng": bad})
  with pytest.raises(CheckpointError, match="'a' is an array already"):
    saver.save(1, {"a": jnp.zeros(1), "a/b": jnp.zeros(1)})
  with pytest.raises(CheckpointError, match="two arrays"):
    saver.save(1, {"a": {"b": jnp.zeros(1)}, "a/b": jnp.zeros(1)})
  saver.close()
