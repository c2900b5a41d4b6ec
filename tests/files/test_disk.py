"""Messages about full disks."""

import errno
import os
import shutil

from bigtrain.files import disk

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_recognised_behind_other_errors():
  error = RuntimeError("not saved")
  assert not disk.is_full(error)
  error.__cause__ = ValueError(f"tensorstore: write: {FULL.strerror} [OS: 28]")
  assert disk.is_full(error) and disk.is_full(FULL)
  assert not disk.is_full(OSError(errno.EACCES, "Permission denied"))


def test_the_reason_names_the_file_once():
  error = ValueError(
    'RESOURCE_EXHAUSTED: Error writing local file "/a/c.0": Failed writing: '
    f'"/a/c.0_6fa8.__lock": Failed to write 9 bytes: {FULL.strerror} [28]'
  )
  text = disk.reason(error, "/")
  assert text.startswith(f"/a/c.0: {FULL.strerror} (/ has "), text
  named = OSError(errno.EACCES, "Permission denied", "/a")
  assert disk.short_reason(named, "/") == "Permission denied (/a)"
  assert disk.short_reason(FULL, "/").startswith(f"{FULL.strerror} (/ has ")


def test_the_free_bytes_are_those_of_the_nearest_folder(tmp_path):
  total = f"of {shutil.disk_usage(tmp_path).total:,} bytes free)"
  text = disk.room(FULL, str(tmp_path / "missing" / "file"))
  assert text.startswith(f" ({tmp_path} has ") and text.endswith(total)
  assert disk.room(RuntimeError(text), str(tmp_path)) == ""
  assert disk.room(FULL, "gs://bucket/run") == ""
  assert disk.room(OSError(errno.EIO, "broken"), str(tmp_path)) == ""
