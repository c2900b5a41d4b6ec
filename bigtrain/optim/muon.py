"""Muon: momentum, made orthogonal by Newton-Schulz iterations.

It computes the same numbers as optax.contrib.muon, whose iterations it calls.
Only the layout differs. If a matrix were split over devices by rows or columns,
each iteration would need a sum over the devices, and each device would multiply
whole square matrices. Instead, matrices of one shape, of all layers and
experts, form a stack; the stack is split over all devices, each of which makes
whole matrices orthogonal; and the results go back to the parameters' layout.
That is the layout of Muon's authors (arXiv 2502.16982, section 2.3) without
their gather: a matrix is sent to one device rather than to all of them.

Axes: M matrices of m rows and n columns, with m <= n.
"""

import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from bigtrain.arrays import trees
from bigtrain.arrays.types import Params

# {name of a matrix, or stack of them: its input and output dimensions}.
Matrices = Mapping[str, optax.contrib.MuonDimensionNumbers]

# Coefficients of the iterations, of Keller Jordan's Muon and of Dion
# (arXiv 2504.05295).
_STANDARD = (3.4445, -4.7750, 2.0315)
_COEFFICIENTS = {
  "standard": _STANDARD,
  "dion": (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
  ),
}

# Elements of the matrices that a device iterates on at a time: 64 MiB in
# float32. Larger stacks take several rounds, which bounds the memory.
_MAX_ELEMENTS = 2**24


def muon(
  learning_rate: Any,
  ns_coeffs: Any = _STANDARD,
  ns_steps: int = 5,
  beta: float = 0.95,
  eps: float = 1e-8,
  weight_decay: float = 0.0,
  weight_decay_mask: Any = None,
  mu_dtype: Any = None,
  *,
  nesterov: bool = True,
  adaptive: bool = False,
  preconditioning: str = "frobenius",
  adam_b1: float = 0.9,
  adam_b2: float = 0.999,
  adam_eps_root: float = 0.0,
  adam_weight_decay: float = 0.0,
  adam_learning_rate: Any = None,
  muon_weight_dimension_numbers: Matrices | None = None,
  consistent_rms: float | None = None,
) -> optax.GradientTransformation:
  """Muon for matrices, Adam for the rest; arguments of optax.contrib.muon.

  Args:
    ns_coeffs: also "standard" or "dion".
    adaptive: whether each matrix is scaled by its dual norm.
    muon_weight_dimension_numbers: matrices by name; by default all parameters
      of two dimensions.
    consistent_rms: root mean square of updates; about 0.2 with Adam.
  """
  if isinstance(ns_coeffs, str):
    if ns_coeffs not in _COEFFICIENTS:
      raise ValueError(f"unknown ns_coeffs {ns_coeffs!r}")
    ns_coeffs = _COEFFICIENTS[ns_coeffs]
  iterate = functools.partial(
    optax.contrib.scale_by_muon,
    ns_coeffs=ns_coeffs,
    ns_steps=ns_steps,
    eps=eps,
    adaptive=adaptive,
    preconditioning=preconditioning,
  )

  def matrices(params: Params) -> Matrices:
    if muon_weight_dimension_numbers is not None:
      return muon_weight_dimension_numbers
    named = trees.flatten_with_names(params)
    plain = optax.contrib.MuonDimensionNumbers()
    return {name: plain for name, x in named if x.ndim == 2}

  def labels(params: Params) -> Any:
    own = matrices(params)
    return trees.map_with_names(
      lambda name, _: "muon" if name in own else "adam", params
    )

  return optax.partition(
    {
      "muon": optax.chain(
        _scale_by_muon(
          iterate, matrices, beta, nesterov, mu_dtype, consistent_rms
        ),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
      ),
      "adam": optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        weight_decay=adam_weight_decay,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
      ),
    },
    labels,
  )


def _scale_by_muon(
  iterate: Callable[..., optax.GradientTransformation],
  matrices: Callable[[Params], Matrices],
  beta: float,
  nesterov: bool,
  mu_dtype: Any,
  consistent_rms: float | None,
) -> optax.GradientTransformation:
  """Orthogonal momentum, of a size that depends on the matrices' shapes.

  Its state is as in optax.contrib.scale_by_muon.
  """
  init = iterate(mu_dtype=mu_dtype).init
  # Without momentum, it only makes its gradient orthogonal.
  alone = iterate(beta=0.0, nesterov=False)

  def update(
    grads: Params, state: Any, params: Any = None
  ) -> tuple[Params, Any]:
    del params
    count = optax.safe_increment(state.count)
    mu = optax.tree.update_moment(grads, state.mu, beta, 1)
    if nesterov:
      ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
      now = optax.tree.bias_correction(grads, beta, count)
      direction = jax.tree.map(
        lambda m, g: beta * m + (1 - beta) * g, ahead, now
      )
    else:
      direction = optax.tree.bias_correction(mu, beta, count)

    def orthogonal(x_mn: jax.Array) -> jax.Array:
      zeros = jnp.zeros_like(x_mn)
      own = optax.contrib.MuonState(
        jnp.zeros((), jnp.int32), zeros, state.ns_coeffs
      )
      return alone.update(x_mn, own)[0]

    own_matrices = matrices(grads)
    flat = dict(trees.flatten_with_names(direction))
    results = by_matrix(orthogonal, flat, own_matrices)

    def scaled(name: str, x: jax.Array, g: jax.Array) -> jax.Array:
      shape = _Shape.of(g.shape, own_matrices[name])
      return results[name] * shape.scale(consistent_rms)

    updates = trees.map_with_names(scaled, direction, grads)
    mu = optax.tree.cast(mu, mu_dtype)
    return updates, optax.contrib.MuonState(count, mu, state.ns_coeffs)

  return optax.GradientTransformation(init, update)


class _Shape(NamedTuple):
  """The dimensions of an array that is a stack of matrices."""

  shape: tuple[int, ...]
  stack: tuple[int, ...]  # Dimensions of layers, experts and the like.
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]

  @classmethod
  def of(cls, shape: Sequence[int], dims: Any) -> "_Shape":
    def numbers(axes: Any) -> tuple[int, ...]:
      axes = axes if isinstance(axes, list | tuple) else (axes,)
      return tuple(axis % len(shape) for axis in axes)

    inputs, outputs = numbers(dims.reduction_axis), numbers(dims.output_axis)
    if {*inputs} & {*outputs}:
      raise ValueError(f"{dims}: inputs and outputs are not disjoint")
    others = {*range(len(shape))} - {*inputs, *outputs}
    return cls(tuple(shape), tuple(sorted(others)), inputs, outputs)

  @property
  def fans(self) -> tuple[int, int]:
    """Numbers of inputs and outputs of a matrix."""
    return self._size(self.inputs), self._size(self.outputs)

  @property
  def number(self) -> int:
    return self._size(self.stack)

  def _size(self, dims: tuple[int, ...]) -> int:
    return math.prod(self.shape[dim] for dim in dims)

  def scale(self, consistent_rms: float | None) -> float:
    """Factor of the matrices, from their shape.

    With `consistent_rms`, every orthogonal matrix has the same root mean square
    (arXiv 2502.16982, section 2.2). By default, matrices with more outputs than
    inputs map vectors to vectors of the same root mean square.
    """
    fan_in, fan_out = self.fans
    if consistent_rms is not None:
      return math.sqrt(max(fan_in, fan_out)) * consistent_rms
    return math.sqrt(max(1, fan_out / fan_in))

  @property
  def _order(self) -> tuple[int, ...]:
    """The order of dimensions in a stack [M, m, n], before they are joined."""
    fan_in, fan_out = self.fans
    if fan_in > fan_out:  # The iterations commute with a transposition.
      return (*self.stack, *self.outputs, *self.inputs)
    return (*self.stack, *self.inputs, *self.outputs)

  def folded(self, x: jax.Array) -> jax.Array:
    """The array as a stack [M, m, n]."""
    m, n = sorted(self.fans)
    return x.transpose(self._order).reshape(self.number, m, n)

  def unfolded(self, x_Mmn: jax.Array) -> jax.Array:
    order = self._order
    x = x_Mmn.reshape([self.shape[dim] for dim in order])
    return x.transpose([order.index(dim) for dim in range(len(order))])


def by_matrix(
  fn: Callable[[jax.Array], jax.Array],
  arrays: Mapping[str, jax.Array],
  matrices: Matrices,
) -> dict[str, jax.Array]:
  """Applies a function of one matrix to all of them, split over all devices.

  Matrices of the same shape are computed together, even if they are in
  different arrays, so that few devices are idle.
  """
  shapes = {n: _Shape.of(x.shape, matrices[n]) for n, x in arrays.items()}
  groups: dict[Any, list[str]] = {}
  for name, shape in shapes.items():
    key = (*sorted(shape.fans), arrays[name].dtype)
    groups.setdefault(key, []).append(name)
  results = {}
  for names in groups.values():
    parts = [shapes[name].folded(arrays[name]) for name in names]
    done_Mmn = _of_stack(fn, jnp.concatenate(parts))
    ends = list(itertools.accumulate(len(part) for part in parts))
    for name, own_Mmn in zip(names, jnp.split(done_Mmn, ends[:-1])):
      results[name] = _laid_out_as(arrays[name], shapes[name].unfolded(own_Mmn))
  return results


def _of_stack(
  fn: Callable[[jax.Array], jax.Array], x_Mmn: jax.Array
) -> jax.Array:
  """Applies a function to each matrix of a stack, in rounds."""
  M, m, n = x_Mmn.shape
  ways, axes = _split(M)
  at_once = ways * max(1, min(_MAX_ELEMENTS // (m * n), math.ceil(M / ways)))
  padded = jnp.pad(x_Mmn, [(0, -M % at_once), (0, 0), (0, 0)])
  rounds = padded.reshape(-1, at_once, m, n)
  layouts = _layouts(axes)
  for spec in layouts:
    rounds = jax.lax.with_sharding_constraint(rounds, spec)
  if len(rounds) == 1:
    done = jax.vmap(fn)(rounds[0])[None]
  else:
    done = jax.lax.map(jax.vmap(fn), rounds)
  for spec in reversed(layouts):
    done = jax.lax.with_sharding_constraint(done, spec)
  return done.reshape(-1, m, n)[:M]


def _layouts(axes: Sequence[str]) -> list[PartitionSpec]:
  """Layouts of [rounds, matrices, m, n], from the parameters' to by matrix.

  Every replica has the parameters, so it selects its matrices without a
  transfer, and only these are sent to whole devices. On the way back, parts of
  matrices are sent first, and only then to the other replicas. XLA finds
  neither by itself.
  """
  if not axes:
    return []
  free = PartitionSpec.UNCONSTRAINED
  copies = [axis for axis in axes if axis == "replica"]
  layouts = [PartitionSpec(None, None, free, free)]
  if copies:
    layouts.append(PartitionSpec(None, "replica", free, free))
  return [*layouts, PartitionSpec(None, tuple(axes), None, None)]


def _split(number: int) -> tuple[int, tuple[str, ...]]:
  """(ways, axes of the mesh) over which a number of matrices is split.

  Minimises the matrices of the busiest device, and then the number of ways.
  """
  mesh = jax.sharding.get_abstract_mesh()
  sizes = {axis: n for axis, n in mesh.shape.items() if n > 1}
  choices = [
    axes
    for length in range(len(sizes) + 1)
    for axes in itertools.combinations(sizes, length)
  ]

  def cost(axes: tuple[str, ...]) -> tuple[int, int]:
    ways = math.prod(sizes[axis] for axis in axes)
    return math.ceil(number / ways), ways

  best = min(choices, key=cost)
  return cost(best)[1], best


def _laid_out_as(like: jax.Array, x: jax.Array) -> jax.Array:
  """Gives x the layout of an array of the same shape.

  jax 0.12 has no function for this; there the layout of x follows from that of
  the parameters, to which it is added.
  """
  name = "jax.experimental.shard_alike"
  is_alone = jax.sharding.get_abstract_mesh().size <= 1
  if is_alone or importlib.util.find_spec(name) is None:
    return x
  return importlib.import_module(name).shard_alike(like, x)[1]
