"""Keeps freed memory in the process, for the next step to use."""

import ctypes
import sys

from bigtrain.runtime import jax_flags

# Parameters of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_MMAP_FROM_BYTES = 2**31 - 1  # The largest value that mallopt accepts.
_GROW_BYTES = 2**26  # The heap grows in steps of this size.


def keep_freed() -> bool:
  """Makes glibc's malloc keep freed blocks below 2 GiB; False if it cannot.

  By default malloc maps and unmaps large blocks one by one. XLA's CPU backend
  allocates its temporaries again in every step, so every step would have to
  fault in all pages, which takes a quarter to a third of the step's time
  (docs/benchmarks.md). Only malloc's main arena holds blocks above 64 MiB, and
  only for the main thread, so programs run in that thread. Call this before the
  first use of devices.
  """
  jax_flags.default("jax_cpu_enable_async_dispatch", False)
  if not sys.platform.startswith("linux"):
    return False
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is None:  # musl, or another malloc was preloaded.
    return False
  return bool(
    mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES)
    and mallopt(_M_TOP_PAD, _GROW_BYTES)
    and mallopt(_M_TRIM_THRESHOLD, -1)
  )
