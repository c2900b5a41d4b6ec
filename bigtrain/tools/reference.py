"""Lists what a config can name, and explains one name.

  python -m bigtrain list tasks
  python -m bigtrain list ops tokenize

The text comes from signatures and docstrings: an argument's name, type and
default, and the first sentence about it.
"""

import ast
import importlib
import importlib.util
import inspect
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bigtrain.config import modules, settings
from bigtrain.config.errors import ConfigError, did_you_mean
from bigtrain.evaluation import evaluations
from bigtrain.optim import optimizers, schedules
from bigtrain.pp import parse, registry

KINDS = settings.read_table(__file__, "reference.toml")
_NAMES = "names of the feature and of the result, by default `key`."
# The same for most ops.
_OF_OPS = {"key": _NAMES, "key_result": _NAMES}
_OF_OPS |= dict.fromkeys(("method", "antialias"), "see `resize`.")
_SECTIONS = ("Args", "Arguments", "Attributes")
_MODULES_OF_TYPES = re.compile(r"\b(typing|collections\.abc|jax|numpy)\.")
_WIDTH = 80


def names(kind: str) -> dict[str, str]:
  """Returns {name: first line of its docstring} of a kind."""
  if kind not in KINDS:
    raise ConfigError(f"list {kind}: unknown.{did_you_mean(kind, KINDS)}")
  if folder := KINDS[kind].get("folder"):
    imported = {
      name: importlib.import_module(f"bigtrain.{folder}.{name}")
      for name in modules.module_names(folder)
    }
    return {name: _first_line(module) for name, module in imported.items()}
  if kind == "variants":
    return {name: ", ".join(map(str, v)) for name, v in _variants()}
  if kind == "configs":
    docs = {n: ast.get_docstring(tree) for n, tree in _configs().items()}
    return {name: (doc or "").partition("\n")[0] for name, doc in docs.items()}
  functions = dict(sorted(_functions(kind).items()))
  if kind == "schedules":
    entry = r"^  (\w+) {2,}(.*(?:\n {14}.*)*)"
    formulas = dict(re.findall(entry, schedules.__doc__, re.M))
    return {name: " ".join(formulas[name].split()) for name in functions}
  return {name: _first_line(fn) for name, fn in functions.items()}


def _functions(kind: str) -> Mapping[str, Callable[..., Any]]:
  if kind == "optimizers":
    return optimizers.constructors()
  if kind == "schedules":
    return schedules.DECAYS
  parse.parse("decode")  # Imports the modules that register ops.
  return {name: registry.find(name) for name in registry.names()}


def _variants() -> Iterator[tuple[str, Mapping[str, Any]]]:
  for name in modules.module_names("models"):
    module = importlib.import_module(f"bigtrain.models.{name}")
    variants = getattr(module, "VARIANTS", None)
    if variants:
      yield name, variants


def _configs() -> dict[str, ast.Module]:
  """The configs that come with the program, by name; none is run."""
  spec = importlib.util.find_spec("configs")
  if spec is None or not spec.submodule_search_locations:
    return {}
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


def explain(kind: str, name: str) -> str:
  known = names(kind)
  if name not in known:
    hint = did_you_mean(name, known)
    raise ConfigError(f"list {kind} {name}: unknown.{hint}")
  if kind == "variants":
    return _table(name, dict(_variants())[name])
  if kind == "configs":
    tree = _configs()[name]
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    main = [n for n in functions if n.name == "get_config"]
    docs = [ast.get_docstring(tree), *(ast.get_docstring(n) for n in main)]
    return "\n\n".join(filter(None, docs))
  given = tuple(KINDS[kind].get("given", ()))
  if "folder" not in KINDS[kind]:
    fn = _functions(kind)[name]
    about = _without_sections(inspect.getdoc(fn) or known[name])
    if kind == "schedules":
      about = textwrap.fill(known[name], _WIDTH)
    return "\n\n".join(filter(None, [about, arguments(fn, given)]))
  folder = KINDS[kind]["folder"]
  module = importlib.import_module(f"bigtrain.{folder}.{name}")
  target = getattr(module, KINDS[kind]["attribute"])
  texts = [inspect.getdoc(module) or ""]
  if kind != "tasks":
    texts.append(_without_sections(inspect.getdoc(target) or ""))
    texts.append(arguments(target, given))
    if kind == "evaluators":
      own = evaluations.batches_of(inspect.signature(target).parameters)
      shared = inspect.signature(evaluations.Batches).parameters
      texts.append(arguments(own, tuple(shared)))
  else:
    texts.append("config.loss:\n" + arguments(target, given))
    for pred, fn in module.predict_fns(None).items():
      options = arguments(fn, ("variables", "batch", "model"))
      line = ": ".join(filter(None, [f"pred = {pred!r}", _first_line(fn)]))
      texts.append("\n".join(filter(None, [line, options])))
  return "\n\n".join(filter(None, texts))


def arguments(fn: Callable[..., Any], given: tuple[str, ...] = ()) -> str:
  described = _described(fn)
  lines = []
  for name, parameter in inspect.signature(fn).parameters.items():
    if name in given or parameter.kind is parameter.VAR_KEYWORD:
      continue
    star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
    head = f"  {star}{name}"
    if parameter.annotation is not parameter.empty:
      annotation = inspect.formatannotation(parameter.annotation)
      head += f": {_MODULES_OF_TYPES.sub('', annotation)}"
    if (default := parameter.default) is not parameter.empty:
      head += f" = {getattr(default, '__name__', repr(default))}"
    lines.append(head)
    if text := described.get(name) or _OF_OPS.get(name):
      lines += textwrap.wrap(
        text, _WIDTH, initial_indent=6 * " ", subsequent_indent=6 * " "
      )
  return "\n".join(lines)


def _of_fields(cls: type) -> dict[str, str]:
  """Returns {field: the comment beside it or above it}."""
  result, above = {}, ""
  others = ("builtins", "flax")
  of_ours = lambda x: x.__module__.partition(".")[0] not in others
  classes = [*filter(of_ours, cls.__mro__)]
  for line in "".join(map(inspect.getsource, classes[::-1])).splitlines():
    if match := re.fullmatch(r"  (\w+): [^#]*(?:# (.*))?", line):
      result[match[1]] = match[2] or above
    above = f"{above} {line.strip('# ')}" if line.startswith("  # ") else ""
  return {name: text.strip() for name, text in result.items() if text}


def _described(fn: Callable[..., Any]) -> dict[str, str]:
  """Returns {argument: first sentence about it}, of docstrings and comments."""
  fn = getattr(fn, "func", fn)  # Of functools.partial.
  docs = [inspect.getdoc(fn) or ""]
  result: dict[str, str] = {}
  if inspect.isclass(fn):
    docs.append(inspect.getdoc(fn.__init__) or "")
    result = _of_fields(fn)
  for doc in docs:
    name, section, indent = "", False, 0
    for line in doc.splitlines():
      if re.fullmatch(rf"({'|'.join(_SECTIONS)}):", line.strip()):
        section, indent, name = True, 0, ""
      elif section and line.strip():
        spaces = len(line) - len(line.lstrip())
        indent = indent or spaces
        if spaces < indent:
          section = False
          continue
        match = re.match(
          r"\*{0,2}(\w+(?:, \*{0,2}\w+)*)[^:]*: *(.*)", line.strip()
        )
        if spaces == indent and match:
          name = match[1]
          result.setdefault(name, match[2])
        elif name:
          result[name] += f" {line.strip()}"
  return {
    each: _first_sentence(text)
    for several, text in result.items()
    for each in several.split(", ")
  }


def _first_sentence(text: str) -> str:
  match = re.match(r"(.+?[.!?])(?:\s+[A-Z(].*)?$", text.strip(), re.DOTALL)
  return match[1] if match else text.strip()


def _without_sections(doc: str) -> str:
  return re.split(r"^[A-Z]\w+:$", doc, flags=re.MULTILINE)[0].strip()


def _table(model: str, variants: Mapping[str, Any]) -> str:
  lines = [f'config.model_name = "{model}", config.model.variant:', ""]
  for name, fields in variants.items():
    shown = ", ".join(f"{key}={value!r}" for key, value in fields.items())
    lines += textwrap.wrap(f"{name}: {shown}", _WIDTH, subsequent_indent="    ")
  return "\n".join(lines)


def _first_line(thing: Any) -> str:
  thing = getattr(thing, "func", thing)
  return (inspect.getdoc(thing) or "").partition("\n")[0]
