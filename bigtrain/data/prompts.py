"""Prompts, with rewards that judge a model's answers to them.

  dict(type="prompts", path="math.jsonl", tokenizer="models/Qwen3-0.6B",
       length=512, rewards="my_project.rewards.exact")

The files are those of data/supervised.py, but only `prompt`, a text or a list
of messages, and `tools` are tokenized. The judges of answers get the whole row
(data/formats/judges.py). With the option `tools`, a function answers the
model's tool calls, and the model then continues (data/formats/toolbox.py).
Features: `prompt` int32 [length], padded with 0; `prompt_length` int32; with
`pictures`, `image` float32 [N, height, width, 3] as in data/supervised.py; with
`prefix`, int32 `prefix`, the prompt's length.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from bigtrain.arrays import picture_features
from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_kwargs,
  check_number,
)
from bigtrain.data import supervised
from bigtrain.data.formats import files, judges, toolbox
from bigtrain.data.formats.reward_worker import Workers
from bigtrain.text import chat, tokenizers

# Stands for the answer where a chat template writes the prompt.
_EMPTY = {"role": "assistant", "content": ""}


def _check_unused(
  tool_calls: str | None, max_turns: int | None, failed_tool: str | None
) -> None:
  given = dict(
    tool_calls=tool_calls, max_turns=max_turns, failed_tool=failed_tool
  )
  for name, value in given.items():
    if value is not None:
      raise ConfigError(
        f"{name}={value!r}: has no effect without `tools`, the function that "
        "answers the model's tool calls."
      )


class Source(supervised.Source):
  """The prompts of one or more files.

  Args:
    rewards: what judges answers: the dotted path of a function of (answers to
      a prompt, its row) that returns a number for each answer; or
      dict(command="python judge.py") or dict(url="http://..."), which may have
      a `time_limit` and a number of `retries`, and an address `headers`. A list
      of (judge, weight) is a weighted sum.
    time_limit: seconds that a call of a judge may take.
    failed_reward: reward of all answers to a prompt for which a judge fails or
      takes too long; a metric counts them. By default, such a failure ends the
      run.
    tools: dotted path of a function of (call, row) that answers the tool calls
      of the model. A call is dict(name=..., arguments=...), and the answer a
      text or a value that is converted to JSON. Prompts then have to be
      conversations.
    tool_calls: format of the calls: a name in tool_calls.PARSERS, by default
      "hermes", or the dotted path of a function that maps a text to a list of
      such calls.
    max_turns: largest number of turns in an answer, by default 8; calls in the
      last turn are not answered.
    failed_tool: what an error of `tools` leads to: a "message" to the model, by
      default, or the end of the run ("stop").
    workers: number of processes that call the functions, for several answers at
      the same time.
    **options: path, name and other options of data/supervised.py.
  """

  _extra = 0  # A prompt has no target after it.
  _one_row_per_prompt = True

  def __init__(
    self,
    tokenizer: tokenizers.Spec,
    length: int,
    rewards: str | Mapping[str, Any] | Sequence[tuple[Any, float]],
    *,
    time_limit: float = 10.0,
    failed_reward: float | None = None,
    tools: str | None = None,
    tool_calls: str | None = None,
    max_turns: int | None = None,
    failed_tool: Literal["message", "stop"] | None = None,
    workers: int = 1,
    **options: Any,
  ):
    given = ["tokenizer", "length", "loss", "pack", "preferences"]
    given += ["references", "masks", "rows", "skip_errors"]
    check_kwargs(supervised.Source, options, "prompts", given)
    check_number("time_limit", time_limit, above=0)
    if failed_reward is not None:
      check_number("failed_reward", failed_reward)
    self._failed_reward = failed_reward
    check_number("workers", workers, least=1, whole=True)
    self._workers = Workers(workers)
    if isinstance(rewards, str | Mapping):
      rewards = [(rewards, 1.0)]
    self._rewards: list[tuple[judges.Judge, float]] = []
    for each in rewards:
      if not isinstance(each, list | tuple) or len(each) != 2:
        raise ConfigError(f"rewards: expected (function, weight), got {each}.")
      judge, weight = judges.get(each[0], time_limit, self._workers), each[1]
      check_number(f"rewards: weight of {judge.name}", weight)
      self._rewards.append((judge, weight))
    if not rewards:
      raise ConfigError("rewards: expected at least one function.")
    # Judges that may return other rewards when they are called again.
    self.outside_calls = [
      judge.name for judge, _ in self._rewards if judge.is_outside
    ]
    self._has_tools = tools is not None
    if tools is None:
      _check_unused(tool_calls, max_turns, failed_tool)
    tool_calls = tool_calls or "hermes"
    max_turns = 8 if max_turns is None else max_turns
    options["rows"] = "prompt_completion"  # See `_find_rows`.
    super().__init__(tokenizer, length, loss="last", **options)
    self.toolbox: toolbox.Toolbox | None = None
    if tools is not None:
      self.toolbox = toolbox.Toolbox(
        tools,
        tool_calls,
        max_turns,
        failed_tool or "message",
        time_limit,
        workers=self._workers,
        tokenizer=self._coder,
        template=chat.get(options.get("template"), self._coder.name),
        variables=options.get("variables") or {},
        end_ids=self.end_ids,
        allow_special=options.get("allow_special", False),
      )
    int32 = np.dtype(np.int32)
    others = picture_features.of_prompts(self.spec)
    self.spec = {"prompt": (int32, (length,)), "prompt_length": (int32, ())}
    self.spec.update(others)
    self.vocab_sizes = {"prompt": self.vocab_sizes["tokens"]}
    options_of_tools = (tools, tool_calls, max_turns) if tools else ()
    self._digest = files.digest(self._digest, rewards, *options_of_tools)

  def _find_rows(self, *args: Any) -> tuple[list[str], Any, str]:
    inputs, rows_of, _ = super()._find_rows(*args)
    self._contents = [row for name in inputs for _, row in rows_of(name)]

    def without_answers(name: str) -> Any:
      for where, row in rows_of(name):
        if isinstance(row, DataError):
          raise row
        prompt = row.get("prompt")
        if not prompt:
          raise DataError(f"{where}: expected prompt, a text or messages.")
        if self._has_tools and isinstance(prompt, str):
          raise DataError(
            f"{where}: prompt: with tools, expected a list of messages."
          )
        # `supervised` needs an answer to find where the prompt ends, and from
        # its end token `end_ids`, which end the model's answers.
        answer: Any = "" if isinstance(prompt, str) else [_EMPTY]
        yield where, row | dict(completion=answer, messages=None, text=None)

    return inputs, without_answers, "prompts"

  def _spans_of(self, rows: np.ndarray) -> np.ndarray:
    return self._rows.spans(rows, pairs=True)[:, :1]

  def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    spans = self._spans[np.asarray(indices), 0]
    prompt = np.zeros((len(spans), *self.spec["prompt"][1]), np.int32)
    for padded, (start, stop) in zip(prompt, spans.tolist()):
      padded[: stop - start] = self._rows.read(start, stop)[0]
    sizes = np.diff(spans, axis=1)[:, 0].astype(np.int32)
    batch = {"prompt": prompt, "prompt_length": sizes}
    if "prefix" in self.spec:
      batch["prefix"] = sizes
    items = [[item] for item in np.asarray(indices).tolist()]
    return batch | self.pictures_of_examples(items)

  def spell(self, ids: np.ndarray) -> str:
    """Returns the text of ids, with special ids spelled out."""
    return self._coder.spell(ids)

  def replies(
    self, turns: Iterable[tuple[int, np.ndarray, bool]]
  ) -> Iterator[toolbox.Reply]:
    """Answers the tool calls of turns: (index, ids, whether it is the last)."""

    def reply(turn: tuple[int, np.ndarray, bool]) -> toolbox.Reply:
      assert self.toolbox is not None
      index, ids, is_last = turn
      row = self._contents[self._kept[index]]
      try:
        return self.toolbox.reply(row, ids, is_last)
      except DataError as e:
        raise DataError(f"{self.where(index)}: {e}") from e

    return self._workers.map(reply, turns)

  def judge(
    self,
    indices: np.ndarray,
    batch: Mapping[str, np.ndarray],
    messages: Sequence[Sequence[Any]] | None = None,
  ) -> dict[str, np.ndarray]:
    """Returns the rewards of G answers to each of B prompts.

    Args:
      indices: indices of the prompts, [B].
      batch: "targets" [B, G, L] and "loss_mask" [B, G, L], which is 0 where the
        target is not part of the answer.
      messages: with tools, the messages of each answer, [B][G].

    Returns:
      "reward" [B, G], and "failed_rewards" [B, G], the number of judges that
      failed.
    """
    targets = batch["targets"]
    is_end = np.isin(targets, self.end_ids)
    is_text = (batch["loss_mask"] != 0) & ~is_end
    rewards = np.zeros(is_text.shape[:2], np.float32)
    failed = np.zeros_like(rewards)
    prompts = []
    for b, index in enumerate(indices):
      row = self._contents[self._kept[index]]
      texts = [
        self._coder.decode(ids[own]) for ids, own in zip(targets[b], is_text[b])
      ]
      own_messages = None
      if messages is not None:
        own_messages = messages[b]
        texts = [toolbox.last_answer(each) for each in own_messages]
      prompts.append(judges.Answers(row, texts, own_messages))
    for judge, weight in self._rewards:
      for b, result in enumerate(judge(prompts)):
        if isinstance(result, str):
          if self._failed_reward is None:
            where = self.where(indices[b])
            raise DataError(f"{where}: reward {judge.name}: {result}.")
          result = [self._failed_reward]
          failed[b] += 1
        rewards[b] += np.float32(weight) * np.asarray(result, np.float32)
    return {"reward": rewards, "failed_rewards": failed}
