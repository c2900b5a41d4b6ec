"""Exports arrays to one file, or in the layout in which a model is published.

A model's module defines its published layouts by a function

  to_published(model, shapes, layout, origin) -> (config, [Tensor, ...])

from {name: shape} of its parameters to the content of config.json and the
arrays of the file. `to_layout` writes them, one array in memory at a time.
"""

import functools
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import jax
import numpy as np

from bigtrain import sharding
from bigtrain.checkpoints import averages, folders, integrity
from bigtrain.checkpoints.foreign import peft_files, safetensors_files
from bigtrain.checkpoints.manifest import CheckpointError, Manifest, dtype_of
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, did_you_mean
from bigtrain.files import paths
from bigtrain.inference import saved
from bigtrain.models.published import families, quantised_arrays
from bigtrain.models.published.blocks import STATE
from bigtrain.models.published.tables import Tensor
from bigtrain.objective import building, published_sizes, trained_adapters
from bigtrain.reports import run_files
from bigtrain.text import chat, tokenizer_files, tokenizers

# Reads slices of arrays: (name, index) of each.
_Read = Callable[[Iterable[tuple[str, Any]]], Iterator[np.ndarray]]

_WEIGHT_FILES = r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
# Files of a published model's tokenizer, and defaults of its generation.
_COMPANIONS = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "tokenizer.model",
  "vocab.json",
  "merges.txt",
  "added_tokens.json",
  "chat_template.jinja",
  "chat_template.json",
  "generation_config.json",
  "preprocessor_config.json",
  "processor_config.json",
)
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Prefix of flax's mutable collections in a checkpoint.
_MUTABLE = "mutable/"


def to_file(
  path: str, out: str, prefix: str = "", step: int | None = None
) -> int:
  """Writes arrays of a checkpoint into one file; returns their number.

  Arrays keep their full names, even with a prefix, so the file can be
  config.model_init. In .npz, bfloat16 and float8 become float32, without loss.
  """
  prefix = prefix.strip("/")
  directory, manifest, names = _find(path, step, prefix)
  config = manifest.host_state.config
  # Shapes and dtypes by name.
  content: Mapping[str, Any] = manifest.arrays
  has_opt_state = any(name.startswith("opt/") for name in names)
  if config and config.get("adapters") and not has_opt_state:
    config, content = _merged(path, step, prefix)
    names = list(content)
    arrays = iter(content.values())
  else:
    slices = [(n, (slice(None),) * len(content[n].shape)) for n in names]
    # Without the optimizer's state, parameters are the averages that some
    # optimizers keep. With it, the file has what the checkpoint has.
    read = integrity.read if has_opt_state else averages.read
    arrays = read(directory, manifest, slices)
  with paths.replacing(out, "wb") as file:
    if out.endswith(".npz"):
      _write_npz(file, names, arrays)
    else:
      specs = {n: (content[n].shape, str(content[n].dtype)) for n in names}
      about = {"step": str(manifest.step)}
      try:
        safetensors_files.write(file.name, specs, arrays, about)
      except ValueError as e:
        raise ConfigError(f"{e}.") from e
    _write_about(f"{out}.json", manifest, config)
  return len(names)


def _merged(
  path: str, step: int | None, prefix: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """The config without adapters, and the parameters with them merged in."""
  checkpoint = saved.find(path, step, "export")
  mesh = sharding.make_mesh(devices=jax.local_devices()[:1])
  weights = prefix or "params"
  variables = saved.variables(checkpoint, weights, mesh)
  arrays = {
    f"{weights}/{name}": np.asarray(x)
    for name, x in trained_adapters.merged(checkpoint.config, variables).items()
  }
  return trained_adapters.plain(checkpoint.config), arrays


def to_peft(
  path: str, out: str, weights: str, step: int | None
) -> tuple[int, int]:
  """Writes a run's adapters as PEFT's files; returns as `to_layout`."""
  checkpoint = saved.find(path, step, "export")
  if not checkpoint.config.get("adapters") or checkpoint.manifest is None:
    raise ConfigError("--format=peft: expected a run with config.adapters.")
  mesh = sharding.make_mesh(devices=jax.local_devices()[:1])
  variables = saved.variables(checkpoint, weights, mesh, with_base=False)
  count = trained_adapters.write_peft(
    out,
    checkpoint.config,
    variables["params"],
    checkpoint.manifest.host_state.base,
  )
  return count, os.path.getsize(os.path.join(out, peft_files.ARRAYS))


def _find(
  path: str, step: int | None, prefix: str
) -> tuple[str, Manifest, list[str]]:
  """Returns (directory, manifest, names of the arrays below a prefix)."""
  directory = folders.find(path, step)
  manifest = folders.read_manifest(directory)
  names = [
    name
    for name in manifest.arrays
    if not prefix or name == prefix or name.startswith(prefix + "/")
  ]
  if not names:
    hint = did_you_mean(prefix, {n.split("/")[0] for n in manifest.arrays})
    raise ConfigError(f"--prefix={prefix}: no such tree in {directory}.{hint}")
  if problems := integrity.inspect(directory, manifest, names):
    raise CheckpointError(f"{directory}: damaged: {problems[0]}")
  return directory, manifest, names


def _write_npz(
  file: IO[bytes], names: Sequence[str], arrays: Iterator[np.ndarray]
) -> None:
  with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
    for name, array in zip(names, arrays):
      if array.dtype.kind == "V":  # bfloat16 and others that numpy lacks.
        array = array.astype(np.float32)
      with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        np.lib.format.write_array(entry, array, allow_pickle=False)


def _write_about(
  path: str, manifest: Manifest, config: dict[str, Any] | None
) -> None:
  """Writes step, config and description of the data, for bigtrain.load."""
  host = manifest.host_state
  about = {
    "step": manifest.step,
    "config": config,
    "data": host.data,
    "fingerprints": host.fingerprints,
  }
  run_files.write_json(path, about)


def to_layout(
  path: str,
  out: str,
  layout: str | None,
  prefix: str,
  step: int | None = None,
  *,
  dtype: str = "",
  max_shard_bytes: int = 0,
  drop_mtp: bool = False,
  quantize: str = "",
) -> tuple[int, int]:
  """Writes a published model's folder, one array in memory at a time.

  The folder has config.json, the weights and, if the run began with a published
  model, its tokenizer. Returns (number of arrays, bytes of the files).

  Args:
    layout: one of the model's, such as "gpt2"; None for the layout of the
      folder that the run began with, or the first that can express the model.
    max_shard_bytes: size of a file of weights; 0 for one file of any size.
    drop_mtp: whether to leave out the modules of config.model.mtp.
    quantize: one of quantised_arrays.METHODS, for matrices of the layers.
  """
  prefix = prefix.strip("/")
  directory, manifest, names = _find(path, step, prefix)
  config = manifest.host_state.config
  if not config or "model_name" not in config:
    raise ConfigError(f"{directory}: no config with a model_name is saved.")
  origin = config
  # Shapes and dtypes by name, and what reads slices of the arrays.
  content: Mapping[str, Any] = manifest.arrays
  read: _Read = functools.partial(averages.read, directory, manifest)
  if config.get("adapters"):
    config, merged = _merged(path, step, prefix)
    names = list(merged)
    content = {**content, **merged}
    read = functools.partial(_read_merged, merged)
  if drop_mtp:
    config = {**config, "model": {**config["model"], "mtp": 0}}
    names = [name for name in names if "/mtp/" not in name]
  module, model = building.model(settings.Config(config))
  if not hasattr(module, "to_published"):
    raise ConfigError(
      f"--format=hf: the model of {directory} has no published layout."
    )

  # {name in the model: name in the checkpoint}
  full_names = {name.removeprefix(f"{prefix}/"): name for name in names}
  for name in manifest.arrays:
    is_dropped = drop_mtp and "/mtp/" in name
    if name.startswith(_MUTABLE + STATE) and not is_dropped:
      full_names[name.removeprefix(_MUTABLE)] = name
  shapes = {name: content[full].shape for name, full in full_names.items()}
  published, tensors = module.to_published(
    model, shapes, layout, published_sizes.layout_of(origin)
  )

  own_dtype = _dtype_of([content[name] for name in names], directory)
  dtype = dtype or own_dtype
  specs = _specs_of(tensors, dtype)
  builders: Mapping[str, Callable[[], np.ndarray]] = {
    tensor.name: functools.partial(_built, read, tensor, full_names)
    for tensor in tensors
  }
  if quantize:
    plan = quantised_arrays.plan(quantize, published, tensors)
    published = {**published, "quantization_config": plan.config}
    specs, builders = _quantised(plan, specs, builders)
  os.makedirs(out, exist_ok=True)
  size = _write_weights(out, specs, builders, max_shard_bytes)
  kept = _copy_companions(manifest, out, published)
  _write_config(out, {**published, **kept, "dtype": dtype})
  _write_about(os.path.join(out, "bigtrain.json"), manifest, config)
  return len(specs), size


def _write_config(out: str, published: Mapping[str, Any]) -> None:
  # transformers' defaults may be ids beyond the vocabulary.
  content = {**dict.fromkeys(_SPECIAL_TOKENS), **published}
  with paths.replacing(os.path.join(out, "config.json")) as file:
    json.dump(content, file, indent=2)


def _specs_of(
  tensors: Iterable[Tensor], dtype: str
) -> dict[str, tuple[Sequence[int], str]]:
  """{name: (shape, dtype)} of the arrays."""
  specs: dict[str, tuple[Sequence[int], str]] = {}
  for tensor in tensors:
    # State, such as the experts' selection biases, keeps its dtype.
    is_state = all(name.startswith(STATE) for name, _ in tensor.parts)
    specs[tensor.name] = (tensor.shape, "float32" if is_state else dtype)
  return specs


def _quantised(
  plan: quantised_arrays.Plan,
  specs: Mapping[str, tuple[Sequence[int], str]],
  builders: Mapping[str, Callable[[], np.ndarray]],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The specs and builders with the arrays of quantised matrices."""

  # The arrays of a matrix follow each other: only one matrix is in memory.
  @functools.lru_cache(maxsize=1)
  def encoded(matrix: str) -> Sequence[np.ndarray]:
    return plan.encoded[matrix].encode(builders[matrix]())

  new_specs: dict[str, Any] = {}
  new_builders: dict[str, Any] = {}
  for name, spec in specs.items():
    if name not in plan.encoded:
      new_specs[name], new_builders[name] = spec, builders[name]
      continue
    for number, part in enumerate(plan.encoded[name].specs):
      new_specs[part] = plan.encoded[name].specs[part]
      new_builders[part] = lambda name=name, i=number: encoded(name)[i]
  return new_specs, new_builders


def _dtype_of(arrays: Iterable[Any], directory: str) -> str:
  dtypes = {str(array.dtype) for array in arrays}
  if len(dtypes) > 1:
    raise ConfigError(f"{directory}: parameters of several dtypes: {dtypes}.")
  return dtypes.pop()


def _read_merged(
  merged: Mapping[str, np.ndarray], slices: Iterable[tuple[str, Any]]
) -> Iterator[np.ndarray]:
  return (merged[name][index] for name, index in slices)


def _write_weights(
  out: str,
  specs: Mapping[str, tuple[Sequence[int], str]],
  builders: Mapping[str, Callable[[], np.ndarray]],
  max_shard_bytes: int,
) -> int:
  """Writes one file, or several with an index; returns the arrays' bytes.

  Args:
    specs: {name: (shape, dtype)}.
    builders: {name: what makes the array}.
  """
  sizes = {
    name: math.prod(shape) * dtype_of(dtype).itemsize
    for name, (shape, dtype) in specs.items()
  }
  files = _files(sizes, max_shard_bytes)

  def built(names: Sequence[str]) -> Iterator[np.ndarray]:
    for name in names:
      _, dtype = specs[name]
      yield builders[name]().astype(dtype_of(dtype), copy=False)

  for file, names in files.items():
    with paths.replacing(os.path.join(out, file), "wb") as temporary:
      safetensors_files.write(
        temporary.name,
        {name: specs[name] for name in names},
        built(names),
        {"format": "pt"},  # transformers requires the framework of the layout.
      )
  written = set(files)
  total = sum(sizes.values())
  if len(files) > 1:
    index = {name: file for file, names in files.items() for name in names}
    content = {"metadata": {"total_size": total}, "weight_map": index}
    written.add(safetensors_files.INDEX)
    run_files.write_json(os.path.join(out, safetensors_files.INDEX), content)
  for name in os.listdir(out):  # Files of an export that this one replaces.
    if re.fullmatch(_WEIGHT_FILES, name) and name not in written:
      os.remove(os.path.join(out, name))
  return total


def _copy_companions(
  manifest: Manifest, out: str, published: Mapping[str, Any]
) -> dict[str, Any]:
  """Copies the tokenizer of the folder in config.model_init, if it is a folder.

  The chat template and the tokens that end an answer come from the run. Returns
  the keys of the folder's config.json to keep: the ids of special tokens, and
  timm's preprocessing of pictures.
  """
  host = manifest.host_state
  config = host.config or {}
  init = config.get("model_init")
  folder = init.get("path") if isinstance(init, Mapping) else init
  if not isinstance(folder, str) or not os.path.isdir(folder):
    return {}
  for name in _COMPANIONS:
    source = os.path.join(folder, name)
    if os.path.isfile(source):
      shutil.copyfile(source, os.path.join(out, name))
  if template := host.data.get("prompts", {}).get("template"):
    texts = chat.get(template, host.data["tokenizer"]["name"]).texts
    with paths.replacing(os.path.join(out, "chat_template.jinja")) as file:
      file.write(texts["default"])
  if ends := host.data.get("end_ids"):
    path = os.path.join(out, "generation_config.json")
    options = run_files.read_json(path) or {}
    old_ends = options.get("eos_token_id") or []
    if isinstance(old_ends, int):
      old_ends = [old_ends]
    options["eos_token_id"] = sorted({*ends, *old_ends})
    run_files.write_json(path, options)
  _write_tokenizer(host.data.get("tokenizer"), folder, out)
  values = families.read_json(folder)[1] or {}
  kept = {name: values[name] for name in _SPECIAL_TOKENS if name in values}
  key = "pretrained_cfg"  # Of timm.
  if key in values and key in published:
    kept[key] = {**values[key], **published[key]}
  return kept


def _write_tokenizer(
  used: Mapping[str, str] | None, folder: str, out: str
) -> None:
  """Writes the run's tokenizer if it has tokens that the folder's lacks."""
  if not used or used["name"] == "bytes":
    return
  fingerprint = used.get("fingerprint")
  if tokenizers.is_folder(folder):
    if fingerprint == tokenizers.get(folder).fingerprint():
      return
  if tokenizers.get(used["name"]).fingerprint() != fingerprint:
    raise ConfigError(
      f"--format=hf: the tokenizer {used['name']!r} is not the one that the "
      f"model was trained with, whose fingerprint is {fingerprint}."
    )
  tokenizer_files.write(used["name"], out)


def _files(
  sizes: Mapping[str, int], max_shard_bytes: int
) -> dict[str, list[str]]:
  """Returns {file: arrays in it}; each array that is too large gets a file."""
  shards: list[list[str]] = [[]]
  size = 0
  for name, num_bytes in sizes.items():
    is_full = shards[-1] and size + num_bytes > max_shard_bytes
    if max_shard_bytes and is_full:
      shards.append([])
      size = 0
    shards[-1].append(name)
    size += num_bytes
  if len(shards) == 1:
    return {safetensors_files.MODEL: shards[0]}
  count = len(shards)
  return {
    f"model-{i:05}-of-{count:05}.safetensors": shard
    for i, shard in enumerate(shards, 1)
  }


def _built(
  read: _Read, tensor: Tensor, full_names: Mapping[str, str]
) -> np.ndarray:
  """A published array, assembled from slices of our arrays."""
  slices = [(full_names[name], index) for name, index in tensor.parts]
  value = tensor.build(list(read(slices)))
  if tuple(value.shape) != tuple(tensor.shape):
    raise ValueError(
      f"{tensor.name}: expected shape {tensor.shape}, got {value.shape}"
    )
  return value
