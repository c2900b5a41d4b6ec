"""The replica x fsdp mesh, and rules for the layout of each array on it.

The batch is split over both axes. Parameters and optimizer state are split
over `fsdp` by rules, pairs of (regular expression over state names, layout):

  ("replicated")            every device holds all of it
  ("fsdp")                  the largest dimension that divides is split
  ("fsdp(min_size=65536)")  the same; smaller arrays are replicated
  ("shard_dim(0)")          this dimension is split, or it is an error

The first rule that matches a name decides. Arrays that do not divide are
reported before anything compiles.
"""

import ast
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bigtrain import trees
from bigtrain.settings import Config, ConfigError, check_kwargs, did_you_mean

AXES = ("replica", "fsdp")
DEFAULT_RULES = ((".*", "fsdp"),)

# Chips of a TPU host: at least this number.
_CHIPS_OF_HOST = 4

# For libtpu without TPUs: it neither searches for them nor locks them, so that
# several processes may compile at once.
_NO_TPU = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# A layout takes (shape, mesh) and returns (spec, complaint or ""). None leaves
# the shape to the next rules.
Layout = Callable[[tuple[int, ...], Mesh], tuple[PartitionSpec, str] | None]


def make_mesh(
  replica: int = 1, fsdp: int = -1, devices: Sequence[Any] | None = None
) -> Mesh:
  """A mesh of all devices with axes ("replica", "fsdp").

  Args:
    replica: number of copies of the sharded state; -1 for the devices that
      `fsdp` leaves.
    fsdp: number of parts of the state; -1 for the devices that `replica`
      leaves.
    devices: all devices of the job unless given.

  Raises:
    ConfigError: the sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  num_devices = len(devices)
  sizes = {"replica": replica, "fsdp": fsdp}
  for axis, size in sizes.items():
    if not isinstance(size, int) or (size < 1 and size != -1):
      raise ConfigError(
        f"config.mesh.{axis}: expected a positive whole number or -1, got "
        f"{size!r}."
      )
  if replica == fsdp == -1:
    raise ConfigError("config.mesh: only one of replica and fsdp can be -1.")
  if replica == -1:
    replica = max(1, num_devices // fsdp)
  if fsdp == -1:
    fsdp = max(1, num_devices // replica)
  if replica * fsdp != num_devices:
    raise ConfigError(
      f"config.mesh: replica={replica} x fsdp={fsdp} = {replica * fsdp}, but "
      f"there are {num_devices} devices."
    )
  if devices[0].platform == "tpu":  # Neighbours are near in the torus.
    from jax.experimental import mesh_utils

    # fsdp=8 in a 4x4x4 slice needs one axis and half of the next.
    grid = mesh_utils.create_device_mesh(
      (replica, fsdp), devices=devices, allow_split_physical_axes=True
    )
  else:
    grid = np.asarray(devices).reshape(replica, fsdp)
  return Mesh(grid, AXES)


def from_config(config: Config) -> Mesh:
  """The mesh that config.mesh describes; see `make_mesh`.

  If config.compile_only names a TPU topology, such as "v5p:2x2x2", the mesh
  consists of those devices and not of this machine's.
  """
  options = config.kwargs("mesh")
  check_kwargs(make_mesh, options, f"{config.path}.mesh", given=("devices",))
  absent = config.get("compile_only", False)
  if isinstance(absent, str):
    options["devices"] = _absent_tpus(absent)
  return make_mesh(**options)


def _absent_tpus(topology: str) -> Sequence[Any]:
  """Devices of a TPU topology, to compile for on a machine without TPUs."""
  from jax.experimental import topologies

  for name, value in _NO_TPU.items():
    os.environ.setdefault(name, value)
  # A topology names whole hosts unless it comes with the size of a host.
  sizes = [int(n) for n in re.findall(r"\d+", topology.partition(":")[2])]
  part = {"chips_per_host_bounds": [*sizes, 1, 1][:3]}
  try:
    return topologies.get_topology_desc(
      platform="tpu",
      topology_name=topology,
      **(part if np.prod(sizes) < _CHIPS_OF_HOST else {}),
    ).devices
  except Exception as e:  # The plugin may raise anything.
    raise ConfigError(
      f"config.compile_only={topology!r}: needs the package libtpu and a "
      f"topology such as 'v5p:2x2x2' ({' '.join(str(e).split())})."
    ) from e


def replicated(mesh: Mesh) -> NamedSharding:
  """Sharding of an array that every device holds in full."""
  return NamedSharding(mesh, PartitionSpec())


def batch(mesh: Mesh) -> NamedSharding:
  """Sharding of an array whose first dimension is split over all devices."""
  return NamedSharding(mesh, PartitionSpec(AXES))


def batch_spec(
  spec: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
  """Adds the batch sharding to each ShapeDtypeStruct."""
  return {
    name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch(mesh))
    for name, x in spec.items()
  }


def one_example(spec: Mapping[str, Any]) -> dict[str, jax.Array]:
  """A batch of one example of zeros, for the initialisation of a model."""
  return {
    name: jnp.zeros((1, *x.shape[1:]), x.dtype) for name, x in spec.items()
  }


def ambient(batch_size: int) -> Any:
  """The mesh of jax.set_mesh if it splits a batch of this size, else None.

  None also inside a shard_map, and for batches that do not divide, such as the
  single example of an initialisation.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not set(AXES) <= set(mesh.axis_names) or mesh.manual_axes:
    return None
  ways = mesh.shape["replica"] * mesh.shape["fsdp"]
  return None if batch_size % ways else mesh


def over_batch(x: jax.Array) -> jax.Array:
  """Constrains dimension 0 to be split, so that XLA does not replicate x."""
  if ambient(x.shape[0]) is None:  # An export may leave the size open.
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(AXES))


def split_batch(fn: Callable[..., Any], *args: Any) -> Any:
  """Calls `fn` with each device's part of the batch, for kernels.

  XLA cannot split a kernel over devices by itself.

  Args:
    fn: function of the arguments that returns arrays; the first dimension of
      all arrays is the batch.
    *args: an array, and arrays or trees of arrays. If the ambient mesh does not
      split the first one's batch, `fn` is called with all of it.
  """
  if ambient(len(args[0])) is None:
    return fn(*args)
  spec = PartitionSpec(AXES)
  return jax.shard_map(
    fn, in_specs=(spec,) * len(args), out_specs=spec, check_vma=False
  )(*args)


def splits(batch_size: int) -> bool:
  """Whether `split_batch` gives each device its own part of a batch.

  True also for a single device, and inside a shard_map.
  """
  mesh = jax.sharding.get_abstract_mesh()
  alone = mesh.empty or mesh.size == 1 or bool(mesh.manual_axes)
  return alone or ambient(batch_size) is not None


def device() -> tuple[str, str]:
  """Platform and kind of the devices that a program is traced for.

  These are the devices of the ambient mesh, which may be absent
  (config.compile_only); without a mesh, those of this machine.

  Returns:
    ("cpu", "gpu" or "tpu"; the `device_kind`).
  """
  of_mesh = jax.sharding.get_abstract_mesh().abstract_device
  if of_mesh is not None:
    return of_mesh.platform, of_mesh.device_kind
  return jax.default_backend(), jax.devices()[0].device_kind


def check_batch(batch_size: int, mesh: Mesh, key: str) -> None:
  """Raises ConfigError unless each device gets the same number of examples."""
  if not isinstance(batch_size, int) or batch_size < 1:
    raise ConfigError(
      f"{key}: expected a positive whole number, got {batch_size!r}."
    )
  if batch_size % mesh.size:
    down = batch_size // mesh.size * mesh.size
    near = [n for n in (down, down + mesh.size) if n]
    raise ConfigError(
      f"{key}={batch_size} does not divide among {mesh.size} devices "
      f"(replica={mesh.shape['replica']} x fsdp={mesh.shape['fsdp']}); "
      f"the nearest sizes that do: {' and '.join(map(str, near))}."
    )


def _replicated() -> Layout:
  return lambda shape, mesh: (PartitionSpec(), "")


def _fsdp(min_size: int = 1024) -> Layout:
  _check_int("min_size", min_size)

  def layout(shape: tuple[int, ...], mesh: Mesh) -> tuple[PartitionSpec, str]:
    ways = mesh.shape["fsdp"]
    if ways == 1 or np.prod(shape, dtype=np.int64) < min_size:
      return PartitionSpec(), ""
    # Later dimensions win ties: the first is often a stack of layers.
    for dim in sorted(range(len(shape)), key=lambda d: (-shape[d], -d)):
      if shape[dim] % ways == 0:
        return PartitionSpec(*[None] * dim, "fsdp"), ""
    return PartitionSpec(), (
      f"no dimension of {shape} divides by fsdp={ways}; it is replicated"
    )

  return layout


def _shard_dim(dim: int) -> Layout:
  _check_int("dim", dim)

  def layout(shape: tuple[int, ...], mesh: Mesh) -> tuple[PartitionSpec, str]:
    ways = mesh.shape["fsdp"]
    at = dim + len(shape) if dim < 0 else dim
    if not 0 <= at < len(shape):
      raise ConfigError(f"shape {shape} has no dimension {dim}")
    if shape[at] % ways:
      raise ConfigError(
        f"dimension {dim} of shape {shape} is {shape[at]}, which does not "
        f"divide by fsdp={ways}"
      )
    return PartitionSpec(*[None] * at, "fsdp"), ""

  return layout


def along(
  spec: PartitionSpec, shape: tuple[int, ...], names: Sequence[Any]
) -> Layout:
  """Returns the layout `spec` for arrays of one shape.

  Args:
    spec: axes of the mesh, or None, for each dimension.
    shape: the shape; other shapes are left to the next rules.
    names: names of the dimensions, for messages.
  """

  def layout(
    given: tuple[int, ...], mesh: Mesh
  ) -> tuple[PartitionSpec, str] | None:
    if given != shape:
      return None
    if len(spec) > len(shape):
      raise ConfigError(f"shape {shape} has fewer dimensions than {names}")
    for dim, axes in enumerate(spec):
      axes = axes if isinstance(axes, tuple) else (axes,) if axes else ()
      ways = int(np.prod([mesh.shape[axis] for axis in axes], dtype=np.int64))
      if shape[dim] % ways:
        raise ConfigError(
          f"dimension {dim} ({names[dim]!r}) of shape {shape} is {shape[dim]}, "
          f"which does not divide by {' x '.join(axes)} = {ways} "
          "(config.logical_axes)"
        )
    return spec, ""

  return layout


def _check_int(name: str, value: Any) -> None:
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(f"{name} is {value!r}, expected a whole number")


_LAYOUTS: dict[str, Callable[..., Layout]] = {
  "replicated": _replicated,
  "fsdp": _fsdp,
  "shard_dim": _shard_dim,
}


def _parse_layout(text: str, key: str) -> Layout:
  try:
    node = ast.parse(text, mode="eval").body
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = ast.unparse(call.func)
    args = [ast.literal_eval(a) for a in call.args]
    kwargs = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
  except (SyntaxError, ValueError, AttributeError, TypeError) as e:
    raise ConfigError(
      f"{key}: cannot read the layout {text!r}; expected for example 'fsdp' or "
      "'shard_dim(0)'."
    ) from e
  if name not in _LAYOUTS:
    hint = did_you_mean(name, _LAYOUTS)
    raise ConfigError(f"{key}: unknown layout {name!r}.{hint}")
  make = _LAYOUTS[name]
  check_kwargs(make, kwargs, f"{key}.{name}", given=_names(make, args))
  try:
    return make(*args, **kwargs)
  except TypeError as e:
    raise ConfigError(f"{key}: {text!r}: {e}.") from e


def _names(fn: Callable[..., Any], args: Sequence[Any]) -> list[str]:
  count = fn.__code__.co_argcount
  return list(fn.__code__.co_varnames[: min(len(args), count)])


def state_shardings(
  shapes: Any,
  mesh: Mesh,
  rules: Sequence[tuple[str, str | Layout]] = DEFAULT_RULES,
  key: str = "config.sharding",
) -> tuple[Any, list[str]]:
  """Computes the NamedSharding of each array of the state.

  Args:
    shapes: tree of ShapeDtypeStructs; rules match the names of its leaves.
    mesh: mesh with the axes of `make_mesh`.
    rules: (regular expression, layout) pairs; the first full match decides. A
      layout is a text of the config or a function.
      Arrays without a match are replicated.
    key: location of the rules in the config, for messages.

  Returns:
    (tree of shardings, notes): one note for each array above the rule's
    minimum size that does not divide and is replicated.

  Raises:
    ConfigError: a rule cannot be read, or arrays cannot be split as their rule
      demands; one line lists all of them.
  """
  parsed = []
  for i, rule in enumerate(rules):
    if not isinstance(rule, list | tuple) or len(rule) != 2:
      raise ConfigError(f"{key}[{i}]: expected (regex, layout), got {rule!r}.")
    try:
      pattern = re.compile(rule[0])
    except re.error as e:
      raise ConfigError(f"{key}[{i}]: bad regex {rule[0]!r}: {e}.") from e
    layout = rule[1]
    if not callable(layout):
      layout = _parse_layout(layout, f"{key}[{i}]")
    parsed.append((pattern, layout))
  notes: list[str] = []
  errors: list[str] = []

  def place(name: str, shape: Any) -> NamedSharding:
    for pattern, layout in parsed:
      if pattern.fullmatch(name):
        try:
          placed = layout(tuple(shape.shape), mesh)
        except ConfigError as e:
          errors.append(f"{name}: {e}")
          return replicated(mesh)
        if placed is None:
          continue
        spec, note = placed
        if note:
          notes.append(f"{name}: {note}")
        return NamedSharding(mesh, spec)
    return replicated(mesh)

  shardings = trees.map_with_names(place, shapes)
  if errors:
    raise ConfigError(f"{key}: {'; '.join(errors)}.")
  return shardings, notes


def state_spec(
  shapes: Any,
  mesh: Mesh,
  rules: Sequence[tuple[str, str | Layout]] = DEFAULT_RULES,
) -> Any:
  """Adds shardings to a tree of ShapeDtypeStructs; see `state_shardings`."""
  shardings, notes = state_shardings(shapes, mesh, rules)
  for note in notes:
    logging.warning("config.sharding: %s", note)
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    shardings,
  )


def bytes_per_device(shapes: Any, shardings: Any) -> int:
  """Number of bytes of the state that one device holds."""
  total = 0
  pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings))
  for shape, sharding in pairs:
    local = sharding.shard_shape(shape.shape)
    total += int(np.prod(local, dtype=np.int64)) * shape.dtype.itemsize
  return total
