"""Compiles programs ahead of time and records what each of them costs.

Tracing needs the interpreter and the ambient mesh of its thread. Compilation
runs in C++ and may take minutes, so it goes into a thread of its own while the
caller does something else:

  compiling = process.Background(programs.lower("update", update, *specs))
  ...
  update = compiling.result()

Identical programs, such as the steps of two evaluations that differ only in
their data, are compiled once.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from bigtrain import settings
from bigtrain.cluster import process
from bigtrain.runtime import compiler_options, device_memory

Program = Callable[..., Any]

_this_thread = threading.local()


@functools.cache
def _count_cache_hits() -> None:
  """Counts what jax reads from its cache, by thread: one compiles at a time."""

  def listen(event: str, **details: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
      _this_thread.hits = getattr(_this_thread, "hits", 0) + 1

  jax.monitoring.register_event_listener(listen)


class Programs:
  """Lowers and compiles functions, and records the time it takes.

  Attributes:
    mode: "compiled"; "checked", compiled at the first call, without reusing
      the arguments' memory, so that jax can run again to find a NaN; or
      "eager", without compilation, one operation at a time.
    compiler_options: options of XLA.
    limit_bytes: memory of a device; None if unknown.
  """

  def __init__(
    self,
    mode: str = "compiled",
    compiler_options: Mapping[str, Any] | None = None,
    limit_bytes: int | None = None,
  ):
    _count_cache_hits()
    self.mode = mode
    self.compiler_options = dict(compiler_options or {})
    self.limit_bytes = limit_bytes
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
    limited: bool = True,
    **options: Any,
  ) -> Callable[[], Program]:
    """Traces a function at once; returns a function that compiles it later.

    That one may run in any thread. Its result takes arguments of exactly these
    shapes, types and shardings.

    Args:
      name: name of the program, for `facts` and the log.
      *specs: jax.ShapeDtypeStructs of its arguments, with shardings.
      share: whether to return an identical program if one was compiled with
        `share` before.
      limited: whether to refuse a program that needs more than limit_bytes.
      **options: arguments of jax.jit.
    """
    if self.mode == "eager":
      return lambda: _eager(fn, options.get("out_shardings"))
    if self.compiler_options:
      options["compiler_options"] = self.compiler_options
    if self.mode == "checked":
      options.pop("donate_argnums", None)
      return lambda: jax.jit(fn, **options)
    began = time.monotonic()
    lowered = jax.jit(fn, **options).lower(*specs)
    self._facts[name] = {
      "trace_secs": time.monotonic() - began,
      "compiler_options": options.get("compiler_options", {}),
    }
    return lambda: self._compile(name, lowered, share, limited)

  def _compile(
    self, name: str, lowered: jax.stages.Lowered, share: bool, limited: bool
  ) -> Program:
    key = _identity(lowered) if share else name
    facts = self._facts[name]
    with self._lock:  # The second of two identical ones waits for the first.
      program = self._shared.get(key)
      if program is not None:
        facts |= {"compile_secs": 0.0, "cache": "shared"}
      else:
        hits = getattr(_this_thread, "hits", 0)
        began = time.monotonic()
        try:
          program = self._shared[key] = lowered.compile()
        except jax.errors.JaxRuntimeError as e:
          raise self.explained(e, name) from e
        facts["compile_secs"] = time.monotonic() - began
        hit = getattr(_this_thread, "hits", 0) > hits
        facts["cache"] = "hit" if hit else "miss" if _caches() else "off"
      self._programs[name] = program
    logging.info(
      "Compiled %s in %.2f s (cache: %s).",
      name,
      facts["compile_secs"],
      facts["cache"],
    )
    if limited:
      device_memory.check(name, program, self.limit_bytes)
    return program

  def explained(self, error: Exception, name: str = "") -> Exception:
    """OutOfMemory for an error of jax about memory, else the error.

    Args:
      name: the program that was being compiled; "" at run time.
    """
    if not device_memory.is_exhausted(error):
      return error
    update = self._programs.get(device_memory.UPDATE)
    return device_memory.explained(error, name, update, self.limit_bytes)

  def compile(
    self, name: str, fn: Callable[..., Any], *specs: Any, **options: Any
  ) -> Program:
    """Lowers and compiles at once, unless an identical program exists."""
    return self.lower(name, fn, *specs, share=True, **options)()

  def facts(self, name: str) -> dict[str, Any]:
    """Costs of a program: trace_secs, compile_secs, bytes, and "cache".

    It is "hit" or "miss" in the compilation cache, "off" without one, "shared"
    if an identical program had been compiled. {} if nothing was compiled ahead.
    """
    if name not in self._programs:
      return {}
    return self._facts[name] | device_memory.memory_bytes(self._programs[name])


def _caches() -> bool:
  folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
  return bool(folder)


def from_config(config: settings.Config, mesh: Mesh) -> Programs:
  """Reads eager, debug_nans, compiler_options and device_memory_bytes.

  The options of jax that ask for the same, such as --jax_debug_nans, count too.
  """
  eager, checked = config.get("eager", False), config.get("debug_nans", False)
  debugs = jax.config.jax_debug_nans or jax.config.jax_debug_infs  # type: ignore[attr-defined]
  checked = checked or debugs
  eager = eager or jax.config.jax_disable_jit  # type: ignore[attr-defined]
  if eager and checked:
    raise settings.ConfigError(
      "config.eager=True and config.debug_nans=True: set one of them; the "
      "second also names the operation that made a NaN."
    )
  mode = "eager" if eager else "checked" if checked else "compiled"
  return Programs(
    mode,
    compiler_options.read(config, mesh),
    device_memory.limit_bytes(config, mesh),
  )


@contextlib.contextmanager
def of_run(config: settings.Config, mesh: Mesh) -> Iterator[Programs]:
  """Programs for a `with` block, with the checks and errors of their mode."""
  programs = from_config(config, mesh)
  with jax.debug_nans(programs.mode == "checked"):
    try:
      yield programs
    except jax.errors.JaxRuntimeError as e:
      explained = programs.explained(e)
      if explained is e:
        raise
      raise explained from e


def _identity(lowered: jax.stages.Lowered) -> Any:
  """Key that is equal for identical programs; the text has constants too."""
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
    # Single operations do not place their results as the jitted program does.
    return jax.device_put(result, out_shardings)

  return run


class Builder:
  """Calls functions in the background, one after the other."""

  def __init__(self, builds: Mapping[str, Callable[[], Any]], mesh: Mesh):
    """Calls nothing yet; `builds` must not communicate with other processes."""
    self._builds = builds
    self._mesh = mesh
    self._running: dict[str, process.Background] = {}
    self._last: threading.Event | None = None
    self._closed = False

  def start(self, names: Iterable[str]) -> None:
    """Calls these functions, in this order, unless called before."""
    for name in names:
      if name not in self._running:
        previous, self._last = self._last, threading.Event()
        call = functools.partial(self._call, name, previous, self._last)
        self._running[name] = process.Background(call, name)

  def _call(
    self, name: str, previous: threading.Event | None, done: threading.Event
  ) -> Any:
    if previous:
      previous.wait()
    try:
      if self._closed:
        return None
      with jax.set_mesh(self._mesh):
        return self._builds[name]()
    finally:
      done.set()

  def get(self, name: str) -> Any:
    """Waits for a function; returns its result or raises its exception."""
    self.start([name])
    return self._running[name].result()

  def check(self) -> None:
    for running in self._running.values():
      if running.failed:
        running.result()

  def close(self) -> None:
    """Calls no more functions; does not wait for a running one."""
    self._closed = True
