"""What is on disk when a rename makes a checkpoint."""

import os

from support.saved_states import save

from bigtrain.checkpoints import folders, integrity


def test_all_is_on_disk_before_the_rename_and_the_rename_after(
  tmp_path, monkeypatch
):
  # tensorstore syncs the arrays' files, and the folders that hold them.
  assert integrity.tensorstore_context()["file_io_sync"].to_json() is True
  workdir = str(tmp_path / "run")
  events = []
  fsync, rename = os.fsync, os.rename

  def noted_fsync(fd):
    events.append(os.readlink(f"/proc/self/fd/{fd}"))
    fsync(fd)

  def noted_rename(old, new):
    events.append((old, new))
    rename(old, new)

  monkeypatch.setattr(folders.os, "fsync", noted_fsync)
  monkeypatch.setattr(folders.os, "rename", noted_rename)
  save(workdir, 1)
  monkeypatch.undo()
  final = folders.find(workdir)
  (number,) = [i for i, event in enumerate(events) if event[-1] == final]
  tmp = events[number][0]
  before, after = set(events[:number]), events[number + 1 :]
  parents = [path for path, below, _ in os.walk(final) if below]
  assert len(parents) > 1
  for path in (os.path.join(final, "manifest.json"), *parents):
    assert path.replace(final, tmp) in before, path
  assert folders.folder(workdir) in after
