"""Large blocks that are freed stay with the process."""

import resource
import subprocess
import sys

import pytest

CODE = """
import resource, sys
from bigtrain import host_memory
if sys.argv[1] == "keep":
  assert host_memory.keep_freed()
for _ in range(50):
  block = bytearray(64 * 2**20)  # Written to, so its pages are touched.
  del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(
  not sys.platform.startswith("linux"), reason="glibc's malloc alone"
)
def test_pages_are_not_faulted_in_again():
  page = resource.getpagesize()
  faults = {
    mode: int(
      subprocess.run(
        [sys.executable, "-c", CODE, mode],
        capture_output=True,
        text=True,
        check=True,
      ).stdout
    )
    for mode in ("default", "keep")
  }
  block = 64 * 2**20 // page
  saved = faults["default"] - faults["keep"]
  # Huge pages may make the default cheap; then there is nothing to save.
  assert saved > 20 * block or faults["default"] < 2 * block
