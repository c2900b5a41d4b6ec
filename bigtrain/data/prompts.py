"""Prompts, with reward functions that judge a model's answers to them.

  dict(type="prompts", path="math.jsonl", tokenizer="models/Qwen3-0.6B",
       length=512, rewards="my_project.rewards.exact")

The files are as for data/supervised.py, but only `prompt`, a text or a list of
messages, and `tools` are tokenized; the reward functions get the whole row.
Features: `prompt` int32 [length], padded with 0, and `prompt_length` int32.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bigtrain.config.errors import (
  ConfigError,
  DataError,
  check_kwargs,
  check_number,
)
from bigtrain.config.modules import find_attribute
from bigtrain.data import supervised
from bigtrain.data.formats import files, reward_worker

# Stands for the answer where a chat template writes the prompt.
_EMPTY = {"role": "assistant", "content": ""}


class Source(supervised.Source):
  """The prompts of one or more files.

  Args:
    rewards: dotted path of a function of (answers to a prompt, its row) that
      returns a number for each answer; or a list of (path, weight), for a
      weighted sum.
    time_limit: seconds that a call of a function may take.
    failed_reward: reward of all answers to a prompt for which a function fails
      or takes too long; a metric counts them. By default, such a failure ends
      the run.
    **options: path, name and others of data/supervised.py.
  """

  _extra = 0  # A prompt has no target after it.

  def __init__(
    self,
    tokenizer: str,
    length: int,
    rewards: str | Sequence[tuple[str, float]],
    *,
    time_limit: float = 10.0,
    failed_reward: float | None = None,
    **options: Any,
  ):
    given = [*("tokenizer", "length", "loss", "pack", "prefix"), "pictures"]
    given += ["preferences", "references"]
    check_kwargs(supervised.Source, options, "prompts", given)
    if isinstance(rewards, str):
      rewards = [(rewards, 1.0)]
    for each in rewards:
      if not isinstance(each, list | tuple) or len(each) != 2:
        raise ConfigError(f"rewards: expected (function, weight), got {each}.")
      function, weight = each
      find_attribute(function, "rewards")
      check_number(f"rewards: weight of {function}", weight)
    if not rewards:
      raise ConfigError("rewards: expected at least one function.")
    check_number("time_limit", time_limit, above=0)
    if failed_reward is not None:
      check_number("failed_reward", failed_reward)
    self._rewards = rewards
    self._failed_reward = failed_reward
    self._worker = reward_worker.Worker(time_limit)
    super().__init__(tokenizer, length, loss="last", **options)
    int32 = np.dtype(np.int32)
    self.spec = {"prompt": (int32, (length,)), "prompt_length": (int32, ())}
    self.vocab_sizes = {"prompt": self._coder.vocab_size}
    self._digest = files.digest(self._digest, rewards)

  def _find_rows(self, *args: Any) -> tuple[list[str], Any, str]:
    inputs, rows_of, _ = super()._find_rows(*args)
    self._contents = [row for name in inputs for _, row in rows_of(name)]

    def without_answers(name: str) -> Any:
      for where, row in rows_of(name):
        prompt = row.get("prompt")
        if not prompt:
          raise DataError(f"{where}: expected prompt, a text or messages.")
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
    sizes = np.diff(spans, axis=1)[:, 0]
    return {"prompt": prompt, "prompt_length": sizes.astype(np.int32)}

  def judge(
    self, indices: np.ndarray, batch: Mapping[str, np.ndarray]
  ) -> dict[str, np.ndarray]:
    """Returns the rewards of G answers to each of B prompts.

    Args:
      indices: of the prompts, [B].
      batch: "targets" [B, G, L] and "loss_mask" [B, G, L], which is 0 where the
        target is no token of the answer.

    Returns:
      "reward" [B, G], and "failed_rewards" [B, G], the number of functions that
      failed.
    """
    targets = batch["targets"]
    is_end = np.isin(targets, self.end_ids)
    is_text = (batch["loss_mask"] != 0) & ~is_end
    rewards = np.zeros(is_text.shape[:2], np.float32)
    failed = np.zeros_like(rewards)
    for b, index in enumerate(indices):
      row = self._contents[self._kept[index]]
      texts = [
        self._coder.decode(ids[own]) for ids, own in zip(targets[b], is_text[b])
      ]
      for function, weight in self._rewards:
        result = self._worker(function, texts, row)
        if isinstance(result, str):
          if self._failed_reward is None:
            where = self.where(index)
            raise DataError(f"{where}: reward {function}: {result}.")
          result = [self._failed_reward]
          failed[b] += 1
        rewards[b] += np.float32(weight) * np.asarray(result, np.float32)
    return {"reward": rewards, "failed_rewards": failed}
