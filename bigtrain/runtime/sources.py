"""The code behind a program, with what that code may read besides the config.

A program that was traced by the same modules, under the same environment
variables, without opening other files, is the same program.
"""

import contextlib
import functools
import hashlib
import importlib.machinery
import os
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

# Environment variables that jax, XLA, compilers and drivers read.
_VARIABLES = re.compile(
  r"(JAX|XLA|LIBTPU|TPU|PJRT|MEGASCALE|TF|CUDA|CUDNN|CUBLAS|NCCL|NVIDIA|ROCM|"
  r"HIP|MIOPEN|TRITON|LLVM|OMP|MKL|LD|PYTHON)_?.*"
)
# These differ between the processes and restarts of one job.
_OF_JOB = {
  "JAX_COORDINATOR_ADDRESS",
  "JAX_PROCESS_ID",
  "TPU_WORKER_HOSTNAMES",
  "TPU_WORKER_ID",
}

# Modules whose variables say where in the job a process runs, not what it runs,
# or how it reaches its files. The last one sets some at the first save.
_OF_JOB_MODULES = (
  *("bigtrain.cluster", "bigtrain.command", "bigtrain.reports"),
  "bigtrain.files.objects",
)

_QUOTED = re.compile(rb"""["'](\w+)["']""")


def _process_began() -> float:
  """Time at which this process started, in seconds since the epoch."""
  try:
    with open("/proc/self/stat") as file:
      ticks = float(file.read().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME)
    age -= ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age
  except (OSError, AttributeError, ValueError, IndexError):
    return time.time() - 60.0  # A system without /proc: a cautious guess.


_BEGAN = _process_began()


class NotKept(Exception):
  """What cannot be kept, with the reason."""


def installed() -> list[str]:
  """Names with versions of all installed distributions."""
  distributions: set[str] = set()
  for folder in sys.path:
    with contextlib.suppress(OSError):
      names = os.listdir(folder or ".")
      distributions.update(
        n for n in names if n.endswith((".dist-info", ".egg-info"))
      )
  return sorted(distributions)


_LIBRARIES = tuple(
  os.path.realpath(folder) + os.sep
  for folder in {
    *(sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib")),
    *(sysconfig.get_path(n) for n in ("platlib",)),
  }
)


def _is_library(name: str, file: str) -> bool:
  """Whether a module belongs to Python or to an installed distribution."""
  own = name.partition(".")[0] == "bigtrain"
  return not own and _has_libraries(os.path.dirname(file))


@functools.cache
def _has_libraries(folder: str) -> bool:
  path = os.path.realpath(folder) + os.sep
  return f"{os.sep}site-packages{os.sep}" in path or path.startswith(_LIBRARIES)


class Sources:
  """The files that a program's code comes from.

  Attributes:
    files: {module: [path, digest]} of the user's modules and bigtrain's, and of
      the config file.
    libraries: {path: [bytes, time]} of the files of installed packages.
    variables: digest of the environment variables that they may read.
  """

  def __init__(self) -> None:
    """Reads the files of the modules that are loaded now.

    Raises:
      NotKept: a module has no file, or it changed since the process started.
    """
    self.files: dict[str, list[str]] = {}
    self.libraries: dict[str, list[int]] = {}
    words: set[bytes] = set()
    for name, module in sorted(sys.modules.copy().items()):
      file = getattr(module, "__file__", None)
      if name == "__mp_main__" and module is sys.modules.get("__main__"):
        continue  # The name that multiprocessing gives it, once it is imported.
      if file is None:
        _check_without_file(name, module)
      elif _is_library(name, file):
        with contextlib.suppress(OSError):  # In a zip file, say.
          self.libraries[file] = _stamp(file)
      else:
        self.files[name] = [file, _digest(name, file, words)]
    for word in sys.argv[1:]:
      if match := re.match(r"(?:--config=)?(.*\.py)(:|$)", word):
        file = os.path.expanduser(match[1])
        if os.path.isfile(file):
          self.files[f"config {file}"] = [file, _digest("", file, words)]
    self.variables = _variables(words)

  def saved(self) -> dict[str, Any]:
    """As JSON."""
    return {
      "files": self.files,
      "libraries": self.libraries,
      "variables": self.variables,
    }

  def fit(self, saved: Mapping[str, Any]) -> bool:
    """Whether a program of the `saved` sources is one of these sources.

    Modules that are not loaded yet are looked up where an import would.
    """
    files: dict[str, list[str]] = saved["files"]
    if not self.files.keys() <= files.keys():
      return False
    words: set[bytes] = set()
    for name, (file, digest) in files.items():
      own = self.files[name][0] if name in self.files else _origin(name)
      if own != file or _digest(name, file, words) != digest:
        return False
    for file, stamp in saved["libraries"].items():
      if self.libraries.get(file) != stamp and _stamp(file) != stamp:
        return False
    return _variables(words) == saved["variables"]


def _check_without_file(name: str, module: Any) -> None:
  spec = getattr(module, "__spec__", None)
  top = sys.modules.get(name.partition(".")[0])
  file = getattr(top, "__file__", None)
  is_made_by_library = file and _is_library(name, file)
  is_known = getattr(spec, "origin", None) in ("built-in", "frozen")
  is_folder = getattr(spec, "submodule_search_locations", None) is not None
  if not (
    is_known
    or is_folder
    or is_made_by_library
    or name.startswith("_cyth")
    or name in ("cython_runtime", "__mp_main__")
  ):
    raise NotKept(f"the module {name} has no file")


def _digest(name: str, file: str, words: set[bytes]) -> str:
  """Digest of a module's file; adds the words that it has in quotes."""
  status = os.stat(file)
  if status.st_ctime >= _BEGAN:
    raise NotKept(f"{file} changed after this process started")
  stamp = status.st_ctime_ns, status.st_mtime_ns, status.st_size
  digest, own_words = _read(file, *stamp)
  if not name.startswith(_OF_JOB_MODULES):
    words |= own_words
  return digest


@functools.cache
def _read(file: str, *stamp: int) -> tuple[str, frozenset[bytes]]:
  """Returns (digest, words in quotes) of a file; `stamp` tells its versions."""
  del stamp
  with open(file, "rb") as stream:
    text = stream.read()
  words = frozenset(_QUOTED.findall(text))
  return hashlib.sha256(text).hexdigest(), words


def _stamp(file: str) -> list[int]:
  status = os.stat(file)
  return [status.st_size, status.st_mtime_ns]


def _origin(name: str) -> str | None:
  """File that an import of `name` would load; imports nothing."""
  if name.startswith("config "):
    return None
  path = None
  for i, _ in enumerate(parts := name.split("."), 1):
    spec = importlib.machinery.PathFinder.find_spec(".".join(parts[:i]), path)
    if spec is None:
      return None
    path = spec.submodule_search_locations
  return spec.origin


def _variables(words: set[bytes]) -> str:
  """Digest of the variables that libraries read or that `words` name."""
  used = {
    name: value
    for name, value in os.environ.items()
    if name not in _OF_JOB
    and (_VARIABLES.fullmatch(name) or name.encode() in words)
  }
  return hashlib.sha256(repr(sorted(used.items())).encode()).hexdigest()


_this_thread = threading.local()


@contextlib.contextmanager
def noting_files(opened: list[str]) -> Iterator[None]:
  """Adds to a list the files that Python code of this thread opens to read.

  Left out are code, which `Sources` has, jax's cache, and the kernel's files
  about the machine.
  """
  _install_hook()
  outer = getattr(_this_thread, "opened", None)
  _this_thread.opened = opened
  try:
    yield
  finally:
    _this_thread.opened = outer


@functools.cache
def _install_hook() -> None:
  sys.addaudithook(_on_event)


def _on_event(event: str, args: tuple[Any, ...]) -> None:
  if event != "open":
    return
  opened = getattr(_this_thread, "opened", None)
  if opened is None or not isinstance(args[0], (str, bytes, os.PathLike)):
    return
  if args[2] & os.O_ACCMODE == os.O_WRONLY:
    return  # Python writes the bytecode of a module at its first import.
  path = os.path.abspath(os.fsdecode(args[0]))
  cache = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
  left_out = (*_LIBRARIES, "/proc/", "/sys/", "/dev/", cache or "/proc/")
  if not path.endswith((".py", ".pyc", ".so")) and not path.startswith(
    left_out
  ):
    opened.append(path)
