"""A user's function that answers a model's tool calls, turn by turn.

`Toolbox.reply` gets the ids of a turn. If they contain calls, it makes the
calls and returns the text from which the model continues: the results, as the
chat template writes them, and the start of the next answer.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_choice,
  check_number,
  did_you_mean,
)
from bigtrain.config.modules import find_attribute
from bigtrain.data.formats.reward_worker import (
  Failure,
  Workers,
  calls_of,
  text_of,
)
from bigtrain.text import chat, tokenizers, tool_calls
from bigtrain.text.tool_calls import Call


class Reply(NamedTuple):
  """The results of the tool calls in a turn of the model.

  Attributes:
    messages: the turn, and the results of its calls.
    ids: the text up to the model's next turn; None if this was the last one.
    num_calls, num_failed: number of calls, and of failed calls.
  """

  messages: list[dict[str, Any]]
  ids: np.ndarray | None = None
  num_calls: int = 0
  num_failed: int = 0


@dataclasses.dataclass
class Toolbox:
  """The function `tools` of data/prompts.py, and the format of tool calls."""

  tools: str
  parser: str
  max_turns: int
  failed_tool: Literal["message", "stop"]
  secs: float  # Time limit of a call.
  _: dataclasses.KW_ONLY
  workers: Workers
  tokenizer: tokenizers.Tokenizer
  template: chat.Template
  variables: Mapping[str, Any]
  end_ids: Sequence[int]
  allow_special: bool

  def __post_init__(self) -> None:
    find_attribute(self.tools, "tools")
    check_number("max_turns", self.max_turns, least=1, whole=True)
    check_choice("failed_tool", self.failed_tool, ("message", "stop"))
    if "." in self.parser:
      find_attribute(self.parser, "tool_calls")
    elif self.parser not in tool_calls.PARSERS:
      hint = did_you_mean(self.parser, tool_calls.PARSERS)
      raise ConfigError(
        f"tool_calls={self.parser!r}: expected a known format or the dotted "
        f"path of a function.{hint}"
      )
    self._continuation = tool_calls.Continuation(
      self.template, self.tokenizer, self.end_ids, **self.variables
    )

  def reply(self, row: Any, ids: np.ndarray, is_last: bool) -> Reply:
    """Answers the calls in the ids of a turn; the last id ends the turn.

    Args:
      row: the row of the prompt.
      is_last: whether no further turn may follow; if so, no call is made.

    Raises:
      DataError: if a call failed, with failed_tool="stop".
    """
    spoken = ids[~np.isin(ids, self.end_ids)]
    text = self.tokenizer.spell(spoken)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if is_last:
      return Reply([message])
    calls = self._parse(text)
    if not calls:
      return Reply([message])
    results, num_failed = [], 0
    for call in calls:
      result = self._call(call, row)
      if isinstance(result, Failure):
        num_failed += 1
        result = f"error: {result.message}"
      results.append(result)
    ids = self._continue(calls, results, _schemas(row))
    tool_messages = [
      {"role": "tool", "name": call.name, "content": result}
      for call, result in zip(calls, results)
    ]
    return Reply([message, *tool_messages], ids, len(calls), num_failed)

  def _parse(self, text: str) -> list[Call]:
    if self.parser in tool_calls.PARSERS:
      return tool_calls.PARSERS[self.parser](text)
    result = self.workers(calls_of, self.parser, text, secs=self.secs)
    if isinstance(result, Failure):
      raise DataError(f"tool_calls {self.parser}: {result.message}.")
    return [tool_calls.of_json(call) for call in result]

  def _call(self, call: Call, row: Any) -> str | Failure:
    if call.error:  # It is the model's, so it never ends the run.
      return Failure(call.error)
    request = {"name": call.name, "arguments": call.arguments}
    result = self.workers(text_of, self.tools, request, row, secs=self.secs)
    if isinstance(result, str) and not self.allow_special:
      spelled = [x for x in self.tokenizer.spellings if x in result]
      if spelled:
        result = Failure(f"the result spells a special token ({len(spelled)})")
    if isinstance(result, Failure) and self.failed_tool == "stop":
      raise DataError(f"tools {self.tools}: {call.name}: {result.message}.")
    return result

  def _continue(
    self, calls: Sequence[Call], results: Sequence[str], schemas: Any
  ) -> np.ndarray:
    # Error messages may quote what the model wrote, special tokens included.
    if not self.allow_special:
      results = [self._without_special(result) for result in results]
    return self._continuation(calls, results, schemas)

  def _without_special(self, text: str) -> str:
    for spelling in self.tokenizer.spellings:
      text = text.replace(spelling, " ")
    return text


def _schemas(row: Mapping[str, Any]) -> Any:
  schemas = row.get("tools")
  return json.loads(schemas) if isinstance(schemas, str) else schemas


def last_answer(messages: Sequence[Mapping[str, Any]]) -> str:
  """Returns the text of the model's last turn."""
  answers = [m["content"] for m in messages if m["role"] == "assistant"]
  return answers[-1] if answers else ""
