"""Keeps memory that was freed, for the next step to use."""

import ctypes
import sys

import jax

# Parameters of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_FROM_BYTES = 2**30


def keep_freed() -> bool:
  """Tells glibc's malloc to hold on to freed blocks below 1 GiB.

  By default large blocks are mapped and unmapped one by one. XLA's CPU backend
  allocates its temporaries anew for every step, and input batches come and go
  as well, so each step would fault in all of their pages again: a third of the
  time of a small model's step (docs/benchmarks.md).

  Only malloc's main arena holds blocks above 64 MiB, and threads have others.
  So the CPU backend, where it is the one in use, runs programs in the thread
  that calls them, which is the loop's and thus the main one: nothing is lost,
  since a step takes all cores and batches are made in threads of their own.
  (One arena for all threads would do as well, but XLA's compiler allocates in
  all of them at once, and takes twice the time if they wait for each other.)

  Must be called before jax's devices are first used.

  Returns:
    Whether this C library understood.
  """
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  if not sys.platform.startswith("linux"):
    return False
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is None:  # musl, or another malloc was preloaded.
    return False
  return bool(
    mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES)
    and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
  )
