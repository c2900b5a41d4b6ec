"""Applies a model in a loss."""

from typing import Any

import jax

from bigtrain.types import Variables


def apply(
  model: Any,
  variables: Variables,
  rng: jax.Array | None,
  train: bool,
  *args: Any,
  collect: tuple[str, ...] = (),
  **kwargs: Any,
) -> tuple[Any, Variables]:
  """Returns (output, mutable collections), which only training changes."""
  mutable = [name for name in variables if name != "params"]
  out, new = model.apply(
    variables,
    *args,
    train=train,
    rngs={"dropout": rng} if train else None,
    mutable=[*mutable, *collect] if train else [],
    **kwargs,
  )
  return out, dict(new) if train else {k: variables[k] for k in mutable}
