"""Optimizer states of T5X, Mesh TF and big_vision, for config.resume.

Moments are converted as the parameters are. Those of Adafactor's rows and
columns are first repeated to the parameter's shape; ours are the same numbers
without the dimensions along which they repeat.
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

# In the order of our Adafactor's state.
_T5X = re.compile("state/param_states/(.*)/(?:(v_row)|(v_col)|(v)|(m))")
_KEY = "config.resume"


def find(spec: Any) -> dict[str, Any] | None:
  """Where the state lies; None if `spec` is of a checkpoint of ours."""
  source = warm_start.read_source(spec, _KEY, ("path", "step"))
  path = paths.absolute(source.path)
  other = path.endswith(".npz") or (
    not paths.is_remote(path) and jax_folders.find(path)
  )
  return dict(path=path, step=source.step) if other else None


def load(
  state: Any, source: Any, like: Any, module: Any, optimizer: Any
) -> int:
  """Sets the optimizer's state and the step of a train state."""
  key = f"{_KEY}: {source['path']}"
  file = parameter_files.open_file(**source, prefix="", key=_KEY)
  arrays = _as_in_big_vision(file.read(list(file.specs)), optimizer, key)
  opt = {name: x for name, x in arrays.items() if name.startswith("opt/")}
  counts = [x for x in opt.values() if x.dtype == np.int32]
  steps = {int(x[()]) for x in counts} | {file.step}
  if len(steps - {0}) != 1:
    raise ConfigError(f"{key}: expected one number of updates, found {steps}.")
  step = np.int32(max(steps))
  theirs = {
    name.removeprefix("params/"): x
    for name, x in arrays.items()
    if name.startswith("params/")
  }
  ours = dict(trees.flatten_with_names(like["params"]))
  size = lambda tree: sum(int(np.prod(x.shape)) for x in tree.values())
  if size(ours) != size(theirs):  # Perhaps positions of another resolution.
    raise ConfigError(
      f"{key}: expected {size(ours)} parameters, found {size(theirs)}."
    )
  specs = trees.flatten_with_names(like["opt"])
  wanted = _grouped({n: x for n, x in specs if not n.endswith("count")}, ours)
  # big_vision names them by the index of each field in optax's states.
  found = _grouped(
    {n: x for n, x in opt.items() if x.dtype != np.int32}, theirs
  )
  numbers = lambda group: [part.zfill(4) for part in group.split("/")]
  if len(found) != len(wanted):
    raise ConfigError(
      f"{key}: expected {len(wanted)} moments, {', '.join(wanted)} of "
      f"config.optimizer; found {len(found)}, {', '.join(found)}."
    )
  given = {w: found[f] for w, f in zip(wanted, sorted(found, key=numbers))}
  for group in filter(lambda group: group.endswith("v_row"), wanted):
    rows, columns = given[group], given[f"{group[:-3]}col"]
    for name, row in rows.items():
      shape = tuple(theirs[name].shape)
      rows[name], columns[name] = _repeated(row, columns[name], shape)
  whole = {g: _converted(x, theirs, ours, module) for g, x in given.items()}
  moments = {}
  for group in wanted:
    for name, spec in wanted[group].items():
      shape, value = tuple(spec.shape), whole[group][name]
      if shape == (1,) != value.shape:  # Unused.
        value = np.zeros(1)
      elif group.endswith(("v_row", "v_col")):
        pair = [whole[f"{group[:-3]}{end}"][name] for end in ("row", "col")]
        value = _reduced(pair, shape, later=group.endswith("row"))
      if value.shape != shape or np.isnan(value).any():
        raise ConfigError(
          f"{key}: it has no {group}/{name} of shape {shape}; expected a config"
          " that trains the same parameters, with the same optimizer."
        )
      moments[f"{group}/{name}"] = value
  place = lambda n, spec: warm_start.place(moments.get(n, step), spec)
  state["opt"] = trees.map_with_names(place, like["opt"])
  state["step"] = place("", like["step"])
  return int(step)


def _as_in_big_vision(arrays: Any, optimizer: Any, key: str) -> dict[str, Any]:
  result = {}
  for name, x in arrays.items():
    if not (match := _T5X.fullmatch(name)):
      result[re.sub("^target/", "params/", name)] = x
    elif not match[5] or x.shape != (1,):  # Without momentum.
      result[f"opt/{match.lastindex}/{match[1]}"] = x
      if match[5] and not optimizer.get("lr_inside"):
        raise ConfigError(
          f"{key}: expected config.optimizer.lr_inside=True, as T5X averages "
          "updates after the learning rate."
        )
  return result


def _grouped(arrays: Any, params: Any) -> dict[str, dict[str, Any]]:
  """{tree of moments: {name of a parameter: its moment}}."""
  groups: dict[str, dict[str, Any]] = {}
  for name, x in arrays.items():
    start = 0
    while (start := name.find("/", start) + 1) and name[start:] not in params:
      pass
    groups.setdefault(name[: start - 1], {})[name[start:]] = x
  return groups


def _converted(moments: Any, theirs: Any, ours: Any, module: Any) -> Any:
  """Moments in the parameters' shapes; NaN where there are none."""
  flat = {
    name: np.asarray(moments[name][...], np.float32)
    if name in moments and moments[name].shape == tuple(x.shape)
    else np.broadcast_to(np.float32("nan"), x.shape)
    for name, x in theirs.items()
  }
  if flat.keys() != ours.keys():
    flat = module.from_published(flat, ours)
  # Stacks of arrays take a slice for each dimension.
  whole = {name: (slice(None),) * len(x.shape) for name, x in ours.items()}
  return {name: np.asarray(flat[name][index]) for name, index in whole.items()}


def _repeated(row: Any, column: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
  """Both with all dimensions; unchanged where there are no rows and columns."""
  without = lambda d: tuple(np.delete(shape, d))
  pair = [int(d) for d in np.argsort(shape)[-2:]]  # As in optax and T5X.
  for r, c in (pair, pair[::-1]) if len(shape) > 1 else ():
    if (row.shape, column.shape) == (without(c), without(r)):
      row, column = np.expand_dims(row[...], c), np.expand_dims(column[...], r)
      return np.broadcast_to(row, shape), np.broadcast_to(column, shape)
  return row, column


def _reduced(pair: Any, shape: tuple[int, ...], *, later: bool) -> np.ndarray:
  """The one of a pair that has `shape` without its repeated dimensions."""
  found: dict[Any, Any] = {}  # Two entries if the shape is square.
  for x in pair:
    same = [d for d in range(x.ndim) if (x == x.take([0], d)).all()]
    for dims in itertools.combinations(same, x.ndim - len(shape)):
      if tuple(np.delete(x.shape, dims)) == shape:
        found[dims] = x.max(axis=dims)
  return found[max(found) if later else min(found)] if found else pair[0]
