import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.saved_states import like, make_state, path_of, same, save

from bigtrain.checkpoints import checkpointer, folders, restore
from bigtrain.checkpoints.manifest import CheckpointError, HostState
from bigtrain.config import lengths as lengths_lib
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


def test_the_next_step_may_overwrite_the_state_during_the_write(
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
  # Copied, because jax cannot donate memory that belongs to numpy.
  state = jax.tree.map(jnp.copy, make_state(spec, 5))
  saver = checkpointer.Checkpointer(workdir)
  saver.save(5, state)
  assert saver.in_flight and folders.newest(workdir) is None
  pointers = [s.data.unsafe_buffer_pointer() for s in _shards(state)]
  state = jax.block_until_ready(train(state))
  assert pointers == [s.data.unsafe_buffer_pointer() for s in _shards(state)]
  stepped.set()
  saver.close()
  assert folders.newest(workdir) == 5
  same(restore.restore(workdir, spec)[0], 5)


def _shards(state):
  return state["params"]["wide"].addressable_shards


def test_the_stall_includes_the_wait_for_the_previous_save(
  workdir, monkeypatch
):
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


def test_keeps_the_newest_and_every_nth_checkpoint(workdir):
  save(workdir, *range(10, 90, 10), keep=2, keep_every_steps=30)
  assert folders.steps(workdir) == [30, 60, 70, 80]
  # A run that was rolled back does not remove newer steps.
  save(workdir, 50, 55, keep=1)
  assert folders.steps(workdir) == [55, 60, 70, 80]
  assert folders.newest(workdir) == 80
  for keep in (-1, 1.5, None):
    with pytest.raises(ConfigError, match=r"config\.keep_ckpts"):
      checkpointer.Checkpointer(workdir, keep=keep)


def options(config, keep_ckpt=None, local_ckpt=None):
  """The options of a run with these lengths."""
  units = lengths_lib.Units(8)
  lengths = lengths_lib.Lengths(
    units, 100, 100, 10, 50, keep_ckpt, local_ckpt, False
  )
  return checkpointer.read_options(config, lengths, "/w")


def test_options_are_read_from_the_config():
  config = settings.Config({"keep_ckpts": 3})
  assert options(config, keep_ckpt=10) == {
    "keep": 3,
    "dtypes": {},
    "keep_every_steps": 10,
    "local": None,
    "config_digest": settings.digest({"keep_ckpts": 3}),
  }
  with pytest.raises(ConfigError, match=r"config\.keep_ckpts.*at least 0"):
    options(settings.Config({"keep_ckpts": -1}))


def test_a_second_save_of_a_step_replaces_the_first(workdir):
  save(workdir, 10)
  shutil.rmtree(path_of(workdir, 10, "params"))
  save(workdir, 10, like=like(1, 8))
  same(restore.restore(workdir, like())[0], 10)
  assert os.listdir(folders.folder(workdir)) == ["00000010"]


def test_host_state_is_copied_at_the_call_and_must_be_json(workdir):
  saver = checkpointer.Checkpointer(workdir)
  state = make_state(like(), 1)
  tally = {"loss": 0.1 + 0.2, "nan": float("inf")}
  host = HostState(tally=tally, hooks={"best": [1, None]})
  saver.save(1, state, host)
  host.hooks["best"].append(2)
  saver.wait()
  saved = folders.read_manifest(path_of(workdir, 1)).host_state
  assert saved == HostState(tally=tally, hooks={"best": [1, None]})
  with pytest.raises(TypeError):
    saver.save(2, state, HostState(tally={"loss": np.float32(1)}))
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
def test_unsafe_array_names_are_refused(workdir, name, ok):
  saver = checkpointer.Checkpointer(workdir)
  state = {name: jnp.zeros(2)}
  if ok:
    saver.save(1, state, block=True)
    assert folders.newest(workdir) == 1
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


def test_keep_0_saves_nothing(workdir):
  saver = checkpointer.Checkpointer(workdir, keep=0)
  assert saver.save(3, {"x": jnp.ones(2)}) is None
  saver.close()
  assert not folders.steps(workdir)


@pytest.mark.parametrize(
  "changes",
  [
    {"keep_ckpt_steps": 5},
    {"local_ckpt_steps": 5},
    {"save_at_start": True},
    {"nonfinite": "rollback"},
  ],
)
def test_keys_that_need_checkpoints_are_refused_without_them(changes):
  config = settings.Config({"keep_ckpts": 0, **changes})
  (key,) = changes
  lengths = {k: v for k, v in changes.items() if k.endswith("_steps")}
  with pytest.raises(ConfigError, match=key.split("_")[0]):
    options(config, **{k.removesuffix("_steps"): v for k, v in lengths.items()})
