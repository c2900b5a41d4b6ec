"""Loads optimizer states of T5X, Mesh TF and big_vision, for config.resume.

Moments have the shapes of parameters, so the model's rules for parameters also
convert them. Adafactor's moments of rows and columns lack dimensions: they are
first repeated to the parameter's shape, then converted, and then reduced to the
dimensions that our optimizer stores.

The moments are in groups, one for each field of the optimizer's state, such as
"opt/0/mu". `load` pairs the groups of the file with ours in order.
"""

import itertools
import re
from typing import Any

import numpy as np

from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.checkpoints.foreign import jax_folders, parameter_files
from bigtrain.config.errors import ConfigError
from bigtrain.files import paths

# The fields have the order of our Adafactor's state.
_T5X = re.compile("state/param_states/(.*)/(?:(v_row)|(v_col)|(v)|(m))")
_KEY = "config.resume"


def find(spec: Any) -> dict[str, Any] | None:
  """The file that config.resume names; None if it is a checkpoint of ours."""
  source = warm_start.read_source(spec, _KEY, ("path", "step"))
  path = paths.absolute(source.path)
  is_foreign = path.endswith(".npz") or (
    not paths.is_remote(path) and jax_folders.find(path)
  )
  return dict(path=path, step=source.step) if is_foreign else None


def load(
  state: Any, source: Any, like: Any, module: Any, optimizer: Any
) -> int:
  """Sets the optimizer's state and the step of a train state.

  Args:
    state: the new train state, whose parameters are loaded already.
    source: result of `find`.
    like: specs of the train state.
    module: the model's module.
    optimizer: config.optimizer.

  Returns: the number of finished steps.
  """
  key = f"{_KEY}: {source['path']}"
  file = parameter_files.open_file(**source, prefix="", key=_KEY)
  arrays = _as_in_big_vision(file.read(list(file.specs)), optimizer, key)
  opt = {name: x for name, x in arrays.items() if name.startswith("opt/")}
  step = _num_updates(opt, file.step, key)
  theirs = {
    name.removeprefix("params/"): x
    for name, x in arrays.items()
    if name.startswith("params/")
  }
  ours = dict(trees.flatten_with_names(like["params"]))
  # Sizes differ, for instance, if positions have another resolution.
  if _num_elements(ours) != _num_elements(theirs):
    raise ConfigError(
      f"{key}: expected {_num_elements(ours)} parameters, found "
      f"{_num_elements(theirs)}."
    )

  # Pairs each group of moments of the optimizer with one of the file.
  specs = trees.flatten_with_names(like["opt"])
  wanted = _grouped({n: x for n, x in specs if not n.endswith("count")}, ours)
  in_file = _grouped(
    {n: x for n, x in opt.items() if x.dtype != np.int32}, theirs
  )
  if len(in_file) != len(wanted):
    raise ConfigError(
      f"{key}: expected {len(wanted)} moments, {', '.join(wanted)} of "
      f"config.optimizer; found {len(in_file)}, {', '.join(in_file)}."
    )
  pairs = zip(wanted, sorted(in_file, key=_field_numbers))
  given = {group: in_file[their_group] for group, their_group in pairs}

  # Repeats rows and columns, and converts.
  for group in wanted:
    if not group.endswith("v_row"):
      continue
    rows, columns = given[group], given[_column_group(group)]
    for name, row in rows.items():
      shape = tuple(theirs[name].shape)
      rows[name], columns[name] = _repeated(row, columns[name], shape)
  converted = {
    group: _converted(moments, theirs, ours, module)
    for group, moments in given.items()
  }

  moments = {}
  for group in wanted:
    for name, spec in wanted[group].items():
      shape = tuple(spec.shape)
      value = _with_shape(converted, group, name, shape)
      if value.shape != shape or np.isnan(value).any():
        raise ConfigError(
          f"{key}: it has no {group}/{name} of shape {shape}; expected a config"
          " that trains the same parameters, with the same optimizer."
        )
      moments[f"{group}/{name}"] = value

  def place(name: str, spec: Any) -> Any:
    # Everything that is not a moment is a count of updates.
    return warm_start.place(moments.get(name, step), spec)

  state["opt"] = trees.map_with_names(place, like["opt"])
  state["step"] = place("", like["step"])
  return int(step)


def _as_in_big_vision(arrays: Any, optimizer: Any, key: str) -> dict[str, Any]:
  """Gives the arrays of a T5X checkpoint the names that big_vision would.

  big_vision names moments by the number of their field in optax's state, such
  as "opt/1/Dense_0/kernel", and parameters "params/Dense_0/kernel".
  """
  result = {}
  for name, x in arrays.items():
    match = _T5X.fullmatch(name)
    if match is None:
      result[re.sub("^target/", "params/", name)] = x
      continue
    parameter, is_momentum = match[1], match[5] is not None
    if is_momentum and x.shape == (1,):  # T5X stores it also if it is not used.
      continue
    result[f"opt/{match.lastindex}/{parameter}"] = x
    if is_momentum and not optimizer.get("lr_inside"):
      raise ConfigError(
        f"{key}: expected config.optimizer.lr_inside=True, as T5X averages "
        "updates after the learning rate."
      )
  return result


def _num_updates(opt: dict[str, Any], step: int, key: str) -> np.int32:
  """The number of updates, which the file may store in several places."""
  counts = {int(x[()]) for x in opt.values() if x.dtype == np.int32}
  steps = counts | {step}
  if len(steps - {0}) != 1:
    raise ConfigError(f"{key}: expected one number of updates, found {steps}.")
  return np.int32(max(steps))


def _num_elements(arrays: dict[str, Any]) -> int:
  return sum(int(np.prod(x.shape)) for x in arrays.values())


def _field_numbers(group: str) -> list[str]:
  """Sorts groups by the numbers in their names, so that 10 follows 9."""
  return [part.zfill(4) for part in group.split("/")]


def _column_group(row_group: str) -> str:
  return row_group.removesuffix("row") + "col"


def _grouped(arrays: Any, params: Any) -> dict[str, dict[str, Any]]:
  """{group, such as "opt/0/mu": {name of a parameter: its moment}}."""
  groups: dict[str, dict[str, Any]] = {}
  for name, x in arrays.items():
    group, parameter = _split(name, params)
    groups.setdefault(group, {})[parameter] = x
  return groups


def _split(name: str, params: Any) -> tuple[str, str]:
  """Splits the name of a moment into its group and its parameter.

  Anything else is a group by itself.
  """
  parts = name.split("/")
  for i in range(1, len(parts)):
    parameter = "/".join(parts[i:])
    if parameter in params:
      return "/".join(parts[:i]), parameter
  return name, ""


def _converted(moments: Any, theirs: Any, ours: Any, module: Any) -> Any:
  """Converts moments as the model converts parameters.

  Parameters without a moment of their shape get NaN.
  """
  flat = {}
  for name, x in theirs.items():
    if name in moments and moments[name].shape == tuple(x.shape):
      flat[name] = np.asarray(moments[name][...], np.float32)
    else:
      flat[name] = np.broadcast_to(np.float32("nan"), x.shape)
  if flat.keys() != ours.keys():
    flat = module.from_published(flat, ours)
  result = {}
  for name, spec in ours.items():
    # The conversion may return stacks of arrays, which need a slice for each
    # dimension.
    whole = (slice(None),) * len(spec.shape)
    result[name] = np.asarray(flat[name][whole])
  return result


def _with_shape(
  converted: Any, group: str, name: str, shape: tuple[int, ...]
) -> np.ndarray:
  """A converted moment in the shape that the optimizer stores."""
  value = converted[group][name]
  if shape == (1,) != value.shape:  # A field that this parameter does not use.
    return np.zeros(1)
  if not group.endswith(("v_row", "v_col")):
    return value
  stem = group[: -len("row")]
  pair = [converted[f"{stem}{end}"][name] for end in ("row", "col")]
  return _reduced(pair, shape, last=group.endswith("row"))


def _repeated(row: Any, column: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
  """Repeats the moments of rows and of columns to a parameter's shape.

  Returns them unchanged if the parameter is not factored.
  """
  if len(shape) < 2:
    return row, column
  # The two largest dimensions, as in optax and T5X, in either order.
  second, largest = (int(dim) for dim in np.argsort(shape)[-2:])
  for row_dim, column_dim in ((second, largest), (largest, second)):
    if row.shape == tuple(
      np.delete(shape, column_dim)
    ) and column.shape == tuple(np.delete(shape, row_dim)):
      row = np.expand_dims(row[...], column_dim)
      column = np.expand_dims(column[...], row_dim)
      return np.broadcast_to(row, shape), np.broadcast_to(column, shape)
  return row, column


def _reduced(pair: Any, shape: tuple[int, ...], *, last: bool) -> np.ndarray:
  """Removes repeated dimensions from moments of rows and columns.

  Args:
    pair: the moments of rows and of columns, in the parameter's shape.
    shape: the shape to reach. Either of the pair may have it once its repeated
      dimensions are removed, because our rows may be their columns.
    last: for a square parameter, where both have it: whether to take the moment
      that loses the last dimensions.
  """
  candidates: dict[tuple[int, ...], np.ndarray] = {}  # By the lost dimensions.
  for x in pair:
    repeated = [dim for dim in range(x.ndim) if (x == x.take([0], dim)).all()]
    for dims in itertools.combinations(repeated, x.ndim - len(shape)):
      if tuple(np.delete(x.shape, dims)) == shape:
        candidates[dims] = x.max(axis=dims)
  if not candidates:
    return pair[0]
  return candidates[max(candidates) if last else min(candidates)]
