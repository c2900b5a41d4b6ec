"""Freed large blocks stay with the process."""

import resource
import subprocess
import sys

import pytest

CODE = """
import resource, sys
from bigtrain.runtime import host_memory
if sys.argv[1] == "keep":
  assert host_memory.keep_freed()
for _ in range(50):
  block = bytearray(64 * 2**20)  # Writes zeros, so all pages are mapped.
  del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""

STEPS = """
import resource, sys
import jax
import jax.numpy as jnp
from bigtrain.runtime import host_memory
if sys.argv[1] == "keep":
  assert host_memory.keep_freed()

@jax.jit
def step(x, y):  # The product is a temporary of 96 MiB.
  product = x @ y
  return jnp.sum(jnp.tanh(product)) + jnp.max(jnp.sum(product, axis=0))

x, y = jnp.ones((6144, 16)), jnp.ones((16, 4096))
assert step.lower(x, y).compile().memory_analysis().temp_size_in_bytes > 2**26
for _ in range(2):
  step(x, y).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
  step(x, y).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


pytestmark = pytest.mark.skipif(
  not sys.platform.startswith("linux"), reason="needs glibc's malloc"
)


@pytest.mark.parametrize(
  "code, blocks, mib",
  [
    pytest.param(CODE, 50, 64, id="python", marks=pytest.mark.slow),
    pytest.param(STEPS, 10, 96, id="xla"),
  ],
)
def test_pages_are_not_faulted_in_again(code, blocks, mib):
  """For blocks of Python and temporaries of XLA, of any size."""
  faults = {
    mode: int(
      subprocess.run(
        [sys.executable, "-c", code, mode],
        capture_output=True,
        text=True,
        check=True,
      ).stdout
    )
    for mode in ("default", "keep")
  }
  block = mib * 2**20 // resource.getpagesize()
  saved = faults["default"] - faults["keep"]
  # With huge pages the default may be cheap too.
  assert saved > 0.4 * blocks * block or faults["default"] < 2 * block
