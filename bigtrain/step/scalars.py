"""Scalars that are computed before a branch, and not in each of its kernels.

The optimizer's update runs in a branch of the program. XLA fuses the operations
on an array with the scalars that they need, such as the schedule and the bias
corrections. With hundreds of arrays it repeats these scalars hundreds of times,
in code that it must optimize, keep and load again. An operand of a branch is
computed once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

_Fn = Callable[[], Any]


def computed_first(fn: _Fn) -> _Fn:
  """Computes now what `fn` computes from scalars alone.

  Args:
    fn: traceable function without arguments, of arrays of an outer trace. It is
      traced here, once for all calls of the result.

  Returns:
    A function that computes the rest, with the same result.
  """
  closed, shapes = jax.make_jaxpr(fn, return_shape=True)()
  jaxpr = closed.jaxpr
  known = {v for v in jaxpr.constvars if v.aval.shape == ()}
  first, rest = [], []
  for eqn in jaxpr.eqns:
    inputs = {v for v in eqn.invars if isinstance(v, core.Var)}
    is_scalar = all(v.aval.shape == () for v in eqn.outvars)
    if is_scalar and inputs <= known and not eqn.effects:
      first.append(eqn)
      known.update(eqn.outvars)
    else:
      rest.append(eqn)
  used = {v for eqn in rest for v in eqn.invars if isinstance(v, core.Var)}
  used.update(v for v in jaxpr.outvars if isinstance(v, core.Var))
  made = [v for eqn in first for v in eqn.outvars if v in used]

  def program(inputs: Any, eqns: Any, outputs: Any) -> Callable[..., Any]:
    """The function of these operations."""
    part = jaxpr.replace(
      constvars=[],
      invars=inputs,
      eqns=eqns,
      outvars=outputs,
      debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(part, ()))

  scalars = program(jaxpr.constvars, first, made)(*closed.consts)
  compute = program([*jaxpr.constvars, *made], rest, jaxpr.outvars)

  def remaining(values: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(shapes), compute(*values))

  remaining.__name__ = fn.__name__  # For profiles.
  compiled = jax.jit(remaining)
  return lambda: compiled([*closed.consts, *scalars])
