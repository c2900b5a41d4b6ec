import numpy as np
import pytest

from bigtrain.data import arrays


@pytest.fixture
def reads(monkeypatch):
  """List of the indices of each call of `read` of an arrays source."""
  calls = []
  read = arrays.Source.read

  def recorded(self, indices):
    calls.append(np.asarray(indices).tolist())
    return read(self, indices)

  monkeypatch.setattr(arrays.Source, "read", recorded)
  return calls
