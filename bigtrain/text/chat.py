"""Chat templates, which write a conversation in the format that a model knows.

  template = chat.get(None, "some/published/model")  # The folder's own.
  template = chat.get("chatml", "tokenizer.json")
  template.render([{"role": "user", "content": "Hello"}])

A template is written in jinja2. It runs in jinja2's sandbox, with the functions
that transformers provides to templates. `supervised` returns the tokens of a
conversation, and which of them a model learns to write.
"""

import dataclasses
import datetime
import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np

from bigtrain.config.errors import ConfigError, DataError, did_you_mean
from bigtrain.files import paths
from bigtrain.text import tokenizers

Message = Mapping[str, Any]
Now = Callable[[], datetime.datetime]

_FILE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"

# Put before the templates in _FOLDER: formats that several models share, of
# which none can write tools.
_NO_TOOLS = """\
{%- if tools %}{{ raise_exception("this template has no tools") }}{% endif %}
"""
_FOLDER = pathlib.Path(__file__).with_name("chat_templates")
# Names that `get` accepts.
NAMES = tuple(sorted(path.stem for path in _FOLDER.iterdir()))


@dataclasses.dataclass(frozen=True)
class Template:
  """A chat template."""

  name: str  # Where it comes from, for messages.
  # {name: jinja2}. "tool_use", if there is one, is for conversations with
  # tools, and "default" for all others.
  texts: Mapping[str, str]
  # Special tokens by name, such as {"bos_token": "<s>"}.
  tokens: Mapping[str, str]

  @classmethod
  def of_folder(cls, folder: str) -> "Template":
    """Returns the template in the folder of a published model."""
    path = paths.absolute(folder)
    tokens = _tokens(path)
    file = os.path.join(path, _FILE)
    if os.path.isfile(file):
      return cls(file, {"default": _read(file)}, tokens)
    # Older folders have it in the tokenizer's config: one, or a list by name.
    file = os.path.join(path, _CONFIG)
    given = _json(file).get("chat_template") if os.path.isfile(file) else None
    if isinstance(given, str):
      return cls(file, {"default": given}, tokens)
    if isinstance(given, list):
      texts = {str(each["name"]): str(each["template"]) for each in given}
      if "default" in texts:
        return cls(file, texts, tokens)
    raise ConfigError(
      f"{path}: no chat template, neither {_FILE} nor in {_CONFIG}; give "
      f"template= a file or a name: {', '.join(NAMES)}."
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
      messages: dicts with "role", "content" and other fields that the template
      reads.
      tools: JSON schemas of functions.
      add_generation_prompt: whether the text ends where an answer begins.
      now: clock for templates that print the date. With None they print the
        date that is written in them, if there is one.
      **variables: other variables of the template, such as
        enable_thinking=False.
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
    except Exception as e:  # Any expression of a template may raise any error.
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

  An answer consists of the ids that it adds to its prompt, including its end.
  The prompt is the conversation before the answer, in the form in which the
  model will be asked later. So the prompt's ids must be a prefix of the whole
  conversation's ids, which fails if a template drops the thoughts of earlier
  answers.

  Args:
    loss: "assistant" for all answers, "last" for the last one, "all" for every
      token except answers of weight 0.
    first: number of the first message whose answer may have a loss.
    **options: options of `Template.render`.

  Raises:
    DataError: if the ids do not begin with the prompt's, or an answer has no
      end token.
  """

  def ids_of(stop: int, prompt: bool = False) -> np.ndarray:
    text = template.render(
      messages[:stop], tools, add_generation_prompt=prompt, **options
    )
    return tokenizer.encode(text, special=True)

  ids = ids_of(len(messages))
  # A template that knows no tools would leave them out without an error.
  if tools and template.render(messages, **options) == template.render(
    messages, tools, **options
  ):
    raise DataError(f"tools: the template {template.name} does not write them.")
  for i, message in enumerate(messages):
    if (weight := message.get("weight")) not in (None, 0, 1):
      raise DataError(f"message {i}: weight: expected 0 or 1, got {weight!r}.")
  trained = np.full(len(ids), loss == "all")
  answers = [
    i
    for i, message in enumerate(messages)
    if message["role"] == "assistant" and i >= first
  ]
  if loss == "last":
    answers = answers[-1:]
  for i in answers:
    has_weight_0 = messages[i].get("weight") == 0
    # With "all", only answers of weight 0 differ from the rest.
    if has_weight_0 != (loss == "all"):
      continue
    prompt = ids_of(i, prompt=True)
    so_far = ids_of(i + 1) if i + 1 < len(messages) else ids
    start, stop = len(prompt), _common_prefix(so_far, ids)
    # Some templates end every text with a token that no turn has.
    is_closed = (
      len(so_far) == stop + 1 and so_far[stop] in tokenizer.special_ids
    )
    shared = _common_prefix(prompt, ids)
    if shared < start:
      _raise_different(tokenizer, ids, prompt, shared, i, "prompt for")
    if stop < len(so_far) and not is_closed:
      _raise_different(tokenizer, ids, so_far, stop, i, "one up to")
    if loss != "all":
      _check_end(tokenizer, ids[start:stop], i)
    trained[start:stop] = loss != "all"
  return ids, trained


def _raise_different(
  tokenizer: tokenizers.Tokenizer,
  whole: np.ndarray,
  part: np.ndarray,
  at: int,
  number: int,
  what: str,
) -> NoReturn:
  raise DataError(
    f"message {number}: the template writes {_around(tokenizer, whole, at)} in "
    f"the whole conversation, but {_around(tokenizer, part, at)} in the {what} "
    "this answer. Templates that drop earlier thoughts do so; loss='last' "
    "trains only the last answer, and template= selects another template."
  )


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
  """Returns the length of the longest common prefix."""
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
    f"{tokenizer.spell(ids[-8:])!r}, and no token that ends a turn follows, so "
    "the model would never learn to stop. The template ends turns with a text "
    f"that is not a special token of {tokenizer.name!r}, or with the next turn."
  )


def get(spec: str | None, tokenizer: str) -> Template:
  """Returns a template by name or path, or else the tokenizer's own.

  Args:
    spec: one of NAMES, a path, or None for the one beside the tokenizer.
    tokenizer: argument of `tokenizers.get`. Its folder has the names of the
      special tokens.
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
  path, _ = tokenizers.parse(tokenizer)
  if path == "bytes":
    return None
  path = paths.absolute(path)
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
    """The tag that some templates put around answers; it changes no text."""

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
