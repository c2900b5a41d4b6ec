"""The shapes of rows that other programs write, and readers for each shape.

  reader = row_shapes.Reader("sharegpt", preferences=False, has_template=True)
  reader.read({"conversations": [...]}).rows  # [{"messages": [...]}]

A row becomes one or more plain rows, which row_encoder.py encodes. A plain row
has `messages`, or `prompt` and `completion`, or `text`; and also `tools` and
`weight` if the row has them. A pair of answers becomes two plain rows, the
chosen answer first. A judgement becomes one plain row with a `label`.

The config names the shape; otherwise it is recognised by its fields. A row that
has the fields of several shapes is refused.
"""

import collections
import difflib
import itertools
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_choice,
  did_you_mean,
)
from bigtrain.data.formats import row_pictures

_Row = Mapping[str, Any]
_Messages = list[dict[str, Any]]

# Stanford Alpaca's prompts, as its train.py has them: the answer follows.
_ALPACA = (
  "Below is an instruction that describes a task{context}. Write a response "
  "that appropriately completes the request.\n\n### Instruction:\n{instruction}"
  "\n\n{input}### Response:"
)
_ALPACA_CONTEXT = ", paired with an input that provides further context"

# Names of the speakers of a conversation in files. A `function_call` is also an
# answer of the assistant.
_ROLES = {
  **dict.fromkeys(("user", "human"), "user"),
  **dict.fromkeys(("assistant", "gpt", "model", "bot"), "assistant"),
  **dict.fromkeys(("chatgpt", "bing", "bard"), "assistant"),
  "system": "system",
  **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
_CALL = "function_call"
_LABEL_FIELDS = ("label", "kto_tag")
_SCORES = ("score_chosen", "score_rejected")
# Other names of fields, which hold lists.
_OTHER_NAMES = {
  "conversation": "conversations",
  "completions": "completion",
  "references": "completion",
}
# Forms of Alpaca's rows: its published prompt, or a conversation.
_ALPACAS = ("alpaca", "alpaca_chat")
_LABELS = {
  **dict.fromkeys(("true", "1", "desirable", "chosen"), True),
  **dict.fromkeys(("false", "0", "undesirable", "rejected"), False),
}


class Shaped(NamedTuple):
  """A row whose shape is known."""

  form: str  # Name of the shape, or of a form of it.
  rows: list[dict[str, Any]]  # Plain rows.
  # Whether a pair's rejected answer has the higher score.
  is_reversed: bool = False


class Reader:
  """Reads rows, and counts the shapes of those that can be used.

  Attributes:
    key: digest of the options, "" for the default; part of the cache's key.
    preferences: whether rows have two answers or judgements.
  """

  def __init__(
    self,
    rows: str | None,
    *,
    preferences: bool,
    has_template: bool,
    repeats: bool = False,
  ):
    """Checks the options.

    Args:
      rows: a name in SHAPES, or None to recognise the shape of each row.
      preferences: whether rows have two answers or judgements.
      has_template: whether there is a chat template. If so, rows that are
        recognised as Alpaca's become conversations.
      repeats: whether an answer that occurs twice in a row counts twice.
    """
    if rows is not None:
      check_choice("supervised: rows", rows, SHAPES)
    if preferences and rows in _ANSWERED:
      raise ConfigError(
        f"supervised: rows={rows!r} has one answer without a label: with "
        f"preferences=True expected {' or '.join(map(repr, _JUDGED))}."
      )
    self._rows = rows
    self._alpaca = "alpaca_chat" if has_template else "alpaca"
    self.preferences = preferences or rows in _JUDGED
    self.key = ""
    if rows is not None:
      self.key = f"rows {rows} {self._alpaca}"
    elif self.preferences:
      self.key = "two answers"
    if repeats:
      self.key += " repeats"
    self._repeats = repeats
    self._forms = collections.Counter[str]()
    self._labels = collections.Counter[bool]()
    self._num_reversed = 0  # Pairs whose rejected answer has the higher score.
    self._roles = collections.defaultdict[str, set[str]](set)

  def read(self, row: Any) -> Shaped:
    """Returns the plain rows of a row; a DataError does not name the place."""
    if not isinstance(row, Mapping):
      raise DataError(f"expected an object, got {type(row).__name__}.")
    nulls = {key for key, value in row.items() if value is None}
    given = _renamed({k: x for k, x in row.items() if k not in nulls})
    name = self._shape_of(given, nulls)
    if (name == "unpaired") != ("unpaired" in self._forms) and self._forms:
      raise DataError(
        "some rows are judgements, and others are not; expected files of one "
        "kind."
      )
    alpaca = name if name in _ALPACAS else self._alpaca
    # Beside a plain text, such a field may say where the text comes from.
    row_pictures.refuse_other_media(given, in_fields=name != "text")
    for field in () if self._repeats else ("completion", "output"):
      if _is_texts(given.get(field)):
        given[field] = list(dict.fromkeys(given[field]))
    plain = SHAPES[name].read(given, alpaca)
    scores: list[Any] = [given.get(field) for field in _SCORES]
    is_scored = all(isinstance(score, int | float) for score in scores)
    is_reversed = name == "preference" and is_scored and scores[0] < scores[1]
    return Shaped(_form_of(name, given), plain, is_reversed)

  def count(self, shaped: Shaped) -> None:
    """Counts a row that can be used."""
    self._forms[shaped.form] += 1
    self._num_reversed += shaped.is_reversed
    for row in shaped.rows:
      for key in ("messages", "prompt", "completion"):
        if isinstance(messages := row.get(key), list):
          roles = {str(message["role"]) for message in messages}
          self._roles[shaped.form] |= roles
    if (label := shaped.rows[0].get("label")) is not None:
      self._labels[label] += 1

  def counts(self) -> dict[str, Any]:
    """Returns the counts: a summary, and the number of rows of each shape."""
    return {"summary": self.summary(), "forms": dict(self._forms)}

  def summary(self) -> str:
    """Returns the shapes in a line, such as "sharegpt, 2 roles"."""
    parts = []
    for name, number in sorted(self._forms.items()):
      part = name if len(self._forms) == 1 else f"{number:,} {name}"
      if roles := self._roles[name]:
        part += f", {len(roles)} role{'s' * (len(roles) > 1)}"
      if name == "unpaired":
        wanted, unwanted = self._labels[True], self._labels[False]
        part += f", {wanted:,} wanted and {unwanted:,} unwanted"
      parts.append(part)
    if self._num_reversed:
      parts.append(f"{self._num_reversed:,} with a higher score_rejected")
    return "; ".join(parts)

  def _shape_of(self, row: _Row, nulls: set[str]) -> str:
    if self._rows is not None:
      missing = [f for f in SHAPES[self._rows].fields if f not in row]
      # These two read other spellings of their fields, and say what is missing.
      if missing and self._rows not in _JUDGED:
        hint = did_you_mean(missing[0], row)
        raise DataError(f"rows={self._rows!r}: no field {missing[0]!r}.{hint}")
      return self._rows
    names = self._candidates(row)
    if len(names) > 1:
      options = " or ".join(f"rows={name!r}" for name in names)
      raise DataError(
        f"{_listed(row)}: the fields of several shapes; expected {options}."
      )
    return names[0] if names else self._nearest(row, nulls)

  def _candidates(self, row: _Row) -> list[str]:
    is_judged = _label_field(row) is not None
    if self.preferences:
      found = {"preference": is_pair(row), "unpaired": is_judged}
      return [name for name, is_so in found.items() if is_so]
    names = [
      name
      for name, shape in _ANSWERED.items()
      if _has(row, shape.fields)
      and (name not in _ALPACAS or name == self._alpaca)
    ]
    # Texts with a label are often classes of texts. Other answers with a
    # judgement may be wrong ones.
    if is_judged and names and names != ["text"]:
      try:
        read_label(row)
        names.append("unpaired")
      except DataError:
        pass
    return names

  def _nearest(self, row: _Row, nulls: set[str]) -> str:
    """Returns the shape that a row has in part, whose `read` says the rest."""
    if self.preferences:
      if nulls.intersection(_LABEL_FIELDS):
        return "unpaired"
      missing = next((f for f in _PAIR if f not in row), _PAIR[0])
      raise DataError(
        "expected chosen and rejected, with preferences=True, or prompt, "
        f"completion and label.{did_you_mean(missing, row)}"
      )
    if is_pair(row):
      raise DataError("the row has two answers: expected preferences=True.")
    if "prompt" in row:
      return "prompt_completion"
    if "instruction" in row:
      hint = did_you_mean("output", row)
      raise DataError(f"the row has an instruction and no output.{hint}")
    expected = "; ".join(" and ".join(s.fields) for s in _DISTINCT)
    fields = [field for shape in _DISTINCT for field in shape.fields]
    meant = next(
      (f for f in fields if difflib.get_close_matches(f, map(str, row), 1)),
      "messages",
    )
    raise DataError(f"expected {expected}.{did_you_mean(meant, row)}")


def _form_of(name: str, row: _Row) -> str:
  """Returns the name of a shape, or of a variant that has a separate name."""
  asks = any(field in row for field in ("prompt", "input", "conversations"))
  if name == "preference" and not asks:
    return "preference without prompt"
  if name == "messages" and row.get("system"):
    return "messages with system"
  return name


# How rows of each shape are read: functions of a row without nulls, and of the
# form of Alpaca's prompts, which return plain rows.


def _read_messages(row: _Row, alpaca: str) -> list[dict[str, Any]]:
  messages = _with_system(_turns(row["messages"], "messages"), row)
  return [{"messages": messages, **_rest(row)}]


def _read_sharegpt(row: _Row, alpaca: str) -> list[dict[str, Any]]:
  return [{"messages": _conversation(row), **_rest(row)}]


def _read_prompt_completion(row: _Row, alpaca: str) -> list[dict[str, Any]]:
  prompt, completion = row["prompt"], row.get("completion")
  if isinstance(completion, list) and _is_texts(completion):
    return _references(row, prompt, completion)
  prompt, completion = (
    _turns(value, name) if isinstance(value, list | dict) else value
    for name, value in (("prompt", prompt), ("completion", completion))
  )
  if isinstance(prompt, list):
    prompt = _with_system(prompt, row)
  return [{"prompt": prompt, "completion": completion, **_rest(row)}]


def _read_text(row: _Row, alpaca: str) -> list[dict[str, Any]]:
  return [{"text": row["text"], **_rest(row)}]


def _read_alpaca(row: _Row, alpaca: str) -> list[dict[str, Any]]:
  prompt, output = _alpaca_prompt(row, alpaca), row["output"]
  if _is_texts(output):
    return _references(row, prompt, output)
  if not isinstance(output, str) or not output.strip():
    raise DataError(f"output: expected a text, got {_short(output)}.")
  if isinstance(prompt, list):
    answer = {"role": "assistant", "content": output}
    return [{"messages": [*prompt, answer], **_rest(row)}]
  return [{"prompt": prompt, "completion": output, **_rest(row)}]


def _read_preference(row: _Row, alpaca: str) -> list[dict[str, Any]]:
  if _has(row, _OPENAI_PAIR):
    row = _of_openai(row)
  if not _has(row, _PAIR):
    missing = next(field for field in _PAIR if field not in row)
    raise DataError(
      f"expected chosen and rejected.{did_you_mean(missing, row)}"
    )
  prompt = row.get("prompt")
  if prompt is None and "conversations" in row:
    prompt = _conversation(row)
  elif prompt is None and "instruction" in row:
    prompt = _alpaca_prompt(row, alpaca)
  elif prompt is None and isinstance(row["chosen"], Mapping):
    prompt = row.get("messages")
  prompt, chosen, rejected = _split_pair(prompt, row)
  if isinstance(prompt, list):
    prompt = _with_system(prompt, row)
  return [
    {"prompt": prompt, "completion": answer, **_rest(row)}
    for answer in (chosen, rejected)
  ]


def _read_unpaired(row: _Row, alpaca: str) -> list[dict[str, Any]]:
  label = read_label(row)
  if "completion" in row:
    prompt, completion = row.get("prompt", ""), row["completion"]
    as_chat = not (isinstance(prompt, str) and isinstance(completion, str))
    if as_chat:
      prompt = _with_system(_as_turns(prompt, "prompt", "user"), row)
      completion = _as_turns(completion, "completion", "assistant")
  elif "output" in row:
    prompt, completion = _alpaca_prompt(row, alpaca), row["output"]
    if isinstance(prompt, list):
      completion = _as_turns(completion, "output", "assistant")
  else:
    prompt, completion = _last_answer(row)
  return [
    {
      "prompt": prompt,
      "completion": completion,
      "label": label,
      **_rest(row),
    }
  ]


_PAIR = ("chosen", "rejected")
_OPENAI_PAIR = ("preferred_output", "non_preferred_output")


class _Shape(NamedTuple):
  fields: tuple[str, ...]  # A row of this shape has all of them.
  read: Callable[[_Row, str], list[dict[str, Any]]]


# Rows whose answers a model learns to write.
_ANSWERED = {
  "messages": _Shape(("messages",), _read_messages),
  "sharegpt": _Shape(("conversations",), _read_sharegpt),
  "prompt_completion": _Shape(
    ("prompt", "completion"), _read_prompt_completion
  ),
  "alpaca": _Shape(("instruction", "output"), _read_alpaca),
  "alpaca_chat": _Shape(("instruction", "output"), _read_alpaca),
  "text": _Shape(("text",), _read_text),
}
# Rows with two answers, or with a judgement of one.
_JUDGED = {
  "preference": _Shape(_PAIR, _read_preference),
  "unpaired": _Shape(("prompt", "completion", "label"), _read_unpaired),
}
SHAPES = _ANSWERED | _JUDGED
_DISTINCT = [_ANSWERED[name] for name in _ANSWERED if name != "alpaca_chat"]
# Fields whose texts are read.
TEXT_FIELDS = (
  *dict.fromkeys(f for shape in SHAPES.values() for f in shape.fields),
  *("tools", "functions", "system", "input", "history", *_OPENAI_PAIR),
  *_OTHER_NAMES,
)
# Shapes that were read in the same way before the others were known.
_OLD_FORMS = ("messages", "prompt_completion", "text", "preference")


def new_forms(counts: Mapping[str, Any]) -> list[str]:
  """Returns the shapes that the fingerprint of a source names.

  The first shapes that were supported are not named, so that runs of that time
  can be continued.
  """
  return [name for name in counts["forms"] if name not in _OLD_FORMS]


def is_pair(row: Any) -> bool:
  """Whether a row has two answers."""
  return isinstance(row, Mapping) and (
    _has(row, _PAIR) or _has(row, _OPENAI_PAIR)
  )


def read_label(row: _Row) -> bool:
  """Returns whether an answer is wanted; raises DataError if it is unclear."""
  field = _label_field(row)
  value = None if field is None else row[field]
  text = str(value).strip().lower()
  if isinstance(value, float) and value.is_integer():
    text = str(int(value))
  if field is None or text not in _LABELS:
    raise DataError(
      f"{field or 'label'}: expected true or false, got {_short(value)}."
    )
  return _LABELS[text]


def _label_field(row: _Row) -> str | None:
  return next((name for name in _LABEL_FIELDS if name in row), None)


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
  """Returns a row with its fields renamed to those of its shape."""
  for other, name in _OTHER_NAMES.items():
    if name not in row and isinstance(row.get(other), list):
      row[name] = row.pop(other)
  return row


def _has(row: _Row, fields: Sequence[str]) -> bool:
  return all(field in row for field in fields)


def _rest(row: _Row) -> dict[str, Any]:
  """Returns the tools, the weight and the pictures of a row."""
  kept = ("weight", "image", "images", row_pictures.FOLDER)
  result = {field: row[field] for field in kept if field in row}
  tools = row.get("tools", row.get("functions"))
  if isinstance(tools, str) and tools.strip():
    try:
      tools = json.loads(tools)
    except ValueError as e:
      raise DataError(f"tools: not valid JSON: {e}.") from e
  if not tools:
    return result
  # OpenAI's older files and ShareGPT files have bare functions.
  if isinstance(tools, list) and ("functions" in row or "conversations" in row):
    tools = [
      {"type": "function", "function": tool}
      if isinstance(tool, Mapping) and "name" in tool and "type" not in tool
      else tool
      for tool in tools
    ]
  return result | {"tools": tools}


def _references(
  row: _Row, prompt: Any, answers: Sequence[str]
) -> list[dict[str, Any]]:
  """Returns a plain row for each right answer; together they count as one."""
  rest = _rest(row)
  weight = rest.get("weight", 1.0)
  if len(answers) > 1 and isinstance(weight, int | float):
    rest["weight"] = weight / len(answers)
  if isinstance(prompt, list):
    prompt = _with_system(_turns(prompt, "prompt"), row)
    messages = [[{"role": "assistant", "content": text}] for text in answers]
    return [{"prompt": prompt, "completion": m, **rest} for m in messages]
  return [{"prompt": prompt, "completion": text, **rest} for text in answers]


def _is_texts(value: Any) -> bool:
  return (
    isinstance(value, list)
    and bool(value)
    and all(isinstance(each, str) for each in value)
  )


# Conversations.


def _conversation(row: _Row) -> _Messages:
  """Returns the messages of ShareGPT's `conversations`."""
  turns = row["conversations"]
  if not isinstance(turns, list) or not turns:
    raise DataError(
      "conversations: expected a list of dict(from=..., value=...), got "
      f"{_short(turns)}."
    )
  return _with_system(_turns(turns, "conversations", strict=True), row)


def _turns(value: Any, field: str, strict: bool = False) -> Any:
  """Returns turns of ShareGPT as messages; messages stay as they are.

  Args:
    strict: whether empty turns are refused, and messages may use ShareGPT's
      names of roles.
  """
  if isinstance(value, Mapping):
    value = [value]
  if not isinstance(value, list):
    return value
  messages = []
  for number, turn in enumerate(value):
    where = f"{field}[{number}]"
    is_turn = isinstance(turn, Mapping)
    if is_turn and not strict:
      is_turn = turn.get("from") is not None and turn.get("role") is None
    message = _message(turn, where) if is_turn else turn
    if strict and message is turn:
      raise DataError(f"{where}: expected dict(from=..., value=...).")
    messages.append(message)
  return messages


def _message(turn: Mapping[str, Any], where: str) -> dict[str, Any]:
  """Returns a turn as a message."""
  is_spoken = turn.get("from") is not None
  names = ("from", "value") if is_spoken else ("role", "content")
  speaker, value = (turn.get(name) for name in names)
  rest = {
    key: each
    for key, each in turn.items()
    if key not in names and each is not None
  }
  if isinstance(speaker, str):
    speaker = speaker.lower()
  if speaker == _CALL:
    return {"role": "assistant", **_calls(value, where), **rest}
  if speaker not in _ROLES:
    hint = did_you_mean(str(speaker), [*_ROLES, _CALL])
    raise DataError(f"{where}: {names[0]}: unknown {speaker!r}.{hint}")
  role = _ROLES[speaker]
  if names[0] == "from" and not isinstance(value, str):
    raise DataError(f"{where}: value: expected a text, got {_short(value)}.")
  needs_text = role in ("user", "assistant") and turn.get("weight") != 0
  is_empty = isinstance(value, str) and not value.strip()
  if is_empty and needs_text and rest.keys() <= {"weight"}:
    raise DataError(f"{where}: {speaker} says nothing: {names[1]} is empty.")
  return {"role": role, "content": value, **rest}


def _calls(value: Any, where: str) -> dict[str, Any]:
  """Returns the tool calls that a `function_call` turn contains as JSON."""
  try:
    calls = json.loads(value) if isinstance(value, str) else value
  except ValueError as e:
    raise DataError(f"{where}: {_CALL} is not valid JSON: {e}.") from e
  calls = calls if isinstance(calls, list) else [calls]
  for call in calls:
    if not isinstance(call, Mapping) or not {"name", "arguments"} <= set(call):
      raise DataError(
        f"{where}: {_CALL}: expected JSON with name and arguments, got "
        f"{_short(call)}."
      )
  functions = [{"type": "function", "function": call} for call in calls]
  return {"content": None, "tool_calls": functions}


def _with_system(messages: Any, row: _Row) -> Any:
  """Puts the row's system prompt, if any, before the messages."""
  system = row.get("system")
  if not system or not isinstance(messages, list):
    return messages
  if not isinstance(system, str):
    raise DataError(f"system: expected a text, got {_short(system)}.")
  first = messages[0] if messages else None
  if not isinstance(first, Mapping) or first.get("role") != "system":
    return [{"role": "system", "content": system}, *messages]
  if first.get("content") != system:
    raise DataError(
      "system: the conversation begins with another system prompt, "
      f"{_short(first.get('content'))}."
    )
  return messages


def _as_turns(value: Any, field: str, role: str) -> _Messages:
  """Returns a text or messages as messages."""
  if isinstance(value, str):
    return [{"role": role, "content": value}]
  messages = _turns(value, field)
  if not isinstance(messages, list):
    raise DataError(
      f"{field}: expected a text or messages, got {_short(value)}."
    )
  return messages


def _last_answer(row: _Row) -> tuple[_Messages, _Messages]:
  """Returns (the messages before, the last answer) of a conversation."""
  if "conversations" in row:
    messages = _conversation(row)
  elif "messages" in row:
    messages = _with_system(_turns(row["messages"], "messages"), row)
  else:
    hint = did_you_mean("completion", row)
    raise DataError(f"expected prompt, completion and label.{hint}")
  last = messages[-1] if isinstance(messages, list) and messages else None
  if not isinstance(last, Mapping) or last.get("role") != "assistant":
    raise DataError("the conversation must end with the answer that is judged.")
  return messages[:-1], messages[-1:]


# Alpaca.


def _alpaca_prompt(row: _Row, form: str) -> Any:
  """Returns Alpaca's published prompt, or messages for "alpaca_chat"."""
  for field in ("instruction", "input"):
    if not isinstance(row.get(field, ""), str):
      raise DataError(f"{field}: expected a text, got {_short(row[field])}.")
  instruction, context = row["instruction"], row.get("input", "")
  if not instruction.strip():
    raise DataError("instruction: expected a text, got ''.")
  has_context = bool(context.strip())
  if form == "alpaca":
    for field in ("system", "history"):
      if row.get(field):
        raise DataError(
          f"{field}: Alpaca's prompt has no place for it; rows='alpaca_chat' "
          "makes it part of a conversation."
        )
    return _ALPACA.format(
      context=_ALPACA_CONTEXT if has_context else "",
      instruction=instruction,
      input=f"### Input:\n{context}\n\n" if has_context else "",
    )
  messages: _Messages = []
  for number, turn in enumerate(row.get("history") or []):
    if not _is_texts(turn) or len(turn) != 2:
      raise DataError(
        f"history[{number}]: expected [question, answer], got {_short(turn)}."
      )
    question, answer = turn
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": answer})
  text = f"{instruction}\n{context}" if has_context else instruction
  messages.append({"role": "user", "content": text})
  return _with_system(messages, row)


# Pairs of answers.


def _split_pair(prompt: Any, row: _Row) -> tuple[Any, Any, Any]:
  """Returns (prompt, chosen, rejected), all texts or all lists of messages."""
  chosen, rejected = (
    _turns(row[name], name) if isinstance(row[name], list | dict) else row[name]
    for name in _PAIR
  )
  if isinstance(chosen, str) and isinstance(rejected, str):
    if prompt is None:
      prompt = _common_text(chosen, rejected)
      return prompt, chosen[len(prompt) :], rejected[len(prompt) :]
    if isinstance(prompt, str):
      return prompt, chosen, rejected
    chosen, rejected = (
      [{"role": "assistant", "content": text}] for text in (chosen, rejected)
    )
  if not (isinstance(chosen, list) and isinstance(rejected, list)):
    raise DataError(
      "chosen and rejected: expected two texts, or two lists of messages."
    )
  if isinstance(prompt, str):
    if not any(_is_by_user(m) for m in (*chosen, *rejected)):
      prompt = [{"role": "user", "content": prompt}]
      return prompt, chosen, rejected
    shared = chosen[: _common_messages(chosen, rejected)]
    if not any(_says(message, prompt) for message in shared):
      raise DataError(
        "prompt: chosen and rejected are whole conversations, in which no "
        f"question is {_short(prompt)}."
      )
    prompt = None
  if isinstance(prompt, list | dict):
    prompt = _turns(prompt, "prompt")
    size = len(prompt)
    if not (chosen[:size] == prompt == rejected[:size]) or size == 0:
      return prompt, chosen, rejected
    prompt = None  # The answers repeat it.
  if prompt is not None:
    raise DataError(
      f"prompt: expected a text or messages, got {_short(prompt)}."
    )
  size = _common_messages(chosen, rejected)
  if size == 0 and not any(_is_by_user(m) for m in (*chosen, *rejected)):
    raise DataError(
      "chosen and rejected begin with an answer; expected prompt."
    )
  return chosen[:size], chosen[size:], rejected[size:]


def _is_by_user(message: Any) -> bool:
  return isinstance(message, Mapping) and message.get("role") == "user"


def _says(message: Any, text: str) -> bool:
  content = message.get("content") if _is_by_user(message) else None
  return isinstance(content, str) and content.strip() == text.strip()


def _common_messages(first: Sequence[Any], second: Sequence[Any]) -> int:
  """Returns the number of messages that both begin with, leaving an answer."""
  pairs = itertools.takewhile(
    lambda pair: pair[0] == pair[1], zip(first, second)
  )
  return max(0, min(len(list(pairs)), len(first) - 1, len(second) - 1))


def _common_text(first: str, second: str) -> str:
  """Returns what both texts begin with, up to a word that differs.

  The space before an answer belongs to the answer, as in TRL's extract_prompt,
  which may also cut within a word.
  """
  pairs = itertools.takewhile(
    lambda pair: pair[0] == pair[1], zip(first, second)
  )
  size = len(list(pairs))
  if size == min(len(first), len(second)):
    size = max(0, size - 1)  # One answer begins with the other one.
  while size and _in_word(first[size - 1]):
    size -= 1
  return first[:size].removesuffix(" ")


def _in_word(letter: str) -> bool:
  """Whether a letter is of a script that puts spaces between words."""
  is_wide = unicodedata.east_asian_width(letter) in "WF"
  return letter in "'\u2019" or (letter.isalnum() and not is_wide)


def _of_openai(row: _Row) -> dict[str, Any]:
  """Renames the fields of a pair from OpenAI's preference files to TRL's."""
  asked = row.get("input")
  if not isinstance(asked, Mapping) or "messages" not in asked:
    raise DataError(f"input: expected dict(messages=...), got {_short(asked)}.")
  chosen, rejected = (row[name] for name in _OPENAI_PAIR)
  result = {"prompt": asked["messages"], "chosen": chosen, "rejected": rejected}
  return {**_rest(row), **_rest(asked), **result}


def _listed(row: _Row) -> str:
  names = [name for name in row if name in TEXT_FIELDS or name in _LABEL_FIELDS]
  return ", ".join(names)


def _short(value: Any) -> str:
  if value is None:
    return "null"
  return f"{value!r:.80}"
