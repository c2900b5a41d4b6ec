"""Limits of the machine, measured in the same run as the other figures.

These are the rates of matrix products, of copies within memory and from the
device, and of writes to disk. input_rate.py measures the rate of JPEGs.
"""

import os
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure


def main() -> None:
  """Prints the rates."""
  args = measure.arguments(__doc__)
  mib = 8 if args.quick else 256
  with tempfile.TemporaryDirectory() as folder:
    calls = {
      "matrix product, float32, GFLOP/s": matrix_product(
        jnp.float32, args.quick
      ),
      "matrix product, bfloat16, GFLOP/s": matrix_product(
        jnp.bfloat16, args.quick
      ),
      "copy in memory, GB/s": memory_copy(mib),
      "copy from device to host, GB/s": device_copy(mib),
      "write and sync to disk, GB/s": disk_write(mib, folder),
    }
    rates_by_name = measure.interleave(calls, args.repeats)
  for name, rates in rates_by_name.items():
    name, unit = name.rsplit(", ", 1)
    measure.report(0, f"limit: {name}", rates, unit=unit)


def matrix_product(dtype: jnp.dtype, quick: bool) -> Callable[[], float]:
  """Returns a function that measures GFLOP/s of a product on one device."""
  on_cpu = jax.devices()[0].platform == "cpu"
  if quick:
    size = 256
  else:
    size = 2048 if on_cpu else 8192
  repeats = 1 if on_cpu else 20
  a = jnp.ones((size, size), dtype)
  product = jax.jit(lambda a: jnp.dot(a, a) / size)

  def rate() -> float:
    def run() -> None:
      x = a
      for _ in range(repeats):
        x = product(x)
      x.block_until_ready()

    return 2e-9 * repeats * size**3 / measure.timed(run)

  return rate


def memory_copy(mib: int) -> Callable[[], float]:
  """Returns a function that measures GB/s of a copy by one thread."""
  source = np.ones(mib * 2**20, np.uint8)
  target = np.zeros_like(source)
  return lambda: (
    1e-9 * source.nbytes / measure.timed(lambda: np.copyto(target, source))
  )


def device_copy(mib: int) -> Callable[[], float]:
  """Returns a function that measures GB/s from device to host memory."""
  source = jax.random.normal(jax.random.key(0), (mib, 2**18))
  add = jax.jit(lambda x: x + 1)

  def rate() -> float:
    array = add(source).block_until_ready()  # New, so no copy is cached.
    secs = measure.timed(lambda: np.array(array, copy=True))
    return 1e-9 * array.nbytes / secs

  return rate


def disk_write(mib: int, folder: str) -> Callable[[], float]:
  """Returns a function that measures GB/s of writing and syncing a file."""
  block = np.random.default_rng(0).bytes(2**20)
  path = os.path.join(folder, "written")

  def rate() -> float:
    def write() -> None:
      with open(path, "wb", buffering=0) as file:
        for _ in range(mib):
          file.write(block)
        os.fsync(file.fileno())

    secs = measure.timed(write)
    os.remove(path)
    return 1e-9 * mib * 2**20 / secs

  return rate


if __name__ == "__main__":
  main()
