"""Marks code that computes more, or less, than the mathematics says.

Padding, for instance, costs FLOPs on the device that are not model FLOPs.
Losses and layers mark such code, and reports/flops.py reads the marks from the
jaxpr. A mark is a name scope: it changes only names in the compiled program.
"""

import contextlib
import fractions
import math
import re
from collections.abc import Iterable
from typing import Any

import jax

_MARK = re.compile(r"model_flops_(\d+)_of_(\d+)")
_RARE = "model_flops_rare"
_MOST_ROUNDS = re.compile(r"model_flops_at_most_(\d+)_rounds")


def share(useful: int, computed: int) -> contextlib.AbstractContextManager[Any]:
  """Marks operations traced inside it: only a share of their work is useful.

  >>> with share(5, 8):  # A length of 5, padded to two chunks of 4.
  ...   pass
  """
  if useful >= computed:
    return contextlib.nullcontext()
  return jax.named_scope(f"model_flops_{useful}_of_{computed}")


def counts_as(
  mathematics: int, computed: int
) -> contextlib.AbstractContextManager[Any]:
  """Sets the number of FLOPs that the operations traced inside it count as.

  An attention kernel skips pairs that a mask hides, for instance, but model
  FLOPs count what the mathematics says.
  """
  if mathematics == computed:
    return contextlib.nullcontext()
  return jax.named_scope(f"model_flops_{mathematics}_of_{computed}")


def rare() -> contextlib.AbstractContextManager[Any]:
  """Marks operations that hardly any step runs: they count as none."""
  return jax.named_scope(_RARE)


def at_most(rounds: int) -> contextlib.AbstractContextManager[Any]:
  """Marks a loop that may end early, by the data: all its rounds count."""
  return jax.named_scope(f"model_flops_at_most_{rounds}_rounds")


def most_rounds(name: str) -> int | None:
  """The rounds of an `at_most` mark, in a name stack or a compiled operation.

  >>> most_rounds("jvp(head/model_flops_at_most_3_rounds/while)")
  3
  """
  marks = _MOST_ROUNDS.findall(name)
  return int(marks[-1]) if marks else None


def is_rare(name: str) -> bool:
  """Whether a name stack, or the text of a compiled operation, has the mark."""
  return _RARE in name


def useful_share(name_stack: str) -> fractions.Fraction:
  """Returns the product of the marks in an operation's name stack.

  >>> useful_share("jvp(decoder/model_flops_5_of_8)")
  Fraction(5, 8)
  """
  if is_rare(name_stack):
    return fractions.Fraction(0)
  marks: Iterable[Any] = _MARK.findall(name_stack)
  if "transpose(" in name_stack:
    marks = set(marks)  # Backward passes have the names of their scopes twice.
  return math.prod(
    (fractions.Fraction(int(n), int(of)) for n, of in marks),
    start=fractions.Fraction(1),
  )
