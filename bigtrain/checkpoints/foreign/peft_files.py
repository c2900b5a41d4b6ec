"""Reads and writes adapters as files of PEFT.

https://github.com/huggingface/peft. A folder has adapter_config.json and
adapter_model.safetensors. Each array's name begins with
base_model.model.<module>, where the module is named as in the model's published
layout:

  .lora_A.weight (rank, inputs), .lora_B.weight (outputs, rank)
  .lora_B.bias (outputs)            with lora_bias
  .lora_magnitude_vector (outputs)  with DoRA
  .lora_embedding_A (rank, tokens), .lora_embedding_B (width, rank)
  .token_adapter.trainable_tokens_delta (tokens, width): embeddings that train
  .weight, .bias                    of modules_to_save, which train in full
  .base_layer.bias                  of a module with an adapter, if biases train

peft_modules.py finds our kernels in each module. On writing, a module of
several kernels gets one adapter. If all kernels have the same A, as they do
when they were read from such a module, the adapter has this A; otherwise its
rank is the sum of their ranks. On reading, each kernel gets its part of the
module's adapter.

Axes: I inputs, O outputs, R rank, E experts.
"""

import collections
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.checkpoints.foreign.peft_modules import (
  EMBEDDING,
  EXPERTS,
  Module,
  Part,
  Published,
)
from bigtrain.config.errors import ConfigError
from bigtrain.files import paths
from bigtrain.models.layers.lora import (
  BIAS,
  FACTORS,
  MAGNITUDE,
  ROWS,
  A,
  B,
  Options,
  adapted_name,
  is_table,
  layer_of,
)

CONFIG, ARRAYS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
# {factor: ending of its array}.
_ENDINGS = {
  A: "lora_A.weight",
  B: "lora_B.weight",
  BIAS: "lora_B.bias",
  MAGNITUDE: "lora_magnitude_vector",
}
_ENDINGS_OF_EMBEDDING = {
  A: "lora_embedding_A",
  B: "lora_embedding_B",
  MAGNITUDE: "lora_magnitude_vector",
}
_ROWS = "token_adapter.trainable_tokens_delta"
_BASE_LAYER = ".base_layer"
HEAD = "lm_head"
# Options of PEFT that change what an adapter computes, and their values that
# this program can read.
_PLAIN: dict[str, Any] = dict(
  peft_type="LORA",
  layer_replication=None,
  use_qalora=None,
  use_bdlora=None,
  alora_invocation_tokens=None,
  arrow_config=None,
  kasa_config=None,
  monteclora_config=None,
  velora_config=None,
)


def is_folder(path: str) -> bool:
  """Whether a folder contains PEFT's adapters."""
  return os.path.isfile(os.path.join(path, CONFIG))


class File(NamedTuple):
  """The contents of a folder; its names lack the prefix `base_model.model.`"""

  folder: str
  config: Mapping[str, Any]
  # {module: {A, B, BIAS or MAGNITUDE: array}}
  factors: Mapping[str, Mapping[str, np.ndarray]]
  rows: Mapping[str, np.ndarray]  # {module: values of its trained tokens}
  in_full: Mapping[str, np.ndarray]  # {name of a published array: array}
  # The weights of modules with an adapter: PEFT adds them to some files,
  # although they are frozen. {name of a published array: array}
  frozen: Mapping[str, np.ndarray]

  def tokens(self, module: str) -> list[int]:
    """Ids of a module's trained tokens."""
    given = self.config.get("trainable_token_indices") or ()
    if not isinstance(given, Mapping):
      return list(given)
    for name, ids in given.items():
      if module == name or module.endswith(f".{name}"):
        return list(ids)
    raise self.error(f"trainable_token_indices={given!r} has no {module!r}.")

  def error(self, text: str) -> ConfigError:
    return ConfigError(f"{self.folder}: {CONFIG}: {text}")


def open_folder(folder: str) -> File:
  """Reads a folder, and refuses methods that this program does not support."""
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
  # Sort the arrays by the endings of their names.
  factors: dict[str, dict[str, np.ndarray]] = {}
  rows, in_full, frozen = {}, {}, {}
  arrays = safetensors_files.read(os.path.join(folder, ARRAYS))
  for full_name, value in arrays.items():
    name = full_name.removeprefix(_PREFIX)
    # Older versions of PEFT add ".weight" to this name.
    name = re.sub(r"(lora_magnitude_vector)\.weight$", r"\1", name)
    module_and_factor = _module_and_factor(name)
    if module_and_factor is not None:
      module, factor = module_and_factor
      factors.setdefault(module, {})[factor] = value
    elif name.endswith(f".{_ROWS}"):
      rows[name.removesuffix(f".{_ROWS}")] = value
    elif name.endswith(f"{_BASE_LAYER}.weight"):
      frozen[name.replace(_BASE_LAYER, "")] = value
    elif "lora_" in name:
      raise ConfigError(
        f"{folder}: {full_name} is not an array of LoRA or DoRA."
      )
    else:  # Among them biases of modules with an adapter.
      in_full[name.replace(_BASE_LAYER, "")] = value
  return File(folder, config, factors, rows, in_full, frozen)


def _module_and_factor(name: str) -> tuple[str, str] | None:
  """Splits the name of an adapter's array: "x.lora_A.weight" is A of x."""
  for endings in (_ENDINGS, _ENDINGS_OF_EMBEDDING):
    for factor, ending in endings.items():
      if name.endswith(f".{ending}"):
        return name.removesuffix(f".{ending}"), factor
  return None


def read(
  file: File, published: Published
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns config.adapters, and the factors of the adapters by name."""
  modules = _by_name_in_file(file, published)
  unknown = set(file.factors) - set(modules)
  if file.config.get("ensure_weight_tying"):
    unknown.discard(HEAD)  # Its adapter is the one of the embeddings.
  if unknown:
    raise ConfigError(
      f"{file.folder}: the model has no module {sorted(unknown)[0]!r} that an "
      "adapter could be for."
    )

  # Split the adapters of the file's modules into those of our kernels:
  # {kernel: {index in its stack: (its factors, scale)}}.
  by_kernel: dict[str, dict[tuple[int, ...], Any]] = {}
  for name, arrays in file.factors.items():
    if name not in modules:
      continue
    module = modules[name]
    rank = len(arrays[A]) // module.num_experts
    scale = _scale(file.config, module.full_name, rank)
    for expert in range(module.num_experts):
      of_expert = _of_expert(module, arrays, expert)
      for part in module.parts_of(expert):
        values = _split(part, of_expert, published)
        by_kernel.setdefault(part.kernel, {})[part.stack] = (values, scale)

  # Join the layers of each kernel. Ranks and alphas may differ by kernel.
  params: dict[str, np.ndarray] = {}
  targets: list[str] = []
  ranks: list[tuple[str, int]] = []
  alphas: list[tuple[str, float]] = []
  for kernel, by_place in by_kernel.items():
    factors, scale = _stacked(kernel, by_place, published)
    for factor, value in factors.items():
      params[f"{layer_of(kernel)}/{factor}"] = value
    rank = factors[A].shape[-1]
    divisor = math.sqrt(rank) if file.config.get("use_rslora") else rank
    regex = re.escape(kernel)
    targets.append(regex)
    ranks.append((regex, rank))
    alphas.append((regex, scale * divisor))

  tokens, rows = _read_rows(file, published)
  options: dict[str, Any] = {
    "targets": targets,
    "dropout": file.config.get("lora_dropout", 0.0),
    "rslora": bool(file.config.get("use_rslora")),
    "dora": bool(file.config.get("use_dora")),
  }
  if any(BIAS in arrays for arrays in file.factors.values()):
    options["lora_bias"] = True
  if tokens:
    options["tokens"] = tokens
  options["rank"] = ranks
  options["alpha"] = alphas
  return options, params | rows


def _by_name_in_file(file: File, published: Published) -> dict[str, Module]:
  """{name of a module in the file: the module}.

  PEFT wraps a module once for each of its adapted parameters, the first one
  innermost. Every wrapper except the outermost adds ".base_layer" to the name.
  """
  targets = file.config.get("target_parameters") or ()
  plain: dict[str, Module] = {}
  of_parameters: dict[str, list[Module]] = {}
  for module in published.modules():
    if module.kind != EXPERTS:
      plain[module.name] = module
      continue
    name = module.full_name
    if any(name == x or name.endswith(f".{x}") for x in targets):
      of_parameters.setdefault(module.name, []).append(module)
  return plain | _wrapped(of_parameters)


def _wrapped(
  of_parameters: Mapping[str, Sequence[Module]],
) -> dict[str, Module]:
  """Names of adapted parameters in the file, given them by their module."""
  result = {}
  for name, modules in of_parameters.items():
    for i, module in enumerate(modules):
      num_wrappers_outside = len(modules) - 1 - i
      result[name + _BASE_LAYER * num_wrappers_outside] = module
  return result


def _read_rows(
  file: File, published: Published
) -> tuple[dict[str, list[int]], dict[str, np.ndarray]]:
  """Returns ({table: ids of its trained tokens}, {parameter: their rows})."""
  tokens, params = {}, {}
  modules = {module.name: module for module in published.modules()}
  for name, values in file.rows.items():
    if name not in modules:
      raise ConfigError(f"{file.folder}: the model has no embeddings {name!r}.")
    (part,) = modules[name].parts
    shape = published.shape(part.kernel)
    size = shape.rows if is_table(part.kernel) else shape.columns
    ids = file.tokens(name)
    if max(ids) >= size:
      raise new_tokens(file, name, max(ids) + 1, size)
    tokens[part.kernel] = ids
    params[f"{layer_of(part.kernel)}/{ROWS}"] = np.asarray(values, np.float32)
  return tokens, params


def new_tokens(file: File, name: str, number: int, size: int) -> ConfigError:
  return ConfigError(
    f"{file.folder}: {name} has at least {number} tokens, more than the "
    f"{size} of the model; expected a model with as many tokens."
  )


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
  """The factor of a module's adapter."""
  alpha = config["lora_alpha"]
  for pattern, value in (config.get("alpha_pattern") or {}).items():
    if re.match(rf"(.*\.)?({pattern})$", module):
      alpha = value
      break
  return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_expert(
  module: Module, arrays: Mapping[str, np.ndarray], expert: int
) -> Mapping[str, np.ndarray]:
  """The adapter of one expert, A (R, I) and B (O, R)."""
  if module.kind != EXPERTS:
    return arrays
  a, b = arrays[A], arrays[B]
  E = module.num_experts
  a_ERI, b_ORE = a.reshape(E, -1, a.shape[-1]), b.reshape(len(b), -1, E)
  return {A: a_ERI[expert], B: b_ORE[..., expert]}


def _split(
  part: Part, arrays: Mapping[str, np.ndarray], published: Published
) -> dict[str, np.ndarray]:
  """A kernel's part of a module's adapter: A (I, R), B (R, O), vectors (O)."""
  shape = published.shape(part.kernel)
  I, O = shape.rows, shape.columns
  a_RI, b_OR = (np.asarray(arrays[x], np.float32) for x in (A, B))
  if a_RI.shape[1] != I or len(part.place) != O or len(b_OR) <= max(part.place):
    raise ConfigError(
      f"{part.kernel}: expected an adapter from {I} to at least {O} numbers, "
      f"got one from {a_RI.shape[1]} to {len(b_OR)}."
    )
  a_IR = np.empty((I, len(a_RI)), np.float32)
  a_IR[part.inputs] = a_RI.T
  b_RO = np.empty((len(a_RI), O), np.float32)
  b_RO[:, part.outputs] = b_OR[part.place].T
  result: dict[str, np.ndarray] = {A: a_IR, B: b_RO}
  for factor in (BIAS, MAGNITUDE):
    if factor in arrays:
      value_O = np.empty(O, np.float32)
      given = np.asarray(arrays[factor], np.float32).reshape(-1)
      value_O[part.outputs] = given[part.place]
      result[factor] = value_O
  return result


def _stacked(
  kernel: str,
  by_place: Mapping[tuple[int, ...], tuple[dict[str, np.ndarray], float]],
  published: Published,
) -> tuple[dict[str, np.ndarray], float]:
  """Stacks the adapters of a kernel; layers without one get zeros.

  Returns: {factor: array}, and the scale of the first layer. B and the biases
    of the other layers are multiplied accordingly.
  """
  shape = published.shape(kernel)
  stack = shape.stack
  rank = max(factors[A].shape[-1] for factors, _ in by_place.values())
  scale = next(iter(by_place.values()))[1]
  names = {name for factors, _ in by_place.values() for name in factors}
  if MAGNITUDE in names and len(by_place) < math.prod(stack):
    raise ConfigError(
      f"{kernel}: DoRA is in some layers only; expected all or none, or a "
      "model with scan=False."
    )
  sizes = {
    A: ((shape.rows, rank), (*shape.inputs, rank)),
    B: ((rank, shape.columns), (rank, *shape.outputs)),
    BIAS: ((shape.columns,), shape.outputs),
    MAGNITUDE: ((shape.columns,), shape.outputs),
  }
  result: dict[str, np.ndarray] = {}
  for name in names:
    flat, whole = sizes[name]
    value = np.zeros((*stack, *flat), np.float32)
    for place, (factors, own_scale) in by_place.items():
      if name not in factors:
        continue
      own: Any = factors[name]
      if name in (B, BIAS):
        own = own_scale / scale * own
      value[place][tuple(map(slice, own.shape))] = own
    result[name] = value.reshape(*stack, *whole)
  return result, scale


class Run(NamedTuple):
  """A trained run that is written as PEFT's files."""

  params: Mapping[str, np.ndarray]  # Factors, and what trained in full.
  options: Options  # config.adapters.
  published: Published
  config: Mapping[str, Any]  # Entries of adapter_config.json of the model.
  tied_head: bool = False  # Whether the head is the table of embeddings.


def write(folder: str, run: Run) -> int:
  """Writes a run's adapters; returns the number of arrays."""
  arrays: dict[str, np.ndarray] = {}
  unwritten = set(run.params)
  modules = [module for module in run.published.modules() if not module.is_old]

  # The adapters. A module may consist of several of our kernels.
  ranks: dict[str, int] = {}  # By full name of the adapted module.
  alphas: dict[str, float] = {}
  for name, module in _adapted_modules(run, modules).items():
    adapted = _adapted(run, module)
    for part in adapted:
      for factor in FACTORS:
        if factor != ROWS:
          unwritten.discard(f"{layer_of(part.kernel)}/{factor}")
    values, rank, scale = _joined(run, module, adapted)
    is_embedding = module.kind == EMBEDDING
    endings = _ENDINGS_OF_EMBEDDING if is_embedding else _ENDINGS
    for factor, ending in endings.items():
      if factor in values:
        arrays[f"{name}.{ending}"] = values[factor]
    if is_embedding and run.tied_head:
      arrays[f"{HEAD}.lora_A.weight"] = values[B].T
      arrays[f"{HEAD}.lora_B.weight"] = values[A].T
    ranks[module.full_name] = rank
    divisor = math.sqrt(rank) if run.options.rslora else rank
    alphas[module.full_name] = scale * divisor
  content = _config(ranks, alphas, modules, run.options)

  # What was trained without adapters: rows of tables, modules and biases.
  content |= _write_rows(run, modules, arrays, unwritten)
  adapted_names = {x.name for x in modules if x.full_name in ranks}
  content |= _write_in_full(run, modules, arrays, unwritten, adapted_names)
  if run.tied_head and any(is_table(name) for name in _trained(run)):
    content["ensure_weight_tying"] = True
  if unwritten:
    raise ConfigError(
      f"--format=peft: PEFT's files have no place for {sorted(unwritten)[0]}; "
      "--format=hf exports the merged model."
    )
  if not ranks:
    raise ConfigError(
      "--format=peft: PEFT's files need an adapter, config.adapters.targets; "
      "--format=hf exports the model."
    )
  _check(content)
  _write_files(folder, arrays, {**content, **run.config})
  return len(arrays)


def _trained(run: Run) -> set[str]:
  """Tables and kernels that have an adapter or train in full."""
  result = set()
  for name in run.params:
    layer, _, last = name.rpartition("/")
    if last != ROWS:
      result.add(adapted_name(layer) if last in FACTORS else name)
  return result


def _write_files(
  folder: str, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> None:
  os.makedirs(folder, exist_ok=True)
  arrays = {
    _PREFIX + name: np.ascontiguousarray(x) for name, x in arrays.items()
  }
  specs = {n: (x.shape, str(x.dtype)) for n, x in arrays.items()}
  with paths.replacing(os.path.join(folder, ARRAYS), "wb") as file:
    in_order = iter(arrays.values())
    safetensors_files.write(file.name, specs, in_order, {"format": "pt"})
  with paths.replacing(os.path.join(folder, CONFIG)) as file:
    json.dump(config, file, indent=2)


def _check(content: Mapping[str, Any]) -> None:
  """Refuses what PEFT cannot compute together."""
  for name, key in (("use_dora", "dora"), ("lora_bias", "lora_bias")):
    if content["target_parameters"] and content[name]:
      raise ConfigError(
        f"--format=peft: config.adapters.{key}: expected False for "
        f"{content['target_parameters'][0]}, an adapter of experts or routers; "
        "--format=hf exports the merged model."
      )


def _adapted_modules(run: Run, modules: Sequence[Module]) -> dict[str, Module]:
  """{name in the file: module} of the modules with an adapter."""
  plain: dict[str, Module] = {}
  of_parameters: dict[str, list[Module]] = {}
  for module in modules:
    if not _adapted(run, module):
      continue
    if module.kind == EXPERTS:
      of_parameters.setdefault(module.name, []).append(module)
    else:
      plain[module.name] = module
  return plain | _wrapped(of_parameters)


def _adapted(run: Run, module: Module) -> list[Part]:
  """The parts of a module that have an adapter."""
  return [
    part
    for part in module.parts
    if f"{layer_of(part.kernel)}/{A}" in run.params
  ]


def _joined(
  run: Run, module: Module, adapted: Sequence[Part]
) -> tuple[dict[str, np.ndarray], int, float]:
  """Joins the adapters of a module; returns (its factors, rank, scale).

  The files have one scale per module, for which we use that of the first part.
  B of the other parts is multiplied to make up for it.
  """
  if run.options.dora and len(adapted) < len(module.parts):
    raise ConfigError(
      f"{module.name}: it joins several kernels, and only some of them have "
      "an adapter, which PEFT's DoRA cannot express."
    )
  scales = [run.options.scale(part.kernel) for part in adapted]
  kernels = {part.kernel for part in adapted}
  num_outputs = sum(len(part.place) for part in module.parts)
  # The factors of each part, by expert; a plain module counts as one expert.
  experts = []
  for expert in range(module.num_experts):
    parts = [part for part in module.parts_of(expert) if part.kernel in kernels]
    experts.append([_factors(run, part) for part in parts])
  shares = True  # Whether all parts have the same A, in every expert.
  for of_expert in experts:
    first = of_expert[0]
    for factors in of_expert:
      shares = shares and np.array_equal(factors[A], first[A])
  joined = [
    _joined_parts(adapted, of_expert, scales, num_outputs, shares)
    for of_expert in experts
  ]
  rank = len(joined[0][A])
  if module.kind != EXPERTS:
    return joined[0], rank, scales[0]
  a = np.concatenate([factors[A] for factors in joined])
  b_ORE = np.stack([factors[B] for factors in joined], axis=-1)
  values = {A: a, B: b_ORE.reshape(len(b_ORE), -1)}
  return values, rank, scales[0]


def _factors(run: Run, part: Part) -> dict[str, np.ndarray]:
  """A (R, I), B (O, R) and vectors (O) of a part, in the module's order."""
  layer = layer_of(part.kernel)
  values = {}
  for factor in (A, B, BIAS, MAGNITUDE):
    if f"{layer}/{factor}" in run.params:
      value = run.params[f"{layer}/{factor}"][part.stack]
      values[factor] = np.asarray(value, np.float32)
  rank = values[A].shape[-1]
  result = {
    A: values[A].reshape(-1, rank)[part.inputs].T,
    B: values[B].reshape(rank, -1)[:, part.outputs].T,
  }
  for factor in (BIAS, MAGNITUDE):
    if factor in values:
      result[factor] = values[factor].reshape(-1)[part.outputs]
  return result


def _joined_parts(
  parts: Sequence[Part],
  factors: Sequence[Mapping[str, np.ndarray]],
  scales: Sequence[float],
  num_outputs: int,
  shares: bool,
) -> dict[str, np.ndarray]:
  """The factors of a matrix that joins the outputs of several parts.

  Args:
    shares: whether all parts have the same A, which then becomes the matrix's
      A.
  """
  if shares:
    a_RI = factors[0][A]
  else:
    a_RI = np.concatenate([own[A] for own in factors])
  result = {A: a_RI, B: np.zeros((num_outputs, len(a_RI)), np.float32)}
  for factor in (BIAS, MAGNITUDE):
    if factor in factors[0]:
      result[factor] = np.zeros(num_outputs, np.float32)
  # Each part has its rows of B and, unless all share A, also its columns.
  first = 0
  for part, own, scale in zip(parts, factors, scales):
    ratio = scale / scales[0]
    result[B][part.place, first : first + len(own[A])] = ratio * own[B]
    if BIAS in own:
      result[BIAS][part.place] = ratio * own[BIAS]
    if MAGNITUDE in own:
      result[MAGNITUDE][part.place] = own[MAGNITUDE]
    if not shares:
      first += len(own[A])
  return result


def _write_rows(
  run: Run,
  modules: Sequence[Module],
  arrays: dict[str, np.ndarray],
  unwritten: set[str],
) -> dict[str, Any]:
  """Adds the trained rows of tables in which only some tokens were trained."""
  indices = {}
  for module in modules:
    name = f"{layer_of(module.parts[0].kernel)}/{ROWS}"
    if name in run.params:
      arrays[f"{module.name}.{_ROWS}"] = run.params[name]
      indices[_last(module.name)] = [
        *run.options.tokens_of(module.parts[0].kernel)
      ]
      unwritten.discard(name)
  return {"trainable_token_indices": indices or None}


def _write_in_full(
  run: Run,
  modules: Sequence[Module],
  arrays: dict[str, np.ndarray],
  unwritten: set[str],
  adapted: set[str],
) -> dict[str, Any]:
  """Adds whole modules that were trained without adapters, or biases.

  Args:
    adapted: names of the modules with an adapter.
  """
  by_module: dict[str, list[Any]] = {}
  for tensor in run.published.tensors:
    module = run.published.name_of(tensor).rpartition(".")[0]
    by_module.setdefault(module, []).append(tensor)

  def is_trained(tensor: Any) -> bool:
    return all(name in run.params for name, _ in tensor.parts)

  def write(name: str, tensor: Any) -> None:
    parts = [run.params[source][index] for source, index in tensor.parts]
    arrays[name] = np.asarray(tensor.build(parts), np.float32)
    unwritten.difference_update(source for source, _ in tensor.parts)

  whole_modules = []  # All of whose arrays are trained.
  with_bias = []  # The other modules with a bias, and those whose bias trains.
  with_trained_bias = []
  for module, tensors in by_module.items():
    if all(is_trained(tensor) for tensor in tensors):
      whole_modules.append(module)
      for tensor in tensors:
        write(run.published.name_of(tensor), tensor)
      continue
    for tensor in tensors:
      if not tensor.name.endswith(".bias"):
        continue
      with_bias.append(module)
      if is_trained(tensor):
        with_trained_bias.append(module)
        name = run.published.name_of(tensor)
        if module in adapted:
          name = f"{module}{_BASE_LAYER}.bias"
        write(name, tensor)

  embedding = [x.name for x in modules if x.kind == EMBEDDING]
  if run.tied_head and embedding and embedding[0] in whole_modules:
    arrays[f"{HEAD}.weight"] = arrays[f"{embedding[0]}.weight"]
  bias = "none"
  if with_trained_bias:
    of_adapted = {module for module in with_bias if module in adapted}
    bias = "lora_only" if {*with_trained_bias} == of_adapted else "all"
  return {
    "modules_to_save": sorted(map(_short, whole_modules)) or None,
    "bias": bias,
  }


def _last(module: str) -> str:
  return module.rpartition(".")[2]


def _short(module: str) -> str:
  """A name by which PEFT finds one module to save.

  PEFT saves all modules whose names end with it: "norm" would match every norm.
  """
  last = _last(module)
  unique = (HEAD, "score", "classifier", "embed_tokens", "wte")
  return last if last in unique else module


def _config(
  ranks: Mapping[str, int],
  alphas: Mapping[str, float],
  modules: Sequence[Module],
  options: Options,
) -> dict[str, Any]:
  """The contents of adapter_config.json, except modules_to_save and bias."""
  adapted = [module for module in modules if module.full_name in ranks]
  others = [module for module in modules if module.full_name not in ranks]
  rank, alpha = 1, 1.0
  if ranks:
    rank = collections.Counter(ranks.values()).most_common(1)[0][0]
    alpha = collections.Counter(alphas.values()).most_common(1)[0][0]
  parameters = [module for module in adapted if module.parameter]
  return {
    "peft_type": "LORA",
    "base_model_name_or_path": None,
    "inference_mode": True,
    "r": rank,
    "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
    "rank_pattern": {m: r for m, r in ranks.items() if r != rank},
    "alpha_pattern": {m: a for m, a in alphas.items() if a != alpha},
    "target_modules": _names(
      [x.name for x in adapted if not x.parameter], [x.name for x in others], 1
    ),
    "target_parameters": _names(
      [x.full_name for x in parameters], [x.full_name for x in others], 2
    )
    or None,
    # PEFT has no dropout before parameters.
    "lora_dropout": 0.0 if parameters else options.dropout,
    "use_rslora": options.rslora,
    "use_dora": options.dora,
    "lora_bias": options.lora_bias,
    "fan_in_fan_out": False,
  }


def _names(
  targets: Iterable[str], others: Iterable[str], num_words: int
) -> list[str]:
  """Names that PEFT matches with all of `targets` and none of `others`.

  The last words of a name, such as "c_attn", stand for all names with them.
  """

  def end(name: str) -> str:
    return ".".join(name.split(".")[-num_words:])

  ambiguous = {end(name) for name in others}
  return sorted({x if end(x) in ambiguous else end(x) for x in targets})
