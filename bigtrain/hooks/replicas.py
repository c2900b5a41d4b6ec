"""Compares the copies of parameters and optimizer state on all devices."""

from bigtrain.checkpoints import comparison
from bigtrain.runtime.hook_context import Context


class Hook:
  """Ends the run when replicas differ, before anything is saved.

  Args:
    every_steps: number of steps between two comparisons.
    policy: "stop", or "rollback" to continue from the newest checkpoint.
  """

  def __init__(
    self, every_steps: int = 1000, policy: str = "stop", *, context: Context
  ):
    self._context = context
    self._every = context.check_every(every_steps)
    self._policy = context.check_policy(policy)
    self._compared_step = -1  # The newest one.

  def after_step(self, step: int) -> None:
    if step % self._every == 0:
      self._compare(step)

  def before_save(self, step: int) -> None:
    # A checkpoint has only one of the replicas, which could be the wrong one.
    if step != self._compared_step:
      self._compare(step)

  def _compare(self, step: int) -> None:
    self._compared_step = step
    if what := comparison.replicas(self._context.state):
      self._context.reject_state(
        f"after step {step}, replicas of the state differ in {what}.",
        self._policy,
      )
