"""Keeps freed memory in the process, for the next step to use."""

import ctypes
import sys

from bigtrain.runtime import jax_flags

# Parameters of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_MMAP_FROM_BYTES = 2**30
_GROW_BYTES = 2**26


def keep_freed() -> bool:
  """Makes glibc's malloc keep freed blocks below 1 GiB.

  By default large blocks are mapped and unmapped one by one. XLA's CPU backend
  allocates its temporaries anew for every step, and so does the input its
  batches, so each step would fault in all of their pages again: a third of the
  time of a small model's step (docs/benchmarks.md).

  Only malloc's main arena holds blocks above 64 MiB, and it serves the main
  thread only. So the CPU backend runs programs in the calling thread, which is
  the loop's and thus the main one. This costs nothing, since a step uses all
  cores and batches are made in threads of their own. (One arena for all
  threads would also work, but XLA's compiler allocates in many threads at
  once, and takes twice the time if they wait for each other.)

  The heap grows by 64 MiB at a time. By default it asks the kernel for each
  132 KiB, or for each page in a thread that compiles or loads a program.

  Call this before the first use of jax's devices.

  Returns:
    Whether this C library supports it.
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
    and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
  )
