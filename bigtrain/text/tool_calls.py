"""Tool calls in a model's answers, and the text that returns the results.

A parser finds the calls in an answer. `Continuation` returns the ids that a
chat template puts between an answer and the next one: the results of its calls,
and the start of the next answer. An answer keeps the ids that the model has
drawn, even if the template would write the answer differently.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.config.errors import ConfigError
from bigtrain.text import chat, tokenizers


class Call(NamedTuple):
  """A call of a tool; `error` says why it cannot be made, "" if it can."""

  name: str
  arguments: Any
  error: str = ""


Parser = Callable[[str], list[Call]]

# Stands for the conversation: only what the template writes after the answer to
# it is used.
_QUESTION = {"role": "user", "content": "?"}
# A result that no tool returns, to try a template with.
_PROBE = "9173"


def hermes(text: str) -> list[Call]:
  """Calls of Hermes and Qwen: <tool_call>{"name": ...}</tool_call>."""
  calls = []
  for part in text.split("<tool_call>")[1:]:
    content, is_closed, _ = part.partition("</tool_call>")
    if is_closed:
      calls.append(_parsed(content))
    else:
      calls.append(Call("", {}, "<tool_call> has no </tool_call>"))
  return calls


def llama3(text: str) -> list[Call]:
  """Calls of Llama 3: an answer that is JSON, with several after a `;`."""
  text = text.removeprefix("<|python_tag|>").strip()
  if not text.startswith("{"):
    return []
  return [_parsed(part) for part in re.split(r"(?<=\})\s*;\s*(?=\{)", text)]


def mistral(text: str) -> list[Call]:
  """Calls of Mistral: [TOOL_CALLS] and a JSON list."""
  _, marker, content = text.partition("[TOOL_CALLS]")
  if not marker:
    return []
  try:
    calls = json.loads(content)
  except ValueError as e:
    return [Call("", {}, f"the calls are not valid JSON: {e}")]
  calls = calls if isinstance(calls, list) else [calls]
  return [of_json(call) for call in calls]


PARSERS: Mapping[str, Parser] = {
  "hermes": hermes,
  "llama3": llama3,
  "mistral": mistral,
}


def _parsed(text: str) -> Call:
  try:
    return of_json(json.loads(text))
  except ValueError as e:
    return Call("", {}, f"the call is not valid JSON: {e}")


def of_json(value: Any) -> Call:
  """A call as {"name": ..., "arguments": {...}}; Llama has "parameters"."""
  if not isinstance(value, dict) or not isinstance(value.get("name"), str):
    return Call("", {}, "the call has no name")
  arguments = value.get("arguments", value.get("parameters", {}))
  if isinstance(arguments, str):
    try:
      arguments = json.loads(arguments)
    except ValueError as e:
      error = f"its arguments are not valid JSON: {e}"
      return Call(value["name"], {}, error)
  if not isinstance(arguments, dict):
    return Call(value["name"], {}, "its arguments are no JSON object")
  return Call(value["name"], arguments)


class Continuation:
  """The ids from the end of an answer with calls to the start of the next one.

  Args:
    end_ids: ids that end an answer.
    **options: options of `chat.Template.render`.

  Raises:
    ConfigError: the template does not write results of tools.
  """

  def __init__(
    self,
    template: chat.Template,
    tokenizer: tokenizers.Tokenizer,
    end_ids: Collection[int],
    **options: Any,
  ):
    self._template, self._tokenizer = template, tokenizer
    self._end_ids = list(end_ids)
    self._options = options
    error = (
      f"tools: the template {template.name} does not write the role 'tool'."
    )
    for self._form in _FORMS:  # The first that the template knows.
      try:
        ids = self([Call("probe", {})], [_PROBE])
      except ConfigError as e:
        error = f"tools: {e}"
        continue
      if _PROBE in tokenizer.spell(ids):
        return
    raise ConfigError(error)

  def __call__(
    self,
    calls: Sequence[Call],
    results: Sequence[str],
    tools: Sequence[Any] | None = None,
  ) -> np.ndarray:
    """Returns the ids; `tools` are the schemas that the prompt has."""
    answer, messages = self._form(calls, results)
    before = [_QUESTION, answer]
    answered = self._ids_of(before, tools, prompt=False)
    whole = self._ids_of([*before, *messages], tools, prompt=True)
    # Templates may write the answer otherwise if something follows it. But it
    # has the same number of turns up to its end.
    num_ends = int(np.isin(answered, self._end_ids).sum())
    ends = np.flatnonzero(np.isin(whole, self._end_ids))
    if not 0 < num_ends <= len(ends):
      raise ConfigError(f"{self._template.name} writes no end of an answer.")
    return whole[ends[num_ends - 1] + 1 :]

  def _ids_of(
    self, messages: Sequence[Any], tools: Any, prompt: bool
  ) -> np.ndarray:
    text = self._template.render(
      messages, tools, add_generation_prompt=prompt, **self._options
    )
    return self._tokenizer.encode(text, special=True)


# (an answer, messages with the results of its calls).
_Form = tuple[dict[str, Any], list[dict[str, Any]]]


def _plain(calls: Sequence[Call], results: Sequence[str]) -> _Form:
  return {"role": "assistant", "content": "!"}, [
    {"role": "tool", "name": call.name, "content": result}
    for call, result in zip(calls, results)
  ]


def _with_ids(calls: Sequence[Call], results: Sequence[str]) -> _Form:
  """Messages for templates that match results to calls by id."""
  made = [
    {
      "id": f"call{i:05d}",  # Mistral's want nine letters and digits.
      "type": "function",
      "function": {"name": call.name, "arguments": call.arguments},
    }
    for i, call in enumerate(calls)
  ]
  _, messages = _plain(calls, results)
  return {"role": "assistant", "content": "", "tool_calls": made}, [
    message | {"tool_call_id": each["id"]}
    for message, each in zip(messages, made)
  ]


_FORMS = (_plain, _with_ids)
