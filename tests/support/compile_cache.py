"""Quick compilation for tests: XLA flags, and a cache that all tests share.

Most of the suite's time is compiling tiny programs that run once. Without
optimizations that takes less than half of the time, and a third less again if
programs share MLIR contexts. The cache serves all workers and sessions, but not
programs for several devices, for the reason in runtime/jax_flags.py. Tests of
the cache itself use folders of their own. `make clean` removes the folder.
"""

import os
import pathlib
import re
import threading

import jaxlib.version

FOLDER = pathlib.Path(__file__).parents[2] / "build" / "test-compile-cache"
QUICK_XLA_FLAGS = (
  "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
  " --xla_cpu_parallel_codegen_split_count=1"
)
# By default, XLA aborts where a simulated device waits 40 seconds for another
# one, which happens on busy machines.
QUICK_XLA_FLAGS += " --xla_cpu_collective_call_terminate_timeout_seconds=300"
# The older of two code generators of XLA; newer versions lack it.
if jaxlib.version.__version_info__ < (0, 11):
  QUICK_XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"


def flags(devices):
  """XLA_FLAGS of a process of its own, on the instruction set of this one."""
  given = re.findall(r"--xla_cpu_max_isa=\S+", os.environ.get("XLA_FLAGS", ""))
  count = f"--xla_force_host_platform_device_count={devices}"
  return " ".join([count, QUICK_XLA_FLAGS, *given])


def enable():
  """Makes this process compile quickly, and through the shared cache."""
  import jax

  if jaxlib.version.__version_info__ < (0, 12):
    _share_contexts()
  _compile_for_several_devices()
  FOLDER.mkdir(parents=True, exist_ok=True)
  jax.config.update("jax_compilation_cache_dir", str(FOLDER))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


# A context keeps the constants of all its programs, so it does not last.
_PROGRAMS_OF_A_CONTEXT = 50


def _share_contexts():
  """Makes an MLIR context serve many programs, as jax does from 0.12 on."""
  from jax._src.interpreters import mlir

  make_context = mlir.make_ir_context
  of_thread = threading.local()

  def shared_context():
    number = getattr(of_thread, "number", 0)
    if number % _PROGRAMS_OF_A_CONTEXT == 0:
      of_thread.context = make_context()
    of_thread.number = number + 1
    return of_thread.context

  mlir.make_ir_context = shared_context


def _compile_for_several_devices():
  """Makes jax compile programs for several devices without the cache."""
  from jax._src import compiler

  through_cache = compiler.compile_or_get_cached

  def compile_or_get_cached(
    backend, computation, devices, options, callbacks, device_list, *args
  ):
    if devices.size > 1:
      return compiler.backend_compile_and_load(
        backend, computation, device_list, options, callbacks
      )
    return through_cache(
      backend, computation, devices, options, callbacks, device_list, *args
    )

  compiler.compile_or_get_cached = compile_or_get_cached
