"""Questions about Python's own library: what is this function for?

A prompt is the name and the signature of a function, a class or a method; the
answer is the first sentence of its documentation.
"""

import importlib
import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

# Modules that can be imported anywhere and do nothing then.
_MODULES = """
abc argparse array ast asyncio base64 bisect builtins bz2 calendar cmath code
codecs collections colorsys configparser contextlib copy csv dataclasses
datetime decimal difflib dis email enum fileinput filecmp fnmatch fractions
ftplib functools gc getopt gettext glob graphlib gzip hashlib heapq hmac html
http imaplib importlib inspect io ipaddress itertools json keyword linecache
locale logging lzma mailbox marshal math mimetypes multiprocessing netrc
numbers operator os pathlib pickle pkgutil platform plistlib poplib pprint
pstats queue quopri random re reprlib runpy sched secrets select selectors
shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl stat
statistics string struct subprocess symtable sys tarfile tempfile textwrap
threading time timeit token tokenize trace traceback tracemalloc types typing
unicodedata unittest urllib.parse urllib.request uuid warnings wave weakref
xml.dom.minidom xml.etree.ElementTree xmlrpc.client zipapp zipfile zlib
zoneinfo
""".split()
_SENTENCE = re.compile(r"(.+?[.!?])(\s|$)")
_TEST_EVERY = 10
_KINDS = (
  type,
  types.FunctionType,
  types.BuiltinFunctionType,
  types.MethodDescriptorType,
)
SPLITS = ("train", "test", "all")


def rows(
  split: str, preferences: bool = False
) -> Iterator[tuple[str, dict[str, str]]]:
  """Yields (place, row) of one of SPLITS; "test" is every tenth row.

  With `preferences`, rows have a second answer, see `_pairs`.
  """
  questions = sorted(_questions())
  all_rows = [{"prompt": text, "completion": x} for text, x in questions]
  for i, row in enumerate(_pairs(questions) if preferences else all_rows):
    is_test = i % _TEST_EVERY == _TEST_EVERY - 1
    if split in ("all", "test" if is_test else "train"):
      yield f"pydoc, question {i}", row


def _pairs(questions: list[tuple[str, str]]) -> list[dict[str, str]]:
  """Classes and as many functions, each with an answer of the other kind, too.

  So each answer is right once and wrong once.
  """
  is_class = lambda x: x.partition("(")[0].rpartition(".")[2][0].isupper()
  kinds = [[q for q in questions if is_class(q[0]) == k] for k in (False, True)]
  n = min(map(len, kinds)) // _TEST_EVERY * _TEST_EVERY
  a, b = ([kind[i * len(kind) // n] for i in range(n)] for kind in kinds)
  return [
    {"prompt": prompt, "chosen": right, "rejected": wrong}
    for (prompt, right), (_, wrong) in [*zip(a, b), *zip(b, a)]
  ]


def _questions() -> Iterator[tuple[str, str]]:
  seen = set[int]()  # Modules import functions from each other.
  for name in _MODULES:
    try:
      module = importlib.import_module(name)
    except ImportError:  # Not in every Python.
      continue
    for key, value in _public(module):
      if id(value) not in seen:
        seen.add(id(value))
        yield from _question(f"{name}.{key}", value)
        for method, function in (
          _public(value) if inspect.isclass(value) else ()
        ):
          yield from _question(f"{name}.{key}.{method}", function)


def _public(owner: Any) -> list[tuple[str, Any]]:
  return [
    (key, value)
    for key, value in sorted(vars(owner).items())
    if key[0] != "_" and isinstance(value, _KINDS)
  ]


def _question(name: str, value: Any) -> Iterator[tuple[str, str]]:
  try:
    signature = str(inspect.signature(value))
  except (AttributeError, TypeError, ValueError):  # Of some C functions.
    return
  text = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
  sentence = _SENTENCE.match(text)
  # Addresses of objects would differ in each process.
  if sentence and len(sentence[1]) > 10 and " at 0x" not in signature:
    yield f"{name.removeprefix('builtins.')}{signature}\n", sentence[1]
