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
from jax._src import compilation_cache
from jax.sharding import Mesh

from bigtrain import settings
from bigtrain.cluster import process
from bigtrain.runtime import compiler_options as compiler_options_lib
from bigtrain.runtime import device_memory, sources
from bigtrain.runtime import kept as kept_lib

Program = Callable[..., Any]

_this_thread = threading.local()


@functools.cache
def _watch_cache() -> None:
  """Notes what jax reads from its cache, in the thread that compiles."""

  def listen(event: str, **details: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
      _this_thread.hits = getattr(_this_thread, "hits", 0) + 1

  jax.monitoring.register_event_listener(listen)
  extract = getattr(compilation_cache, "extract_executable_and_time", None)
  if extract is None:  # Another version of jax.
    return

  def noting(entry: bytes) -> tuple[bytes, int]:
    executable, secs = extract(entry)
    _this_thread.read = executable
    return executable, secs

  setattr(compilation_cache, extract.__name__, noting)


class Programs:
  """Lowers and compiles functions, and records the time it takes.

  Attributes:
    mode: "compiled"; "checked", compiled at the first call, without reusing
      the arguments' memory, so that jax can run again to find a NaN; or
      "eager", without compilation, one operation at a time.
    compiler_options: options of XLA.
    limit_bytes: memory of a device; None if unknown.
    kept: what earlier starts of the same run kept.
  """

  def __init__(
    self,
    mode: str = "compiled",
    compiler_options: Mapping[str, Any] | None = None,
    limit_bytes: int | None = None,
  ):
    """See the attributes."""
    _watch_cache()
    self.mode = mode
    self.compiler_options = dict(compiler_options or {})
    self.limit_bytes = limit_bytes
    self.kept = kept_lib.Kept()
    self._lock = threading.Lock()
    self._shared: dict[Any, jax.stages.Compiled] = {}
    self._programs: dict[str, jax.stages.Compiled] = {}
    self._facts: dict[str, dict[str, Any]] = {}
    self._opened: list[str] = []

  def making_parts(self) -> contextlib.AbstractContextManager[None]:
    """A context in which the task and the model of the programs are made.

    Programs are not kept if this opens files other than Python's, because
    nothing tells later whether these are still the same.
    """
    return sources.noting_files(self._opened)

  def keep(
    self, config: Mapping[str, Any], mesh: Mesh, *facts: Any
  ) -> kept_lib.Kept:
    """Sets and returns `kept`: what earlier starts of the run kept."""
    # These want a trace: one logs it, the other counts its operations.
    traces = config.get("debug_shapes") or config.get("compile_only")
    if self.mode == "compiled" and not traces:
      options = self.compiler_options, self.limit_bytes
      facts = *facts, options
      self.kept = kept_lib.find(config, mesh, *facts, opened=self._opened)
    return self.kept

  def lower(
    self,
    name: str,
    fn: Callable[..., Any],
    *specs: Any,
    share: bool = False,
    closure: Callable[..., Any] | None = None,
    **options: Any,
  ) -> Callable[[], Program]:
    """Traces a function at once, for compilation later.

    The program is kept for later starts of the same run. If an earlier start
    kept it, nothing is traced. A shared program is kept only if `closure` tells
    what it is, see Kept.evaluation_key.

    Args:
      *specs: jax.ShapeDtypeStructs of its arguments, with shardings.
      share: whether to return an identical program if one was compiled with
        `share` before.

    Returns:
      A function that compiles, in any thread, and returns the program. That
      takes arguments of exactly these shapes, types and shardings.
    """
    if self.mode == "eager":
      return lambda: _eager(fn, options.get("out_shardings"))
    if self.compiler_options:
      options["compiler_options"] = self.compiler_options
    if self.mode == "checked":
      options.pop("donate_argnums", None)
      return lambda: jax.jit(fn, **options)
    options |= dict(share=share, closure=closure)
    options |= dict(limit_bytes=self.limit_bytes)
    return self.lower_ahead(name, fn, *specs, **options)

  def lower_ahead(
    self,
    name: str,
    fn: Callable[..., Any],
    *specs: Any,
    share: bool = False,
    closure: Callable[..., Any] | None = None,
    limit_bytes: int | None = None,
    **options: Any,
  ) -> Callable[[], Program]:
    """Like `lower`, in every mode and without the run's options and limit."""
    key, kept_name = "", "evaluation" if share else name
    if not share:
      key = kept_lib.program_key(specs, options)
    elif closure is not None:
      key = self.kept.evaluation_key(closure, specs, options)
    mesh = jax.sharding.get_mesh()

    def trace() -> Callable[[], Program]:
      began = time.monotonic()
      with self.kept.tracing():
        lowered = jax.jit(fn, **options).lower(*specs)
      self._facts[name] = {
        "trace_secs": time.monotonic() - began,
        "compiler_options": options.get("compiler_options", {}),
      }
      return functools.partial(
        self._compile, name, lowered, share, key, limit_bytes
      )

    def load() -> Program:
      began = time.monotonic()
      program = self._shared.get(key) if share else None
      cache = "shared" if program else "kept"
      program = program or self.kept.read_program(kept_name, key, specs)
      if program is None:
        with jax.set_mesh(mesh):
          return trace()()
      secs = time.monotonic() - began
      self._facts[name] = {
        "trace_secs": 0.0,
        "compiler_options": options.get("compiler_options", {}),
        "compile_secs": secs,
        "cache": cache,
      }
      self._programs[name] = program
      if share:
        self._shared[key] = program
      logging.info("Loaded %s in %.2f s, without a trace.", name, secs)
      return program  # Only programs that fit the same devices are kept.

    return load if key and self.kept.hit else trace()

  def _compile(
    self,
    name: str,
    lowered: jax.stages.Lowered,
    share: bool,
    kept_key: str,
    limit_bytes: int | None,
  ) -> Program:
    key = _identity(lowered) if share else name
    with self._lock:  # The second of two identical ones waits for the first.
      program = self._shared.get(key)
      facts = self._facts[name]
      read = None  # Bytes of the executable, if jax had them in its cache.
      if program is None:
        hits = getattr(_this_thread, "hits", 0)
        _this_thread.read = None
        began = time.monotonic()
        try:
          program = self._shared[key] = lowered.compile()
        except jax.errors.JaxRuntimeError as e:
          raise self.explained(e, name) from e
        facts["compile_secs"] = time.monotonic() - began
        hit = getattr(_this_thread, "hits", 0) > hits
        facts["cache"] = "hit" if hit else "miss" if _caches() else "off"
        read, _this_thread.read = _this_thread.read, None
      else:
        facts |= {"compile_secs": 0.0, "cache": "shared"}
      self._programs[name] = program
    logging.info(
      "Compiled %s in %.2f s (cache: %s).",
      name,
      facts["compile_secs"],
      facts["cache"],
    )
    device_memory.check(name, program, limit_bytes)
    if kept_key:
      if name == device_memory.UPDATE and not share:  # The last of all facts.
        self.kept.write_facts()
      # XLA for CPUs serializes a program that it has read itself without all of
      # its functions.
      if read or facts["cache"] in ("miss", "off"):
        kept_name = "evaluation" if share else name
        self.kept.write_program(kept_name, kept_key, program, read)
    return program

  def explained(self, error: Exception, name: str = "") -> Exception:
    """Returns OutOfMemory for an error of jax about memory, else the error.

    Args:
      name: the program that was being compiled; "" at run time.
    """
    if not device_memory.is_exhausted(error):
      return error
    update = self._programs.get(device_memory.UPDATE)
    memory = device_memory.memory_bytes(update) if update else {}
    return device_memory.explained(error, name, memory, self.limit_bytes)

  def compile(
    self, name: str, fn: Callable[..., Any], *specs: Any, **options: Any
  ) -> Program:
    """Lowers and compiles at once, unless an identical program exists."""
    return self.lower(name, fn, *specs, share=True, **options)()

  def facts(self, name: str) -> dict[str, Any]:
    """Costs of a program: trace_secs, compile_secs, cache, and bytes.

    Also the compiler_options that it was compiled with.

    Returns:
      {} for a program that was not compiled ahead of time. "cache" is "hit" or
      "miss" in the persistent compilation cache, "off" without one, "shared"
      if an identical program had been compiled, "kept" if an earlier start kept
      the program itself. For the bytes, which are per
      device, see device_memory.py.
    """
    if name not in self._programs:
      return {}
    return self._facts[name] | device_memory.memory_bytes(self._programs[name])


def _caches() -> bool:
  """Whether jax has a persistent cache."""
  folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
  return bool(folder)


def from_config(config: settings.Config, mesh: Mesh) -> Programs:
  """Reads eager, debug_nans, compiler_options and device_memory_bytes.

  The options of jax that ask for the same, such as --jax_debug_nans, count too.

  Raises:
    ConfigError: the first two are both set, the compiler does not know an
      option, or the memory is not a positive whole number.
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
    compiler_options_lib.read(config, mesh),
    device_memory.limit_bytes(config, mesh),
  )


@contextlib.contextmanager
def of_run(config: settings.Config, mesh: Mesh) -> Iterator[Programs]:
  """Programs for a `with` block, with the checks and errors of their mode.

  Raises:
    ConfigError: see `from_config`.
    OutOfMemory: a device ran out of memory.
  """
  programs = from_config(config, mesh)
  with jax.debug_nans(programs.mode == "checked"):
    try:
      yield programs
    except jax.errors.JaxRuntimeError as e:
      programs.kept.forget()
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
    """Calls nothing yet.

    Args:
      builds: functions by name. Several processes call them at different
        times, so they must not communicate with each other.
    """
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
    """Raises the exception of a function that has failed."""
    for running in self._running.values():
      if running.failed:
        running.result()

  def close(self) -> None:
    """Calls no more functions; does not wait for a running one."""
    self._closed = True
