"""Functions that may compute something else have different texts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain.runtime import closures
from bigtrain.runtime.sources import NotKept


def holding(value):
  """A function with `value` in its closure."""

  def fn(x):
    return x, value

  return fn


def with_default(value):
  def fn(x, y=value, *, z=value):
    return x, y, z

  return fn


def wrapped(value):
  @functools.wraps(holding(1))
  def fn(x):
    return x + value

  return fn


def predict_fn(path):
  fn = holding([])  # Alone it would not be kept.
  vars(fn)[closures.FROM_CONFIG] = path, id(fn)
  return fn


# Functions that make values; all values differ.
VALUES = (
  *(None, 1, 1.0, True, "1", b"1", 0.0, -0.0, math.nan, (), (1,), (1, 1)),
  *((1, (1,)), ("1",), np.float32(1), np.float64(1), np.dtype("float32")),
  *(np.ones(3), np.ones((3, 1)), np.ones(3, "float32"), np.array([1.0, 1, 2])),
  *(math, np, jnp.tanh, jnp.float32, dict, len, holding, with_default),
  *(holding(1), holding(2), holding(holding(1)), holding((holding(1),))),
  *(with_default(1), with_default(2), wrapped(1), wrapped(2)),
  *(functools.partial(holding, 1), functools.partial(holding, value=1)),
  *(functools.partial(holding, 2), lambda x: x + 1, lambda x: x + 2),
  *(lambda x: x - 1, lambda x: x in {1, 2}, lambda x: x in {1, 3}),
  *(lambda x: np.sin(x), lambda x: np.cos(x), lambda x: lambda: x + 1),
  *(lambda x: lambda: x + 2, predict_fn("evals.a"), predict_fn("evals.b")),
)


def test_different_functions_have_different_texts():
  texts = [closures.text(holding(value)) for value in VALUES]
  assert len(set(texts)) == len(VALUES)
  again = [closures.text(holding(value)) for value in VALUES]
  assert texts == again


def test_equal_functions_have_equal_texts():
  for make in (
    lambda: holding((1, "a", np.arange(5), jnp.tanh)),
    lambda: with_default(3),
    lambda: predict_fn("evals.a"),
  ):
    assert closures.text(make()) == closures.text(make())


def test_a_function_may_call_itself():
  def recursive(n):
    return n and recursive(n - 1)

  assert "outer 0" in closures.text(recursive)


class Instance:
  def method(self):
    """Depends on the instance."""


def changes_its_closure():
  count = 0

  def fn(x):
    nonlocal count
    count += 1
    return x

  return fn


def with_attribute():
  fn = holding(1)
  fn.scale = 2
  return fn


def wraps_a_predict_fn():
  """functools.wraps copies what says that the inner one is of the config."""
  values = [1]

  @functools.wraps(predict_fn("evals.a"))
  def fn(x):
    return x, values

  return fn


def empty_cell():
  def fn():
    return later

  if fn.__name__ == "other":
    later = 1
  return fn


NOT_KEPT = {
  "list": lambda: holding([1]),
  "dict": lambda: holding({"a": 1}),
  "set": lambda: holding({1}),
  "subclass": lambda: holding(type("Number", (int,), {})(1)),
  "instance": lambda: holding(Instance()),
  "method": lambda: holding(Instance().method),
  "array of jax": lambda: holding(jnp.ones(2)),
  "objects": lambda: holding(np.array([[], 1], dtype=object)),
  "compiled": lambda: holding(jax.jit(holding(1))),
  "change": changes_its_closure,
  "attribute": with_attribute,
  "wraps": wraps_a_predict_fn,
  "empty cell": empty_cell,
  "name of another": lambda: holding(
    type("len", (), {"__module__": "builtins", "__qualname__": "len"})
  ),
}


@pytest.mark.parametrize("make", NOT_KEPT.values(), ids=list(NOT_KEPT))
def test_what_can_change_has_no_text(make):
  with pytest.raises(NotKept):
    closures.text(make())
