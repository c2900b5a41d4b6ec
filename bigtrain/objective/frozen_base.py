"""The frozen base of a run with config.adapters; see models/layers/lora.py.

Every start loads it from config.model_init, like a teacher. Checkpoints have
only a digest of its arrays, and refuse another base.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import traverse_util
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.arrays.types import TrainState
from bigtrain.checkpoints import checksums, device_checksums, warm_start
from bigtrain.cluster import process
from bigtrain.config import settings
from bigtrain.models.layers import block_quantization, lora
from bigtrain.models.layers.block_quantization import Quantized

KEY = "config.model_init"


class Loaded(NamedTuple):
  """A base from its source."""

  base: Any
  # {"digest": of its arrays, "arrays": {name: [dtype, shape]}}, as before
  # quantization.
  saved: dict[str, Any]
  others: dict[str, Any]  # Mutable collections, "params" that train in full.


class Base:
  """The base of a run; without config.adapters, `spec` and `saved` are {}."""

  def __init__(
    self, model: Any, spec: Mapping[str, Any], read: Callable[[], Loaded]
  ):
    self._model, self.spec, self._read = model, spec, read
    self._loaded = Loaded({}, {}, {})

  @property
  def saved(self) -> dict[str, Any]:
    return self._loaded.saved

  def load(self) -> dict[str, Any]:
    """Returns {"base": arrays}, or {}."""
    if not self.spec:
      return {}
    self._loaded = self._read()
    return {"base": self._loaded.base}

  def begin(self, state: TrainState) -> None:
    """Adds to a new state what trains in full, and DoRA's norms."""
    others = dict(self._loaded.others)
    params = trees.flatten_with_names(others.pop("params", {}))
    if others:
      state["mutable"] = others
    place = jax.tree.map(lambda x: x.sharding, state["params"])
    flat = dict(trees.flatten_with_names(state["params"])) | dict(params)
    fill = jax.jit(self._model.adapters.with_magnitudes, out_shardings=place)
    state["params"] = fill(trees.from_flat(flat), self._loaded.base)


def from_config(
  config: settings.Config,
  module: Any,
  model: Any,
  variables: Any,  # Of initial.py.
  state_spec: Mapping[str, Any],
  rules: sharding.Rules,
  mesh: Mesh,
) -> Base:
  """Reads config.model_init; without it, draws a base for tests by the seed."""
  if not hasattr(model, "adapters"):
    return Base(model, {}, lambda: Loaded({}, {}, {}))
  source = config.get("model_init")
  if isinstance(source, settings.Config):
    source = config.kwargs("model_init")
  shapes = jax.eval_shape(variables.base)
  spec = sharding.state_spec({"base": shapes}, mesh, rules)
  as_loaded = {"base": lora.unquantized(shapes)}
  like_base = sharding.state_spec(as_loaded, mesh, rules)["base"]
  in_full = lora.in_full(state_spec["params"])
  params = trees.merge(like_base, in_full)
  like = {"params": params, **state_spec.get("mutable", {})}

  def fresh() -> dict[str, Any]:
    others = variables()
    base = lora.unquantized(variables.base())
    params = trees.merge(base, lora.in_full(others.pop("params")))
    return {"params": params, **others}

  def read() -> Loaded:
    place = jax.tree.map(lambda x: x.sharding, spec["base"])
    if source is None:
      base = jax.jit(variables.base, out_shardings=place)()
      named = trees.flatten_with_names(lora.unquantized(base))
      return Loaded(base, about(dict(named)), {})
    shardings = jax.tree.map(lambda x: x.sharding, like)
    init = jax.jit(fresh, out_shardings=shardings)
    return load(source, like, place, init, module, model)

  return Base(model, spec, read)


def load(
  source: Any,
  like: Mapping[str, Any],
  place: Any,
  init: Callable[[], Any],
  module: Any,
  model: Any,
) -> Loaded:
  """Loads a base, and quantizes it array by array.

  Args:
    like: {"params": specs of all arrays but adapters, mutable collections}.
    place: shardings of the base as it is kept.
  """
  read = warm_start.load_variables
  variables = read(source, like, init=init, module=module, key=KEY)
  params = traverse_util.flatten_dict(variables.pop("params"), sep="/")
  place = traverse_util.flatten_dict(place, sep="/")
  base = {name: params.pop(name) for name in place}
  saved = about(base)
  table = module.param_dims(model) if hasattr(module, "param_dims") else {}
  for name, kept in place.items():
    if isinstance(kept, Quantized):
      options = model.adapters.quantization(name, base[name].shape, table)
      fn = jax.jit(
        block_quantization.quantize,
        static_argnames=tuple(options),
        out_shardings=kept,
      )
      base[name] = fn(base[name], **options)
  others = {"params": trees.from_flat(params), **variables}
  return Loaded(trees.from_flat(base), saved, others)


def about(base: Mapping[str, Any]) -> dict[str, Any]:
  """The field `saved` of `Loaded`, for a base {name: array}."""
  named = sorted(base.items())
  arrays = {name: [str(x.dtype), list(x.shape)] for name, x in named}
  return {"digest": _digest(named), "arrays": arrays}


def _digest(named: Sequence[tuple[str, jax.Array]]) -> str:
  """A hash of arrays and their names, however devices share them."""
  by_device = device_checksums.start(named)()
  own = {}
  for name, x in named:
    shards = [s.device for s in x.addressable_shards if s.replica_id == 0]
    own[name] = checksums.add(by_device[name][device] for device in shards)
  parts = process.gather(own)
  result = hashlib.sha256()
  for name, x in named:
    total = checksums.as_text(checksums.add(part[name] for part in parts))
    result.update(f"{name} {x.dtype} {x.shape} {total}\n".encode())
  return result.hexdigest()[:32]
