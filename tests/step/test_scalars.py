"""Scalars before a branch."""

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.step import scalars


def _primitives(jaxpr):
  """Names of the operations of a jaxpr, also of those inside others."""
  for eqn in jaxpr.eqns:
    yield eqn.primitive.name
    for value in jax.tree.leaves(
      list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        yield from _primitives(inner)


def _step(flag, step, x, *, first):
  def advance():
    rate = jnp.cos(step / 100) * jnp.minimum(step, 7)
    size = jnp.tanh(jnp.sum(x))  # A scalar of an array.
    return {"x": x * rate + size, "rate": rate, "step": step + 1, "old": x}

  advance = scalars.computed_first(advance) if first else advance
  twice = advance(), advance()
  return jax.lax.cond(flag, lambda: advance(), lambda: twice[0]), twice[1]


def test_scalars_are_operands_of_the_branch_and_results_are_the_same():
  args = jnp.asarray(True), jnp.int32(12), jnp.arange(6.0).reshape(2, 3)
  step = jax.jit(_step, static_argnames="first")
  jax.tree.map(
    np.testing.assert_array_equal,
    step(*args, first=True),
    _step(*args, first=False),
  )
  traced = jax.make_jaxpr(lambda *a: _step(*a, first=True))(*args)
  (cond,) = [e for e in traced.eqns if e.primitive.name == "cond"]
  inside = {n for b in cond.params["branches"] for n in _primitives(b.jaxpr)}
  assert "tanh" in inside
  assert not {"cos", "min"} & inside
  assert {"cos", "min"} <= set(_primitives(traced.jaxpr))
