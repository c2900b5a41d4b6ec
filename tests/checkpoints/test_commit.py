import os

import pytest
from support.saved_states import like, path_of, same, save

from bigtrain.checkpoints import restore


@pytest.fixture
def workdir(tmp_path):
  return str(tmp_path / "run")


def test_a_checkpoint_without_its_replacement_gets_its_name_back(workdir):
  # Killed between the two renames of a save that replaces a checkpoint.
  save(workdir, 10)
  os.rename(path_of(workdir, 10), path_of(workdir, 10) + ".old-ab12-0")
  state, _ = restore.resume(workdir, like())
  same(state, 10)
