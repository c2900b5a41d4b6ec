"""Compiles programs ahead of time and records what each of them costs.

Tracing needs the interpreter and the ambient mesh of its thread. Compilation
runs in C++ and may take minutes, so it goes into a thread of its own. Identical
programs, such as the steps of two evaluations that differ only in their data,
are compiled once.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh

from bigtrain.cluster import process
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
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

  The mode is "compiled"; "checked", compiled at the first call, which keeps the
  arguments, so that jax can run again to find a NaN; or "eager", one operation
  at a time.
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
    """Traces a function; returns a function that compiles it, in any thread.

    The program takes arguments of exactly these shapes, types and shardings.
    With `share`, an identical program that was compiled with `share` before is
    returned. With `limited`, one that needs more than limit_bytes is refused.
    """
    if self.mode == "eager":
      return lambda: _eager(fn, options.get("out_shardings"))
    if self.compiler_options:
      options["compiler_options"] = self.compiler_options
    options["keep_unused"] = share  # So that the text tells which are used.
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

  def lower_sizes(
    self,
    name: str,
    fn: Callable[..., Any],
    *specs: Any,
    argnum: int,
    sizes: Sequence[Any],
    **options: Any,
  ) -> Callable[[], Program]:
    """`lower` for several sizes of one argument, each with its own program.

    The size in `specs`, the largest, has the name, and counts in reports.
    """
    if self.mode != "compiled" or len(sizes) == 1:
      return self.lower(name, fn, *specs, **options)
    shapes = lambda tree: tuple(x.shape for x in jax.tree.leaves(tree))
    compiles = {}
    for i, size in enumerate(sizes):
      given = (*specs[:argnum], size, *specs[argnum + 1 :])
      largest = shapes(size) == shapes(specs[argnum])
      own_name = name if largest else f"{name} of batch size {i}"
      compiles[shapes(size)] = self.lower(own_name, fn, *given, **options)

    def compile_all() -> Program:
      programs = {size: compile() for size, compile in compiles.items()}
      return lambda *args: programs[shapes(args[argnum])](*args)

    return compile_all

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
        folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        facts["cache"] = "hit" if hit else "miss" if folder else "off"
      self._programs[name] = program
    took = f"{facts['compile_secs']:.2f} s (cache: {facts['cache']})"
    logging.info("Compiled %s in %s.", name, took)
    if limited:
      device_memory.check(name, program, self.limit_bytes)
    return program

  def explained(self, error: Exception, name: str = "") -> Exception:
    """OutOfMemory for an error of jax about memory, else the error.

    `name` is the program that was being compiled; "" at run time.
    """
    if not device_memory.is_exhausted(error):
      return error
    update = self._programs.get(device_memory.UPDATE)
    return device_memory.explained(error, name, update, self.limit_bytes)

  def compile(
    self, name: str, fn: Callable[..., Any], *specs: Any, **options: Any
  ) -> Program:
    return self.lower(name, fn, *specs, share=True, **options)()

  def facts(self, name: str) -> dict[str, Any]:
    """Costs of a program: trace_secs, compile_secs, bytes, and "cache".

    That is "hit" or "miss" in the compilation cache, "off" without one, or
    "shared" with an identical program. {} if nothing was compiled ahead.
    """
    if name not in self._programs:
      return {}
    return self._facts[name] | device_memory.memory_bytes(self._programs[name])


def from_config(config: settings.Config, mesh: Mesh) -> Programs:
  flags: Any = jax.config  # Such as --jax_debug_nans.
  debugs = flags.jax_debug_nans or flags.jax_debug_infs
  checked = config.get("debug_nans", False) or debugs
  eager = config.get("eager", False) or flags.jax_disable_jit
  if eager and checked:
    raise ConfigError(
      "config.eager=True and config.debug_nans=True: set one of them; the "
      "second also names the operation that made a NaN."
    )
  mode = "eager" if eager else "checked" if checked else "compiled"
  options = compiler_options.read(config, mesh)
  return Programs(mode, options, device_memory.limit_bytes(config, mesh))


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
  # The text has the constants too.
  avals = str(lowered.in_avals)
  return lowered.as_text(), lowered.in_tree, lowered.out_tree, avals


def _eager(fn: Callable[..., Any], out_shardings: Any) -> Program:
  def run(*args: Any) -> Any:
    with jax.disable_jit():
      result = fn(*args)
    # Single operations do not place their results as the jitted program does.
    return jax.device_put(result, out_shardings)

  return run


class Builder:
  """Calls functions in the background, one after the other.

  They must not communicate with other processes. `start` calls each of them
  once; `close` does not wait for a running one.
  """

  def __init__(self, builds: Mapping[str, Callable[[], Any]], mesh: Mesh):
    self._builds = builds
    self._mesh = mesh
    self._running: dict[str, process.Background] = {}
    self._last: threading.Event | None = None
    self._closed = False

  def start(self, names: Iterable[str]) -> None:
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
    self.start([name])
    return self._running[name].result()

  def check(self) -> None:
    for running in self._running.values():
      if running.failed:
        running.result()

  def close(self) -> None:
    self._closed = True
