"""Computes some steps twice and compares the results bit by bit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bigtrain.checkpoints import comparison
from bigtrain.runtime.hook_context import Context


class Hook:
  """Finds devices that compute wrong numbers.

  If two computations of a step differ in any bit, the run ends before anything
  is saved. The program must be deterministic; on GPUs that needs
  XLA_FLAGS=--xla_gpu_deterministic_ops=true.

  Args:
    every_steps: number of steps between two replays. A replay takes as long as
      a step, and needs memory for a second state.
    policy: "stop", or "rollback" to continue from the newest checkpoint.
  """

  def __init__(
    self, every_steps: int = 1000, policy: str = "stop", *, context: Context
  ):
    self._context = context
    self._every = context.check_every(every_steps)
    self._policy = context.check_policy(policy)
    self._copy: Any = None  # The compiled copy of a state.

  def around_update(
    self, step: int, update: Callable[..., Any], state: Any, *rest: Any
  ) -> tuple[Any, Any]:
    if step % self._every:
      return update(state, *rest)
    # The update donates its state, so the first one gets a copy.
    first_state, first_metrics = update(self._copied(state), *rest)
    # Simulated devices on a CPU would run both at once, and their collectives
    # could mix up the messages of the two.
    jax.block_until_ready(first_state)
    new_state, metrics = update(state, *rest)
    first = {"state": first_state, "step_metrics": first_metrics}
    second = {"state": new_state, "step_metrics": metrics}
    if what := comparison.results(first, second):
      self._context.reject_state(
        f"step {step}, computed twice from the same state, has other bits in "
        f"{what}. A device computes wrong numbers, or the program is not "
        "deterministic.",
        self._policy,
      )
    return new_state, metrics

  def _copied(self, state: Any) -> Any:
    if self._copy is None:
      shardings = jax.tree.map(lambda x: x.sharding, state)

      def copy(x: jax.Array) -> jax.Array:
        # Optimizer state in host memory has to be on the device to be copied;
        # out_shardings then put the copy back.
        if jax.typeof(x).memory_space == jax.memory.Space.Host:
          x = jax.device_put(x, jax.memory.Space.Device)
        return jnp.copy(x)

      self._copy = jax.jit(
        lambda tree: jax.tree.map(copy, tree), out_shardings=shardings
      )
    return self._copy(state)
