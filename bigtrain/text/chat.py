"""Chat templates: from messages to the text that a model was trained on.

  template = chat.get(None, "some/published/model")  # The folder's own.
  template = chat.get("chatml", "tokenizer.json")
  template.render([{"role": "user", "content": "Hello"}])

Templates are jinja2, in its sandbox, with what they find in transformers.
`supervised` has the tokens of a conversation that a model learns to write.
"""

import dataclasses
import datetime
import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, did_you_mean
from bigtrain.files import paths
from bigtrain.text import tokenizers

Message = Mapping[str, Any]
Now = Callable[[], datetime.datetime]

_FILE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"

# Of the formats in _FOLDER, which several models share, none takes tools.
_NO_TOOLS = """\
{%- if tools %}{{ raise_exception("this template has no tools") }}{% endif %}
"""
_FOLDER = pathlib.Path(__file__).with_name("chat_templates")
NAMES = tuple(sorted(path.stem for path in _FOLDER.iterdir()))


@dataclasses.dataclass(frozen=True)
class Template:
  """A chat template."""

  name: str  # Where it comes from, for messages.
  # jinja2 by name. "tool_use", where there is one, is for conversations with
  # tools, and "default" for all others.
  texts: Mapping[str, str]
  # Special tokens by name, such as {"bos_token": "<s>"}.
  tokens: Mapping[str, str]

  @classmethod
  def of_folder(cls, folder: str) -> "Template":
    """The template in the folder of a published model."""
    path = paths.absolute(folder)
    tokens = _tokens(path)
    file = os.path.join(path, _FILE)
    if os.path.isfile(file):
      return cls(file, {"default": _read(file)}, tokens)
    file = os.path.join(path, _CONFIG)
    given = _json(file).get("chat_template") if os.path.isfile(file) else None
    if isinstance(given, str):
      return cls(file, {"default": given}, tokens)
    if isinstance(given, list):
      texts = {str(each["name"]): str(each["template"]) for each in given}
      if "default" in texts:
        return cls(file, texts, tokens)
    raise ConfigError(
      f"{path}: no chat template, neither {_FILE} nor in {_CONFIG}; give the "
      f"file of one, or a name: {', '.join(NAMES)}."
    )

  def render(
    self,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    *,
    now: Now | None = datetime.datetime.now,
    **variables: Any,
  ) -> str:
    """Returns the text of a conversation.

    Args:
      messages: dicts with "role", "content" and what else the template reads.
      tools: JSON schemas of functions.
      add_generation_prompt: whether the text ends where an answer begins.
      now: time for templates that print the date; None for those that then
        have a date of their own.
      **variables: others of the template, such as enable_thinking=False.
    """
    name = "tool_use" if tools and "tool_use" in self.texts else "default"
    if now is not None:
      clock = {"strftime_now": lambda form: now().strftime(form)}
      variables = clock | variables
    template = _compiled(self.texts[name], self.name)
    try:
      return template.render(
        messages=messages,
        tools=tools or None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **{**self.tokens, **variables},
      )
    except Exception as e:  # A template's own, or of any of its expressions.
      message = " ".join(str(e).split()) or type(e).__name__
      raise ConfigError(f"chat template {self.name}: {message}") from e


def supervised(
  template: Template,
  tokenizer: tokenizers.Tokenizer,
  messages: Sequence[Message],
  tools: Sequence[Any] | None = None,
  *,
  loss: Literal["assistant", "last", "all"] = "assistant",
  first: int = 0,
  **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the ids of a conversation, int32 [n], and which have a loss.

  What an answer adds to the ids of its prompt has a loss, its end included.

  Args:
    loss: "assistant" for all answers, "last" for the last one, "all" for every
      token but answers of weight 0.
    first: number of the first message whose answer may have a loss.
    **options: of `Template.render`.

  Raises:
    DataError: no prefix of the ids is what the model would be asked with, as if
      the template drops earlier thoughts, or an answer has no end token.
  """

  def ids_of(stop: int, prompt: bool = False) -> np.ndarray:
    text = template.render(
      messages[:stop], tools, add_generation_prompt=prompt, **options
    )
    return tokenizer.encode(text, special=True)

  ids = ids_of(len(messages))
  if tools and template.render(messages, **options) == template.render(
    messages, tools, **options
  ):
    raise DataError(f"tools: the template {template.name} does not write them.")
  for i, message in enumerate(messages):
    if (weight := message.get("weight")) not in (None, 0, 1):
      raise DataError(f"message {i}: weight: expected 0 or 1, got {weight!r}.")
  trained = np.full(len(ids), loss == "all")
  turns = [i for i, x in enumerate(messages) if x["role"] == "assistant"]
  turns = [i for i in turns if i >= first]
  for i in turns[-1:] if loss == "last" else turns:
    if (messages[i].get("weight") == 0) != (loss == "all"):
      continue
    prompt = ids_of(i, prompt=True)
    turn = ids_of(i + 1) if i + 1 < len(messages) else ids
    start, stop = len(prompt), _common(turn, ids)
    # Some templates end every text in a token of its own.
    closed = len(turn) == stop + 1 and turn[stop] in tokenizer.special_ids
    shared = _common(prompt, ids)
    if shared < start or (stop < len(turn) and not closed):
      at, other = (shared, prompt) if shared < start else (stop, turn)
      raise DataError(
        f"message {i}: the template writes {_around(tokenizer, ids, at)} in "
        f"the whole conversation, but {_around(tokenizer, other, at)} in the "
        f"{'prompt for' if shared < start else 'one up to'} this answer. "
        "Templates that drop earlier thoughts do so; loss='last' trains only "
        "the last answer, and template= takes another."
      )
    if loss != "all":
      _check_end(tokenizer, ids[start:stop], i)
    trained[start:stop] = loss != "all"
  return ids, trained


def _common(a: np.ndarray, b: np.ndarray) -> int:
  """Length of the longest common prefix."""
  size = min(len(a), len(b))
  different = np.flatnonzero(a[:size] != b[:size])
  return int(different[0]) if different.size else size


def _around(tokenizer: tokenizers.Tokenizer, ids: np.ndarray, at: int) -> str:
  return repr(tokenizer.spell(ids[max(at - 4, 0) : at + 8]))


def _check_end(
  tokenizer: tokenizers.Tokenizer, ids: np.ndarray, number: int
) -> None:
  """Checks that a model that writes these ids learns to stop."""
  for token in ids[::-1].tolist():
    if token in tokenizer.special_ids:
      return
    if tokenizer.spell([token]).strip():
      break
  raise DataError(
    f"message {number}: the end of the answer has no loss: its tokens are "
    f"{tokenizer.spell(ids[-8:])!r}, and none that ends a turn follows, so the "
    "model would never learn to stop. The template ends turns with a text that "
    f"is no special token of {tokenizer.name!r}, or with the next turn."
  )


def get(spec: str | None, tokenizer: str) -> Template:
  """Returns a template by name or path, or else the tokenizer's own.

  Args:
    spec: one of NAMES, a path, or None for the one beside the tokenizer.
    tokenizer: argument of `tokenizers.get`, which has the special tokens.
  """
  folder = _folder_of(tokenizer)
  if spec is None:
    if folder is None:
      raise ConfigError(
        f"the tokenizer {tokenizer!r} has no chat template, and no special "
        "tokens to write one with; conversations need a tokenizer.json, and "
        f"template= a file or a name: {', '.join(NAMES)}."
      )
    return Template.of_folder(folder)
  tokens = {} if folder is None else _tokens(folder)
  if spec in NAMES:
    text = _NO_TOOLS + (_FOLDER / f"{spec}.jinja").read_text()
    return Template(f"'{spec}'", {"default": text}, tokens)
  path = paths.absolute(spec)
  if os.path.isdir(path):
    return Template.of_folder(path)
  if not os.path.isfile(path):
    hint = did_you_mean(spec, NAMES)
    raise ConfigError(f"template={spec!r}: no such file or name.{hint}")
  return Template(path, {"default": _read(path)}, tokens)


def _folder_of(tokenizer: str) -> str | None:
  if tokenizer == "bytes":
    return None
  path = paths.absolute(tokenizer)
  return path if os.path.isdir(path) else os.path.dirname(path)


def _tokens(folder: str) -> dict[str, str]:
  declared = tokenizers.declared_special_tokens(folder)
  return {kind: token for kind, token in declared.items() if token is not None}


def _read(path: str) -> str:
  try:
    return paths.read_bytes(path).decode()
  except (OSError, ValueError) as e:
    raise ConfigError(f"{path}: cannot be read: {e}.") from e


def _json(path: str) -> dict[str, Any]:
  try:
    content = json.loads(_read(path))
  except ValueError as e:
    raise ConfigError(f"{path}: not valid JSON: {e}.") from e
  return content if isinstance(content, dict) else {}


@functools.lru_cache(maxsize=16)
def _compiled(text: str, name: str) -> Any:
  import jinja2

  try:
    return _environment().from_string(text)
  except jinja2.TemplateSyntaxError as e:
    raise ConfigError(
      f"chat template {name}, line {e.lineno}: {e.message}"
    ) from e


@functools.cache
def _environment() -> Any:
  import jinja2.sandbox
  from jinja2 import ext, nodes

  class Generation(ext.Extension):
    """The tag that some templates have around answers; it changes no text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      # A scope, as in transformers: names set inside are unknown outside.
      return nodes.Scope(body).set_lineno(line)

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, ext.loopcontrols],
  )
  environment.filters["tojson"] = to_json
  environment.globals["raise_exception"] = raise_exception
  return environment
