"""A Gated DeltaNet layer, compiled for an absent TPU v5p, for compilers.py.

The layer of Qwen3-Next with one sequence of 4,096 tokens: forward, and with
full remat forward again and backward.

  python -m benchmarks.delta_rule_compiled BACKEND FOLDER

BACKEND is that of the recurrence, "xla" or "pallas". The compiler does not
estimate the cycles of kernels, but writes their schedules into the FOLDER. A
kernel takes the bundles of its schedule for each block of its grid, and the two
cores of a chip share the blocks. Prints JSON: seconds without kernels, seconds
of the kernels, and the peak memory in bytes.
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
from bigtrain.models.layers import deltanet
from bigtrain.models.published import decoder_variants
from bigtrain.reports import flops
from bigtrain.runtime import device_memory
from bigtrain.sharding import absent
from bigtrain.tools.plan import cycles, hardware, hlo

_LENGTH, _WIDTH = 4096, 2048
_CORES = 2


def main() -> None:
  """Compiles the layer and prints its figures."""
  backend, folder = sys.argv[1:]
  if backend == "pallas":  # Writing the schedules takes long, and 2 GB.
    os.environ["LIBTPU_INIT_ARGS"] = (
      f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    )
  kinds = decoder_variants.VARIANTS["qwen3_next_80b"]["kinds"]
  given = {**kinds["linear"]["deltanet"], "backend": backend}
  layer = deltanet.DeltaNet(
    deltanet.Options(**given),
    norm_eps=1e-6,
    init_std=0.02,
    out_init_std=0.02,
    dtype="bfloat16",
  )

  def loss(params: Any, x_BLD: jax.Array, weights_BLD: jax.Array) -> jax.Array:
    apply = jax.checkpoint(lambda *args: layer.apply(*args)[0])
    return jnp.sum(apply(params, x_BLD) * weights_BLD)

  mesh = sharding.make_mesh(devices=absent.devices("v5p:2x2x1")[:1])
  whole = NamedSharding(mesh, PartitionSpec())
  x = jax.ShapeDtypeStruct((1, _LENGTH, _WIDTH), jnp.bfloat16, sharding=whole)
  with jax.set_mesh(mesh):
    # In a trace the key is not put on the absent device.
    init = lambda x: layer.init(jax.random.key(0), x)
    shapes = jax.eval_shape(init, x)
    params = jax.tree.map(
      lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=whole), shapes
    )
    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(params, x, x)
    compiled = traced.lower().compile()
  v5p = hardware.find("tpu_v5p")
  module = hlo.Module(compiled.as_text())
  totals = cycles.cycles(
    module,
    v5p.clock_hertz,
    v5p.flops_per_cycle,
    lambda collective: hardware.seconds(collective, v5p).secs,
  )
  assert totals is not None
  grids = dict(_grids(traced.jaxpr))
  kernel_cycles = sum(
    grids[name] * _bundles(folder, name) / _CORES for name in _runs(module)
  )
  figures = dict(
    secs=totals.compute_secs,
    kernel_secs=kernel_cycles / v5p.clock_hertz,
    peak_bytes=device_memory.memory_bytes(compiled)["peak_bytes"],
  )
  print(json.dumps(figures))


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
  """Bundles of a kernel's schedule for a block."""
  pattern = f"*-{kernel}*schedule-analysis_final_bundles.txt"
  paths = sorted(pathlib.Path(folder).glob(pattern))
  match = re.search(r"total scheduled bundles:\s+(\d+)", paths[0].read_text())
  assert match
  return int(match[1])


if __name__ == "__main__":
  main()
