"""Says what was wrong with a step that was not finite.

tally.py keeps such a step out of the state. As the state is then still that
before the step, and the batch a function of the step, what went wrong can be
looked at at leisure.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bigtrain import trees


class NotFinite(RuntimeError):
  """A loss or gradient was NaN or infinite."""


class Rollback(Exception):
  """The run goes back to a checkpoint and passes over some batches.

  Attributes:
    step: the step that was not finite.
    restart: the step of the checkpoint.
  """

  def __init__(self, error: NotFinite, step: int, restart: int):
    super().__init__(
      f"{error} ROLLING BACK to step {restart}; the batches of steps "
      f"{restart + 1} to {step} are passed over."
    )
    self.step = step
    self.restart = restart


def check_skipped(skipped: int, first: int, most: int) -> None:
  """Raises NotFinite if more steps were skipped than may be.

  Args:
    skipped: so many steps were.
    first: the first of them since the process began.
    most: config.max_nonfinite.
  """
  if skipped > most:
    raise NotFinite(
      f"{skipped} steps were not finite and skipped, more than "
      f"config.max_nonfinite={most}; the first was step {first}."
    )


def explain(
  step: int,
  index: int,
  state: Any,
  train_input: Any,
  gradients: Callable[[Any, Any], Any],
) -> NotFinite:
  """The error for a step that was not finite.

  Args:
    step: the step, counted from 1.
    index: of its batch, counted from 0.
    state: the state before it.
    train_input: gives that step's batch and the names of its examples.
    gradients: (state, batch) -> (gradients, pairs, mutable).

  Returns:
    An error that names the step, the loss, the first parameter whose gradient
    is not finite, and examples of the batch.
  """
  batches = train_input.start(index, index + 1)
  try:
    batch = next(batches)
  finally:
    batches.close()

  @jax.jit
  def look(state: Any, batch: Any) -> Any:
    grads, pairs, _ = gradients(state, batch)
    finite = jax.tree.map(lambda g: jax.numpy.isfinite(g).all(), grads)
    return finite, pairs["loss"][0] / pairs["loss"][1]

  finite, loss = jax.device_get(look(state, batch))
  bad = [name for name, ok in trees.flatten_with_names(finite) if not ok]
  where = f"first of {len(bad)}: {bad[0]}" if bad else "none, but their norm is"
  order = train_input.order(index)
  ids = ", ".join(map(str, order.index[:8]))
  more = ", ..." if len(order.index) > 8 else ""
  first = train_input.where(int(order.source[0]), int(order.index[0]))
  return NotFinite(
    f"step {step} is not finite: loss {np.float32(loss)}, gradients that are "
    f"not finite: {where}; examples {ids}{more} (the first is {first}). No "
    "checkpoint has seen it; config.nonfinite='skip' would leave "
    "such steps out."
  )
