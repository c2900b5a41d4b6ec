"""The gated delta rule, compiled for an absent TPU v5p, for compilers.py.

With the sizes of a layer of Qwen3-Next and one sequence of 4,096 tokens.

  python -m benchmarks.delta_rule_compiled BACKEND FOLDER

BACKEND is "xla" or "pallas". The compiler does not estimate the cycles of
kernels, but writes their schedules into the FOLDER. A kernel takes the bundles
of its schedule for each block of its grid, and the two cores of a chip share
the blocks. Prints JSON, for the rule and for the rule with its gradient:
seconds, and how many of them are the kernels'.

Axes: as in delta_rule.py.
"""

import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from bigtrain import sharding
from bigtrain.models.layers import delta_rule
from bigtrain.reports import flops
from bigtrain.sharding import absent
from bigtrain.tools.plan import cycles, hardware, hlo

_CORES = 2


def main() -> None:
  """Compiles the rule and prints its figures."""
  backend, folder = sys.argv[1:]
  if backend == "pallas":  # Writing the schedules takes long.
    os.environ["LIBTPU_INIT_ARGS"] = (
      f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    )

  def rule(*arrays: jax.Array) -> jax.Array:
    inputs = delta_rule.Inputs(*arrays)
    return delta_rule.chunked(inputs, delta_rule.empty_state(inputs), backend)[
      0
    ]

  def with_gradient(gradient: jax.Array, *arrays: jax.Array) -> Any:
    outputs, transposed = jax.vjp(rule, *arrays)
    return outputs, transposed(gradient)

  mesh = sharding.make_mesh(devices=absent.devices("v5p:2x2x1")[:1])
  whole = NamedSharding(mesh, PartitionSpec())

  def array(*heads: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, 4096, *heads), jnp.float32, sharding=whole)

  q_BLGK, v_BLGRV, beta_BLGR = array(16, 128), array(16, 2, 128), array(16, 2)
  arrays = q_BLGK, q_BLGK, v_BLGRV, beta_BLGR, beta_BLGR
  with jax.set_mesh(mesh):
    traced = (
      jax.jit(rule).trace(*arrays),
      jax.jit(with_gradient).trace(v_BLGRV, *arrays),
    )
    names = "forward", "forward and backward"
    figures = {n: _figures(t, folder) for n, t in zip(names, traced)}
  print(json.dumps(figures))


def _figures(traced: Any, folder: str) -> dict[str, float]:
  module = hlo.Module(traced.lower().compile().as_text())
  v5p = hardware.find("tpu_v5p")
  totals = cycles.cycles(
    module,
    v5p.clock_hertz,
    v5p.flops_per_cycle,
    lambda collective: hardware.seconds(collective, v5p).secs,
  )
  secs = 0.0 if totals is None else totals.compute_secs
  grids = dict(_grids(traced.jaxpr))
  kernel_cycles = sum(
    grids[name] * _bundles(folder, name) / _CORES for name in _runs(module)
  )
  kernel_secs = kernel_cycles / v5p.clock_hertz
  return dict(secs=secs + kernel_secs, kernel_secs=kernel_secs)


def _grids(jaxpr: Any) -> Iterator[tuple[str, int]]:
  """Yields (name, number of blocks) of all kernels."""
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    if equation.primitive.name == "pallas_call":
      heads, chunks = equation.params["grid_mapping"].grid
      yield equation.params["name"], heads * chunks
    else:
      for inner in flops.nested(equation.params):
        yield from _grids(inner)


def _runs(module: hlo.Module) -> Iterator[str]:
  """Yields the name of each kernel that runs."""
  for run in module.runs():
    if 'custom_call_target="tpu_custom_call"' in run.op.attributes:
      match = re.search(r"(\w+)/pallas_call", run.op.attributes)
      assert match
      yield from [match[1]] * run.times


def _bundles(folder: str, kernel: str) -> int:
  """Bundles of the last schedule of a kernel, for a block."""
  pattern = f"*-{kernel}*schedule-analysis_final_bundles.txt"
  paths = sorted(pathlib.Path(folder).glob(pattern))
  match = re.search(r"total scheduled bundles:\s+(\d+)", paths[-1].read_text())
  assert match
  return int(match[1])


if __name__ == "__main__":
  main()
