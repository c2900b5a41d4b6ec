"""Local checkpoints, and what makes them unusable."""

import errno
import logging
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest
import tiny
from support.saved_states import host_state, like, make_state, same

from bigtrain import main
from bigtrain.checkpoints import (
  checkpointer,
  folders,
  integrity,
  local_checkpoints,
)
from bigtrain.checkpoints import start as start_lib
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.runtime import programs


def tier_of(folder, workdir="run", config="config"):
  """The local checkpoints of a run in a folder."""
  (folder / workdir).mkdir(exist_ok=True)
  return local_checkpoints.LocalCheckpoints(
    str(folder / "local"), 1, str(folder / workdir), config
  )


def save(folder, *steps, start=0, shared=(), offset=0):
  """Starts a run and saves steps; `offset` changes the values of the states."""
  tier = tier_of(folder)
  stored = folders.newest(str(folder / "run"))
  tier.begin(start, stored)
  saver = checkpointer.Checkpointer(str(folder / "run"), local=tier)
  for step in steps:
    state = make_state(like(), step + offset)
    saver.save(step, state, host_state(step), shared=step in shared)
  saver.close()


def restored(folder, stored=None, mesh=(2, 4), **kwargs):
  """The step of the state that is restored, or None; checks its bits."""
  result = tier_of(folder, **kwargs).restore(stored, like(*mesh))
  if result is None:
    return None
  state, manifest = result
  same(state, manifest.step)
  assert manifest.host_state == host_state(manifest.step)
  return manifest.step


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
  """A folder with steps 2 and 3 on this host, and none in the workdir."""
  folder = tmp_path_factory.mktemp("saved")
  save(folder, 1, 2, 3)
  return folder


@pytest.fixture
def saved(saved_once):
  """A copy of that folder at the same path, which is part of the identity."""
  kept = saved_once.with_name("kept")
  shutil.copytree(saved_once, kept)
  yield saved_once
  shutil.rmtree(saved_once)
  kept.rename(saved_once)


def directories(folder):
  """{step: directory} of the local checkpoints."""
  found = sorted((folder / "local").glob("run-*/0/checkpoints/0*"))
  return {int(path.name[:8]): path for path in found}


def flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 4
  path.write_bytes(content)


def change_step(path):
  text = path.read_text()
  assert text.count('"step": 3,') == 1
  path.write_text(text.replace('"step": 3,', '"step": 9,'))


CHUNK = "params/wide/c.0.0"


DAMAGE = {
  "a flipped bit": lambda path: flip(path / CHUNK),
  "a flipped bit of the manifest": lambda path: flip(path / "manifest.json"),
  "another step": lambda path: change_step(path / "manifest.json"),
  "half of the data": lambda path: os.truncate(path / CHUNK, 100),
  "no data": lambda path: (path / CHUNK).unlink(),
  "no manifest": lambda path: (path / "manifest.json").unlink(),
  "killed while writing": lambda path: path.rename(f"{path}.tmp-1f-0"),
}


def test_the_newest_step_is_restored_and_two_are_kept(saved):
  assert [*directories(saved)] == [2, 3]
  assert restored(saved) == 3
  assert restored(saved, stored=3) == 3


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_step_is_left_out(saved, damage):
  damage(directories(saved)[3])
  assert restored(saved) == 2
  assert restored(saved, stored=3) is None
  # The next start removes what it cannot use.
  save(saved, start=2)
  assert len([*(saved / "local").glob("run-*/0/checkpoints/0*.tmp*")]) == 0


def test_an_older_step_than_the_workdirs_is_left_out(saved):
  assert restored(saved, stored=4) is None


def test_steps_of_other_runs_are_left_out(saved):
  assert restored(saved, config="other") is None
  assert restored(saved, mesh=(1, 8)) is None
  # A copy of the workdir is another run, even with the files of this one.
  shutil.copytree(saved / "run", saved / "copy")
  tier = tier_of(saved, workdir="copy")
  shutil.copytree(directories(saved)[3].parents[2], tier._root)
  assert tier.restore(None, like()) is None
  # As is a new run in the same place.
  record = saved / "run" / local_checkpoints.RECORD
  content = record.read_text()
  for other in ("{", "[]", '{"0": "1"}', "{}"):
    record.write_text(other)
    assert restored(saved) is None
  record.write_text(content)
  assert restored(saved) == 3


def test_steps_that_the_run_has_left_behind_are_left_out(saved):
  # It went on from step 1, on hosts that do not have these files.
  away = saved / "away"
  shutil.move(saved / "local", away)
  save(saved, start=1)
  shutil.rmtree(saved / "local")
  shutil.move(away, saved / "local")
  assert restored(saved) is None
  # Steps up to the one that it went on from are still of its past.
  save(saved, 1, 2)
  shutil.copytree(saved / "local", away)
  save(saved, 3, start=2, offset=10)
  shutil.copytree(away, saved / "local", dirs_exist_ok=True)
  save(saved, start=2)
  assert [*directories(saved)] == [1, 2] and restored(saved) == 2


def test_a_start_without_local_checkpoints_ends_their_use(saved):
  init = lambda seed: jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), like()
  )
  options = start_lib.StartOptions(None, None, (), False)
  lower = programs.Programs().lower
  workdir = str(saved / "run")
  start_lib.start(
    options,
    workdir,
    {},
    state_spec=like(),
    init_state=init,
    model_module=None,
    seed=0,
    fingerprints={},
    lower=lower,
  )
  assert restored(saved) is None


def test_a_checkpoint_that_was_removed_from_the_workdir_does_not_return(
  saved, caplog
):
  save(saved, 4, start=3, shared=[4])
  assert restored(saved, stored=4) == 4
  shutil.rmtree(folders.find(str(saved / "run")))
  assert restored(saved) is None
  assert "step 4 was removed from the workdir" in caplog.text
  save(saved)  # From there on, it counts as never saved.
  save(saved, 1, 2)
  assert restored(saved) == 2


def test_files_of_a_process_that_no_longer_runs_here_are_used(saved):
  own = directories(saved)[3].parents[1]
  own.rename(own.with_name("7"))
  assert restored(saved) == 3
  save(saved, 4, start=3)
  assert os.listdir(own.parent) == ["0"] and [*directories(saved)] == [4]


def test_a_full_disk_turns_them_off_with_one_warning(
  tmp_path, monkeypatch, caplog
):
  write, calls = integrity.write, []

  def fail(directory, *args, **options):
    if "/local/" in directory:
      calls.append(directory)
      if len(calls) == 2:
        raise OSError(errno.ENOSPC, "No space left on device", "/a/data")
    write(directory, *args, **options)

  monkeypatch.setattr(integrity, "write", fail)
  save(tmp_path, 1, 2, 3, shared=[3])
  (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
  assert "/a/data: No space left on device" in record.getMessage()
  assert "bytes free" in record.getMessage()
  assert len(calls) == 2 and not directories(tmp_path)
  assert folders.steps(str(tmp_path / "run")) == [3]


def test_no_step_waits_for_a_write_to_the_workdir(tmp_path, monkeypatch):
  tier = tier_of(tmp_path)
  tier.begin(0, None)
  saver = checkpointer.Checkpointer(str(tmp_path / "run"), local=tier)
  due = []
  monkeypatch.setattr(
    checkpointer,
    "_point",
    lambda name: name == "data written" and due.append(saver.due_locally(2)),
  )
  saver.save(1, make_state(like(), 1))
  saver.close()
  assert due == [False] and saver.due_locally(2)
  assert [*directories(tmp_path)] == [1]
  saver.remove_local()
  assert os.listdir(tmp_path / "local") == []


@pytest.mark.parametrize(
  "folder, every, message",
  [
    (None, 5, r"local_ckpt_dir=None: expected a folder.*/dev/shm"),
    (3, 5, r"local_ckpt_dir=3: expected a folder"),
    ("gs://bucket/x", 5, "not an object store"),
    ("file/x", 5, "cannot write to .*file"),
    ("x", None, "needs config.local_ckpt_steps"),
  ],
)
def test_mistakes_in_the_config(tmp_path, monkeypatch, folder, every, message):
  monkeypatch.chdir(tmp_path)
  pathlib.Path("file").touch()
  config = settings.Config({"local_ckpt_dir": folder})
  with pytest.raises(ConfigError, match=message):
    local_checkpoints.from_config(config, every, "/w")
  config = settings.Config({"local_ckpt_dir": "~"})
  assert local_checkpoints.from_config(config, 0, "/w") is None


def test_a_run_that_failed_ends_bit_equal(tiny_config, tmp_path, monkeypatch):
  config = tiny_config(
    {
      "model.statistics": True,
      "model.dropout": 0.3,
      "ema_decay": 0.5,
      "input.pp": "random_crop(8,pad=1)",
      "ckpt_steps": 0,
      "log_steps": 4,
    }
  )
  quiet, run = tmp_path / "quiet", tmp_path / "run"
  main.train(config, str(quiet))
  local = dict(local_ckpt_steps=1, local_ckpt_dir=str(tmp_path / "local"))
  fails = {"fails": dict(type="tiny.hooks.Fails", step=6)}
  with pytest.raises(RuntimeError, match="fails before step 6"):
    main.train(config | local | {"hooks": fails}, str(run))
  assert tiny.checkpoint_steps(run) == [] and [*directories(tmp_path)] == [4, 5]
  read, read_each = [], integrity.read_each
  with monkeypatch.context() as patch:
    patch.setattr(
      integrity,
      "read_each",
      lambda path, *args: read.append(path) or read_each(path, *args),
    )
    main.train(config | local, str(run))
  assert read and all(path.startswith(str(tmp_path / "local")) for path in read)
  tiny.assert_same(tiny.arrays(run), tiny.arrays(quiet))
  assert tiny.rows(run) == tiny.rows(quiet)
  # A finished run leaves nothing behind.
  assert os.listdir(tmp_path / "local") == []
  assert not (run / local_checkpoints.RECORD).exists()


def test_two_processes_agree_on_a_step(two_processes):
  part = two_processes("checkpoints.local_together.run")
  first, second = part.results
  # Both have all; process 1 has lost step 2; process 1 has lost all of its own,
  # of which process 0 has copies, in a file for each array; a stranger gets
  # nothing.
  assert first[:3] == second[:3] == ["step 2", "step 1", "step 4"]
  assert (first[3], second[3]) == (0, 6)
  assert first[4:] == second[4:] == ["step 4", "none"]
