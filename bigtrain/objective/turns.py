"""Answers of several turns, between which a function answers tool calls.

The task's `rollout` writes the first turn. Then, on the host that has read a
prompt, the prompt's source answers the calls of each turn, with
`replies([(index, ids, whether it is the last turn), ...])`. Then, on the
devices, the task's `next_turn` continues all texts that the source has not
ended. Text that the source adds has no loss. A text that has no room for the
results of its calls ends before them, and counts as truncated.

All processes take part in each turn until all texts of the global batch have
ended.

Axes: B prompts of this process; G answers; T = L + 1 tokens of a text.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import picture_features
from bigtrain.arrays.types import Variables
from bigtrain.inputs.pipeline import TrainInput
from bigtrain.objective.shared_rows import SharedRows

# What a batch has in addition to the results of the task's rollout; float32
# [B, G].
COUNTS = ("turns", "tool_calls", "failed_tools")

# The messages of each answer, [B][G].
Messages = Sequence[Sequence[list[dict[str, Any]]]]


class Turns:
  """The turns of answers after the first one.

  Args:
    next_turn: (variables, {"tokens" [B, G, T], "length" [B, G], and what the
      rollout has of prompts}, step, turn) -> (tokens, log-probabilities),
      both [B, G, T].
    made: shapes of the rollout's results, with "tokens" [B, G, L].
    max_new: largest number of tokens after a prompt.
    eos_ids: ids that end a turn.
  """

  def __init__(
    self,
    next_turn: Any,
    train_input: TrainInput,
    mesh: Mesh,
    made: Mapping[str, Any],
    max_new: int,
    eos_ids: Sequence[int],
    shared: SharedRows,
  ):
    self._input, self._shared = train_input, shared
    self._max_new, self._eos_ids = max_new, eos_ids
    self._next_turn = next_turn
    self._batch = sharding.batch(mesh)
    self._replicated = sharding.replicated(mesh)
    B, G, L = made["tokens"].shape
    self._spec = {
      "tokens": jax.ShapeDtypeStruct((B, G, L + 1), jnp.int32),
      "length": jax.ShapeDtypeStruct((B, G), jnp.int32),
      **picture_features.of_prompts(made),
    }
    self._spec = sharding.batch_spec(self._spec, mesh)
    self._any = jax.jit(jnp.any, out_shardings=self._replicated)

  def compile(self, programs: Any, variables_spec: Any) -> None:
    number = jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated)
    self._next_turn = programs.compile(
      "next_turn",
      self._next_turn,
      variables_spec,
      self._spec,
      number,
      number,
      out_shardings=self._batch,
    )

  def __call__(
    self, variables: Variables, made: Mapping[str, Any], step: int
  ) -> tuple[dict[str, Any], Messages]:
    """Finishes the answers of a rollout; returns the batch and messages."""
    placement = self._input.placement
    kept = picture_features.of_prompts(made)
    local = {
      name: placement.get(x) for name, x in made.items() if name not in kept
    }
    texts = _Texts(local, self._max_new, self._eos_ids)
    sources = self._sources(step)
    texts.end_others([b for _, index_of in sources for b in index_of])
    # The loop ends, because the calls in a text's last turn are not answered.
    for turn in itertools.count(1):
      for source, index_of in sources:
        is_last = turn >= source.toolbox.max_turns
        places = texts.open_places(index_of)
        asked = [
          (index_of[b], texts.turn(b, g), is_last or texts.is_cut(b, g))
          for b, g in places
        ]
        for reply, (b, g) in zip(source.replies(asked), places):
          texts.add_reply(b, g, reply)
      batch = placement.put(self._shared.exchange(texts.given()))
      if not jax.device_get(self._any(batch["length"])):
        break
      numbers = jax.device_put(
        [np.int32(step), np.int32(turn)], self._replicated
      )
      drawn = self._next_turn(variables, {**batch, **kept}, *numbers)
      texts.add(*map(placement.get, drawn))
    batch = placement.put(self._shared.exchange(texts.batch()))
    return {**batch, **kept}, texts.messages

  def _sources(self, step: int) -> list[tuple[Any, dict[int, int]]]:
    """Sources with tools: (source, {own row of the batch: index there})."""
    engine = self._input.engine
    order = engine.row_order(step, 0, engine.num_rows)
    result = []
    for i, part in enumerate(engine.parts):
      if getattr(part.source, "toolbox", None):
        rows = np.flatnonzero((order.source == i) & self._shared.own)
        indices = order.index[rows]
        result.append((part.source, dict(zip(rows.tolist(), indices.tolist()))))
    return result


class _Texts:
  """Prompts with their answers so far.

  Attributes:
    messages: messages of each answer so far.
  """

  def __init__(
    self,
    made: Mapping[str, np.ndarray],
    max_new: int,
    eos_ids: Sequence[int],
  ):
    self._eos_ids = eos_ids
    first_BG1, rest_BGL = made["tokens"][..., :1], made["targets"]
    self._text_BGT = np.concatenate([first_BG1, rest_BGL], axis=-1)
    # Mask and log-probabilities of the batch belong to targets. Here they
    # belong to the tokens of the text, one place later.
    shift = ((0, 0), (0, 0), (1, 0))
    self._mask_BGT = np.pad(made["loss_mask"], shift)
    self._log_prob_BGT = np.pad(made["log_probs"], shift)
    self._truncated_BG = made["truncated"].copy()
    is_new = self._mask_BGT != 0
    T = is_new.shape[-1]
    # The current turn: [start, stop). No text may become longer than `limit`.
    self._start_BG = is_new.argmax(axis=-1)
    self._stop_BG = T - is_new[..., ::-1].argmax(axis=-1)
    self._limit_BG = np.minimum(self._start_BG + max_new, T)
    self._goes_on_BG = np.ones(is_new.shape[:2], bool)
    self._counts = {
      name: np.zeros(is_new.shape[:2], np.float32) for name in COUNTS
    }
    self._counts["turns"] += 1
    B, G = is_new.shape[:2]
    self.messages: list[list[list[dict[str, Any]]]] = [
      [[] for _ in range(G)] for _ in range(B)
    ]

  def end_others(self, rows: Sequence[int]) -> None:
    """Ends the texts of all but these prompts."""
    self._goes_on_BG[np.setdiff1d(np.arange(len(self.messages)), rows)] = False

  def open_places(self, rows: Iterable[int]) -> list[tuple[int, int]]:
    """Returns (b, g) of those texts of these prompts that go on."""
    return [
      (b, g) for b in rows for g in np.flatnonzero(self._goes_on_BG[b]).tolist()
    ]

  def turn(self, b: int, g: int) -> np.ndarray:
    """Returns the ids of the current turn."""
    return self._text_BGT[b, g, self._start_BG[b, g] : self._stop_BG[b, g]]

  def is_cut(self, b: int, g: int) -> bool:
    """Whether the current turn has no end, so that its calls are incomplete."""
    return bool(self._truncated_BG[b, g])

  def add_reply(self, b: int, g: int, reply: Any) -> None:
    """Adds a source's reply to the current turn, or ends the text."""
    self._goes_on_BG[b, g] = False
    if reply.ids is None:
      self.messages[b][g] += reply.messages
      return
    stop = self._stop_BG[b, g]
    end = stop + len(reply.ids)
    if end >= self._limit_BG[b, g]:  # No room for results and an answer.
      self._truncated_BG[b, g] = 1
      self.messages[b][g] += reply.messages[:1]
      return
    self._goes_on_BG[b, g] = True
    self.messages[b][g] += reply.messages
    self._text_BGT[b, g, stop:end] = reply.ids
    self._start_BG[b, g] = end
    self._counts["turns"][b, g] += 1
    self._counts["tool_calls"][b, g] += reply.num_calls
    self._counts["failed_tools"][b, g] += reply.num_failed

  def given(self) -> dict[str, np.ndarray]:
    """The texts to continue in the next turn; an ended one has length 0."""
    length_BG = np.where(self._goes_on_BG, self._start_BG, 0)
    return {"tokens": self._text_BGT, "length": length_BG.astype(np.int32)}

  def add(self, text_BGT: np.ndarray, log_prob_BGT: np.ndarray) -> None:
    """Adds the tokens that the model has drawn; ids below 0 are padding."""
    place_T = np.arange(text_BGT.shape[-1])
    new_BGT = (text_BGT >= 0) & self._goes_on_BG[..., None]
    new_BGT &= place_T >= self._start_BG[..., None]
    new_BGT &= place_T < self._limit_BG[..., None]
    self._text_BGT = np.where(new_BGT, text_BGT, self._text_BGT)
    self._log_prob_BGT = np.where(new_BGT, log_prob_BGT, self._log_prob_BGT)
    self._mask_BGT = np.where(new_BGT, 1.0, self._mask_BGT)
    self._stop_BG = np.where(
      self._goes_on_BG, self._start_BG + new_BGT.sum(-1), self._stop_BG
    )
    last_BG1 = np.maximum(self._stop_BG - 1, 0)[..., None]
    last_BG = np.take_along_axis(self._text_BGT, last_BG1, axis=-1)[..., 0]
    is_open_BG = ~np.isin(last_BG, self._eos_ids)
    self._truncated_BG = np.where(
      self._goes_on_BG, is_open_BG.astype(np.float32), self._truncated_BG
    )

  def batch(self) -> dict[str, np.ndarray]:
    return {
      "tokens": self._text_BGT[..., :-1],
      "targets": self._text_BGT[..., 1:],
      "loss_mask": self._mask_BGT[..., 1:],
      "log_probs": self._log_prob_BGT[..., 1:],
      "truncated": self._truncated_BG,
      **self._counts,
    }
