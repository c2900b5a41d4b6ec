"""Keeps what a program's traces yield, so that a restart does not trace again.

jax's compilation cache saves a restart the compiler, but not the minutes of
Python that trace and lower a large model. An entry here holds the shapes and
counts that main.py gets from traces ("facts"), or a compiled executable.

An entry is used only if everything that its trace depends on is the same:

- the config, except what step/hparams.py leaves out: numbers that are arguments
  of the programs, and keys about files and logs. And what the program computed
  from the data: the specs of a batch (`key`);
- the devices, their mesh and memory, jax's flags, and Python's flags and path;
- the content of each module of the user's and of bigtrain that was loaded when
  the entry was written, and of the config file; size and time of change of each
  file of installed packages, and the versions of all of them (`Sources`);
- the environment variables that jax, XLA and drivers read, and those whose
  names occur in these modules.

An entry is not written if the trace opened any other file. It is neither
written nor used if making the task or the model opened one, or if a module has
changed since the process started. Only `python -m bigtrain...` keeps entries:
in a notebook or a test, functions may have been replaced at run time.

Reading an executable unpickles it. So the folder belongs to its user alone; a
folder that others can write to is not used.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import pickle
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from bigtrain import settings
from bigtrain.cluster import process
from bigtrain.runtime import closures, early, kept_files
from bigtrain.runtime import sources as sources_lib
from bigtrain.runtime.sources import NotKept, Sources
from bigtrain.step import hparams

_JOIN_SECS = 600.0

_num_agreements = itertools.count()


def _spec(tree: Any) -> str:
  """Text that differs for different specs: structure, types, layouts."""
  leaves, structure = jax.tree.flatten(tree)
  texts = [
    f"{x.shape} {x.dtype} {getattr(x, 'weak_type', '')} {x.sharding!r}"
    if isinstance(x, jax.ShapeDtypeStruct)
    else repr(x)
    for x in leaves
  ]
  return f"{structure}\n{texts}"


def _processor() -> str:
  """Model and features of the CPU; programs for CPUs contain its code."""
  with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
    first = file.read(8192).partition("\n\n")[0].splitlines()
    names = ("vendor", "model", "cpu family", "stepping", "flags", "Features")
    return "\n".join(line for line in first if line.startswith(names))
  return platform.processor()


def _traced(config: Mapping[str, Any]) -> dict[str, Any]:
  """The part of a plain config that programs depend on.

  Raises:
    NotKept: the config has a mistake, which the program reports later.
  """
  try:
    return hparams.traced_config(config)
  except (settings.ConfigError, AttributeError, TypeError, ValueError) as e:
    raise NotKept(f"the config has a mistake: {e}") from e


def _key(config: Mapping[str, Any], mesh: Mesh, facts: tuple[Any, ...]) -> str:
  devices = [
    (d.id, d.process_index, d.platform, d.device_kind, getattr(d, "coords", ""))
    for d in mesh.devices.flat
  ]
  client = mesh.local_devices[0].client
  parts = {
    "config": closures.config_text(_traced(config)),
    "facts": [_spec(fact) for fact in facts],
    "mesh": (mesh, mesh.axis_types, devices),
    "backend": (client.platform, client.platform_version),
    "jobs": (jax.process_index(), jax.process_count(), jax.device_count()),
    "flags": sorted(jax.config.values.items()),  # type: ignore[attr-defined]
    "python": (sys.version, sys.flags, sys.path),
    "machine": (platform.machine(), _processor()),
    "packages": sources_lib.installed(),
  }
  text = "\n".join(f"{name}: {part!r}" for name, part in parts.items())
  return hashlib.sha256(kept_files.FORMAT + text.encode()).hexdigest()


class Kept:
  """Facts and executables of one program, from this start or an earlier one.

  Attributes:
    hit: whether all processes of the job have the facts of an earlier start.
  """

  def __init__(self) -> None:
    """Keeps nothing; see `find`."""
    self.hit = False
    self._folder = ""
    self._key = ""
    self._config = ""  # Digest of the config.
    self._all_values = ""  # Another one, "" if the config has no exact text.
    self._model = ""  # Text of config.model with its numbers.
    self._facts: dict[str, Any] = {}
    self._mesh: Any = None
    self._sources: Sources | None = None
    self._opened: list[str] = []

  @property
  def enabled(self) -> bool:
    """Whether this start may write entries."""
    return bool(self._folder)

  def __call__(self, name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Returns `fn(*args)`, or what it returned at an earlier start."""
    if self.hit and name in self._facts:
      return self._facts[name]
    with self.tracing():
      value = self._facts[name] = fn(*args)
    return value

  def shapes(self, fn: Callable[[], Any]) -> Any:
    """Returns jax.eval_shape(fn), or what it was at an earlier start."""
    return self(fn.__name__, jax.eval_shape, fn)

  def tracing(self) -> contextlib.AbstractContextManager[None]:
    """A context for traces, which must not depend on files."""
    if not self.enabled:
      return contextlib.nullcontext()
    return sources_lib.noting_files(self._opened)

  def write_facts(self) -> None:
    """Writes the facts, and what the program chose for each "auto"."""
    if self.enabled and not self.hit:
      content = self._facts, settings.choices()
      process.Background(lambda: self._write("facts", content), "keep facts")

  def write_program(
    self,
    name: str,
    key: str,
    program: jax.stages.Compiled,
    read: bytes | None = None,
  ) -> None:
    """Writes an executable, in the background; does nothing if it cannot.

    Args:
      read: its bytes, if jax has read them from its own cache.
    """
    if not self.enabled:
      return

    def write() -> None:
      with contextlib.suppress(Exception):  # jax has many reasons to refuse.
        unloaded = program._executable._unloaded_executable  # type: ignore[attr-defined]
        if unloaded.host_callbacks or unloaded.keepalive:
          return  # They refer to objects of this process.
        content = _serialized(program, read)
        out_tree: Any = program.out_tree
        numbers = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
        about = numbers, settings.choices()
        self._write(self._entry(name, key), about, content)
        self._note(name, key, len(jax.tree.leaves(program.args_info)))

    process.Background(write, f"keep {name}")

  def read_program(
    self, name: str, key: str, specs: tuple[Any, ...]
  ) -> jax.stages.Compiled | None:
    """Returns an executable of an earlier start if all processes have it.

    Args:
      specs: jax.ShapeDtypeStructs of its arguments.
    """
    if not self.hit:
      return None
    program = None
    about, serialized = self._read(self._entry(name, key))
    if serialized:
      with contextlib.suppress(Exception):  # Another runtime refuses it.
        numbers, choices = about
        in_tree = jax.tree.structure((specs, {}))
        begun = early.take(serialized, self._mesh) if name == "update" else None
        out_tree = jax.tree.structure(numbers)
        program = _loaded(serialized, in_tree, out_tree, self._mesh, begun)
        self._note(name, key, len(jax.tree.leaves(specs)))
        _note_choices(choices)
    return program if _agree(program is not None) else None

  def evaluation_key(
    self, fn: Callable[..., Any], specs: tuple[Any, ...], options: Any
  ) -> str:
    """Digest of all that an evaluation's program depends on besides the facts.

    That is every value of the config, since what is an argument of the update
    may be a constant of an evaluation, and what the evaluator put into `fn`.

    Args:
      specs: jax.ShapeDtypeStructs of the program's arguments.

    Returns:
      "" if the program is not to be kept: `fn` holds what no text describes.
      Or the job has several processes, which would have to agree, and build
      their evaluations at different times.
    """
    if not self.enabled or not self._all_values or jax.process_count() > 1:
      return ""
    try:
      text = f"{self._all_values}\n{closures.text(fn)}"
    except NotKept as e:
      logging.debug("The program of an evaluation is not kept: %s", e)
      return ""
    text += program_key(specs, options)
    return hashlib.sha256(text.encode()).hexdigest()

  def forget(self) -> None:
    """Removes the facts after a failure, so that the next start traces."""
    if self.enabled:
      with contextlib.suppress(OSError):
        os.unlink(self._path("facts"))

  def _note(self, name: str, key: str, num_args: int) -> None:
    """Notes the update for the next start, see early.py."""
    if name == "update":
      entry = self._path(self._entry(name, key))
      early.note(self._folder, self._config, entry, self._mesh, num_args)

  def _find(self, folder: str, key: str, mesh: Mesh, sources: Sources) -> None:
    self._folder, self._key, self._mesh = folder, key, mesh
    self._sources = sources
    content, _ = self._read("facts")
    if content is not None:
      self._facts, choices = content
      _note_choices(choices)

  def _entry(self, name: str, key: str) -> str:
    """Name of a program's entry."""
    # Numbers of the model, such as dropout, are arguments of the update alone.
    return f"{name} {key} {'' if name == 'update' else self._model}"

  def _path(self, name: str) -> str:
    name = hashlib.sha256(f"{self._key} {name}".encode()).hexdigest()
    return os.path.join(self._folder, f"{name}{kept_files.SUFFIX}")

  def _write(self, name: str, content: Any, executable: bytes = b"") -> None:
    try:
      sources = Sources()
      if self._opened:
        raise NotKept(f"its trace opened {self._opened[0]}")
      pickled = io.BytesIO()
      _Pickler(pickled, self._mesh).dump(content)
      head = json.dumps(sources.saved()).encode()
      body = early.joined(head, pickled.getvalue(), executable)
      kept_files.store(self._path(name), body)
    except (OSError, NotKept, pickle.PicklingError, TypeError) as e:
      logging.debug("%s is not kept: %s", name, e)
    except AttributeError as e:  # pickle's error for local classes.
      logging.debug("%s is not kept: %s", name, e)

  def _read(self, name: str) -> tuple[Any, bytes]:
    """Returns (content, executable) of an entry, (None, b"") if none fits."""
    path = self._path(name)
    body = kept_files.load(path)
    nothing = None, b""
    if body is None or self._sources is None:
      return nothing
    try:
      head, pickled, executable = early.split(body)
      if not self._sources.fit(json.loads(head)):
        return nothing
      content = _Unpickler(io.BytesIO(pickled), self._mesh).load()
    except (OSError, NotKept):
      return nothing
    except Exception as e:  # The checksum fits, but not this program.
      logging.debug("%s: %s", path, e)
      return nothing
    with contextlib.suppress(OSError):
      os.utime(path)  # The entries that were not used for longest go first.
    return content, executable


def _note_choices(choices: Mapping[str, Any]) -> None:
  for key, cases in choices.items():
    for case, entry in cases.items():
      settings.note_choice(key, case, entry["choice"], entry["reason"])


def _serialized(program: jax.stages.Compiled, read: bytes | None) -> bytes:
  """Serializes an executable, with these bytes for XLA's part if given."""
  if read is None:
    return serialize_executable.serialize(program)[0]

  class Pickler(serialize_executable._JaxPjrtPickler):  # type: ignore[name-defined]
    def persistent_id(self, value: Any) -> Any:
      pid = super().persistent_id(value)
      return ("exec", read) if pid and pid[0] == "exec" else pid

  # From here on this does what jax's function does, which always uses its own
  # pickler.
  if program._params.const_args:  # type: ignore[attr-defined]
    raise NotImplementedError("arrays in the program")
  executable = program._executable._unloaded_executable  # type: ignore[attr-defined]
  content = executable, jax.tree.leaves(program.args_info), program._no_kwargs
  file = io.BytesIO()
  Pickler(file).dump(content)
  return file.getvalue()


def _loaded(
  serialized: bytes, in_tree: Any, out_tree: Any, mesh: Mesh, begun: Any
) -> jax.stages.Compiled:
  """Loads an executable, unless it is in `begun`."""
  if begun is not None:
    args = jax.tree.unflatten(in_tree, jax.tree.leaves(begun.args_info))
    return jax.stages.Compiled(
      begun._executable, [], args, out_tree, no_kwargs=begun._no_kwargs
    )
  return serialize_executable.deserialize_and_load(
    serialized,
    in_tree,
    out_tree,
    backend=mesh.local_devices[0].client,
    execution_devices=list(mesh.devices.flat),
  )


def find(
  config: Mapping[str, Any], mesh: Mesh, *facts: Any, opened: Sequence[str] = ()
) -> Kept:
  """Returns what earlier starts of a run kept.

  Args:
    *facts: what the program computed from its data, for the key: numbers,
      texts, and trees of jax.ShapeDtypeStructs.
    opened: files from which the task or the model was made. With any of them
      nothing is kept, because their content is not in the key.
  """
  kept = Kept()
  folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
  if _is_command() and folder and "://" not in folder:
    try:
      if opened:
        raise NotKept(f"the task or the model opened {opened[0]}")
      key = _key(config, mesh, facts)
      kept._config = settings.digest(config)
      kept._model = closures.config_text(config.get("model"))
      with contextlib.suppress(NotKept):
        kept._all_values = closures.config_text(config)
      kept._find(kept_files.own_folder(folder), key, mesh, Sources())
    except (OSError, NotKept) as e:
      logging.debug("Nothing is kept: %s", e)
  kept.hit = _agree(bool(kept._facts))
  if not kept.hit:
    kept._facts = {}
    early.forget(kept._folder, kept._config)
  return kept


def _is_command() -> bool:
  """Whether the process is `python -m bigtrain...`."""
  spec = getattr(sys.modules["__main__"], "__spec__", None)
  return spec is not None and spec.name.startswith("bigtrain.")


def _agree(mine: bool) -> bool:
  """Whether all processes of the job say yes."""
  key = f"bigtrain/kept/{next(_num_agreements)}"
  return all(process.share(key, mine, _JOIN_SECS))


def program_key(specs: tuple[Any, ...], options: Mapping[str, Any]) -> str:
  """Digest of a program's arguments and of jax.jit's options."""
  text = f"{_spec(specs)}\n{sorted((k, _spec(v)) for k, v in options.items())}"
  return hashlib.sha256(text.encode()).hexdigest()


class _Pickler(pickle.Pickler):
  """Pickles trees whose shardings have the run's mesh."""

  def __init__(self, file: Any, mesh: Mesh):
    super().__init__(file)
    self._mesh = mesh

  def persistent_id(self, value: Any) -> Any:
    """See pickle."""
    if isinstance(value, Mesh):
      if value != self._mesh:
        raise pickle.PicklingError("another mesh")
      return "mesh"
    return None


class _Unpickler(pickle.Unpickler):
  """Reads what _Pickler wrote."""

  def __init__(self, file: Any, mesh: Mesh):
    super().__init__(file)
    self._mesh = mesh

  def persistent_load(self, pid: Any) -> Any:
    """See pickle."""
    if pid != "mesh":
      raise pickle.UnpicklingError(pid)
    return self._mesh
