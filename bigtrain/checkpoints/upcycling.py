"""Sparse upcycling: experts that begin as the MLPs of a dense model.

config.model_init.upcycle loads a dense model's parameters into one with experts
(Komatsuzaki et al., https://arxiv.org/abs/2212.05055). Each expert begins as a
copy of the MLP in its layer, the router is initialised at random, and
everything else is loaded from the file. Experts may get noise or, as in
Drop-Upcycling (https://arxiv.org/abs/2502.19261), new values for some of their
hidden units. These numbers depend neither on the devices nor on the run's seed.

Axes: N stacked layers, E experts, D model width, F hidden width.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bigtrain.config.errors import ConfigError, check_kwargs, check_number

# Arrays of experts, (N, E, D, F) or biases (N, E, F); N is missing in some.
_EXPERTS = re.compile(r"((?:.*/)?)moe/(up|gate|down)/(kernel|bias)")
# Other arrays of a layer with experts that a dense layer lacks.
_ROUTER = re.compile(
  r"(.*/)?moe/(router/(kernel|bias)|router_scale|expert_scale|selection_bias)"
)


class Upcycling(NamedTuple):
  """Options of config.model_init.upcycle."""

  # Standard deviation of noise on the experts, as a multiple of the array's.
  noise: float = 0.0
  # Share of each expert's hidden units that are drawn at random instead, with
  # the mean and the deviation of the array.
  reinit_fraction: float = 0.0
  seed: int = 0  # Of both.

  def in_file(self, specs: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The specs {name: spec} of the dense model."""
    result = {
      name: spec
      for name, spec in specs.items()
      if not _EXPERTS.fullmatch(name) and not _ROUTER.fullmatch(name)
    }
    experts = [name for name in specs if _EXPERTS.fullmatch(name)]
    if not experts:
      raise ConfigError(
        f"{key}.upcycle: the model has no experts; expected config.model.moe."
      )
    for name in experts:
      if dense_name(name) in result:
        raise ConfigError(
          f"{key}.upcycle: {name} and {dense_name(name)} would both begin as "
          "the MLP; expected experts in place of an MLP, not beside it."
        )
      shape = [*specs[name].shape]
      del shape[_expert_axis(name, shape)]
      result[dense_name(name)] = jax.ShapeDtypeStruct(
        tuple(shape), specs[name].dtype
      )
    return result

  def experts(self, names: Mapping[str, Any]) -> dict[str, str]:
    """{array of experts: array of the dense model that is copied}."""
    return {n: dense_name(n) for n in names if _EXPERTS.fullmatch(n)}

  def new(self, names: Mapping[str, Any]) -> list[str]:
    """Arrays of the routers, which begin at random."""
    return [name for name in names if _ROUTER.fullmatch(name)]

  def describe(self, num_experts: int) -> str:
    text = f"copied to {num_experts} experts"
    if self.reinit_fraction:
      text += f", {self.reinit_fraction:.0%} of the hidden units drawn anew"
    return text + (f", with noise of {self.noise}" if self.noise else "")


def read(given: Any, key: str) -> Upcycling | None:
  """Reads config.model_init.upcycle: a dict, or True for no options."""
  if given is None or given is False:
    return None
  key = f"{key}.upcycle"
  if given is True:
    return Upcycling()
  if not isinstance(given, Mapping):
    raise ConfigError(f"{key}: expected True or a dict, got {given!r}.")
  check_kwargs(Upcycling, given, key)
  options = Upcycling(**given)
  check_number(f"{key}.noise", options.noise, least=0)
  check_number(
    f"{key}.reinit_fraction", options.reinit_fraction, least=0, most=1
  )
  check_number(f"{key}.seed", options.seed, least=0, whole=True)
  return options


def dense_name(name: str) -> str:
  """The array of the dense model.

  >>> dense_name("blocks/moe/up/kernel")
  'blocks/mlp/up/kernel'
  """
  return _EXPERTS.sub(r"\1mlp/\2/\3", name)


def dense(model: Any) -> Any:
  """The same model with MLPs in place of experts."""
  changes: dict[str, Any] = {"moe": None}
  if getattr(model, "kinds", None):
    changes["kinds"] = {
      name: {key: x for key, x in fields.items() if key != "moe"}
      for name, fields in model.kinds.items()
    }
  return model.clone(**changes)


def describe_start(model: Any, options: Upcycling) -> str:
  reasons = differences(model, options)
  if not reasons:
    return "At step 0 the model computes the same function as the dense one."
  return (
    "At step 0 the model does not compute the function of the dense one: "
    f"{'; '.join(reasons)}."
  )


def differences(model: Any, options: Upcycling) -> list[str]:
  """Reasons why the new model's outputs differ from the dense model's.

  With none they are the same: all experts are equal, and the weights of a
  token's experts add up to 1.
  """
  moe = model.moe
  reasons = []
  if options.noise or options.reinit_fraction:
    reasons.append("the experts are not exact copies")
  adds_up = moe.score == "softmax_of_top" or moe.normalizes()
  if not adds_up or moe.scale != 1:
    reasons.append(
      "the weights of a token's experts do not add up to 1; with "
      "config.model.moe.normalize=True and scale=1 they do"
    )
  if moe.routing == "expert_choice":
    reasons.append("no expert may choose a token")
  elif moe.capacity_factor is not None:
    reasons.append("config.model.moe.capacity_factor may drop tokens")
  if moe.shared_experts or moe.shared_dim:
    reasons.append("the shared experts are new")
  if moe.scaled_router:
    reasons.append("the router is scaled")
  return reasons


class ExpertsOfMlp:
  """Experts that are copies of an MLP's array, computed as they are indexed."""

  def __init__(self, array: Any, name: str, num_experts: int, how: Upcycling):
    match = _EXPERTS.fullmatch(name)
    assert match is not None
    # The chosen hidden units are the same in up, gate and down.
    self._layer_seed = zlib.crc32(match[1].encode())
    self._array_seed = zlib.crc32(name.encode())
    self._array, self._how = array, how
    shape = [*array.shape]
    inner = 2 if match[3] == "kernel" else 1
    self._axis = len(shape) - inner
    # The axis of hidden units in an expert; a bias of `down` has none.
    self._units = {"up": inner - 1, "gate": inner - 1}.get(match[2])
    if match[2] == "down" and inner == 2:
      self._units = 0
    self.shape = (*shape[: self._axis], num_experts, *shape[self._axis :])
    is_wide = array.dtype.itemsize >= 4 or not (how.noise + how.reinit_fraction)
    self.dtype = array.dtype if is_wide else np.dtype(np.float32)

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    whole = [slice(*x.indices(n)) for x, n in zip(index, self.shape)]
    layers, experts = whole[: self._axis], whole[self._axis]
    inner = whole[self._axis + 1 :]
    if not self._how.noise and not self._how.reinit_fraction:
      copy = np.asarray(self._array[(*layers, *inner)])
      number = experts.stop - experts.start
      return np.repeat(np.expand_dims(copy, self._axis), number, self._axis)
    if not layers:
      return self._changed(self._layer(()), 0, experts)[(slice(None), *inner)]
    result = []
    for layer in range(layers[0].start, layers[0].stop):
      mlp = self._layer((slice(layer, layer + 1),))[0]
      result.append(self._changed(mlp, layer, experts)[(slice(None), *inner)])
    return np.stack(result)

  def _layer(self, index: tuple[slice, ...]) -> np.ndarray:
    rest = len(self.shape) - 1 - len(index)
    return np.asarray(self._array[(*index, *[slice(None)] * rest)])

  def _changed(self, mlp: np.ndarray, layer: int, experts: slice) -> np.ndarray:
    """The experts of a layer, with noise and new hidden units."""
    how = self._how
    result = []
    mlp = mlp.astype(self.dtype)
    mean, deviation = mlp.mean(dtype=np.float64), mlp.std(dtype=np.float64)
    for e in range(experts.start, experts.stop):
      own = mlp.astype(np.float64)
      of_array = np.random.default_rng([how.seed, self._array_seed, layer, e])
      if how.noise:
        own += how.noise * deviation * of_array.standard_normal(own.shape)
      if how.reinit_fraction and self._units is not None:
        F = own.shape[self._units]
        of_layer = np.random.default_rng([how.seed, self._layer_seed, layer, e])
        chosen = of_layer.permutation(F)[: round(how.reinit_fraction * F)]
        drawn = mean + deviation * of_array.standard_normal(own.shape)
        units = np.moveaxis(own, self._units, 0)  # A view.
        units[chosen] = np.moveaxis(drawn, self._units, 0)[chosen]
      result.append(own.astype(self.dtype))
    return np.stack(result)


def num_experts(name: str, shape: Sequence[int]) -> int:
  return shape[_expert_axis(name, shape)]


def _expert_axis(name: str, shape: Sequence[int]) -> int:
  return len(shape) - (3 if name.endswith("kernel") else 2)
