"""Adapters after training: with their base or another one, merged, exported.

Tools and inference use these functions on checkpoints of runs with
config.adapters (see frozen_base.py for the run itself). PEFT's format is in
checkpoints/foreign/peft_files.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import dims, trees
from bigtrain.arrays.types import Params
from bigtrain.checkpoints import changes
from bigtrain.checkpoints.foreign import peft_files
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
  """{name: array} of a plain model that computes the same."""
  model = Adapted.of(config).model
  params = traverse_util.flatten_dict(variables["params"], sep="/")
  base = lora.unquantized(variables["base"])
  result = dict(traverse_util.flatten_dict(base, sep="/"))
  for name, x in params.items():
    layer, _, last = name.rpartition("/")
    if last == lora.A:
      factors = {
        factor: params[f"{layer}/{factor}"]
        for factor in lora.FACTORS
        if f"{layer}/{factor}" in params
      }
      kernel = f"{layer}/kernel"
      scale = model.adapters.options.scale(kernel)
      result[kernel] = lora.merged(result[kernel], factors, scale)
    elif last not in lora.FACTORS:  # It trained in full.
      result[name] = x
  return result


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
  """The config of the merged model, which has no adapters and no base."""
  left_out = ("adapters", "model_init")
  return {key: x for key, x in config.items() if key not in left_out}


def published(
  config: Mapping[str, Any], shapes: Mapping[str, Any]
) -> peft_files.Published:
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
  return peft_files.Published(tensors, shapes, adapted.table, prefix)


def read_peft(
  folder: str, config: Mapping[str, Any], base: Params, mesh: Mesh
) -> tuple[dict[str, Any], Params]:
  """Returns (the config with adapters of PEFT's files, their parameters)."""
  whole = traverse_util.flatten_dict(lora.unquantized(base), sep="/")
  shapes = {name: tuple(x.shape) for name, x in whole.items()}
  options, params = peft_files.read(folder, published(config, shapes))
  place, _ = sharding.state_shardings(trees.from_flat(params), mesh)
  new = {**plain(config), "adapters": options}
  return new, jax.device_put(trees.from_flat(params), place)


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
  path = source["path"] if isinstance(source, Mapping) else source
  about = {
    "fan_in_fan_out": bool(layout.prefix),  # GPT-2's Conv1D.
    "base_model_name_or_path": path,
  }
  if config["model_name"] == "decoder":
    about["task_type"] = "CAUSAL_LM"
  return peft_files.write(folder, arrays, model.adapters.options, layout, about)
