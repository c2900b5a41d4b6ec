"""Lists of what a config can name, from signatures and docstrings."""

import functools
import inspect
import re

import pytest

from bigtrain.pp import registry
from bigtrain.tools import reference


def names_of(kind):
  """Names of a kind, without the ops that other tests register."""
  names = reference.names(kind)
  if kind == "ops":
    ours = lambda name: registry.find(name).__module__.startswith("bigtrain.")
    names = {name: line for name, line in names.items() if ours(name)}
  return names


@pytest.mark.parametrize("kind", reference.KINDS)
def test_every_name_has_a_line_and_a_text(kind):
  names = names_of(kind)
  assert len(names) >= 3
  without_text = [
    name
    for name, line in names.items()
    if not line or len(reference.explain(kind, name)) < len(line)
  ]
  assert not without_text


@pytest.mark.parametrize(
  "kind", ["ops", "models", "sources", "evaluators", "hooks", "schedules"]
)
def test_every_argument_is_described(kind):
  for name in names_of(kind):
    lines = reference.explain(kind, name).splitlines()
    for line, following in zip(lines, [*lines[1:], ""]):
      if re.match(r"  [*\w]+(: |$)", line) and " = " in line:
        assert following.startswith("      "), f"{kind} {name}: {line}"


def test_types_defaults_and_first_sentences():
  def fn(
    size: int | tuple[int, int],
    *keys: str,
    rate: float = 0.5,
    call: object = functools.reduce,
    other=None,
  ):
    """Does a thing.

    More of it.

    Args:
      size: one number, e.g. 3, or (height,
        width). A second sentence.
      *keys: names
      rate, call: of both.

    Returns:
      rate: not this one.
    """

  assert reference.arguments(fn, passed=("other",)) == inspect.cleandoc(
    """
      size: int | tuple[int, int]
          one number, e.g. 3, or (height, width).
      *keys: str
          names
      rate: float = 0.5
          of both.
      call: object = reduce
          of both.
    """
  ).replace("\n  ", "\n  ").join(["  ", ""]).replace("\n", "\n  ")


def test_a_task_shows_its_loss_and_its_predict_functions():
  text = reference.explain("tasks", "classification")
  assert "mixup_alpha: float = 0.0" in text and "pred = 'pre_logits'" in text
  assert "gpt2_124m" in reference.explain("variants", "decoder")
  assert "runlocal" in reference.explain("configs", "digits")
  assert "timescale" in reference.explain("schedules", "rsqrt")
