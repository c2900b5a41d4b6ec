"""Reads and writes adapters as PEFT's files (https://github.com/huggingface/peft).

A folder has adapter_config.json and adapter_model.safetensors, with the arrays
base_model.model.<module>.lora_A.weight (rank, inputs), .lora_B.weight (outputs,
rank) and .lora_magnitude_vector (outputs). The modules are named as in the
model's published layout.

A module may consist of several kernels of ours, as GPT-2's c_attn does of
query, key and value, and the order of its inputs and outputs may differ. So
`Published` finds the parts of each module. On writing, a module of several
kernels gets one adapter, whose rank is the sum of theirs; on reading, each
kernel gets its part of the module's adapter.

Axes: I inputs, O outputs, R rank.
"""

import collections
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.arrays import dims
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config.errors import ConfigError
from bigtrain.files import paths
from bigtrain.models.layers.lora import FACTORS, MAGNITUDE, A, B, Options, Shape

CONFIG, ARRAYS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_SUFFIXES = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
# Options of PEFT that change what an adapter computes, and their values that
# this program can read.
_PLAIN: dict[str, Any] = dict(
  peft_type="LORA",
  bias="none",
  modules_to_save=None,
  target_parameters=None,
  trainable_token_indices=None,
  layer_replication=None,
  lora_bias=None,
  use_qalora=None,
  alora_invocation_tokens=None,
)


class _Part(NamedTuple):
  """A kernel of ours that is a module, or a part of one."""

  kernel: str
  stack: tuple[int, ...]  # Index among layers and experts.
  inputs: np.ndarray  # Input i of the module is input inputs[i] of the kernel.
  # Output place[i] of the module is output outputs[i] of the kernel.
  place: np.ndarray
  outputs: np.ndarray


class Published(NamedTuple):
  """A model's kernels in its published layout."""

  tensors: Sequence[Any]  # See models/published/tables.py.
  shapes: Mapping[str, Sequence[int]]  # Shapes of our parameters.
  table: dims.Table  # The model's `param_dims`.
  prefix: str = ""  # Put before the names of modules in the layout.

  def modules(self) -> Iterator[tuple[str, list[_Part]]]:
    """Yields (name, parts) of each module that is one matrix."""
    known: dict[Any, list[_Part]] = {}
    for tensor in self.tensors:
      names = [name for name, _ in tensor.parts]
      if len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
        continue
      if not all(name.endswith("/kernel") for name in names):
        continue
      module = self.prefix + tensor.name.removesuffix(".weight")
      # All layers have the same parts, so they are found once.
      key = (re.sub(r"\d+", "#", tensor.name), tuple(tensor.shape))
      if key not in known:
        known[key] = self._parts(tensor)
      parts = []
      for part, (name, index) in zip(known[key], tensor.parts):
        sizes = zip(index, self.shape(name).stack)
        stack = tuple(s.indices(size)[0] for s, size in sizes)
        parts.append(part._replace(kernel=name, stack=stack))
      yield module, parts

  def shape(self, name: str) -> Shape:
    return Shape.of(name, self.shapes[name], self.table)

  def _parts(self, tensor: Any) -> list[_Part]:
    """Finds the inputs and outputs of each kernel in a module.

    The layout can build a module's array from our kernels. Here it builds two
    arrays from kernels whose elements are the numbers of their inputs and of
    their outputs.
    """
    rows, columns = [], []
    starts = []  # (kernel, number of its first output, number of outputs).
    first = 0
    for name, index in tensor.parts:
      shape = [
        len(range(*s.indices(size)))
        for s, size in zip(index, self.shapes[name])
      ]
      I, O = self.shape(name).rows, self.shape(name).columns
      row_IO, column_IO = np.mgrid[:I, first : first + O]
      rows.append(row_IO.reshape(shape))
      columns.append(column_IO.reshape(shape))
      starts.append((name, first, O))
      first += O
    input_OI, output_OI = tensor.build(rows), tensor.build(columns)
    # Some modules are (inputs, outputs).
    if np.ptp(input_OI[0]) == 0 and input_OI.shape[1] > 1:
      input_OI, output_OI = input_OI.T, output_OI.T
    output_O = output_OI[:, 0]
    result = []
    for name, start, O in starts:
      place = np.flatnonzero((output_O >= start) & (output_O < start + O))
      outputs = output_O[place] - start
      result.append(_Part(name, (), input_OI[0], place, outputs))
    return result


def write(
  folder: str,
  params: Mapping[str, np.ndarray],
  options: Options,
  published: Published,
  config: Mapping[str, Any],
) -> int:
  """Writes adapters; returns the number of arrays.

  Args:
    folder: where to write.
    params: the adapters' parameters, by name.
    options: config.adapters.
    published: the model's published layout.
    config: entries of adapter_config.json that depend on the model.
  """
  arrays: dict[str, np.ndarray] = {}
  ranks: dict[str, int] = {}
  alphas: dict[str, float] = {}
  unwritten = set(params)
  modules = dict(published.modules())
  for module, parts in modules.items():
    adapted = [
      _Adapted(part, _root(part.kernel), options.scale(part.kernel))
      for part in parts
      if _root(part.kernel) + A in params
    ]
    if not adapted:
      continue
    if options.dora and len(adapted) < len(parts):
      raise ConfigError(
        f"{module}: it joins several kernels, of which only some have an "
        "adapter; PEFT's DoRA cannot express it."
      )
    unwritten -= {one.root + name for one in adapted for name in FACTORS}
    num_outputs = sum(len(part.place) for part in parts)
    values, rank = _joined(adapted, params, num_outputs)
    for suffix, value in zip(_SUFFIXES, values):
      if value is not None:
        arrays[f"{_PREFIX}{module}.{suffix}"] = value
    scale = adapted[0].scale
    ranks[module] = rank
    alphas[module] = scale * (math.sqrt(rank) if options.rslora else rank)
  if unwritten:
    raise ConfigError(
      f"--format=peft: PEFT's files have no place for {sorted(unwritten)[0]}; "
      "--layout exports the merged model."
    )
  content = _config(ranks, alphas, list(modules), options) | dict(config)
  os.makedirs(folder, exist_ok=True)
  specs = {n: (x.shape, str(x.dtype)) for n, x in arrays.items()}
  with paths.replacing(os.path.join(folder, ARRAYS), "wb") as file:
    in_order = iter(arrays.values())
    safetensors_files.write(file.name, specs, in_order, {"format": "pt"})
  with paths.replacing(os.path.join(folder, CONFIG)) as file:
    json.dump(content, file, indent=2)
  return len(arrays)


class _Adapted(NamedTuple):
  """A part of a module that has an adapter."""

  part: _Part
  root: str  # Name of its adapter's parameters, without their last parts.
  scale: float


def _root(kernel: str) -> str:
  return kernel.removesuffix("kernel")


def _joined(
  adapted: Sequence[_Adapted],
  params: Mapping[str, np.ndarray],
  num_outputs: int,
) -> tuple[list[np.ndarray | None], int]:
  """Joins the adapters of a module: ([A, B, magnitude or None], rank).

  The files have one scale for a module, the first part's. The others'
  matrices B are multiplied accordingly.
  """
  rows = []
  scale = adapted[0].scale
  ranks = [params[one.root + A].shape[-1] for one in adapted]
  b_OR = np.zeros((num_outputs, sum(ranks)), np.float32)
  first = 0
  magnitude = None
  for (part, root, own_scale), rank in zip(adapted, ranks):
    a_IR = np.asarray(params[root + A][part.stack], np.float32)
    a_IR = a_IR.reshape(-1, rank)
    b_RO = np.asarray(params[root + B][part.stack], np.float32)
    b_RO = b_RO.reshape(rank, -1)
    rows.append(a_IR[part.inputs].T)
    ratio = own_scale / scale
    b_OR[part.place, first : first + rank] = ratio * b_RO[:, part.outputs].T
    first += rank
    if root + MAGNITUDE in params:
      if magnitude is None:
        magnitude = np.zeros(num_outputs, np.float32)
      value_O = np.asarray(params[root + MAGNITUDE][part.stack]).reshape(-1)
      magnitude[part.place] = value_O[part.outputs]
  return [np.concatenate(rows), b_OR, magnitude], sum(ranks)


def _config(
  ranks: Mapping[str, int],
  alphas: Mapping[str, float],
  modules: Sequence[str],
  options: Options,
) -> dict[str, Any]:
  """The content of adapter_config.json."""

  def last(module: str) -> str:
    return module.rpartition(".")[2]

  # A name such as "c_attn" stands for all modules with this last part. It is a
  # target if all of them have adapters; other modules have their whole names.
  incomplete = {last(module) for module in modules if module not in ranks}
  targets = {
    module if last(module) in incomplete else last(module) for module in ranks
  }
  rank = collections.Counter(ranks.values()).most_common(1)[0][0]
  alpha = collections.Counter(alphas.values()).most_common(1)[0][0]
  return {
    "peft_type": "LORA",
    "base_model_name_or_path": None,
    "inference_mode": True,
    "r": rank,
    "lora_alpha": alpha,
    "rank_pattern": {m: r for m, r in ranks.items() if r != rank},
    "alpha_pattern": {m: a for m, a in alphas.items() if a != alpha},
    "target_modules": sorted(targets),
    "lora_dropout": options.dropout,
    "use_rslora": options.rslora,
    "use_dora": options.dora,
    "bias": "none",
    "fan_in_fan_out": False,
    "modules_to_save": None,
  }


def is_folder(path: str) -> bool:
  """Whether a folder has PEFT's adapters."""
  return os.path.isfile(os.path.join(path, CONFIG))


def read(
  folder: str, published: Published
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Reads a folder; returns config.adapters, and its parameters by name."""
  with open(os.path.join(folder, CONFIG)) as file:
    config = json.load(file)
  for name, value in _PLAIN.items():
    given = config.get(name) or None
    if given not in (value, None):
      raise ConfigError(
        f"{folder}: {CONFIG} has {name}={given!r}; expected {value!r}."
      )
  init = config.get("init_lora_weights")
  if isinstance(init, str) and init not in ("gaussian", "eva", "orthogonal"):
    raise ConfigError(
      f"{folder}: {CONFIG} has init_lora_weights={init!r}, with which PEFT "
      "changes the base; its save_pretrained can convert such adapters."
    )
  file_arrays = _file_arrays(folder)
  modules = dict(published.modules())
  unknown = set(file_arrays) - set(modules)
  if unknown:
    raise ConfigError(
      f"{folder}: the model has no module {sorted(unknown)[0]!r} that an "
      f"adapter could be for."
    )
  # {kernel: {index in its stack: (A, B, magnitude, scale)}}
  by_kernel: dict[str, dict[tuple[int, ...], Any]] = {}
  for module, of_module in file_arrays.items():
    scale = _scale(config, module, len(of_module[_SUFFIXES[0]]))
    for part in modules[module]:
      values = _split(part, of_module, published)
      by_kernel.setdefault(part.kernel, {})[part.stack] = (*values, scale)
  params: dict[str, np.ndarray] = {}
  rules: dict[str, list[tuple[str, Any]]] = {"rank": [], "alpha": []}
  for kernel, by_place in by_kernel.items():
    factors, scale = _stacked(kernel, by_place, published)
    params |= {_root(kernel) + name: x for name, x in factors.items()}
    rank = factors[A].shape[-1]
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    regex = re.escape(kernel)
    rules["rank"].append((regex, rank))
    rules["alpha"].append((regex, scale * divisor))
  options = {
    "targets": [regex for regex, _ in rules["rank"]],
    "dropout": config.get("lora_dropout", 0.0),
    "rslora": bool(config.get("use_rslora")),
    "dora": bool(config.get("use_dora")),
    **rules,
  }
  return options, params


def _file_arrays(folder: str) -> dict[str, dict[str, np.ndarray]]:
  """{module: {one of _SUFFIXES: array}}."""
  result: dict[str, dict[str, np.ndarray]] = {}
  arrays = safetensors_files.read(os.path.join(folder, ARRAYS))
  for name, value in arrays.items():
    if ".base_layer." in name:  # A head, which PEFT adds although it is frozen.
      continue
    short = name.removeprefix(_PREFIX).removesuffix(".weight")
    for suffix in _SUFFIXES:
      end = "." + suffix.removesuffix(".weight")
      if short.endswith(end):
        result.setdefault(short.removesuffix(end), {})[suffix] = value
        break
    else:
      raise ConfigError(f"{folder}: {name} is not an array of LoRA or DoRA.")
  return result


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
  """The factor of a module's adapter."""
  alpha = config["lora_alpha"]
  for pattern, value in (config.get("alpha_pattern") or {}).items():
    if re.match(rf"(.*\.)?({pattern})$", module):
      alpha = value
      break
  return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _split(
  part: _Part, arrays: Mapping[str, np.ndarray], published: Published
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """A kernel's part (A, B, magnitude) of a module's adapter."""
  shape = published.shape(part.kernel)
  I, O = shape.rows, shape.columns
  a_RI, b_OR = (np.asarray(arrays[s], np.float32) for s in _SUFFIXES[:2])
  a_IR = np.empty((I, len(a_RI)), np.float32)
  a_IR[part.inputs] = a_RI.T
  b_RO = np.empty((len(a_RI), O), np.float32)
  b_RO[:, part.outputs] = b_OR[part.place].T
  magnitude_O = None
  if _SUFFIXES[2] in arrays:
    magnitude_O = np.empty(O, np.float32)
    given = np.asarray(arrays[_SUFFIXES[2]], np.float32).reshape(-1)
    magnitude_O[part.outputs] = given[part.place]
  return a_IR, b_RO, magnitude_O


def _stacked(
  kernel: str, by_place: Mapping[tuple[int, ...], Any], published: Published
) -> tuple[dict[str, np.ndarray], float]:
  """Stacks the adapters of a kernel; layers without one get zeros.

  Returns: {name of a factor: array}, and the scale of the first layer.
    The others' matrices B are multiplied accordingly.
  """
  shape = published.shape(kernel)
  stack = shape.stack
  rank = max(a.shape[-1] for a, _, _, _ in by_place.values())
  scale = next(iter(by_place.values()))[3]
  a = np.zeros((*stack, shape.rows, rank), np.float32)
  b = np.zeros((*stack, rank, shape.columns), np.float32)
  magnitude = np.zeros((*stack, shape.columns), np.float32)
  has_magnitude = [m is not None for _, _, m, _ in by_place.values()]
  if any(has_magnitude) and len(by_place) < math.prod(stack):
    raise ConfigError(
      f"{kernel}: DoRA is in some layers only; expected all or none, or a "
      "model with scan=False."
    )
  for place, (a_IR, b_RO, magnitude_O, own_scale) in by_place.items():
    own = a_IR.shape[-1]
    a[place][:, :own] = a_IR
    b[place][:own] = own_scale / scale * b_RO
    if magnitude_O is not None:
      magnitude[place] = magnitude_O
  factors = {
    A: a.reshape(*stack, *shape.inputs, rank),
    B: b.reshape(*stack, rank, *shape.outputs),
  }
  if any(has_magnitude):
    factors[MAGNITUDE] = magnitude.reshape(*stack, *shape.outputs)
  return factors, scale
