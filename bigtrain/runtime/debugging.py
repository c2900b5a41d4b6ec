"""For looking into a run: shapes of everything that flows through the model."""

from collections.abc import Callable
from typing import Any

import jax
from absl import logging


def with_shapes(
  loss_fn: Callable[[Any, Any, Any], Any],
) -> Callable[[Any, Any, Any], Any]:
  """The same function, which logs what it sees when it is traced.

  The first call logs the batch, every flax module's arguments and results in
  the order of their calls, and the metrics.

  Args:
    loss_fn: (variables, batch, rng) -> (pairs, mutable).
  """
  told = False

  def wrapped(variables: Any, batch: Any, rng: Any) -> Any:
    nonlocal told
    if told:
      return loss_fn(variables, batch, rng)
    told = True
    from flax import linen as nn

    lines = [f"batch: {_shapes(batch)}"]

    def look(next_fn: Any, args: Any, kwargs: Any, context: Any) -> Any:
      at = len(lines)
      lines.append("")
      result = next_fn(*args, **kwargs)
      path = "/".join(context.module.path) or "model"
      if context.method_name != "__call__":
        path += f".{context.method_name}"
      name = type(context.module).__name__
      given = _shapes((args, kwargs))
      lines[at] = f"{path} ({name}): {given} -> {_shapes(result)}"
      return result

    with nn.intercept_methods(look):
      result = loss_fn(variables, batch, rng)
    lines.append(f"metrics: {_shapes(result[0])}")
    logging.info("config.debug_shapes:\n  %s", "\n  ".join(filter(None, lines)))
    return result

  return wrapped


def _shapes(tree: Any) -> str:
  """Types and shapes of the arrays in a tree, by name."""
  shown = []
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    if not hasattr(leaf, "shape"):
      continue
    keys = [getattr(key, "key", None) for key in path]
    name = "/".join(key for key in keys if isinstance(key, str))
    shape = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    shown.append(f"{name}={shape}" if name else shape)
  return ", ".join(shown) or "nothing"
