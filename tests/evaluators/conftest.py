"""Every program of an evaluator can be kept for the next start."""

import types

import pytest

from bigtrain.evaluation import evaluations
from bigtrain.runtime import closures


@pytest.fixture(autouse=True)
def check_that_functions_can_be_kept(monkeypatch):
  """Fails a test whose evaluator compiles a function that has no text."""
  compile_for_batches = evaluations.Batches.map

  def checked(self, fn):
    for cell in fn.__closure__ or ():
      predict_fn = cell.cell_contents  # A run makes it from its config.
      if isinstance(predict_fn, types.FunctionType):
        known = "the config", id(predict_fn)
        vars(predict_fn).setdefault(closures.FROM_CONFIG, known)
    assert closures.text(fn)
    return compile_for_batches(self, fn)

  monkeypatch.setattr(evaluations.Batches, "map", checked)
