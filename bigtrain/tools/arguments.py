"""Command lines of the tools.

Each tool builds a parser, adds its arguments with argparse's `add_argument`,
and parses the words that follow its name:

  Parser     for tools that do without jax, such as `runs`
  JaxParser  for the others: it also accepts the flags of jax and absl and, for
             some tools, changes of the config
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from bigtrain.config.errors import ConfigError, did_you_mean

_CONFIG_PREFIX = "--config."
# argparse's message about a value that is not among an argument's choices.
_INVALID_CHOICE = re.compile(
  r"argument ([^:]*): invalid choice: '(.*)' \(choose from (.*)\)"
)


class OneLineParser(argparse.ArgumentParser):
  """A parser whose errors are ConfigErrors, in place of a page about usage.

  `exits.in_one_line` prints one line for them.
  """

  def error(self, message: str) -> NoReturn:
    if wrong := _INVALID_CHOICE.fullmatch(message):
      name, value, listed = wrong.groups()
      choices = [choice.strip("'") for choice in listed.split(", ")]
      message = f"{name}: unknown {value!r}.{did_you_mean(value, choices)}"
    raise ConfigError(message)

  def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
    parsed, unknown = self.parse_known_args(args, namespace)
    if unknown:
      self.refuse(unknown[0])
    return parsed

  def refuse(self, word: str, others: Iterable[str] = ()) -> NoReturn:
    """Raises the error for an argument that the tool does not have.

    Args:
      others: names, besides the tool's options, that the hint may suggest.
    """
    name = word.partition("=")[0]
    options = list(self._option_string_actions)
    # A tool with commands, such as `checkpoint`, has one parser for each.
    for action in self._actions:
      if isinstance(action, argparse._SubParsersAction):
        for command in action.choices.values():
          options += command._option_string_actions
    hint = did_you_mean(name, [*options, *others])
    if "mean" not in hint:
      # No name is similar. List the tool's options only.
      hint = did_you_mean(name, options)
    raise ConfigError(f"{word!r}: unknown argument.{hint}")


class Parser(OneLineParser):
  """A parser whose --help begins with the docstring of the tool."""

  def __init__(self, tool: str, doc: str | None, **options: Any):
    super().__init__(
      prog=f"python -m bigtrain.tools.{tool}",
      description=doc,
      formatter_class=argparse.RawDescriptionHelpFormatter,
      **options,
    )


class JaxParser(Parser):
  """A parser that also handles flags of jax and absl, and --config.KEY=VALUE.

  runtime/jax_flags.py has the flags.
  """

  def __init__(self, tool: str, doc: str | None, *, changes_config: bool):
    epilog = None
    if changes_config:
      epilog = "--config.KEY=VALUE changes the config, as for bigtrain.main."
    # An abbreviated option could be a misspelled flag of jax.
    super().__init__(tool, doc, epilog=epilog, allow_abbrev=False)
    self._changes_config = changes_config

  def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the arguments, and changes of the config as "KEY=VALUE"."""
    if {"-h", "--help"} & set(argv):
      self.print_help()
      self.exit()
    # This imports jax, which --help and the tools with a `Parser` do without.
    from bigtrain.runtime import jax_flags

    changes = []
    words = []
    for word in argv:
      if word.startswith(_CONFIG_PREFIX):
        changes.append(word.removeprefix(_CONFIG_PREFIX))
      else:
        words.append(word)
    if changes and not self._changes_config:
      raise ConfigError(
        f"{_CONFIG_PREFIX}{changes[0]}: this tool changes no config."
      )
    args, unknown = self.parse_known_args(jax_flags.take(words))
    if unknown:
      self.refuse(unknown[0], jax_flags.names())
    return args, changes


def split_at_commas(text: str) -> list[str]:
  """Splits at the commas outside brackets and quotes.

  >>> split_at_commas("(1,2),'a,b',3")
  ['(1,2)', "'a,b'", '3']
  """
  parts = [""]
  depth = 0  # Number of brackets that are open.
  quote = ""  # The quotation mark that is open.
  for letter in text:
    if quote:
      if letter == quote:
        quote = ""
    elif letter in "'\"":
      quote = letter
    elif letter in "([{":
      depth += 1
    elif letter in ")]}":
      depth -= 1
    if letter == "," and not depth and not quote:
      parts.append("")
    else:
      parts[-1] += letter
  return parts
