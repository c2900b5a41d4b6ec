"""Exports arrays to one file, or in the layout in which a model is published.

The module of a model defines its layouts by to_published(model, shapes, layout)
-> (config, [Tensor, ...]), from {name: shape} of its parameters to the content
of config.json and the arrays of the file.
"""

import functools
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from bigtrain.models.published import families
from bigtrain.models.published.blocks import STATE
from bigtrain.models.published.tables import Tensor
from bigtrain.objective import building, trained_adapters
from bigtrain.reports import record
from bigtrain.text import chat


def to_file(
  path: str, out: str, prefix: str = "", step: int | None = None
) -> int:
  """Writes arrays of a checkpoint into one file; returns their number.

  Arrays keep their full names, even with a prefix, so the file can be
  config.model_init. In .npz, bfloat16 and float8 become float32, without loss.
  """
  directory, manifest, names = _find(path, step, prefix.strip("/"))
  config = manifest.host_state.config
  content: Mapping[str, Any] = manifest.arrays
  is_state = any(name.startswith("opt/") for name in names)
  if config and config.get("adapters") and not is_state:
    config, content = _merged(path, step, prefix.strip("/"))
    names, arrays = list(content), iter(content.values())
  else:
    slices = [(n, (slice(None),) * len(content[n].shape)) for n in names]
    read = integrity.read if is_state else averages.read
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
  given = saved.variables(checkpoint, weights, mesh, with_base=False)
  about = checkpoint.manifest.host_state.base
  count = trained_adapters.write_peft(
    out, checkpoint.config, given["params"], about
  )
  return count, os.path.getsize(os.path.join(out, peft_files.ARRAYS))


def _find(
  path: str, step: int | None, prefix: str
) -> tuple[str, Manifest, list[str]]:
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
      if array.dtype.kind == "V":  # numpy's kind of ml_dtypes.
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
  record.write_json(path, about)


def to_layout(
  path: str,
  out: str,
  layout: str | None,
  prefix: str,
  step: int | None = None,
  *,
  dtype: str = "",
  max_shard_bytes: int = 0,
) -> tuple[int, int]:
  """Writes a published model's folder, one array in memory at a time.

  The folder has config.json, the weights, in files of up to `max_shard_bytes`
  if given, and the tokenizer of a published model that the run began with.
  `layout` is one of the model, such as "gpt2"; None for the first that
  expresses it. Returns (number of arrays, bytes of the files).
  """
  prefix = prefix.strip("/")
  directory, manifest, names = _find(path, step, prefix)
  config = manifest.host_state.config
  if not config or "model_name" not in config:
    raise ConfigError(f"{directory}: no config with a model_name is saved.")
  module, model = building.model(settings.Config(config))
  if not hasattr(module, "to_published"):
    raise ConfigError(
      f"--format=hf: the model of {directory} has no published layout."
    )
  content: Mapping[str, Any] = manifest.arrays
  read: Callable[..., Any] = functools.partial(
    averages.read, directory, manifest
  )
  plain = config
  if config.get("adapters"):
    plain, merged = _merged(path, step, prefix)
    module, model = building.model(settings.Config(plain))
    names, content = list(merged), {**content, **merged}
    read = lambda slices: (merged[name][index] for name, index in slices)
  full_names = {name.removeprefix(f"{prefix}/"): name for name in names}
  state = [n for n in manifest.arrays if n.startswith(_MUTABLE + STATE)]
  full_names |= {name.removeprefix(_MUTABLE): name for name in state}
  shapes = {n: content[full].shape for n, full in full_names.items()}
  published, tensors = module.to_published(model, shapes, layout)
  dtypes = {str(content[name].dtype) for name in names}
  if len(dtypes) > 1:
    raise ConfigError(f"{directory}: parameters of several dtypes: {dtypes}.")
  (stored,) = dtypes
  # State, such as the experts' selection biases, keeps its dtype.
  kept = lambda t: all(name.startswith(STATE) for name, _ in t.parts)
  specs = {
    t.name: (t.shape, "float32" if kept(t) else dtype or stored)
    for t in tensors
  }
  os.makedirs(out, exist_ok=True)
  size = _write_weights(
    out,
    specs,
    {
      tensor.name: functools.partial(_built, read, tensor, full_names)
      for tensor in tensors
    },
    max_shard_bytes,
  )
  published = {
    **dict.fromkeys(_SPECIAL_TOKENS),  # Defaults may be beyond the vocabulary.
    **published,
    **_copy_companions(manifest, out, published),
    "dtype": dtype or stored,
  }
  with paths.replacing(os.path.join(out, "config.json")) as file:
    json.dump(published, file, indent=2)
  _write_about(os.path.join(out, "bigtrain.json"), manifest, plain)
  return len(tensors), size


def _write_weights(
  out: str,
  specs: Mapping[str, tuple[Sequence[int], str]],
  builders: Mapping[str, Callable[[], np.ndarray]],
  max_shard_bytes: int,
) -> int:
  """Writes one file, or several with an index; returns their arrays' bytes."""
  sizes = {
    name: math.prod(shape) * dtype_of(dtype).itemsize
    for name, (shape, dtype) in specs.items()
  }
  files = _files(sizes, max_shard_bytes)
  for file, names in files.items():
    with paths.replacing(os.path.join(out, file), "wb") as temporary:
      safetensors_files.write(
        temporary.name,
        {name: specs[name] for name in names},
        (
          builders[name]().astype(dtype_of(specs[name][1]), copy=False)
          for name in names
        ),
        {"format": "pt"},  # transformers requires the framework of the layout.
      )
  written = set(files)
  total = sum(sizes.values())
  if len(files) > 1:
    index = {name: file for file, names in files.items() for name in names}
    content = {"metadata": {"total_size": total}, "weight_map": index}
    written.add(safetensors_files.INDEX)
    record.write_json(os.path.join(out, safetensors_files.INDEX), content)
  for name in os.listdir(out):  # Of an export that this one replaces.
    if re.fullmatch(_WEIGHTS, name) and name not in written:
      os.remove(os.path.join(out, name))
  return total


_WEIGHTS = r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
# Files of a published model's tokenizer, and defaults of its generation.
_COMPANIONS = (
  *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
  *("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"),
  *("chat_template.jinja", "chat_template.json", "generation_config.json"),
  "preprocessor_config.json",
)
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MUTABLE = "mutable/"


def _copy_companions(
  manifest: Manifest, out: str, published: Mapping[str, Any]
) -> dict[str, Any]:
  """Copies the tokenizer of the folder in config.model_init, if it is one.

  The chat template and the tokens that end an answer come from the run.
  Returns the ids of special tokens in the folder's config.json, and timm's
  processing of pictures.
  """
  host = manifest.host_state
  config = host.config or {}
  init = config.get("model_init")
  folder = init.get("path") if isinstance(init, Mapping) else init
  if not isinstance(folder, str) or not os.path.isdir(folder):
    return {}
  for name in _COMPANIONS:
    if os.path.isfile(source := os.path.join(folder, name)):
      shutil.copyfile(source, os.path.join(out, name))
  if template := host.data.get("prompts", {}).get("template"):
    texts = chat.get(template, host.data["tokenizer"]["name"]).texts
    with paths.replacing(os.path.join(out, "chat_template.jinja")) as file:
      file.write(texts["default"])
  if ends := host.data.get("end_ids"):
    path = os.path.join(out, "generation_config.json")
    options = record.read_json(path) or {}
    old = options.get("eos_token_id") or []
    ends = sorted({*ends, *([old] if isinstance(old, int) else old)})
    record.write_json(path, options | {"eos_token_id": ends})
  values = families.read_json(folder)[1] or {}
  kept = {n: values[n] for n in _SPECIAL_TOKENS if n in values}
  if (key := "pretrained_cfg") in values and key in published:
    kept[key] = {**values[key], **published[key]}
  return kept


def _files(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
  """Returns {file: arrays in it}; an array larger than `most` has its own."""
  shards: list[list[str]] = [[]]
  size = 0
  for name, num_bytes in sizes.items():
    if most and shards[-1] and size + num_bytes > most:
      shards.append([])
      size = 0
    shards[-1].append(name)
    size += num_bytes
  if len(shards) == 1:
    return {safetensors_files.MODEL: shards[0]}
  N = len(shards)
  return {
    f"model-{i:05}-of-{N:05}.safetensors": shard
    for i, shard in enumerate(shards, 1)
  }


def _built(
  read: Callable[..., Any], tensor: Tensor, full_names: Mapping[str, str]
) -> np.ndarray:
  slices = [(full_names[name], index) for name, index in tensor.parts]
  value = tensor.build(list(read(slices)))
  if tuple(value.shape) != tuple(tensor.shape):
    raise ValueError(
      f"{tensor.name}: expected shape {tensor.shape}, got {value.shape}"
    )
  return value
