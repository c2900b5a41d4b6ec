"""Loads parameters from elsewhere: config.model_init, and config.resume.

`load_params` opens the file (foreign/), renames its arrays, lets the model
convert them if they do not fit, compares their names and shapes with the
model's, refuses differences that the config does not allow, and puts the arrays
on the devices. It logs a table of all names in the file and in the model.

Nothing is padded, cut or left out unless the config allows it by name. A
model's own rules, such as the resampling of position embeddings, are in its
`from_published`. Mutable collections, such as the running means of batch
normalisation, have names like "batch_stats/bn1/mean".

With `parts`, each part of a model, such as the tower and the decoder of
models.vision_language, comes from its own source.
"""

import collections
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain.arrays import trees
from bigtrain.checkpoints import folders, restore, upcycling
from bigtrain.checkpoints.added_rows import AddedRows, WithAddedRows
from bigtrain.checkpoints.foreign import parameter_files, safetensors_files
from bigtrain.checkpoints.manifest import Manifest
from bigtrain.config import errors
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_keys,
  check_kwargs,
)
from bigtrain.files import paths
from bigtrain.models.published.conversions import Remark, describe
from bigtrain.optim import patterns

# A model's `from_published`: (arrays of a file by name, specs of the model by
# name) -> arrays with the model's names and, as far as possible, shapes. A
# Remark in place of an array explains what happened to it.
Convert = Callable[..., dict[str, Any]]

# Options that list regexes of arrays.
ALLOWED = ("allow_missing", "allow_reshaped", "allow_unused")
# Statuses that are errors unless the config allows them.
_REFUSED = ("missing", "reshaped", "unused", "retyped")


class Line(NamedTuple):
  """A line of the table: an array and what became of it.

  The status is one of:
    loaded, cast        taken from the file; cast to the model's dtype
    extended            taken from the file, with rows for new tokens
    upcycled            an MLP of the file, copied to experts
    new                 a router of such experts, which begins at random
    converted           made by the model's `from_published`
    merged              equal to another array, with which it is merged
    ignored             a constant that the model does not need
    dropped             left out by a rename or by the model's rules
    missing, unused     only in the model; only in the file
    reshaped, retyped   of another shape; of another kind of dtype
  """

  status: str
  name: str
  what: str  # Shapes and dtypes.


@dataclasses.dataclass(frozen=True)
class Source:
  """Options of config.model_init, which docs/config.md describes."""

  path: str
  step: int | None = None
  prefix: str | None = None
  rename: Sequence[tuple[str, str | None]] = ()
  allow_missing: Sequence[str] = ()
  allow_reshaped: Sequence[str] = ()
  allow_unused: Sequence[str] = ()
  allow_changed: Sequence[str] = ()
  allow_unread: Sequence[str] = ()
  convert: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # True, or the fields of Upcycling: the file is of a dense model.
  upcycle: bool | Mapping[str, Any] | None = None
  # The fields of AddedRows, written by objective/new_rows.py.
  new_rows: Mapping[str, Any] | None = None


class Derived(NamedTuple):
  """An array that is computed from another one in the file, as it is read."""

  source: str  # Name of the other array.
  make: Callable[[Any], Any]


def load_params(
  spec: str | Mapping[str, Any],
  like: Any,
  *,
  init: Callable[[], Any] | None = None,
  convert: Convert | None = None,
  collections: Sequence[str] = (),
  key: str = "config.model_init",
) -> tuple[Any, list[Line]]:
  """Loads parameters from a file or a checkpoint onto the devices.

  Args:
    spec: config.model_init.
    like: specs of the model's parameters, with shardings.
    init: makes fresh parameters; called only if the file lacks some.
    convert: the model's `from_published`. It is applied after renaming, unless
      all names and shapes fit already.
    collections: names of the model's mutable collections.
    key: name of `spec` in messages.

  Returns: the parameters, and the lines of the table.
  """
  source = read_source(spec, key)
  specs_in_model = dict(trees.flatten_with_names(like))
  # The file may be of a smaller model: without new rows, or with MLPs in place
  # of experts. `specs` has the arrays that it should have.
  changes = _changes_of(source, specs_in_model, key)
  specs = changes.in_file

  # The file's arrays, by the names that `rename` gives them.
  file = parameter_files.open_file(
    source.path,
    step=source.step,
    prefix=source.prefix,
    key=key,
    collections=collections,
  )
  names, lines = _rename(file, source, key)  # {new name: name in the file}.
  available: dict[str, Any] = {
    new: file.specs[old] for new, old in names.items()
  }

  # If they do not fit as they are, the model converts them.
  if source.convert:
    fn = convert or (lambda flat, like: like)
    check_kwargs(fn, source.convert, f"{key}.convert", given=("flat", "like"))
  values: dict[str, Any] = {}
  converted: set[str] = set()
  if convert is not None and not _fits(available, specs):
    values, converted = _converted(file, names, convert, specs, source.convert)
    available = values

  # The table, and the differences that the config does not allow.
  lines += _compare(available, specs, converted)
  lines, fresh, refused = _judge(lines, source)
  absent = fresh | {line.name for line in refused}
  lines, derived = changes.derive(lines, absent)
  logging.info("%s: %s\n%s", key, source.path, table(lines))
  if refused:
    raise _refusal(refused, source, key)
  if fresh:
    _warn_of_fresh(fresh, len(specs), key)

  # The values: from the file or, for arrays that it lacks, fresh ones.
  fresh = changes.fresh(fresh)
  wanted = {
    name: spec for name, spec in specs_in_model.items() if name not in fresh
  }
  loaded = _loaded(file, names, values, wanted, derived)
  if fresh:
    if init is None:
      raise ConfigError(f"{key}: no fresh values for {sorted(fresh)}.")
    initial = dict(trees.flatten_with_names(init()))
    loaded |= {name: initial[name] for name in fresh}
  return trees.map_with_names(lambda name, _: loaded[name], like), lines


def _fits(available: Mapping[str, Any], specs: Mapping[str, Any]) -> bool:
  """Whether a file has exactly the model's names and shapes."""
  return available.keys() == specs.keys() and all(
    available[name].shape == tuple(specs[name].shape) for name in available
  )


def _converted(
  file: parameter_files.File,
  names: Mapping[str, str],
  convert: Convert,
  specs: Mapping[str, Any],
  options: Mapping[str, Any],
) -> tuple[dict[str, Any], set[str]]:
  """Returns the results of `convert`, and the names that it has changed."""
  arrays = file.read(list(names.values()))
  before = {new: arrays[old][...] for new, old in names.items()}
  values = dict(convert(dict(before), specs, **options))
  changed = {name for name in values if values[name] is not before.get(name)}
  return values, changed


class _Changes(NamedTuple):
  """Specs of the model, and of the arrays that a smaller model's file has."""

  model: Mapping[str, Any]  # The model's specs by name.
  dense: Mapping[str, Any]  # The same, with MLPs in place of upcycled experts.
  in_file: Mapping[str, Any]  # The same as `dense`, without new rows.
  rows: AddedRows | None
  how: upcycling.Upcycling | None

  def derive(
    self, lines: Sequence[Line], absent: Collection[str]
  ) -> tuple[list[Line], dict[str, Derived]]:
    """The arrays that are computed from others: their lines and functions.

    Args:
      lines: one for each array `in_file`.
      absent: names of arrays that the file does not have.
    """
    lines = [*lines]
    derived = {}
    rows = self.rows
    how = self.how
    if rows:
      extended = {
        n for n, spec in self.in_file.items() if spec is not self.dense[n]
      }
      extended -= {*absent}
      lines = _with_extended(lines, extended, self.dense, rows.describe())
      for name in extended:
        make = functools.partial(WithAddedRows, name=name, rows=rows)
        derived[name] = Derived(name, make)
    if how:
      experts = _experts(how, self.model, absent)
      lines = _with_experts(lines, how, experts, self.model)
      derived |= experts
    return lines, derived

  def fresh(self, names: Collection[str]) -> set[str]:
    """The model's arrays that begin at random; `names` are the file's."""
    result = {*names} & {*self.model}
    if self.how:
      experts = self.how.experts(self.model)
      result |= {name for name, mlp in experts.items() if mlp in names}
      result |= {*self.how.new(self.model)}
    return result


def _changes_of(source: Source, specs: Mapping[str, Any], key: str) -> _Changes:
  rows = AddedRows(**source.new_rows) if source.new_rows else None
  how = upcycling.read(source.upcycle, key)
  dense = how.in_file(specs, key) if how else specs
  in_file = rows.in_file(dense) if rows else dense
  return _Changes(specs, dense, in_file, rows, how)


def _loaded(
  file: parameter_files.File,
  names: Mapping[str, str],
  values: Mapping[str, Any],
  wanted: Mapping[str, Any],
  derived: Mapping[str, Derived],
) -> dict[str, Any]:
  """Puts the arrays `wanted` {name: spec} on the devices.

  Args:
    names: {name: name in the file}.
    values: converted arrays by name; {} to use the arrays of the file.
    derived: arrays that are computed from others, by name.
  """
  plain = {n: spec for n, spec in wanted.items() if n not in derived}
  loaded = {}
  if file.checkpoint and not values:
    # A checkpoint of ours: each process reads what its devices need.
    directory, manifest, places = file.checkpoint
    sources = {name: places[names[name]] for name in plain}
    loaded = restore.load(directory, manifest, sources, plain)
    plain = {}
  needed = {name: name for name in plain}
  needed |= {name: how.source for name, how in derived.items()}
  if not values:
    arrays = file.read([names[name] for name in needed.values()])
    values = {name: arrays[names[name]] for name in needed.values()}
  for name, source in needed.items():
    value = values[source]
    if name in derived:
      value = derived[name].make(value)
    loaded[name] = place(value, wanted[name])
  return loaded


def _experts(
  how: upcycling.Upcycling, specs: Mapping[str, Any], absent: Collection[str]
) -> dict[str, Derived]:
  """Experts by name, computed from the MLPs in the file."""
  result = {}
  for name, mlp in how.experts(specs).items():
    if mlp not in absent:
      make = functools.partial(
        upcycling.ExpertsOfMlp,
        name=name,
        num_experts=upcycling.num_experts(name, specs[name].shape),
        how=how,
      )
      result[name] = Derived(mlp, make)
  return result


def load_variables(
  spec: str | Mapping[str, Any],
  like: Mapping[str, Any],
  *,
  init: Callable[[], Mapping[str, Any]],
  module: Any,
  key: str = "config.model_init",
) -> dict[str, Any]:
  """`load_params` for all variables of a model.

  Args:
    spec: config.model_init.
    like: specs: {"params": parameters, collection: variables}.
    init: makes fresh variables.
    module: the model's module.
    key: name of `spec` in messages.
  """

  if has_parts(spec):
    return _load_parts(spec, like, init=init, module=module, key=key)

  def joined(variables: Mapping[str, Any]) -> dict[str, Any]:
    collections = {n: x for n, x in variables.items() if n != "params"}
    return {**variables["params"], **collections}

  mutable = [name for name in like if name != "params"]
  params, _ = load_params(
    spec,
    joined(like),
    init=lambda: joined(init()),
    convert=getattr(module, "from_published", None),
    collections=mutable,
    key=key,
  )
  variables = {name: params.pop(name) for name in mutable}
  return {"params": params, **variables}


def _warn_of_fresh(names: Collection[str], total: int, key: str) -> None:
  logging.warning(
    f"{key}: {len(names)} of {total} arrays keep their fresh initialisation: "
    f"{', '.join(sorted(names))}"
  )


def has_parts(spec: Any) -> TypeGuard[Mapping[str, Any]]:
  """Whether config.model_init has a source for each part of the model."""
  return isinstance(spec, Mapping) and spec.get("parts") is not None


def _load_parts(
  spec: Mapping[str, Any],
  like: Mapping[str, Any],
  *,
  init: Callable[[], Mapping[str, Any]],
  module: Any,
  key: str,
) -> dict[str, Any]:
  """Like `load_variables`, with a separate source for each part of the model.

  Arrays outside the parts keep their initial values, which `allow_missing` must
  permit.
  """
  sources = _read_parts(spec, module, key)
  initial = functools.cache(init)
  result = {name: dict(tree) for name, tree in like.items()}
  for part, source in sources.items():
    part_module, _ = module.PARTS[part]
    loaded = load_variables(
      source,
      _of_part(like, part),
      init=functools.partial(_fresh, initial, part),
      module=part_module,
      key=f"{key}.parts.{part}",
    )
    for name, tree in loaded.items():
      result[name][part] = tree
  fresh = {name for name in like["params"] if name not in sources}
  names = [
    name
    for name, _ in trees.flatten_with_names(like["params"])
    if name.split("/")[0] in fresh
  ]
  allowed = spec.get("allow_missing", ())
  lines = [
    Line("missing", name, "of no part")
    for name in names
    if not any(re.fullmatch(regex, name) for regex in allowed)
  ]
  if lines:
    raise ConfigError(
      f"{table(lines)}\n{key}.parts: no source of {len(lines)} array(s), "
      f"listed above; {key}.allow_missing lists those that keep their fresh "
      "initialisation."
    )
  if fresh:
    _warn_of_fresh(names, len(trees.names(like["params"])), key)
  for name in fresh:
    result["params"][name] = initial()["params"][name]
  return result


def _of_part(variables: Mapping[str, Any], part: str) -> dict[str, Any]:
  return {n: tree[part] for n, tree in variables.items() if part in tree}


def _fresh(init: Callable[[], Mapping[str, Any]], part: str) -> dict[str, Any]:
  return _of_part(init(), part)


def _read_parts(
  spec: Mapping[str, Any], module: Any, key: str
) -> Mapping[str, Any]:
  """Checks `parts`; returns {part: its source}."""
  known = getattr(module, "PARTS", {})
  check_keys(key, spec, ("parts", "allow_missing"))
  _check_regexes(f"{key}.allow_missing", spec.get("allow_missing", ()))
  if not known or not isinstance(spec["parts"], Mapping):
    raise ConfigError(
      f"{key}.parts: expected a model of several parts, and a dict such as "
      f"dict({'=PATH, '.join(known) or 'img'}=PATH)."
    )
  check_keys(f"{key}.parts", spec["parts"], known)
  return spec["parts"]


def load_state(
  spec: str | Mapping[str, Any], like: Any
) -> tuple[Any, Manifest]:
  """Loads the whole state of config.resume, a checkpoint of ours."""
  key = "config.resume"
  source = read_source(spec, key, ("path", "step"))
  return restore.restore(
    folders.find_named(source.path, source.step, key), like
  )


def table(lines: Sequence[Line]) -> str:
  """The lines sorted by status, and the number of lines of each status."""
  counts = collections.Counter(line.status for line in lines)
  order = list(counts)
  width = max([len(line.name) for line in lines], default=0)
  texts = [
    f"  {line.status:<10}{line.name:<{width}}  {line.what}"
    for line in sorted(lines, key=lambda line: order.index(line.status))
  ]
  total = ", ".join(f"{n} {status}" for status, n in counts.items())
  return "\n".join([*texts, f"  {total or 'nothing'}"])


def read_source(
  spec: Any, key: str, allowed: Sequence[str] | None = None
) -> Source:
  """Checks config.model_init; config.resume has only the keys `allowed`."""
  spec = {"path": spec} if isinstance(spec, str) else spec
  if not isinstance(spec, Mapping):
    raise ConfigError(f"{key}: expected a path or a dict, got {spec!r}.")
  check_kwargs(Source, spec, key)
  check_keys(key, spec, spec if allowed is None else allowed)
  source = Source(**spec)
  if not isinstance(source.path, str) or not source.path:
    raise ConfigError(f"{key}.path: expected a path, got {source.path!r}.")
  for pair in source.rename:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
      raise ConfigError(
        f"{key}.rename: expected a list of (regex, replacement or None), got "
        f"{pair!r} in it."
      )
  for field in (*ALLOWED, "allow_changed", "allow_unread"):
    _check_regexes(f"{key}.{field}", getattr(source, field))
  return source


def _check_regexes(key: str, regexes: Any) -> None:
  if isinstance(regexes, str):
    raise ConfigError(f"{key}: expected a list of regexes, got {regexes!r}.")
  for regex in regexes:
    errors.regex(key, regex)


def check_published(
  spec: str | Mapping[str, Any],
  module: Any,
  model: Any,
  *,
  path: str = "config",
) -> None:
  """Compares the config.json of published weights with the model.

  It has what the shapes of arrays cannot show: the number of heads, the base of
  rotary embeddings, the activation. Fields that follow from shapes may differ
  if the config has an `allow_...` list of arrays, which `load_params` applies.

  Args:
    spec: config.model_init.
    module: the model's module.
    model: the model.
    path: the config's name in messages.
  """
  key = f"{path}.model_init"
  if has_parts(spec):
    for part, part_spec in _read_parts(spec, module, key).items():
      part_module, model_of = module.PARTS[part]
      _check_published(
        part_spec,
        part_module,
        getattr(model, model_of)(),
        f"{key}.parts.{part}",
        f"{path}.model",
      )
    return
  _check_published(spec, module, model, key, f"{path}.model")


def _check_published(
  spec: Any, module: Any, model: Any, key: str, fields_key: str
) -> None:
  source = read_source(spec, key)
  how = upcycling.read(source.upcycle, key)
  if how and getattr(model, "moe", None) is not None:
    logging.info("%s.upcycle: %s", key, upcycling.describe_start(model, how))
  file = paths.absolute(source.path)
  published = safetensors_files.is_folder(file) or file.endswith(".safetensors")
  if not published or not hasattr(module, "published_fields"):
    return
  arrays = parameter_files.open_file(
    source.path, step=source.step, prefix=source.prefix, key=key
  ).specs
  fields = module.published_fields(file, source.allow_unread)
  if fields is None:
    if not any("/" in name for name in arrays):  # Only our names have slashes.
      logging.warning(
        f"{key}: there is no config.json beside {file}, so its number of heads,"
        " its rotary embeddings and the like cannot be compared with "
        f"{fields_key}."
      )
    return
  for name in source.allow_changed:
    problem = f"{fields.path} does not determine"
    check_choice(f"{key}.allow_changed", name, fields, problem)
  if how:
    model = upcycling.dense(model)
  messages = fields.contradictions(model, arrays, fields_key)
  may_differ = any(getattr(source, field) for field in ALLOWED)
  if source.new_rows:
    messages.pop("vocab_size", None)
  wrong = [
    message
    for name, message in messages.items()
    if name not in source.allow_changed
    and not (fields[name].in_shapes and may_differ)
  ]
  if wrong:
    raise ConfigError(
      f"{key}: {fields.path} contradicts {fields_key}: {'; '.join(wrong)}. "
      f"{fields_key} = dict(published=PATH) takes the file's values; "
      f"{key}.allow_changed lists fields that may differ."
    )


def _rename(
  file: parameter_files.File, source: Source, key: str
) -> tuple[dict[str, str], list[Line]]:
  """Returns {new name: name in the file}, and lines of the dropped arrays."""
  names: dict[str, str] = {}
  lines = []
  regexes = [regex for regex, _ in source.rename]
  matches = patterns.first_match(regexes, list(file.specs), f"{key}.rename")
  for old, spec in file.specs.items():
    new: str | None = old
    if old in matches:
      regex, replacement = source.rename[matches[old]]
      new = _replaced(old, regex, replacement, key)
    if new is None:
      lines.append(Line("dropped", old, describe(spec)))
    elif new in names:
      raise ConfigError(
        f"{key}.rename: both {names[new]!r} and {old!r} become {new!r}."
      )
    else:
      names[new] = old
  return names, lines


def _replaced(
  name: str, regex: str, replacement: str | None, key: str
) -> str | None:
  """The new name of an array; None to drop it."""
  if replacement is None:
    return None
  match = re.fullmatch(regex, name)
  try:
    return match and match.expand(replacement)
  except (re.error, IndexError) as e:
    raise ConfigError(
      f"{key}.rename: bad replacement {replacement!r}: {e}."
    ) from e


def _compare(
  available: Mapping[str, Any], specs: Mapping[str, Any], converted: set[str]
) -> list[Line]:
  """A line for each array of the model, and for each that only the file has."""
  lines = []
  for name, spec in specs.items():
    if name not in available:
      lines.append(Line("missing", name, f"expected {describe(spec)}"))
      continue
    array = available[name]
    if isinstance(array, Remark):
      what = f"expected {describe(spec)}, {array.text}"
      lines.append(Line(array.status, name, what))
      continue
    what = f"expected {describe(spec)}, found {describe(array)}"
    same_dtype = array.dtype == spec.dtype
    both_float = all(
      jnp.issubdtype(x.dtype, jnp.floating) for x in (array, spec)
    )
    if tuple(array.shape) != tuple(spec.shape):
      status = "reshaped"
    elif not same_dtype and not both_float:
      status = "retyped"
    elif name in converted:
      status, what = "converted", describe(spec)
    elif not same_dtype:
      status = "cast"
    else:
      status, what = "loaded", describe(spec)
    lines.append(Line(status, name, what))
  for name, array in available.items():
    if name in specs:
      continue
    if isinstance(array, Remark):
      lines.append(Line(array.status, name, array.text))
    else:
      lines.append(Line("unused", name, f"found {describe(array)}"))
  return lines


def _judge(
  lines: Sequence[Line], source: Source
) -> tuple[list[Line], set[str], list[Line]]:
  """Applies the `allow_...` lists of the config.

  Returns: the lines, names of the arrays that keep their fresh initialisation,
    and the lines that are not allowed.
  """
  result, fresh, refused = [], set(), []
  for line in lines:
    if line.status in _REFUSED:
      regexes = getattr(source, f"allow_{line.status}", ())
      if not any(re.fullmatch(regex, line.name) for regex in regexes):
        refused.append(line)
      elif line.status != "unused":
        fresh.add(line.name)
        what = f"{line.what}; keeps its fresh initialisation"
        line = line._replace(what=what)
    result.append(line)
  return result, fresh, refused


def _with_extended(
  lines: Sequence[Line],
  names: Collection[str],
  specs: Mapping[str, Any],
  text: str,
) -> list[Line]:
  """Marks the lines of the arrays `names` as extended by new rows."""
  return [
    Line("extended", line.name, f"{describe(specs[line.name])}, {text}")
    if line.name in names
    else line
    for line in lines
  ]


def _with_experts(
  lines: Sequence[Line],
  how: upcycling.Upcycling,
  derived: Mapping[str, Derived],
  specs: Mapping[str, Any],
) -> list[Line]:
  """Replaces the lines of MLPs by those of experts, and adds the routers."""
  experts = {own.source: name for name, own in derived.items()}
  result = []
  for line in lines:
    if line.name in experts:
      name = experts[line.name]
      spec = specs[name]
      number = upcycling.num_experts(name, spec.shape)
      what = f"{describe(spec)}, {line.name} {how.describe(number)}"
      line = Line("upcycled", name, what)
    result.append(line)
  routers = [Line("new", n, describe(specs[n])) for n in how.new(specs)]
  return [*result, *routers]


def _refusal(refused: Sequence[Line], source: Source, key: str) -> ConfigError:
  kinds = sorted({line.status for line in refused} - {"retyped"})
  advice = " and ".join(f"{key}.allow_{kind}" for kind in kinds)
  text = (
    f"{table(refused)}\n{key}: {source.path} does not fit the model: "
    f"{len(refused)} array(s), listed above."
  )
  if kinds:
    text += f" Rename them ({key}.rename) or allow it ({advice})."
  if {"missing", "reshaped"} & set(kinds):
    text += " Arrays that may be missing or reshaped stay freshly initialised."
  if source.upcycle and any("mlp/" in line.name for line in refused):
    text += (
      " Experts begin as the MLPs of the file, so config.model.moe.mlp_dim is "
      "their width, by default config.model.mlp_dim."
    )
  return ConfigError(text)


def place(value: Any, spec: Any) -> jax.Array:
  """Puts an array on the devices of a spec.

  If the value is mapped from a file or assembled from parts of one, this is
  where it is read, and only the shards of this process's devices are.
  """
  return jax.make_array_from_callback(
    tuple(value.shape),
    restore.sharding_of(spec),
    lambda index: np.asarray(value[index]).astype(spec.dtype, copy=False),
  )
