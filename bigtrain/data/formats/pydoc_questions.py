"""Questions about Python's standard library: what is this function for?

A prompt is the name and the signature of a function, a class or a method; the
answer is the first sentence of its documentation.
"""

import importlib
import inspect
import itertools
import pathlib
import re
import types
from collections.abc import Iterator
from typing import Any

# Names of modules whose import has no effects and works on every system.
_MODULES = pathlib.Path(__file__).with_name("pydoc_modules.txt")
_SENTENCE = re.compile(r"(.+?[.!?])(\s|$)")
_TEST_EVERY = 10
_MIN_LENGTH = 10  # Of an answer, in characters: others say nothing.
_KINDS = (
  type,
  types.FunctionType,
  types.BuiltinFunctionType,
  types.MethodDescriptorType,
)
SPLITS = ("train", "test", "all")
_ROW = ("prompt", "completion")
_PAIR = ("prompt", "chosen", "rejected")


def rows(
  split: str, preferences: bool = False
) -> Iterator[tuple[str, dict[str, str]]]:
  """Yields (place, row) of one of SPLITS; "test" is every tenth row.

  With `preferences`, only rows with a second, worse answer: a later sentence of
  the same docstring, which describes a detail.
  """
  fields = _PAIR if preferences else _ROW
  questions = sorted(_questions())
  if preferences:
    questions = [each for each in questions if each[2]]
  for i, question in enumerate(questions):
    is_test = i % _TEST_EVERY == _TEST_EVERY - 1
    if split in ("all", "test" if is_test else "train"):
      yield f"pydoc, question {i}", dict(zip(fields, question))


def _questions() -> Iterator[tuple[str, str, str]]:
  """Yields (name and signature, first sentence, a later one or "")."""
  seen = set[int]()  # Modules import functions from each other.
  for name in _MODULES.read_text().split():
    try:
      module = importlib.import_module(name)
    except ImportError:  # Not in every Python.
      continue
    for key, value in _public(module):
      if id(value) in seen:
        continue
      seen.add(id(value))
      yield from _question(f"{name}.{key}", value)
      if inspect.isclass(value):
        for method, function in _public(value):
          yield from _question(f"{name}.{key}.{method}", function)


def _public(owner: Any) -> list[tuple[str, Any]]:
  return [
    (key, value)
    for key, value in sorted(vars(owner).items())
    if key[0] != "_" and isinstance(value, _KINDS)
  ]


def _question(name: str, value: Any) -> Iterator[tuple[str, str, str]]:
  try:
    signature = str(inspect.signature(value))
  except (AttributeError, TypeError, ValueError):  # Some C functions have none.
    return
  paragraphs = (inspect.getdoc(value) or "").split("\n\n")
  texts = [" ".join(paragraph.split()) for paragraph in paragraphs]
  sentences = [_SENTENCE.findall(text) for text in texts]
  # Addresses of objects would differ in each process.
  if not sentences[0] or " at 0x" in signature:
    return
  first, *later = [sentence for sentence, _ in itertools.chain(*sentences)]
  if len(first) > _MIN_LENGTH:
    details = [x for x in later if len(x) > _MIN_LENGTH and x[0].isalpha()]
    prompt = f"{name.removeprefix('builtins.')}{signature}\n"
    yield prompt, first, details[0] if details else ""
