"""Checkpoints that T5X and big_vision wrote themselves."""

import pathlib
import tarfile

_FILE = pathlib.Path(__file__).parents[1] / "golden" / "old_checkpoints.tar.gz"


def unpack(folder):
  """Writes what golden/make_old_checkpoints.py made."""
  with tarfile.open(_FILE) as archive:
    archive.extractall(folder, filter="data")
