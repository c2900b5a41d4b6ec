"""Programs compiled ahead of time, and what is known about each of them.

Tracing needs the interpreter and the ambient mesh of its thread; compiling is
done in C++ and may take minutes, so it goes into a thread of its own while
the caller does something else:

  compiling = cluster.Background(programs.lower("update", update, *specs))
  ...
  update = compiling.result()

Two programs that are the same, such as the steps of two evaluations that
differ in their data alone, are compiled once.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from bigtrain import settings
from bigtrain.cluster import process

Program = Callable[..., Any]

_this_thread = threading.local()


@functools.cache
def _count_cache_hits() -> None:
  def listen(event: str, **details: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
      # jax tells it in the thread that compiles.
      _this_thread.hits = getattr(_this_thread, "hits", 0) + 1

  jax.monitoring.register_event_listener(listen)


class Programs:
  """Lowers and compiles functions, and remembers what that took.

  Attributes:
    mode: "compiled"; "checked", compiled when first called and without
      reusing the arguments' memory, so that jax can look for a NaN again; or
      "eager", each operation by itself, as Python comes to it.
  """

  def __init__(self, mode: str = "compiled"):
    _count_cache_hits()
    self.mode = mode
    self._lock = threading.Lock()
    self._shared: dict[Any, jax.stages.Compiled] = {}
    self._programs: dict[str, jax.stages.Compiled] = {}
    self._facts: dict[str, dict[str, Any]] = {}

  def lower(
    self,
    name: str,
    fn: Callable[..., Any],
    *specs: Any,
    share: bool = False,
    **options: Any,
  ) -> Callable[[], Program]:
    """Traces a function here and now.

    Args:
      name: of the program, for `facts` and the log.
      fn: function of arrays.
      *specs: its arguments' jax.ShapeDtypeStructs, with shardings.
      share: whether a program like it may have been compiled already.
      **options: of jax.jit.

    Returns:
      A function that compiles, in any thread, and returns the program, which
      takes arguments of exactly these shapes, types and shardings.
    """
    if self.mode == "eager":
      return lambda: _eager(fn, options.get("out_shardings"))
    if self.mode == "checked":
      options.pop("donate_argnums", None)
      return lambda: jax.jit(fn, **options)
    began = time.monotonic()
    lowered = jax.jit(fn, **options).lower(*specs)
    self._facts[name] = {"trace_secs": time.monotonic() - began}
    return functools.partial(self._compile, name, lowered, share)

  def _compile(
    self, name: str, lowered: jax.stages.Lowered, share: bool
  ) -> Program:
    key = _identity(lowered) if share else name
    with self._lock:  # The second of two that are the same waits for the first.
      program = self._shared.get(key)
      facts = self._facts[name]
      if program is None:
        hits = getattr(_this_thread, "hits", 0)
        began = time.monotonic()
        program = self._shared[key] = lowered.compile()
        facts["compile_secs"] = time.monotonic() - began
        hit = getattr(_this_thread, "hits", 0) > hits
        facts["cache"] = "hit" if hit else "miss" if _caches() else "off"
      else:
        facts |= {"compile_secs": 0.0, "cache": "shared"}
      self._programs[name] = program
    logging.info(
      "Compiled %s in %.2f s (cache: %s).",
      name,
      facts["compile_secs"],
      facts["cache"],
    )
    return program

  def compile(
    self, name: str, fn: Callable[..., Any], *specs: Any, **options: Any
  ) -> Program:
    """Lowers and compiles, here and now, unless one like it has been."""
    return self.lower(name, fn, *specs, share=True, **options)()

  def facts(self, name: str) -> dict[str, Any]:
    """What is known of a program: trace_secs, compile_secs, cache, memory.

    Args:
      name: of a program that was compiled.

    Returns:
      {} for one that was not compiled ahead of time. "cache" is "hit" or
      "miss" of the persistent compilation cache, "off" without one, "shared"
      for a program that another one had compiled; the bytes are those on each
      device.
    """
    if name not in self._programs:
      return {}
    return self._facts[name] | memory(self._programs[name])


def _caches() -> bool:
  """Whether jax has a persistent cache."""
  folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
  return bool(folder)


def from_config(config: settings.Config) -> Programs:
  """Reads config.eager and config.debug_nans.

  Raises:
    ConfigError: both are set.
  """
  eager, checked = config.get("eager", False), config.get("debug_nans", False)
  if eager and checked:
    raise settings.ConfigError(
      "config.eager and config.debug_nans: set one of them; the second tells "
      "the operation that made a NaN as well."
    )
  return Programs("eager" if eager else "checked" if checked else "compiled")


def memory(program: jax.stages.Compiled) -> dict[str, int]:
  """Bytes of a compiled program on each device, where the backend tells.

  Returns:
    argument_bytes, output_bytes, temporary_bytes, and alias_bytes, which
    arguments and outputs have in common.
  """
  found = program.memory_analysis()
  if found is None:
    return {}
  return {
    "argument_bytes": found.argument_size_in_bytes,
    "output_bytes": found.output_size_in_bytes,
    "temporary_bytes": found.temp_size_in_bytes,
    "alias_bytes": found.alias_size_in_bytes,
  }


def _identity(lowered: jax.stages.Lowered) -> Any:
  """Equal for programs that compute the same; constants are in the text."""
  return (
    lowered.as_text(),
    lowered.in_tree,
    lowered.out_tree,
    str(lowered.in_avals),
  )


def _eager(fn: Callable[..., Any], out_shardings: Any) -> Program:
  def run(*args: Any) -> Any:
    with jax.disable_jit():
      result = fn(*args)
    # Where operations leave their results is nobody's promise.
    return jax.device_put(result, out_shardings)

  return run


class Builder:
  """Calls functions in the background, one after the other.

  Args:
    builds: functions by name. On several processes they are not called in
      step, so they must not do anything that needs the others.
    mesh: the ambient mesh for them.
  """

  def __init__(self, builds: Mapping[str, Callable[[], Any]], mesh: Mesh):
    self._builds = builds
    self._mesh = mesh
    self._running: dict[str, process.Background] = {}
    self._last: threading.Event | None = None
    self._closed = False

  def start(self, names: Iterable[str]) -> None:
    """Has these called, in this order, unless that has been done."""
    for name in names:
      if name not in self._running:
        earlier, self._last = self._last, threading.Event()
        call = functools.partial(self._call, name, earlier, self._last)
        self._running[name] = process.Background(call, name)

  def _call(
    self, name: str, earlier: threading.Event | None, done: threading.Event
  ) -> Any:
    if earlier:
      earlier.wait()
    try:
      if self._closed:
        return None
      with jax.set_mesh(self._mesh):
        return self._builds[name]()
    finally:
      done.set()

  def get(self, name: str) -> Any:
    """What the function of that name returns, or raises."""
    self.start([name])
    return self._running[name].result()

  def check(self) -> None:
    """Raises what one of the functions has raised."""
    for running in self._running.values():
      if running.failed:
        running.result()

  def close(self) -> None:
    """No more functions are called; one that is running goes on."""
    self._closed = True
