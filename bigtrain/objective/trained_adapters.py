"""Adapters after training: used with a base, merged into it, or exported.

Tools and inference use these functions on checkpoints of runs with
config.adapters (see frozen_base.py for the run itself). PEFT's format is in
checkpoints/foreign/peft_files.py.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import dims, trees
from bigtrain.arrays.types import Params
from bigtrain.checkpoints import changes
from bigtrain.checkpoints.foreign import peft_files
from bigtrain.checkpoints.foreign.peft_modules import Published
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.models.layers import lora
from bigtrain.objective import building, frozen_base, published_sizes


class Adapted(NamedTuple):
  """A run's config with adapters, and its modules."""

  config: dict[str, Any]
  module: Any
  model: Any

  @classmethod
  def of(cls, config: Mapping[str, Any]) -> "Adapted":
    return cls(dict(config), *building.model(settings.Config(config)))

  @property
  def table(self) -> dims.Table:
    return dims.of_model(self.module, self.model)


def load_base(
  config: Mapping[str, Any],
  saved: Mapping[str, Any],
  params: Params,
  mesh: Mesh,
) -> Params:
  """Loads the base of a checkpoint's adapters from config.model_init.

  Args:
    saved: description of the base in the checkpoint, see frozen_base.Loaded.
    params: the checkpoint's parameters.
  """
  adapted = Adapted.of(config)
  module, model = adapted.module, adapted.model
  source = config.get("model_init")
  if not source or not saved:
    raise ConfigError(
      f"{frozen_base.KEY}: missing; expected the base of the run's adapters."
    )
  specs = {
    name: jax.ShapeDtypeStruct(shape, dtype)
    for name, (dtype, shape) in saved["arrays"].items()
  }
  # As the run kept the base, perhaps quantized.
  stored = {
    name: jax.eval_shape(
      lambda x, name=name: model.adapters.stored(name, x, adapted.table), spec
    )
    for name, spec in specs.items()
  }
  place, _ = sharding.state_shardings(trees.from_flat(stored), mesh)
  in_full = lora.in_full(params)
  like = trees.merge(
    sharding.state_spec(trees.from_flat(specs), mesh),
    jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      in_full,
    ),
  )
  # What trains in full may be missing, and is the checkpoint's.
  init = lambda: {"params": in_full}
  like = {"params": like}
  loaded = frozen_base.load(source, like, place, init, module, model)
  changes.check_base(saved, loaded.saved)
  return loaded.base


def base_of(
  params: Params,
  base: Params,
  own: Mapping[str, Any],
  expected: Mapping[str, Any],
) -> Params:
  """Checks a base; returns the part that does not train with `params`.

  Args:
    own: description of the base in its checkpoint; {} for a plain model.
    expected: the same in the checkpoint of the adapters.
  """
  in_full = set(trees.names(lora.in_full(params)))
  flat = traverse_util.flatten_dict(base, sep="/")
  flat = {name: x for name, x in flat.items() if name not in in_full}
  for name, (_, shape) in expected.get("arrays", {}).items():
    if name in flat and [*lora.unquantized(flat[name]).shape] != [*shape]:
      raise ConfigError(
        f"adapter: expected a base in which {name} has the shape {shape}, got "
        f"{[*lora.unquantized(flat[name]).shape]}."
      )
  if not own and all(hasattr(x, "dtype") for x in flat.values()):
    own = frozen_base.about(flat)
  # The digest depends on the arrays' dtype.
  if expected and own and own["arrays"] == expected["arrays"]:
    changes.check_base(expected, own)
  return trees.from_flat(flat)


def merged(
  config: Mapping[str, Any], variables: Mapping[str, Any]
) -> dict[str, Any]:
  """{name: array} of a model without adapters that computes the same."""
  layers = Adapted.of(config).model.adapters
  params = traverse_util.flatten_dict(variables["params"], sep="/")
  base = lora.unquantized(variables["base"])
  result = dict(traverse_util.flatten_dict(base, sep="/"))
  by_layer: dict[str, dict[str, Any]] = {}
  for name, x in params.items():
    layer, _, last = name.rpartition("/")
    if last in lora.FACTORS:
      by_layer.setdefault(layer, {})[last] = x
    else:  # It trained in full.
      result[name] = x
  for layer, factors in by_layer.items():
    kernel = lora.adapted_name(layer)
    scale = layers.options.scale(kernel) if lora.A in factors else 1.0
    result[kernel] = layers.whole(kernel, result[kernel], factors, scale)
    if lora.BIAS in factors:
      if f"{layer}/bias" not in result:
        raise ConfigError(
          f"config.adapters.lora_bias: {layer!r} has no bias, so its adapter "
          "cannot be merged; --format=peft exports it."
        )
      added = scale * factors[lora.BIAS]
      result[f"{layer}/bias"] = result[f"{layer}/bias"] + added
  return result


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
  """The config of the merged model, which has no adapters and no base."""
  left_out = ("adapters", "model_init")
  return {key: x for key, x in config.items() if key not in left_out}


def published(
  config: Mapping[str, Any], shapes: Mapping[str, Any]
) -> Published:
  """The published layout of a model without adapters."""
  adapted = Adapted.of(plain(config))
  module, model = adapted.module, adapted.model
  if not hasattr(module, "to_published"):
    raise ConfigError(
      f"config.model_name={config['model_name']!r}: PEFT's files have names of "
      "a published layout, and this model has none."
    )
  origin = published_sizes.layout_of(config)
  about, tensors = module.to_published(model, shapes, None, origin)
  prefix = "transformer." if about.get("model_type") == "gpt2" else ""
  return Published(tensors, shapes, adapted.table, prefix)


class Read(NamedTuple):
  """A model with adapters of PEFT's files."""

  config: dict[str, Any]  # With config.adapters.
  params: Params
  base: Params


def read_peft(
  folder: str, config: Mapping[str, Any], base: Params, mesh: Mesh
) -> Read:
  """Reads adapters of PEFT's files for a model with this base.

  They may change the model: with a trained head, a language model becomes a
  classifier, and a head that was tied to the embedding table may be untied.
  """
  file = peft_files.open_folder(folder)
  flat = dict(traverse_util.flatten_dict(base, sep="/"))
  new, flat = _with_head(file, plain(config), flat)
  whole = traverse_util.flatten_dict(
    lora.unquantized(trees.from_flat(flat)), sep="/"
  )
  shapes = {name: tuple(x.shape) for name, x in whole.items()}
  layout = published(new, shapes)
  _check_frozen(file, layout, whole)
  options, params = peft_files.read(file, layout)
  in_full = _read_in_full(file, new, layout, whole)
  if in_full:
    options["train"] = [re.escape(name) for name in in_full]
  flat = {name: x for name, x in flat.items() if name not in in_full}
  params = trees.from_flat({**params, **in_full})
  place, _ = sharding.state_shardings(params, mesh)
  return Read(
    {**new, "adapters": options},
    jax.device_put(params, place),
    trees.from_flat(flat),
  )


def _with_head(
  file: peft_files.File, config: dict[str, Any], base: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The model's config and base, with the head that the adapters are for."""
  if config["model_name"] != "decoder":
    return config, base
  model = dict(config["model"])
  score = file.in_full.get("score.weight")
  if score is not None and "score/kernel" not in base:
    model["num_classes"] = len(score)
    base = {n: x for n, x in base.items() if not n.startswith("head/")}
    shape = (score.shape[1], len(score))
    base["score/kernel"] = np.zeros(shape, score.dtype)  # It is in the file.
    return {**config, "model": model}, base
  tied = "head/kernel" not in base and "score/kernel" not in base
  if tied and _parts_head(file):
    model["tied_head"] = False
    base = {**base, "head/kernel": jnp.transpose(base["token_embedding"])}
  return {**config, "model": model}, base


def _parts_head(file: peft_files.File) -> bool:
  """Whether the adapters untie a tied model: only the head or table has one.

  PEFT keeps the two equal on request, or if only some tokens are trained.
  """
  if file.config.get("ensure_weight_tying"):
    return False
  names = {"lm_head", "model.embed_tokens", "transformer.wte"}
  changed = {*file.factors, *(x.rpartition(".")[0] for x in file.in_full)}
  return bool(changed & names) or "lm_head" in file.rows


def _check_frozen(
  file: peft_files.File, layout: Published, base: Mapping[str, Any]
) -> None:
  """Checks that frozen weights that PEFT has written are those of the base."""
  tensors = {layout.name_of(tensor): tensor for tensor in layout.tensors}
  for name, value in file.frozen.items():
    if name not in tensors:
      continue  # A head that is the table of embeddings.
    own = _built(tensors[name], base)
    if own.shape[0] < value.shape[0]:
      raise peft_files.new_tokens(file, name, len(value), len(own))
    value = np.asarray(value).astype(own.dtype)
    if own.shape != value.shape or not np.array_equal(own, value):
      raise ConfigError(
        f"{file.folder}: {name} differs from the model's; expected the base "
        "with which the adapters were trained."
      )


def _built(tensor: Any, params: Mapping[str, Any]) -> np.ndarray:
  parts = [np.asarray(params[name][index]) for name, index in tensor.parts]
  return tensor.build(parts)


def _read_in_full(
  file: peft_files.File,
  config: Mapping[str, Any],
  layout: Published,
  base: Mapping[str, Any],
) -> dict[str, Any]:
  """The parameters that the file has in full, by name.

  In stacked layers, those that PEFT did not train come from the base.
  """
  given = dict(file.in_full)
  if file.config.get("ensure_weight_tying") and "head/kernel" not in base:
    given.pop("lm_head.weight", None)  # It is the table of embeddings.
  tensors = {layout.name_of(tensor): tensor for tensor in layout.tensors}
  if unknown := sorted(set(given) - set(tensors)):
    raise ConfigError(
      f"{file.folder}: {unknown[0]} is neither an adapter nor an array of the "
      "model."
    )
  touched = {part for name in given for part, _ in tensors[name].parts}
  arrays: dict[str, np.ndarray] = {}
  for full_name, tensor in tensors.items():
    if full_name in given:
      value = given[full_name]
      if tuple(value.shape) != tuple(tensor.shape):
        module = full_name.rpartition(".")[0]
        if value.shape[1:] == tuple(tensor.shape[1:]):
          sizes = len(value), tensor.shape[0]
          raise peft_files.new_tokens(file, module, *sizes)
        raise ConfigError(
          f"{file.folder}: {full_name} has the shape {tuple(value.shape)}; "
          f"expected {tuple(tensor.shape)}."
        )
      arrays[tensor.name] = np.asarray(value, np.float32)
    elif touched & {part for part, _ in tensor.parts}:
      arrays[tensor.name] = np.asarray(_built(tensor, base), np.float32)
  if not arrays:
    return {}
  like = {
    name: jax.ShapeDtypeStruct(x.shape, np.float32) for name, x in base.items()
  }
  converted = Adapted.of(config).module.from_published(arrays, like)
  result = {}
  for name in sorted(touched):
    x = converted[name]
    result[name] = np.asarray(x[(slice(None),) * len(x.shape)])
  return result


def write_peft(
  folder: str,
  config: Mapping[str, Any],
  params: Params,
  saved: Mapping[str, Any],
) -> int:
  """Writes adapters of the `saved` base for PEFT; returns their number."""
  model = Adapted.of(config).model
  flat = traverse_util.flatten_dict(params, sep="/")
  arrays = {name: np.asarray(x) for name, x in flat.items()}
  in_full = traverse_util.flatten_dict(lora.in_full(params), sep="/")
  shapes = {name: tuple(shape) for name, (_, shape) in saved["arrays"].items()}
  shapes |= {name: tuple(x.shape) for name, x in in_full.items()}
  layout = published(config, shapes)
  source = config.get("model_init")
  path = source.get("path", "") if isinstance(source, Mapping) else source
  about = {
    "fan_in_fan_out": bool(layout.prefix),  # GPT-2's Conv1D.
    "base_model_name_or_path": path,
  }
  tied = False
  if config["model_name"] == "decoder":
    classes = model.num_classes is not None
    about["task_type"] = "SEQ_CLS" if classes else "CAUSAL_LM"
    tied = model.tied_head and not classes
  run = peft_files.Run(arrays, model.adapters.options, layout, about, tied)
  return peft_files.write(folder, run)
