"""Chat templates: from messages to the text that a model was trained on.

  template = chat.get(None, "some/published/model")  # The folder's own.
  template = chat.get("chatml", "tokenizer.json")
  template.render([{"role": "user", "content": "Hello"}])

Templates are jinja2, in its sandbox, with what they find in transformers.
"""

import dataclasses
import datetime
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bigtrain.files import paths
from bigtrain.pp import tokenizers
from bigtrain.settings import ConfigError, did_you_mean, import_package

Message = Mapping[str, Any]
Now = Callable[[], datetime.datetime]

_FILE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"

# Formats that several models share. None of them takes tools.
_NO_TOOLS = """\
{%- if tools %}{{ raise_exception("this template has no tools") }}{% endif %}
"""
_NAMED = {
  "chatml": """\
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
""",
  # Every answer keeps its thoughts, so a text does not change as it goes on.
  "qwen3": """\
{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\n" }}
{%- if message.role == "assistant" %}
{{- "<think>\n" + (message.reasoning_content or "").strip("\n") }}
{{- "\n</think>\n\n" }}
{%- endif %}
{{- message.content + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
""",
  "llama3": """\
{%- macro head(role) %}
{{- "<|start_header_id|>" + role + "<|end_header_id|>\n\n" }}
{%- endmacro %}
{{- bos_token }}
{%- for message in messages %}
{{- head(message.role) + message.content | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ head("assistant") }}{% endif %}
""",
  "gemma": """\
{{- bos_token }}
{%- set ns = namespace(system="") %}
{%- for message in messages %}
{%- if message.role == "system" %}
{%- set ns.system = message.content + "\n\n" %}
{%- else %}
{%- set role = "model" if message.role == "assistant" else message.role %}
{{- "<start_of_turn>" + role + "\n" + ns.system + message.content | trim }}
{{- "<end_of_turn>\n" }}
{%- set ns.system = "" %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<start_of_turn>model\n" }}{% endif %}
""",
  "mistral": """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == "user" %}
{{- "[INST] " + message.content + "[/INST]" }}
{%- elif message.role == "assistant" %}
{{- " " + message.content | trim + eos_token }}
{%- else %}
{{- raise_exception("this template has the roles user and assistant") }}
{%- endif %}
{%- endfor %}
""",
  "phi3": """\
{%- for message in messages %}
{{- "<|" + message.role + "|>\n" + message.content + "<|end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>\n" }}{% endif %}
""",
}
NAMES = tuple(_NAMED)


@dataclasses.dataclass(frozen=True)
class Template:
  """A chat template.

  Attributes:
    name: where it comes from, for messages.
    texts: jinja2 by name. "tool_use", where there is one, is for conversations
      with tools, and "default" for all others.
    tokens: special tokens by name, such as {"bos_token": "<s>"}.
  """

  name: str
  texts: Mapping[str, str]
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
    found = _json(file).get("chat_template") if os.path.isfile(file) else None
    if isinstance(found, str):
      return cls(file, {"default": found}, tokens)
    if isinstance(found, list):
      texts = {str(each["name"]): str(each["template"]) for each in found}
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
      variables = {
        "strftime_now": lambda form: now().strftime(form)
      } | variables
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


def get(spec: str | None, tokenizer: str) -> Template:
  """Returns a template by name, of a file or folder, or that of a tokenizer.

  Args:
    spec: one of NAMES, a path, or None for the one beside the tokenizer.
    tokenizer: argument of `tokenizers.get`, which has the special tokens.
  """
  folder = paths.absolute(tokenizer)
  if not os.path.isdir(folder):
    folder = os.path.dirname(folder)
  if spec is None:
    return Template.of_folder(folder)
  if spec in _NAMED:
    return Template(
      f"'{spec}'", {"default": _NO_TOOLS + _NAMED[spec]}, _tokens(folder)
    )
  path = paths.absolute(spec)
  if os.path.isdir(path):
    return Template.of_folder(path)
  if not os.path.isfile(path):
    hint = did_you_mean(spec, NAMES)
    raise ConfigError(f"template={spec!r}: no such file or name.{hint}")
  return Template(path, {"default": _read(path)}, _tokens(folder))


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
  by = f"chat template {name}: reading it"
  jinja2 = import_package("jinja2", by, "'bigtrain[text]'")
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

  def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
  ) -> str:
    return json.dumps(
      value,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
    )

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, ext.loopcontrols],
  )
  environment.filters["tojson"] = to_json
  environment.globals["raise_exception"] = raise_exception
  return environment
