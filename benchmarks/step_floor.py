"""Benchmark 1, second part: a step beside the time of its products alone.

The floor of a step is the sum over its matrix products and convolutions, each
compiled and timed alone, with the shapes that it has in the update. What a step
takes beyond it is attention's softmax, norms, activations, the optimizer,
copies and waits. The models and batches are those of step_rate.py.
--only=vit,convnext chooses models.
"""

import collections
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import measure, program, step_rate
from bigtrain import main as bigtrain_main
from bigtrain.reports import flops

_PRODUCTS = ("dot_general", "conv_general_dilated")
# A product is timed for about as long, in calls that follow each other.
_PRODUCT_SECS = 0.1
_STEPS = 3


def main() -> None:
  """Prints the floor and the step over the floor, for each model."""
  args = measure.arguments(__doc__, only="names of cases, separated by commas")
  sizes = step_rate.QUICK if args.quick else step_rate.CPU
  names = args.only.split(",") if args.only else [*sizes.cases]
  if not {*names} <= {*sizes.cases}:
    sys.exit(f"--only={args.only}: expected some of {', '.join(sizes.cases)}.")
  for name in names:
    case = step_rate.case_of(name, sizes)
    products = _products_of_update(case.config)
    calls = {key: _timed_call(equation) for key, (equation, _) in products}
    step = program.build(case.config)
    step_secs, floor_secs = [], []
    for _ in range(args.repeats):
      step_secs.append(step.run(_STEPS) / _STEPS)
      floor_secs.append(sum(calls[key]() * n for key, (_, n) in products))
    gflop = 1e-9 * sum(flops.product_flops(e) * n for _, (e, n) in products)
    rates = [gflop / secs for secs in floor_secs]
    measure.report(1, f"products alone: {case.name}", floor_secs, unit="s")
    measure.report(1, f"rate of products: {case.name}", rates, unit="GFLOP/s")
    values = measure.ratios(step_secs, floor_secs)
    measure.report(1, f"step / its products alone: {case.name}", values)


def _products_of_update(config: Any) -> list[tuple[str, tuple[Any, int]]]:
  """Returns each product of a step, and how many times the step has it."""
  config["compile_cache"] = False
  jaxpr = bigtrain_main.train(
    config,
    on_update=lambda run, update_fn, specs, compile: jax.make_jaxpr(update_fn)(
      *specs
    ),
  )
  equations: dict[str, Any] = {}
  times: collections.Counter[str] = collections.Counter()
  for equation, n in _products(jaxpr.jaxpr):
    key = f"{[v.aval for v in equation.invars]} {equation.params}"
    equations[key] = equation
    times[key] += n
  return [(key, (equations[key], times[key])) for key in equations]


def _products(jaxpr: Any) -> Iterator[tuple[Any, int]]:
  """Yields the products of a program and how often each runs."""
  for equation in jaxpr.eqns:
    name, params = equation.primitive.name, equation.params
    if name in _PRODUCTS:
      yield equation, 1
      continue
    bodies = [list(_products(body)) for body in flops.nested(params)]
    if name == "cond":
      bodies = [_branch_that_runs(bodies, params.get("branches_platforms"))]
    repeats = params["length"] if name == "scan" else 1
    for body in bodies:
      yield from ((product, n * repeats) for product, n in body)


def _branch_that_runs(bodies: list[Any], platforms: Any) -> Any:
  """Returns the branch for this platform, or the one with the most products.

  `platforms` has the names of each branch's platforms, None for all others; it
  is None if the branch depends on a value.
  """
  if platforms is None:
    return max(bodies, key=len)
  ours = jax.default_backend()
  for body, names in zip(bodies, platforms, strict=True):
    if names is None or ours in names:
      return body
  raise ValueError(f"No branch for {ours}: {platforms}.")


def _timed_call(equation: Any) -> Callable[[], float]:
  """Returns a function that measures the seconds of a product alone."""
  keys = jax.random.split(jax.random.key(0), len(equation.invars))
  arrays = [
    jax.random.normal(key, v.aval.shape, jnp.float32).astype(v.aval.dtype)
    for key, v in zip(keys, equation.invars)
  ]
  product = jax.jit(lambda *x: equation.primitive.bind(*x, **equation.params))
  product = product.lower(*arrays).compile()

  def run(times: int) -> float:
    def calls() -> None:
      for _ in range(times):
        jax.block_until_ready(product(*arrays))

    return measure.timed(calls) / times

  run(1)
  times = max(1, round(_PRODUCT_SECS / run(1)))
  return lambda: run(times)


if __name__ == "__main__":
  main()
