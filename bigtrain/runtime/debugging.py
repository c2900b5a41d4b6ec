"""Options that help to find mistakes: logged shapes, guarded transfers."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from absl import logging

from bigtrain.config.errors import check_choice
from bigtrain.config.settings import Config

_TRANSFER_GUARDS = ("allow", "log", "disallow", "log_explicit")


class Transfers(NamedTuple):
  """config.transfer_guard: what happens when arrays are copied implicitly."""

  level: str | None  # None leaves all as it is.

  @classmethod
  def read(cls, config: Config) -> "Transfers":
    level = config.get("transfer_guard")
    if level is not None:
      check_choice("config.transfer_guard", level, _TRANSFER_GUARDS)
    return cls(level)

  def guard(self) -> contextlib.AbstractContextManager[Any]:
    """The guard of the loop, as a context manager."""
    if self.level is None:
      return contextlib.nullcontext()
    return jax.transfer_guard(self.level)

  def place(self, hparams: Any, layout: jax.sharding.Sharding) -> Any:
    """Copies scalars of the host to the devices, explicitly under a guard."""
    if self.level is None:
      # The update copies numpy's scalars itself, which is faster, but implicit.
      return hparams
    return jax.device_put(hparams, layout)


def instrument(config: Config, loss_fn: Callable[..., Any]) -> Any:
  """With config.debug_shapes, logs shapes when the loss is first traced.

  It logs the shapes of the batch, of the arguments and results of every flax
  module in the order of their calls, and of the metrics.
  """
  if not config.get("debug_shapes", False):
    return loss_fn
  is_logged = False

  def wrapped(variables: Any, batch: Any, rng: Any) -> Any:
    nonlocal is_logged
    if is_logged:
      return loss_fn(variables, batch, rng)
    is_logged = True
    from flax import linen as nn

    lines = [f"batch: {_shapes(batch)}"]

    def intercept(next_fn: Any, args: Any, kwargs: Any, context: Any) -> Any:
      place = len(lines)  # Above the lines of the modules inside this one.
      lines.append("")
      result = next_fn(*args, **kwargs)
      is_bound = context.module.scope is not None
      path = ("/".join(context.module.path) if is_bound else "") or "model"
      if context.method_name != "__call__":
        path += f".{context.method_name}"
      name = type(context.module).__name__
      inputs = _shapes((args, kwargs))
      lines[place] = f"{path} ({name}): {inputs} -> {_shapes(result)}"
      return result

    with nn.intercept_methods(intercept):
      result = loss_fn(variables, batch, rng)
    lines.append(f"metrics: {_shapes(result[0])}")
    logging.info("config.debug_shapes:\n  %s", "\n  ".join(filter(None, lines)))
    return result

  return wrapped


def _shapes(tree: Any) -> str:
  """The shapes of a tree, as "name=dtype[sizes]" for each array."""
  words = []
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    if not hasattr(leaf, "shape"):
      continue
    keys = [getattr(key, "key", None) for key in path]
    name = "/".join(key for key in keys if isinstance(key, str))
    shape = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    words.append(f"{name}={shape}" if name else shape)
  return ", ".join(words) or "nothing"
