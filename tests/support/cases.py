"""Which cases of a parametrised test are quick."""

import pytest


def quick(cases, *chosen):
  """All cases; those that are not chosen are marked slow."""
  cases = list(cases)
  assert {*chosen} <= {*cases}, {*chosen} - {*cases}
  return [
    case if case in chosen else pytest.param(case, marks=pytest.mark.slow)
    for case in cases
  ]
