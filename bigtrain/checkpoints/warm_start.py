"""Parameters and states from elsewhere: config.model_init, config.resume.

  config.model_init = "vit_b16.npz"
  config.model_init = dict(
    path="runs/pretrained",          # .npz, .safetensors, workdir, checkpoint
    step=90_000,                     # of a workdir; the newest unless given
    prefix="ema",                    # which tree of it; "params" unless given
    rename=[(r"img/(.*)", r"\\1"),    # whole names; the first match decides;
            (r"txt/.*", None)],      # None drops
    allow_missing=[r"head/.*"],      # keep their fresh initialisation
    allow_reshaped=[r"pos_embed.*"], # the same
    allow_unused=[r"pre_logits/.*"],
  )

Every name of the file and of the model gets a line in a printed table. Nothing
is padded, cut or left out unless the config allows it by name. Mutable
collections of the model, such as the running means of batch normalisation, are
taken from the file too, under names like "batch_stats/bn1/mean".
"""

import collections
import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import trees
from bigtrain.checkpoints import parameter_files, restore
from bigtrain.checkpoints.manifest import Manifest
from bigtrain.optim import patterns
from bigtrain.settings import ConfigError, check_kwargs, did_you_mean

# Takes (arrays by name, the model's jax.ShapeDtypeStructs by name); returns
# the arrays under the model's names and in its shapes, as far as it can.
Convert = Callable[[dict[str, np.ndarray], dict[str, Any]], dict[str, Any]]


class Line(NamedTuple):
  """A row of the table.

  Attributes:
    status: "loaded"; "cast" to the model's dtype; "converted" by the model's
      rules for published files; "missing"; "reshaped"; "retyped"; "unused";
      "dropped" by a rename.
    name: in the model; or in the file, if the model has no place for it.
    what: shapes and dtypes.
  """

  status: str
  name: str
  what: str


@dataclasses.dataclass(frozen=True)
class Source:
  """What config.model_init says; see the module."""

  path: str
  step: int | None = None
  prefix: str | None = None
  rename: Sequence[tuple[str, str | None]] = ()
  allow_missing: Sequence[str] = ()
  allow_reshaped: Sequence[str] = ()
  allow_unused: Sequence[str] = ()


def load_params(
  spec: str | Mapping[str, Any],
  like: Any,
  *,
  init: Callable[[], Any] | None = None,
  convert: Convert | None = None,
  collections: Sequence[str] = (),
  key: str = "config.model_init",
) -> tuple[Any, list[Line]]:
  """Parameters from a file or a checkpoint, on the model's devices.

  Args:
    spec: a path, or a dict with one: see the module.
    like: tree of jax.ShapeDtypeStruct with shardings: the model's parameters.
    init: returns freshly initialised parameters on the devices; called only
      if some of them are needed.
    convert: the model's `from_published`, applied after renaming unless all
      names and shapes fit as they are.
    collections: branches of `like` that are mutable collections.
    key: where `spec` is in the config.

  Returns:
    (tree like `like` of jax.Arrays, the table, which is logged too).

  Raises:
    ConfigError: no such file; an array that is missing, unused, or of another
      shape, without being allowed to; all of them are listed.
    CheckpointError: a checkpoint that is damaged or cannot be read.
  """
  source = _source(spec, key)
  wanted = dict(trees.flatten_with_names(like))
  file = parameter_files.open_file(
    source.path,
    step=source.step,
    prefix=source.prefix,
    key=key,
    collections=collections,
  )
  names, lines = _rename(file, source, key)
  found: dict[str, Any] = {new: file.specs[old] for new, old in names.items()}
  converted: set[str] = set()
  values: dict[str, Any] = {}
  fits = set(found) == set(wanted) and all(
    found[name].shape == tuple(wanted[name].shape) for name in found
  )
  if convert is not None and not fits:
    given = file.read(list(names.values()))
    given = {new: given[old] for new, old in names.items()}
    found = values = dict(convert(dict(given), wanted))
    converted = {n for n in found if found[n] is not given.get(n)}
  lines += _compare(found, wanted, converted)
  logging.info("%s: %s\n%s", key, source.path, table(lines))
  fresh = _check_allowed(lines, source, key)
  take = {name: wanted[name] for name in wanted if name not in fresh}
  if file.checkpoint and not values:
    arrays = _from_checkpoint(file.checkpoint, names, found, take)
  else:
    values = values or file.read([names[name] for name in take])
    arrays = {
      name: _place(values[name if name in values else names[name]], spec)
      for name, spec in take.items()
    }
  if fresh:
    if init is None:
      raise ConfigError(f"{key}: no fresh values for {sorted(fresh)}.")
    initial = dict(trees.flatten_with_names(init()))
    arrays |= {name: initial[name] for name in fresh}
  return trees.map_with_names(lambda name, _: arrays[name], like), lines


def load_state(
  spec: str | Mapping[str, Any], like: Any, *, key: str = "config.resume"
) -> tuple[Any, Manifest]:
  """A whole train state from another workdir or checkpoint.

  Args:
    spec: a path, or dict(path=..., step=...).
    like: see restore.restore, which does it and raises what is wrong.
    key: where `spec` is in the config.

  Raises:
    ConfigError: no such checkpoint, or of another model.
    CheckpointError: a checkpoint that is damaged or cannot be read.
  """
  source = _source(spec, key, ("path", "step"))
  directory = parameter_files.find_checkpoint(source.path, source.step, key)
  return restore.restore(directory, like)


def table(lines: Sequence[Line]) -> str:
  """The table as text: one line an array, and the totals."""
  order = list(dict.fromkeys(line.status for line in lines))
  width = max([len(line.name) for line in lines], default=0)
  rows = [
    f"  {line.status:<10}{line.name:<{width}}  {line.what}"
    for status in order
    for line in lines
    if line.status == status
  ]
  counts = collections.Counter(line.status for line in lines)
  total = ", ".join(f"{counts[status]} {status}" for status in order)
  return "\n".join([*rows, f"  {total or 'nothing'}"])


def _source(
  spec: Any, key: str, allowed: Sequence[str] | None = None
) -> Source:
  if isinstance(spec, str):
    spec = {"path": spec}
  if not isinstance(spec, Mapping):
    raise ConfigError(f"{key}: expected a path or a dict, got {spec!r}.")
  check_kwargs(Source, spec, key)
  for name in spec:
    if allowed is not None and name not in allowed:
      raise ConfigError(
        f"{key}.{name}: unknown key.{did_you_mean(name, allowed)}"
      )
  source = Source(**spec)
  if not isinstance(source.path, str) or not source.path:
    raise ConfigError(f"{key}.path: expected a path, got {source.path!r}.")
  for pair in source.rename:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
      raise ConfigError(
        f"{key}.rename: expected a list of (regex, replacement or None), got "
        f"{pair!r} in it."
      )
  for field in ("allow_missing", "allow_reshaped", "allow_unused"):
    regexes = getattr(source, field)
    if isinstance(regexes, str):
      raise ConfigError(f"{key}.{field}: expected a list of regexes.")
    for regex in regexes:
      try:
        re.compile(regex)
      except (re.error, TypeError) as e:
        raise ConfigError(f"{key}.{field}: bad regex {regex!r}: {e}.") from e
  return source


def _rename(
  file: parameter_files.File, source: Source, key: str
) -> tuple[dict[str, str], list[Line]]:
  """({new name: name in the file}, lines for what is dropped)."""
  names: dict[str, str] = {}
  lines = []
  regexes = [regex for regex, _ in source.rename]
  which = patterns.first_match(regexes, list(file.specs), f"{key}.rename")
  for old, spec in file.specs.items():
    new: str | None = old
    if old in which:
      regex, replacement = source.rename[which[old]]
      new = None
      if replacement is not None:
        try:
          new = re.fullmatch(regex, old).expand(replacement)
        except (re.error, IndexError) as e:
          raise ConfigError(
            f"{key}.rename: bad replacement {replacement!r}: {e}."
          ) from e
    if new is None:
      lines.append(Line("dropped", old, _text(spec)))
    elif new in names:
      raise ConfigError(
        f"{key}.rename: both {names[new]!r} and {old!r} become {new!r}."
      )
    else:
      names[new] = old
  return names, lines


def _compare(
  found: Mapping[str, Any], wanted: Mapping[str, Any], converted: set[str]
) -> list[Line]:
  lines = []
  for name, spec in wanted.items():
    if name not in found:
      lines.append(Line("missing", name, f"expected {_text(spec)}"))
      continue
    have = found[name]
    what = f"expected {_text(spec)}, found {_text(have)}"
    same_dtype = have.dtype == spec.dtype
    both_float = all(
      jnp.issubdtype(x.dtype, jnp.floating) for x in (have, spec)
    )
    if tuple(have.shape) != tuple(spec.shape):
      lines.append(Line("reshaped", name, what))
    elif not same_dtype and not both_float:
      lines.append(Line("retyped", name, what))
    elif name in converted:
      lines.append(Line("converted", name, _text(spec)))
    elif not same_dtype:
      lines.append(Line("cast", name, what))
    else:
      lines.append(Line("loaded", name, _text(spec)))
  for name, have in found.items():
    if name not in wanted:
      lines.append(Line("unused", name, f"found {_text(have)}"))
  return lines


def _text(x: Any) -> str:
  return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"


def _check_allowed(lines: Sequence[Line], source: Source, key: str) -> set[str]:
  """Names that stay fresh; raises ConfigError for what is not allowed."""
  allowed = {
    "missing": source.allow_missing,
    "reshaped": source.allow_reshaped,
    "unused": source.allow_unused,
    "retyped": (),
  }
  fresh, bad = set(), []
  for line in lines:
    if line.status not in allowed:
      continue
    regexes = allowed[line.status]
    if not any(re.fullmatch(regex, line.name) for regex in regexes):
      bad.append(line)
    elif line.status != "unused":
      fresh.add(line.name)
  if bad:
    kinds = sorted({line.status for line in bad} - {"retyped"})
    advice = " and ".join(f"{key}.allow_{kind}" for kind in kinds)
    raise ConfigError(
      f"{table(bad)}\n{key}: {source.path} does not fit the model: "
      f"{len(bad)} array(s), listed above."
      + (f" Rename them ({key}.rename) or allow it ({advice})." * bool(kinds))
    )
  return fresh


def _from_checkpoint(
  checkpoint: tuple[str, Manifest, Mapping[str, str]],
  names: Mapping[str, str],
  found: Mapping[str, Any],
  take: Mapping[str, Any],
) -> dict[str, jax.Array]:
  """Each device's part straight from the files."""
  directory, manifest, places = checkpoint
  as_stored = {
    name: jax.ShapeDtypeStruct(
      spec.shape, found[name].dtype, sharding=spec.sharding
    )
    for name, spec in take.items()
  }
  sources = {name: places[names[name]] for name in take}
  arrays = restore.load(directory, manifest, sources, as_stored)
  return {name: arrays[name].astype(take[name].dtype) for name in take}


def _place(value: Any, spec: Any) -> jax.Array:
  # What is mapped from a file, or put together from parts of it, is read here:
  # each device's share and no more.
  sharding = spec.sharding or jax.sharding.SingleDeviceSharding(
    jax.local_devices()[0]
  )
  return jax.make_array_from_callback(
    tuple(value.shape),
    sharding,
    lambda index: np.asarray(value[index]).astype(spec.dtype, copy=False),
  )
