"""Marks of work that is not of the mathematics, and what reads them."""

import fractions

import jax
import jax.numpy as jnp
import pytest

from bigtrain.arrays import model_flops
from bigtrain.reports import flops

X = jnp.ones((4, 4))
PRODUCT = 2 * 4**3


def scanned(x):
  return jax.lax.scan(lambda c, _: (c @ c, None), x, length=3)[0]


@pytest.mark.parametrize(
  ("fn", "products"),
  [
    (lambda x: x @ x, 1),
    (scanned, 3),
    (jax.jit(scanned), 3),
    (jax.checkpoint(scanned), 3),
  ],
)
def test_a_mark_counts_once_in_nested_programs(fn, products):
  def marked(x):
    with model_flops.share(3, 4):
      y = fn(x)
      with model_flops.share(1, 2):
        return y, fn(x)

  part = fractions.Fraction(3, 4) + fractions.Fraction(3, 8)
  assert flops.forward_flops(marked, X) == part * products * PRODUCT
  assert flops.executed_flops(marked, X) == 2 * products * PRODUCT


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
def test_gradients_keep_marks(wrap):
  def loss(x):
    with model_flops.share(3, 4):
      return wrap(lambda x: x @ x)(x).sum()

  whole = flops.executed_flops(jax.grad(loss), X)
  assert flops.forward_flops(jax.grad(loss), X) == whole * 3 / 4


def test_equal_marks_multiply():
  def fn(x):
    with model_flops.share(1, 2), model_flops.share(1, 2):
      return x @ x

  assert flops.forward_flops(fn, X) == PRODUCT / 4


def test_a_mark_of_all_work_changes_nothing():
  for useful in (4, 5):
    with model_flops.share(useful, 4):
      jaxpr = jax.make_jaxpr(lambda x: x @ x)(X)
    assert str(jaxpr.eqns[0].source_info.name_stack) == ""


def test_marks_change_nothing_in_the_compiled_program():
  def fn(x, useful):
    with model_flops.share(useful, 4):
      return scanned(x)

  one, two = (
    jax.jit(fn, static_argnums=1).lower(X, useful).as_text()
    for useful in (3, 4)
  )
  assert one == two
