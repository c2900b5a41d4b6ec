"""New tokens: a model with a larger vocabulary than config.model_init.

`with_new_rows` compares the model, the tokenizers of the input and model_init.
If there are more tokens than rows, it enlarges config.model.vocab_size and
records in config.model_init which rows are new; checkpoints/added_rows.py makes
them when the file is loaded. With config.new_rows.train="rows", gradients and
updates of all other rows of these arrays are 0 (`TrainedRows`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from bigtrain.arrays import dims, trees
from bigtrain.arrays.types import ClassCount, Params
from bigtrain.checkpoints import added_rows, folders, warm_start
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.config import settings
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_kwargs,
  check_number,
)
from bigtrain.files import paths
from bigtrain.inputs import vocabulary
from bigtrain.inputs.pipeline import TrainInput
from bigtrain.models.layers import lora
from bigtrain.objective import building, task_functions

_KEY = "config.new_rows"
_TRAIN = ("full", "rows")


class Options(NamedTuple):
  """Options of config.new_rows."""

  init: str = "mean"  # One of added_rows.INITS.
  multiple_of: int = 1  # The vocabulary becomes a multiple of this.
  # "full": the whole arrays train. "rows": only their new rows. By default
  # "full", and with adapters "rows".
  train: str | None = None


class _Source(NamedTuple):
  """The vocabulary of config.model_init."""

  size: int  # Rows of its embedding.
  tokenizer: vocabulary.Used | None

  def has_all(self, used: Sequence[vocabulary.Used]) -> bool:
    """Whether all these tokenizers are the one of model_init."""
    return self.tokenizer is not None and all(
      fingerprint == self.tokenizer[1] for _, fingerprint in used
    )


def with_new_rows(
  config: settings.Config, train_input: TrainInput
) -> settings.Config:
  """Enlarges the model if the config has more tokens than model_init.

  Otherwise the config stays as it is, unless it has config.new_rows, which
  nothing would then use: that is an error.
  """
  options = _read(config)
  source_options = config.get("model_init")
  if isinstance(source_options, settings.Config):
    source_options = config.kwargs("model_init")
  if not source_options:
    return _unchanged(config, "expected config.model_init beside it.")
  if warm_start.has_parts(source_options):
    return _unchanged(config, "not with config.model_init.parts.")

  # The number of rows in the model of the config, and in model_init.
  task = building.task(config)
  module, model = building.model(config)
  # Models of several parts have the size in a part, which stays as it is.
  has_size = "vocab_size" in type(model).__dataclass_fields__
  size: Any = model.vocab_size if has_size else None
  source = warm_start.read_source(source_options, "config.model_init")
  known = _source(source, module) if isinstance(size, int) else None
  if known is None:
    return _unchanged(
      config,
      f"the size of the vocabulary in config.model_init={source.path!r} is not "
      "known; expected a published model with a config.json, or a checkpoint "
      "of this program, of a model with a vocab_size.",
    )

  # The tokens of the input, and whether the config leaves them to the user.
  new = vocabulary.new_tokens(train_input.tokenizers, known.tokenizer)
  num_ids = _num_ids(task, model, train_input)
  if "new_rows" not in config and not new:
    if "vocab_size" in source.allow_changed or source.allow_reshaped:
      return config  # The user's choice: fresh arrays.
    if num_ids > size and not known.has_all(train_input.tokenizers):
      # The ids may mean other words than in the file. The model's own check of
      # ids raises the error.
      return config
  multiple = options.multiple_of
  new_size = math.ceil(max(size, num_ids) / multiple) * multiple
  # Published models often have more rows than tokens. New tokens may use the
  # spare ones: then the size stays, and yet some rows are new.
  uses_spare_rows = bool(new) and size == known.size
  if new_size <= known.size and not uses_spare_rows:
    return _unchanged(
      config,
      f"no row is new: {source.path!r} has {known.size}, and the input has "
      f"{num_ids} tokens; expected new_tokens beside the tokenizer, a larger "
      "config.model.vocab_size, or multiple_of.",
    )

  _check_teacher(config, new_size)
  if new:
    vocabulary.check_evaluations(config, new)
  first = min(known.size, new.first) if new else known.size
  rows = added_rows.AddedRows(
    old_size=known.size,
    new_size=new_size,
    first=first,
    stop=new.stop if new else first,
    axes=axes_of(dims.of_model(module, model)),
    init=options.init,
    pieces=new.pieces() if new and options.init == "pieces" else (),
  )
  train = options.train or ("rows" if config.get("adapters") else "full")
  logging.info(
    "config.model_init: %s has %d rows for tokens; the model has %d. %s. "
    "Of embedding and head, %s.",
    source.path,
    known.size,
    new_size,
    rows.describe(),
    "all rows train" if train == "full" else "only the new rows train",
  )
  return _replaced(config, source_options, rows, train, model)


def _unchanged(config: settings.Config, why: str) -> settings.Config:
  """The config as it is; with config.new_rows, the error that says why."""
  if "new_rows" in config:
    raise ConfigError(f"{_KEY}: {why}")
  return config


def _read(config: settings.Config) -> Options:
  given = config.kwargs("new_rows")
  check_kwargs(Options, given, _KEY)
  options = Options(**given)
  check_choice(f"{_KEY}.init", options.init, added_rows.INITS)
  key = f"{_KEY}.multiple_of"
  check_number(key, options.multiple_of, least=1, whole=True)
  if options.train is not None:
    check_choice(f"{_KEY}.train", options.train, _TRAIN)
  return options


def _source(source: warm_start.Source, module: Any) -> _Source | None:
  """Reads the size and the tokenizer of model_init; None if they are unknown.

  The file may be gone when a run is resumed.
  """
  path = paths.absolute(source.path)
  is_published = safetensors_files.is_folder(path)
  if is_published or path.endswith(".safetensors"):
    if not hasattr(module, "published_fields"):
      return None
    fields = module.published_fields(path, source.allow_unread)
    if fields is None or "vocab_size" not in fields:
      return None
    tokenizer = vocabulary.of_folder(path) if is_published else None
    return _Source(fields["vocab_size"].value, tokenizer)
  if path.endswith(".npz") or not paths.exists(path):
    return None
  try:
    directory = folders.find(path, source.step)
  except (ConfigError, CheckpointError):
    return None  # A folder of another program; loading it says what is wrong.
  host = folders.read_manifest(directory).host_state
  if not host.config or "model_name" not in host.config:
    return None
  _, model = building.model(settings.Config(host.config))
  size = getattr(model, "vocab_size", None)
  saved = host.data.get("tokenizer")
  tokenizer = (saved["name"], saved["fingerprint"]) if saved else None
  return None if size is None else _Source(size, tokenizer)


def _check_teacher(config: settings.Config, size: int) -> None:
  """Refuses a reference model that does not know the new tokens."""
  teacher = config.get("teacher")
  if not isinstance(teacher, settings.Config) or "model_name" not in teacher:
    return
  own = getattr(building.model(teacher)[1], "vocab_size", size)
  if isinstance(own, int) and own < size:
    raise ConfigError(
      f"config.teacher: its vocabulary has {own} entries, and the model {size} "
      "with the new tokens; expected a teacher that knows them, such as a run "
      "or an export with the same tokens."
    )


def _num_ids(task: Any, model: Any, train_input: TrainInput) -> int:
  """Largest id of the input + 1, if known."""
  limits = task_functions.vocab_sizes(task, model)
  sizes = [
    train_input.vocab_sizes.get(name, 0)
    for name, limit in limits.items()
    if not isinstance(limit, ClassCount)
  ]
  return max(sizes, default=0)


def axes_of(table: dims.Table) -> dict[str, int]:
  """{regex of arrays: axis of their rows, counted from the end}."""
  result = {}
  for regex, text in table.items():
    last = regex.rpartition("/")[2]
    if regex.startswith("score/") or last in lora.FACTORS:
      continue  # Rows of classes, and of adapters.
    parsed = dims.parse(text)
    letters = (*parsed.stack, *parsed.inputs, *parsed.outputs)
    if "V" in letters:
      result[regex] = letters.index("V") - len(letters)
  return result


def _replaced(
  config: settings.Config,
  source: str | Mapping[str, Any],
  rows: added_rows.AddedRows,
  train: str,
  model: Any,
) -> settings.Config:
  """The config, with everything that later stages read about the new rows."""
  source = {"path": source} if isinstance(source, str) else source
  plain = config.to_dict()
  values: dict[str, Any] = {
    "model": {**plain["model"], "vocab_size": rows.new_size},
    "model_init": {**source, "new_rows": rows._asdict()},
    "new_rows": {**(plain.get("new_rows") or {}), "train": train},
  }
  if adapters := plain.get("adapters"):
    values["adapters"] = _beside_adapters(adapters, rows, train, model)
  return config.with_values(values)


def _beside_adapters(
  adapters: Mapping[str, Any],
  rows: added_rows.AddedRows,
  train: str,
  model: Any,
) -> dict[str, Any]:
  """config.adapters in which new rows train, or the arrays that have them.

  Arrays that the config already trains or adapts are left alone.
  """
  options = lora.read(adapters)
  own = [*options.targets, *options.train]
  names = [
    name
    for name in rows.axes
    if not any(re.fullmatch(regex, name) for regex in own)
    and not (name == "head/kernel" and getattr(model, "tied_head", False))
  ]
  tables = [x for x in names if train == "rows" and x in lora.TABLES]
  in_full = [x for x in names if x not in tables]
  result = dict(adapters)
  if tables:
    ids = rows.new_tokens()
    result["tokens"] = {
      name: [*dict.fromkeys([*options.tokens_of(name), *ids])]
      for name in tables
    }
  # One regular expression, because each has to match a parameter.
  if in_full and (train == "full" or not tables):
    result["train"] = [*options.train, "|".join(in_full)]
  return result


class TrainedRows(NamedTuple):
  """The rows that train, in arrays whose other rows do not change."""

  # {array: (axis of its rows, first row that trains)}; empty if all train.
  first: Mapping[str, tuple[int, int]] = {}

  def masked(self, tree: Params) -> Params:
    """Gradients or updates, with 0 for the rows that do not train."""
    if not self.first:
      return tree

    def mask(name: str, x: jax.Array) -> jax.Array:
      if name not in self.first:
        return x
      axis, first = self.first[name]
      row = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim + axis)
      return jnp.where(row >= first, x, jnp.zeros((), x.dtype))

    return trees.map_with_names(mask, tree)


def trained_rows(config: settings.Config, params_spec: Params) -> TrainedRows:
  """Reads from a config of `with_new_rows` which rows train."""
  train = config.get("new_rows", {}).get("train")
  init = config.get("model_init")
  plan = init.get("new_rows") if isinstance(init, settings.Config) else None
  if train != "rows" or plan is None:
    return TrainedRows()
  rows = added_rows.AddedRows(**config.kwargs("model_init")["new_rows"])
  first = {}
  for name in trees.names(params_spec):
    axis = rows.axis(name)
    if axis is not None:
      first[name] = (axis, min(rows.first, rows.old_size))
  return TrainedRows(first)
