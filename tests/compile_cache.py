"""The compilation cache that tests share, across workers and sessions.

Most of the suite's time is compiling the same tiny programs. Tests of the cache
itself use folders of their own. `make clean` removes the folder.
"""

import pathlib

FOLDER = pathlib.Path(__file__).parents[1] / "build" / "test-compile-cache"


def enable():
  """Makes this process compile through the shared cache."""
  import jax

  FOLDER.mkdir(parents=True, exist_ok=True)
  jax.config.update("jax_compilation_cache_dir", str(FOLDER))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
