"""Lists what a config can name, and explains one name.

  python -m bigtrain list tasks
  python -m bigtrain list ops tokenize

All text comes from the code, so it cannot be out of date. A list has the first
line of each docstring. An explanation has the docstring and then, for each
argument that a config can set, its name, type and default, and the first
sentence that a docstring or a comment says about it.
"""

import ast
import importlib
import importlib.util
import inspect
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from bigtrain.config import modules
from bigtrain.config.errors import ConfigError, did_you_mean
from bigtrain.evaluation import evaluations
from bigtrain.optim import optimizers, schedules
from bigtrain.pp import parse, registry


class _Package(NamedTuple):
  """A package of which a config names the modules."""

  name: str
  attribute: str  # The function or class of a module that gets the arguments.
  # Arguments that the program passes and a config does not.
  passed: tuple[str, ...] = ()


_PACKAGES = {
  "tasks": _Package(
    "tasks", "loss_fn", passed=("variables", "batch", "rng", "model", "train")
  ),
  "models": _Package("models", "Model", passed=("parent", "name")),
  "sources": _Package("data", "Source"),
  "evaluators": _Package(
    "evaluators", "Evaluator", passed=("predict_fn", "batches", "context")
  ),
  "hooks": _Package("hooks", "Hook", passed=("context",)),
}
_FUNCTIONS = ("ops", "optimizers", "schedules")
KINDS = (*_PACKAGES, *_FUNCTIONS, "variants", "configs")

# Arguments that most ops share, for docstrings that leave them out.
_OP_ARGUMENTS = {
  "key": "names of the feature and of the result, by default `key`.",
  "key_result": "names of the feature and of the result, by default `key`.",
  "method": "see `resize`.",
  "antialias": "see `resize`.",
}
_SECTIONS = ("Args", "Arguments", "Attributes")
_MODULES_OF_TYPES = re.compile(r"\b(typing|collections\.abc|jax|numpy)\.")
_WIDTH = 80


def names(kind: str) -> dict[str, str]:
  """Returns {name: a line about it} of a kind."""
  if kind not in KINDS:
    raise ConfigError(f"list {kind}: unknown.{did_you_mean(kind, KINDS)}")
  if kind in _PACKAGES:
    package = _PACKAGES[kind].name
    return {
      name: _first_line(_import(package, name))
      for name in modules.module_names(package)
    }
  if kind == "variants":
    return {name: ", ".join(map(str, v)) for name, v in _variants()}
  if kind == "configs":
    docs = {n: ast.get_docstring(tree) for n, tree in _configs().items()}
    return {name: (doc or "").partition("\n")[0] for name, doc in docs.items()}
  functions = dict(sorted(_functions(kind).items()))
  if kind == "schedules":
    # The docstring of the module has a formula for each.
    entry = r"^  (\w+) {2,}(.*(?:\n {14}.*)*)"
    formulas = dict(re.findall(entry, schedules.__doc__, re.M))
    return {name: " ".join(formulas[name].split()) for name in functions}
  return {name: _first_line(fn) for name, fn in functions.items()}


def explain(kind: str, name: str) -> str:
  known = names(kind)
  if name not in known:
    hint = did_you_mean(name, known)
    raise ConfigError(f"list {kind} {name}: unknown.{hint}")
  if kind == "variants":
    texts = [_table(name, dict(_variants())[name])]
  elif kind == "configs":
    texts = _config_texts(name)
  elif kind == "schedules":
    about = textwrap.fill(known[name], _WIDTH)
    texts = [about, arguments(_functions(kind)[name], ("total",))]
  elif kind in _FUNCTIONS:
    fn = _functions(kind)[name]
    about = _without_sections(inspect.getdoc(fn) or known[name])
    texts = [about, arguments(fn)]
  elif kind == "tasks":
    texts = _task_texts(name)
  else:
    texts = _module_texts(kind, name)
  return "\n\n".join(text for text in texts if text)


# What the names of each kind stand for.


def _import(package: str, name: str) -> ModuleType:
  return importlib.import_module(f"bigtrain.{package}.{name}")


def _functions(kind: str) -> Mapping[str, Callable[..., Any]]:
  if kind == "optimizers":
    return optimizers.constructors()
  if kind == "schedules":
    return schedules.DECAYS
  parse.parse("decode")  # Imports the modules that register ops.
  return {name: registry.find(name) for name in registry.names()}


def _variants() -> Iterator[tuple[str, Mapping[str, Any]]]:
  """Yields (model, {variant: its fields}) of the models that have variants."""
  for name in modules.module_names("models"):
    variants = getattr(_import("models", name), "VARIANTS", None)
    if variants:
      yield name, variants


def _configs() -> dict[str, ast.Module]:
  """The configs that come with the program, by name, parsed but not run."""
  spec = importlib.util.find_spec("configs")
  if spec is None or not spec.submodule_search_locations:
    return {}  # An installed package has no configs.
  folder = pathlib.Path(next(iter(spec.submodule_search_locations)))
  trees = {
    path.stem: ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(folder.glob("*.py"))
  }
  return {
    name: tree
    for name, tree in trees.items()
    if any(getattr(node, "name", "") == "get_config" for node in tree.body)
  }


# Texts about one name.


def _table(model: str, variants: Mapping[str, Any]) -> str:
  lines = [f'config.model_name = "{model}", config.model.variant:', ""]
  for name, fields in variants.items():
    shown = ", ".join(f"{key}={value!r}" for key, value in fields.items())
    lines += textwrap.wrap(f"{name}: {shown}", _WIDTH, subsequent_indent="    ")
  return "\n".join(lines)


def _config_texts(name: str) -> list[str]:
  tree = _configs()[name]
  texts = [ast.get_docstring(tree) or ""]
  for node in tree.body:
    if isinstance(node, ast.FunctionDef) and node.name == "get_config":
      texts.append(ast.get_docstring(node) or "")
  return texts


def _task_texts(name: str) -> list[str]:
  package = _PACKAGES["tasks"]
  module = _import(package.name, name)
  loss_fn = getattr(module, package.attribute)
  texts = [
    inspect.getdoc(module) or "",
    "config.loss:\n" + arguments(loss_fn, package.passed),
  ]
  for pred, fn in module.predict_fns(None).items():
    about = _first_line(fn)
    lines = [
      f"pred = {pred!r}" + (f": {about}" if about else ""),
      arguments(fn, ("variables", "batch", "model")),
    ]
    texts.append("\n".join(line for line in lines if line))
  return texts


def _module_texts(kind: str, name: str) -> list[str]:
  package = _PACKAGES[kind]
  module = _import(package.name, name)
  target = getattr(module, package.attribute)
  texts = [
    inspect.getdoc(module) or "",
    _without_sections(inspect.getdoc(target) or ""),
    arguments(target, package.passed),
  ]
  if kind == "evaluators":
    # Keys of the entry that go to the evaluator's class of batches, without
    # those that all evaluators have.
    batches = evaluations.batches_of(inspect.signature(target).parameters)
    shared = inspect.signature(evaluations.Batches).parameters
    texts.append(arguments(batches, tuple(shared)))
  return texts


def arguments(fn: Callable[..., Any], passed: tuple[str, ...] = ()) -> str:
  """Describes the arguments of a function, except those in `passed`."""
  texts = _argument_texts(fn)
  lines = []
  for name, parameter in inspect.signature(fn).parameters.items():
    if name in passed or parameter.kind is parameter.VAR_KEYWORD:
      continue
    star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
    line = f"  {star}{name}"
    if parameter.annotation is not parameter.empty:
      annotation = inspect.formatannotation(parameter.annotation)
      line += f": {_MODULES_OF_TYPES.sub('', annotation)}"
    default = parameter.default
    if default is not parameter.empty:
      line += f" = {getattr(default, '__name__', repr(default))}"
    lines.append(line)
    text = texts.get(name) or _OP_ARGUMENTS.get(name)
    if text:
      lines += textwrap.wrap(
        text, _WIDTH, initial_indent=6 * " ", subsequent_indent=6 * " "
      )
  return "\n".join(lines)


# Docstrings and comments.


def _argument_texts(fn: Callable[..., Any]) -> dict[str, str]:
  """Returns {argument: first sentence about it}.

  The text comes from the docstring's list of arguments. A class can also
  describe its fields in comments.
  """
  fn = getattr(fn, "func", fn)  # The function in a functools.partial.
  texts: dict[str, str] = {}
  docs = [inspect.getdoc(fn) or ""]
  if inspect.isclass(fn):
    texts = _field_comments(fn)
    docs.append(inspect.getdoc(fn.__init__) or "")
  for doc in docs:
    for entry_names, text in _entries(doc):
      for name in entry_names.split(", "):
        texts.setdefault(name, text)
  return {name: _first_sentence(text) for name, text in texts.items()}


def _entries(doc: str) -> list[tuple[str, str]]:
  """Entries "name: text" of a docstring's sections about arguments.

  The name of an entry may stand for several: "min_size, max_size".
  """
  entries: list[tuple[str, str]] = []
  in_section = False
  indent = 0  # Of the section's entries, known from the first one.
  header = re.compile(rf"({'|'.join(_SECTIONS)}):")
  entry = re.compile(r"\*{0,2}(\w+(?:, \*{0,2}\w+)*)[^:]*: *(.*)")
  for line in doc.splitlines():
    words = line.strip()
    if header.fullmatch(words):
      in_section, indent = True, 0
      continue
    if not in_section or not words:
      continue
    spaces = len(line) - len(line.lstrip())
    indent = indent or spaces
    match = entry.match(words)
    if spaces < indent:
      in_section = False
    elif spaces == indent and match:
      entries.append((match[1], match[2]))
    elif entries:  # A continuation line.
      name, text = entries[-1]
      entries[-1] = (name, f"{text} {words}")
  return entries


def _field_comments(cls: type) -> dict[str, str]:
  """Returns {field: the comment beside it, or above it}."""
  classes = [
    base
    for base in reversed(cls.__mro__)
    if base.__module__.partition(".")[0] not in ("builtins", "flax")
  ]
  result = {}
  above = ""
  for line in "".join(map(inspect.getsource, classes)).splitlines():
    field = re.fullmatch(r"  (\w+): [^#]*(?:# (.*))?", line)
    if field:
      result[field[1]] = field[2] or above
    if line.startswith("  # "):
      above = f"{above} {line.strip('# ')}"
    else:
      above = ""
  return {name: text.strip() for name, text in result.items() if text}


def _first_sentence(text: str) -> str:
  match = re.match(r"(.+?[.!?])(?:\s+[A-Z(].*)?$", text.strip(), re.DOTALL)
  return match[1] if match else text.strip()


def _without_sections(doc: str) -> str:
  return re.split(r"^[A-Z]\w+:$", doc, flags=re.MULTILINE)[0].strip()


def _first_line(thing: Any) -> str:
  thing = getattr(thing, "func", thing)
  return (inspect.getdoc(thing) or "").partition("\n")[0]
