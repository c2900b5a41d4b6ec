"""Log entries about a batch of judged answers.

They have quantiles and a histogram of the rewards of all processes, and a table
with the best and the worst answer and their prompts.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bigtrain import metrics, sharding
from bigtrain.inputs.pipeline import TrainInput
from bigtrain.reports import media

# {name: quantile}; the mean is a metric of the task.
_QUANTILES = {
  "reward_min": 0.0,
  "reward_q10": 0.1,
  "reward_q50": 0.5,
  "reward_q90": 0.9,
  "reward_max": 1.0,
}
_BINS = 20
_TEXTS = ("tokens", "targets", "loss_mask")


class RewardReport:
  """Makes the values of log entries.

  A call starts the work on the devices; the function that it returns fetches
  the results.
  """

  def __init__(self, train_input: TrainInput, mesh: Mesh):
    self._input = train_input
    # Every process takes part, because each has only its own rows.
    self._collect = jax.jit(_collect, out_shardings=sharding.replicated(mesh))

  def __call__(
    self, batch: Mapping[str, Any], step: int
  ) -> Callable[[], dict[str, Any]]:
    """Reports a batch of answers to the prompts of the input's batch `step`."""
    needed = {name: batch[name] for name in ("reward", *_TEXTS)}
    collected = self._collect(needed)
    return lambda: self._values(jax.device_get(collected), step)

  def _values(self, collected: Any, step: int) -> dict[str, Any]:
    reward_BG, chosen, texts = collected
    order = self._input.order(step)
    rows = []
    for number, place in enumerate(chosen.tolist()):
      b, g = divmod(place, reward_BG.shape[1])
      source = self._input.engine.parts[order.source[b]].source
      if not hasattr(source, "spell"):  # A user's own source may have none.
        continue
      prompt, answer = _split(*(texts[name][number] for name in _TEXTS))
      rows.append(
        {
          "prompt": source.spell(prompt),
          "answer": source.spell(answer),
          "reward": float(reward_BG[b, g]),
          "mean_of_group": float(reward_BG[b].mean(dtype=np.float64)),
        }
      )
    quantiles = np.quantile(
      reward_BG.astype(np.float64), [*_QUANTILES.values()]
    )
    values: dict[str, Any] = dict(zip(_QUANTILES, quantiles.tolist()))
    values["reward_histogram"] = _histogram(reward_BG)
    if rows:
      values["answers"] = media.Table(rows)
    return values


def _collect(batch: Any) -> Any:
  """(all rewards, places of the best and the worst answer, their texts)."""
  reward_N = batch["reward"].reshape(-1)
  # If all are equal, these are the first and the last answer.
  worst = len(reward_N) - 1 - jnp.argmin(reward_N[::-1])
  chosen = jnp.stack([jnp.argmax(reward_N), worst])
  texts = {
    name: batch[name].reshape(len(reward_N), -1)[chosen] for name in _TEXTS
  }
  return batch["reward"], chosen, texts


def _split(
  tokens_L: np.ndarray, targets_L: np.ndarray, mask_L: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the ids of a prompt, and of the answer with results of tools."""
  (places,) = np.nonzero(mask_L)
  start, stop = places[0], places[-1] + 1
  return tokens_L[: start + 1], targets_L[start:stop]


def _histogram(reward_BG: np.ndarray) -> metrics.Histogram:
  low, high = float(reward_BG.min()), float(reward_BG.max())
  if low == high:
    low, high = low - 0.5, high + 0.5
  counts, _ = np.histogram(reward_BG, _BINS, (low, high))
  return metrics.Histogram(counts.astype(np.float32), low, high)
