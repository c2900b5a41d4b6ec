"""Which cases of a parametrised test are quick."""

import pytest


def quick(cases, *chosen):
  """All cases; those that are not chosen are marked slow."""
  cases = list(cases)
  assert all(case in cases for case in chosen), chosen
  return [
    case if case in chosen else pytest.param(case, marks=pytest.mark.slow)
    for case in cases
  ]
