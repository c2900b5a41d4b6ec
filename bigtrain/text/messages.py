"""Messages in a form that a chat template writes in full.

Templates skip fields that they do not know, such as tool calls, and some write
values that are not text in Python's notation: `None`, or `[{'type': 'text',
...`. A model would learn to write that. `readable` finds a form of each message
that the template writes as text, and refuses the conversation if there is none.

To find out whether a template writes a value, the conversation is rendered
again with a different value in its place. If the text stays the same, the
template does not write the value.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.text import chat

# What leads to a value in a message, such as ("tool_calls", 0, "id").
_Path = tuple[str | int, ...]

# Fields that `readable` handles apart, or that the training reads.
_OWN_FIELDS = ("role", "content", "weight")
# Messages with one of these need no content.
_CALLS = ("tool_calls", "function_call")
# Content that marks where a template writes content; and a key that no template
# reads, so it is written only if the template spells parts as they are.
_UNREAD = "unread-by-any-template"
_TEXT_PART = '{"type": "text", "text": "..."}'


def readable(
  template: chat.Template,
  messages: Sequence[chat.Message],
  tools: Sequence[Any] | None = None,
  *,
  ignore_fields: Collection[str] = (),
  **options: Any,
) -> list[dict[str, Any]]:
  """Returns the messages in a form that the template writes in full.

  Contents in parts become one text unless the template reads parts itself;
  texts become parts for a template that reads only these. Arguments of tool
  calls that are JSON in a text, as in OpenAI's files, become a dict if the
  template would put the text in quotes.

  Args:
    ignore_fields: fields that are left out, such as "name"; "tool_calls.id" is
      the field `id` of each tool call.
    **options: options of `chat.Template.render`.

  Raises:
    DataError: if a content is not text, or the template does not write a field.
    ConfigError: if the template refuses the conversation.
  """
  _check_messages(messages)
  given = [_without(message, ignore_fields) for message in messages]
  for number, message in enumerate(given):
    _check_kinds(number, message)
  conversation = _Conversation(template, given, tools, options)
  if conversation.is_plain() and conversation.has_all_contents():
    return given
  dropped = [conversation.settle(number) for number in range(len(given))]
  if any(dropped):
    conversation.raise_dropped(dropped)
  # What the template refuses as a whole, it says itself.
  template.render(conversation.messages, tools, **options)
  return conversation.messages


class _Conversation:
  """A conversation, whose messages are converted one by one for a template."""

  def __init__(
    self,
    template: chat.Template,
    given: Sequence[dict[str, Any]],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
  ):
    self._template = template
    self._given = given
    self._tools = tools
    self._options = options
    # Messages after the one at hand have a form that most templates accept.
    self.messages = [
      message | {"content": _joined(message.get("content"))}
      for message in given
    ]

  def is_plain(self) -> bool:
    """Whether messages have only a role and a text."""
    return all(
      isinstance(message.get("content"), str)
      and message.keys() <= set(_OWN_FIELDS)
      for message in self._given
    )

  def has_all_contents(self) -> bool:
    """Whether the contents appear in the text, one after the other.

    This needs no second rendering. False proves nothing, because templates may
    change a content slightly.
    """
    text = self._render(self.messages)
    at = 0
    for message in self.messages:
      content = message["content"].strip()
      at = text.find(content, at) if text is not None else -1
      if at < 0:
        return False
      at += len(content)
    return True

  def settle(self, number: int) -> list[_Path]:
    """Sets a message's first form that the template writes in full.

    If there is none, sets the form of which the template drops the least.
    Returns the paths of the dropped values.
    """
    best: tuple[dict[str, Any], list[_Path]] | None = None
    for form in _forms(self._given[number]):
      self.messages[number] = form
      texts = self._texts(number, form)
      is_refused = all(text is None for text in texts)
      if is_refused or self._is_spelled(number, texts):
        continue
      if any(_is_quoted(form, text or "") for text in texts):
        continue
      # A value is dropped if another one in its place gives the same texts.
      dropped = []
      for path in _leaves(form):
        if self._texts(number, _changed(form, path)) == texts:
          dropped.append(path)
      if not dropped:
        self._check_spelling(number, texts)
        return []
      if best is None or len(dropped) < len(best[1]):
        best = form, dropped
    if best is None:
      self._raise_unreadable(number)
    self.messages[number], dropped = best
    return dropped

  def _render(self, messages: Sequence[chat.Message]) -> str | None:
    """Returns a text, or None if the template refuses the messages."""
    try:
      return self._template.render(messages, self._tools, **self._options)
    except ConfigError:
      return None

  def _texts(self, number: int, message: dict[str, Any]) -> list[str | None]:
    """Returns the texts up to a message and of all messages, with it replaced.

    Templates may leave out a field once the conversation continues, as they do
    with thoughts. `chat.supervised` decides whether that is allowed.
    """
    before, after = self.messages[:number], self.messages[number + 1 :]
    so_far = [*before, message]
    texts = [self._render(so_far)]
    if after:
      texts.append(self._render([*so_far, *after]))
    return texts

  def _is_spelled(self, number: int, texts: Sequence[str | None]) -> bool:
    """Whether the template spells content that is not text."""
    message = self.messages[number]
    content = message.get("content")
    if content is None:
      marked = self._texts(number, message | {"content": _UNREAD})
      return any(map(_spells_none, texts, marked))
    if isinstance(content, list):
      parts = [{**part, _UNREAD: _UNREAD} for part in content]
      marked = self._texts(number, message | {"content": parts})
      return any(_UNREAD in (text or "") for text in marked)
    return False

  def _check_spelling(self, number: int, texts: Sequence[str | None]) -> None:
    """Refuses fields that the template writes in Python's notation."""
    text = texts[-1] or texts[0] or ""
    for path, value in _containers(self.messages[number]):
      spelled = str(value)
      if spelled in text and spelled != json.dumps(value, ensure_ascii=False):
        raise DataError(
          f"message {number}: {_spell(path)}: the template "
          f"{self._template.name} writes it in Python's spelling, "
          f"{spelled:.80}; expected a text, such as its JSON."
        )

  def _raise_unreadable(self, number: int) -> NoReturn:
    content = self._given[number].get("content")
    template = self._template.name
    others = []
    if isinstance(content, list):
      others = [part for part in content if not _is_text(part)]
    if others:
      raise DataError(
        f"message {number}: content: the template {template} reads no such "
        f"parts; expected {_TEXT_PART}, got {others[0]!r:.80}."
      )
    # The template refuses the conversation, and says why.
    joined = _joined(content)
    self.messages[number] = self._given[number] | {"content": joined}
    self._template.render(self.messages, self._tools, **self._options)
    raise DataError(
      f"message {number}: content: expected a text; the template {template} "
      f"writes {content!r:.80} in Python's spelling."
    )

  def raise_dropped(self, dropped: Sequence[Sequence[_Path]]) -> NoReturn:
    """Names the first message that is not written in full.

    `dropped` has the paths of each message. The hint has the fields of all of
    them.
    """
    template = self._template.name
    fields: list[list[_Path]] = []  # The dropped fields of each message.
    for number, (message, paths) in enumerate(zip(self.messages, dropped)):
      if any(path in _text_paths(message) for path in paths):
        raise DataError(
          f"message {number}: content: the template {template} does not write "
          f"that of the role {message['role']!r}."
        )
      fields.append(_as_fields(message, paths))
    first = next(number for number, paths in enumerate(fields) if paths)
    spelled = ", ".join(_spell(path) for path in fields[first])
    raise DataError(
      f"message {first}: {spelled}: the template {template} does not write "
      "this, so a model would not see it; "
      f"ignore_fields={_names_to_ignore(fields)} leaves it out, and template= "
      "selects another template."
    )


def _names_to_ignore(fields: Sequence[Sequence[_Path]]) -> list[str]:
  """The value of ignore_fields that leaves out the fields of all messages."""
  names: dict[str, None] = {}  # In order, each once.
  for paths in fields:
    for path in paths:
      # Without the numbers of list items: ("tool_calls", 0, "id").
      keys = [key for key in path if isinstance(key, str)]
      names[".".join(keys)] = None
  return list(names)


def _as_fields(
  message: Mapping[str, Any], paths: Sequence[_Path]
) -> list[_Path]:
  """Replaces the paths of a field by its own if all its values are dropped."""
  dropped: dict[Any, list[_Path]] = {}  # By field.
  for path in paths:
    dropped.setdefault(path[0], []).append(path)
  every: dict[Any, list[_Path]] = {}  # All values of the message, by field.
  for path in _leaves(message):
    every.setdefault(path[0], []).append(path)
  result: list[_Path] = []
  for field, own in dropped.items():
    if own == every.get(field):
      result.append((field,))
    else:
      result += own
  return result


def _check_messages(messages: Any) -> None:
  if not isinstance(messages, list | tuple) or not messages:
    raise DataError("messages: expected a list of dict(role=..., content=...).")
  for i, message in enumerate(messages):
    if not isinstance(message, Mapping) or "role" not in message:
      raise DataError(f"message {i}: expected dict(role=..., content=...).")


def _without(
  message: chat.Message, ignore_fields: Collection[str]
) -> dict[str, Any]:
  """Returns a message without ignored fields and null fields.

  Parquet files have null for each field that a message or a part does not have.
  """
  result = {
    key: value
    for key, value in message.items()
    if key == "content" or value is not None
  }
  content = result.get("content")
  if isinstance(content, list):
    result["content"] = [
      {key: value for key, value in part.items() if value is not None}
      if isinstance(part, dict)
      else part
      for part in content
    ]
  for name in ignore_fields:
    result = _remove(result, name.split("."))
  return result


def _remove(value: Any, keys: Sequence[str]) -> Any:
  if isinstance(value, list):
    return [_remove(each, keys) for each in value]
  if not isinstance(value, dict) or keys[0] not in value:
    return value
  key, *rest = keys
  if rest:
    return value | {key: _remove(value[key], rest)}
  return {name: each for name, each in value.items() if name != key}


def _check_kinds(number: int, message: Mapping[str, Any]) -> None:
  """Refuses roles and contents that no template writes as text."""
  role, content = message["role"], message.get("content")
  if not isinstance(role, str):
    raise DataError(f"message {number}: role: expected a text, got {role!r}.")
  got = f"{content!r:.80}"
  if content is None:
    got = "null" if "content" in message else "nothing"
    if any(message.get(field) for field in _CALLS):
      return
  if isinstance(content, list):
    others = [part for part in content if not _is_part(part)]
    if not others:
      return
    got = f"{others[0]!r:.80}"
  elif isinstance(content, str):
    return
  raise DataError(
    f"message {number}: content: expected a text, or a list of {_TEXT_PART}, "
    f"got {got}."
  )


def _is_part(value: Any) -> bool:
  return isinstance(value, dict) and isinstance(value.get("text", ""), str)


def _is_text(part: Mapping[str, Any]) -> bool:
  return part.keys() == {"type", "text"} and part["type"] == "text"


def _forms(message: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns the forms of a message that a template may know, best first."""
  forms = _forms_of_content(message)
  if _json_arguments(message):
    forms += [
      form | {"tool_calls": [_with_parsed(call) for call in form["tool_calls"]]}
      for form in forms
    ]
  return forms


def _json_arguments(message: Mapping[str, Any]) -> list[str]:
  """Returns the arguments of tool calls that are JSON in a text."""
  calls = message.get("tool_calls")
  if not isinstance(calls, list):
    return []
  functions = [call.get("function", call) for call in calls if _is_dict(call)]
  texts = [each.get("arguments") for each in functions if _is_dict(each)]
  return [text for text in texts if _is_dict(_parsed(text))]


def _with_parsed(call: Any) -> Any:
  """Returns a tool call with its arguments as a dict, if they are JSON."""
  if not _is_dict(call):
    return call
  if _is_dict(call.get("function")):
    return call | {"function": _with_parsed(call["function"])}
  arguments = _parsed(call.get("arguments"))
  return call | {"arguments": arguments} if _is_dict(arguments) else call


def _parsed(value: Any) -> Any:
  if not isinstance(value, str):
    return None
  try:
    return json.loads(value)
  except ValueError:
    return None


def _is_dict(value: Any) -> bool:
  return isinstance(value, dict)


def _is_quoted(message: Mapping[str, Any], text: str) -> bool:
  """Whether a text has JSON arguments inside a JSON string."""
  return any(
    json.dumps(arguments, ensure_ascii=False) in text
    for arguments in _json_arguments(message)
  )


def _forms_of_content(message: dict[str, Any]) -> list[dict[str, Any]]:
  content = message.get("content")
  contents: list[Any]
  if isinstance(content, str):
    contents = [content, [{"type": "text", "text": content}]]
  elif isinstance(content, list):
    contents = [content]
    if all(map(_is_text, content)):
      contents.append(_joined(content))
  else:
    contents = [None, "", [{"type": "text", "text": ""}]]
    if "content" not in message:
      return [message, *(message | {"content": each} for each in contents)]
  return [message | {"content": each} for each in contents]


def _joined(content: Any) -> str:
  """Returns the text of a content in any form."""
  if isinstance(content, str):
    return content
  return "".join(part.get("text") or "" for part in content or [])


def _leaves(message: Mapping[str, Any]) -> Iterator[_Path]:
  """Yields the paths of the values that a template has to write."""
  for field, value in message.items():
    if field not in _OWN_FIELDS or field == "content":
      yield from _leaves_of(value, (field,))


def _leaves_of(value: Any, path: _Path) -> Iterator[_Path]:
  is_element = isinstance(path[-1], int)
  if isinstance(value, dict):
    if is_element and value.keys() == {"type"} and value["type"] != "text":
      yield path  # Such as {"type": "image"}.
    for key, each in value.items():
      # The type of a part or of a tool call says what its other fields are.
      if not (is_element and key == "type"):
        yield from _leaves_of(each, (*path, key))
  elif isinstance(value, list):
    for i, each in enumerate(value):
      yield from _leaves_of(each, (*path, i))
  elif value is not None and value != "":
    yield path


def _text_paths(message: Mapping[str, Any]) -> list[_Path]:
  """Returns the paths of the texts in a message's content."""
  content = message.get("content")
  if isinstance(content, list):
    return [("content", i, "text") for i in range(len(content))]
  return [("content",)]


def _containers(message: Mapping[str, Any]) -> Iterator[tuple[_Path, Any]]:
  """Yields the paths and values of the dicts and lists in other fields."""

  def visit(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    if not value or not isinstance(value, dict | list):
      return
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
      # Some templates write calls as Python's, with its lists as arguments.
      if "arguments" not in path:
        yield from visit(each, (*path, key))

  for field, value in message.items():
    if field not in _OWN_FIELDS:
      yield from visit(value, (field,))


def _changed(value: Any, path: _Path) -> Any:
  """Returns a copy with another value at a path."""
  if not path:
    if isinstance(value, bool):
      return not value
    if isinstance(value, int | float):
      return value + 1
    if isinstance(value, str):
      return value + "x"
    return None
  key, *rest = path
  copy = value.copy()
  copy[key] = _changed(value[key], tuple(rest))
  if copy[key] is None:
    del copy[key]
  return copy


def _spells_none(text: str | None, marked: str | None) -> bool:
  """Whether a text has "None" or "null" where the other text has `_UNREAD`."""
  if text is None or marked is None or _UNREAD not in marked:
    return False
  spellings = [
    marked.replace(_UNREAD, "None"),
    marked.replace(_UNREAD, "null"),
    marked.replace(json.dumps(_UNREAD), "null"),
  ]
  # White space may depend on whether there is content.
  return "".join(text.split()) in ["".join(s.split()) for s in spellings]


def _spell(path: _Path) -> str:
  """Returns a path as people write it, such as tool_calls[0].id."""
  name = str(path[0])
  for key in path[1:]:
    name += f"[{key}]" if isinstance(key, int) else f".{key}"
  return name
