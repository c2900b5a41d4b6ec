"""Keeps memory that was freed, for the next step to use."""

import ctypes
import sys

# Parameters of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MMAP_FROM_BYTES = 2**30


def keep_freed() -> bool:
  """Tells glibc's malloc to hold on to freed blocks below 1 GiB.

  By default large blocks are mapped and unmapped one by one. XLA's CPU backend
  allocates its temporaries anew for every step, and input batches come and go
  as well, so each step would fault in all of their pages again: a third of the
  time of a small model's step (docs/benchmarks.md). The threads that run XLA's
  programs would have arenas of their own, which hold no block above 64 MiB and
  map those all the same: so there is one arena for all threads.

  Returns:
    Whether this C library understood.
  """
  if not sys.platform.startswith("linux"):
    return False
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is None:  # musl, or another malloc was preloaded.
    return False
  return bool(
    mallopt(_M_ARENA_MAX, 1)
    and mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES)
    and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
  )
