"""Compiles programs ahead of time, and records what each of them costs.

`Programs.lower` traces a function, which needs the interpreter and the ambient
mesh of its thread. It returns a function that compiles the program. Compilation
happens in C++ and may take minutes, so it runs in another thread (`Builder`, or
process.Background). Identical programs, such as the steps of two evaluations
that differ only in their data, are compiled once.
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
  """Counts the programs that jax reads from its cache, for each thread."""

  def listen(event: str, **details: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
      _this_thread.hits = getattr(_this_thread, "hits", 0) + 1

  jax.monitoring.register_event_listener(listen)


class Programs:
  """Lowers and compiles functions, and records how long that takes.

  The modes are:
    compiled  ahead of time
    checked   at the first call. Arguments are not donated, so that jax can run
              a step again to find the operation that made a NaN.
    eager     not at all: one operation at a time
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

    Args:
      name: name of the program, for reports.
      fn: the function.
      *specs: shapes, dtypes and shardings of its arguments.
      share: whether an identical program may be used, if one was compiled with
        `share` before.
      limited: whether a program that needs more than limit_bytes is an error.
      **options: arguments of jax.jit.
    """
    if self.mode == "eager":
      return lambda: _eager(fn, options.get("out_shardings"))
    if self.compiler_options:
      options["compiler_options"] = self.compiler_options
    # The text of a shared program shows which arguments it uses only if it
    # keeps the others.
    options["keep_unused"] = share
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

  def lower_each(
    self,
    name: str,
    fn: Callable[..., Any],
    all_specs: Sequence[tuple[Any, ...]],
    *,
    argnums: Sequence[int],
    **options: Any,
  ) -> Callable[[], Program]:
    """`lower` for arguments of several shapes, each with its own program.

    Args:
      name: name of the last program, which is the largest and the one in
        reports.
      fn: the function.
      all_specs: specs of its arguments, for each program.
      argnums: numbers of the arguments whose shapes or keys differ.
      **options: arguments of `lower`.
    """
    if self.mode != "compiled" or len(all_specs) == 1:
      return self.lower(name, fn, *all_specs[-1], **options)

    def key_of(args: Sequence[Any]) -> Any:
      leaves, structure = jax.tree.flatten([args[i] for i in argnums])
      return structure, tuple(x.shape for x in leaves)

    compile_fns = {}
    for i, specs in enumerate(all_specs):
      is_last = i == len(all_specs) - 1
      own_name = name if is_last else f"{name} number {i}"
      compile_fns[key_of(specs)] = self.lower(own_name, fn, *specs, **options)

    def compile_all() -> Program:
      programs = {key: compile_fn() for key, compile_fn in compile_fns.items()}
      return lambda *args: programs[key_of(args)](*args)

    return compile_all

  def _compile(
    self, name: str, lowered: jax.stages.Lowered, share: bool, limited: bool
  ) -> Program:
    key = _identity(lowered) if share else name
    facts = self._facts[name]
    # One at a time: the second of two identical programs waits for the first.
    with self._lock:
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
        if hit:
          facts["cache"] = "hit"
        else:
          facts["cache"] = "miss" if folder else "off"
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
    """Converts jax's errors about memory to OutOfMemory; keeps other errors.

    Args:
      error: the error.
      name: the program that was being compiled; "" if one was running.
    """
    if not device_memory.is_exhausted(error):
      return error
    update = self._programs.get(device_memory.UPDATE)
    return device_memory.explained(error, name, update, self.limit_bytes)

  def compile(
    self, name: str, fn: Callable[..., Any], *specs: Any, **options: Any
  ) -> Program:
    """Lowers and compiles a program that may be shared."""
    return self.lower(name, fn, *specs, share=True, **options)()

  def facts(self, name: str) -> dict[str, Any]:
    """Costs of a program: trace_secs, compile_secs, sizes and "cache".

    "cache" is "hit" or "miss" in the compilation cache, "off" without one, or
    "shared" with an identical program. Programs that were not compiled ahead of
    time have no facts.
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
  mode = "compiled"
  if eager:
    mode = "eager"
  elif checked:
    mode = "checked"
  options = compiler_options.read(config, mesh)
  return Programs(mode, options, device_memory.limit_bytes(config, mesh))


@contextlib.contextmanager
def of_run(config: settings.Config, mesh: Mesh) -> Iterator[Programs]:
  """The programs of a run, in a `with` block.

  Inside it, jax's errors about memory are explained, and with the mode
  "checked" NaNs are errors.
  """
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
  """A key that is equal for identical programs."""
  # The text has the constants, too.
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

  The functions compile programs, for instance, and must not communicate with
  other processes. Each is called once, by the first `start` or `get` of its
  name. `close` does not wait for a running function.
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
    """Waits for the result of a function."""
    self.start([name])
    return self._running[name].result()

  def check(self) -> None:
    """Raises the error of a function that has failed."""
    for running in self._running.values():
      if running.failed:
        running.result()

  def close(self) -> None:
    self._closed = True
