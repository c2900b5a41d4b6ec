"""The frozen base of a run with config.adapters; see models/layers/lora.py.

Every start loads the base from config.model_init, like a teacher, and quantizes
it if the config says so. Checkpoints only have a digest of its arrays, so that
a different base is refused. Without config.adapters a run has an empty `Base`.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import traverse_util
from jax.sharding import Mesh

from bigtrain import sharding
from bigtrain.arrays import dims, trees
from bigtrain.arrays.types import TrainState
from bigtrain.checkpoints import checksums, device_checksums, warm_start
from bigtrain.cluster import process
from bigtrain.config import settings
from bigtrain.models.layers import block_quantization, lora
from bigtrain.models.layers.block_quantization import Quantized

KEY = "config.model_init"


class Loaded(NamedTuple):
  """The arrays of a base that has been read, sorted by use."""

  base: Any  # The arrays that stay as they are, perhaps quantized.
  # Goes into checkpoints: {"digest": of the base's arrays before quantization,
  # "arrays": {name: [dtype, shape]}}.
  saved: dict[str, Any]
  # Mutable collections, and as "params" the arrays that train in full.
  others: dict[str, Any]


_NOTHING = Loaded({}, {}, {})


class Base:
  """The base of a run; without config.adapters, `spec` and `saved` are {}."""

  def __init__(
    self,
    model: Any,
    spec: Mapping[str, Any],
    read: Callable[[], Loaded] = lambda: _NOTHING,
  ):
    self.spec = spec  # {"base": specs of its arrays}, or {}.
    self._model = model
    self._read = read
    self._loaded = _NOTHING

  @property
  def saved(self) -> dict[str, Any]:
    """The record of the base in checkpoints; known once the base is loaded."""
    return self._loaded.saved

  def load(self) -> dict[str, Any]:
    """Returns {"base": arrays}, or {}."""
    if not self.spec:
      return {}
    self._loaded = self._read()
    return {"base": self._loaded.base}

  def begin(self, state: TrainState) -> None:
    """Adds values from the base's source to a new state.

    These are the arrays that train in full, mutable collections, the rows of
    trained tokens, and for DoRA the magnitudes, which begin as the norms of the
    base's kernels.
    """
    others = dict(self._loaded.others)
    in_full = dict(trees.flatten_with_names(others.pop("params", {})))
    if others:
      state["mutable"] = others
    shardings = jax.tree.map(lambda x: x.sharding, state["params"])
    params = dict(trees.flatten_with_names(state["params"])) | in_full
    fill = jax.jit(
      self._model.adapters.with_values_of_base, out_shardings=shardings
    )
    state["params"] = fill(trees.from_flat(params), self._loaded.base)


def from_config(
  config: settings.Config,
  module: Any,
  model: Any,
  variables: Any,  # An InitialVariables; inference does without initial.py.
  state_spec: Mapping[str, Any],
  rules: sharding.Rules,
  mesh: Mesh,
) -> Base:
  """Reads config.model_init; without it, draws a base for tests by the seed."""
  if not hasattr(model, "adapters"):
    return Base(model, {})
  source = config.get("model_init")
  if isinstance(source, settings.Config):
    source = config.kwargs("model_init")
  # The base as the run keeps it, perhaps quantized.
  shapes = jax.eval_shape(variables.base)
  spec = sharding.state_spec({"base": shapes}, mesh, rules)
  # All that the source holds: the base before quantization, what trains in
  # full, and mutable collections.
  unquantized = {"base": lora.unquantized(shapes)}
  params = trees.merge(
    sharding.state_spec(unquantized, mesh, rules)["base"],
    lora.in_full(state_spec["params"]),
  )
  like = {"params": params, **state_spec.get("mutable", {})}

  def fresh() -> dict[str, Any]:
    """Initial values of these arrays, for those that the source may lack."""
    others = variables()
    base = lora.unquantized(variables.base())
    params = trees.merge(base, lora.in_full(others.pop("params")))
    return {"params": params, **others}

  def read() -> Loaded:
    base_shardings = jax.tree.map(lambda x: x.sharding, spec["base"])
    if source is None:
      base = jax.jit(variables.base, out_shardings=base_shardings)()
      named = trees.flatten_with_names(lora.unquantized(base))
      return Loaded(base, about(dict(named)), {})
    shardings = jax.tree.map(lambda x: x.sharding, like)
    init = jax.jit(fresh, out_shardings=shardings)
    return load(source, like, base_shardings, init, module, model)

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
    place: shardings of the base in the form in which it is kept.
  """
  variables = warm_start.load_variables(
    source, like, init=init, module=module, key=KEY
  )
  params = traverse_util.flatten_dict(variables.pop("params"), sep="/")
  place = traverse_util.flatten_dict(place, sep="/")
  base = {name: params.pop(name) for name in place}
  saved = about(base)
  table = dims.of_model(module, model)
  for name, layout in place.items():
    if isinstance(layout, Quantized):
      options = model.adapters.quantization(name, base[name].shape, table)
      quantize = jax.jit(
        block_quantization.quantize,
        static_argnames=tuple(options),
        out_shardings=layout,
      )
      base[name] = quantize(base[name], **options)
  # The remaining parameters are trained in full.
  others = {"params": trees.from_flat(params), **variables}
  return Loaded(trees.from_flat(base), saved, others)


def about(base: Mapping[str, Any]) -> dict[str, Any]:
  """The field `saved` of `Loaded`, for a base {name: array}."""
  named = sorted(base.items())
  arrays = {name: [str(x.dtype), list(x.shape)] for name, x in named}
  return {"digest": _digest(named), "arrays": arrays}


def _digest(named: Sequence[tuple[str, jax.Array]]) -> str:
  """A hash of arrays and their names, which does not depend on their layout."""
  by_device = device_checksums.start(named)()
  own = {}  # The sum over this process's shards, each shard counted once.
  for name, x in named:
    devices = [s.device for s in x.addressable_shards if s.replica_id == 0]
    own[name] = checksums.add(by_device[name][device] for device in devices)
  of_processes = process.gather(own)
  result = hashlib.sha256()
  for name, x in named:
    sums = [of_process[name] for of_process in of_processes]
    total = checksums.as_text(checksums.add(sums))
    result.update(f"{name} {x.dtype} {x.shape} {total}\n".encode())
  return result.hexdigest()[:32]
