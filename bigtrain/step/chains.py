"""Chains: what a traced program does element by element to an array.

A chain has the elementwise operations of a program that share arrays, such as
all that an optimizer does to a parameter, its gradient and its moments. Chains
with the same operations are computed at once, on vectors that have their arrays
end to end; see small_arrays.py.
"""

import collections
import graphlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from bigtrain.step.joined import Joined, Layout, Place, end_to_end, part

# Arrays of 1,024 or more elements may be split over devices, or be in host
# memory (sharding/layouts.py, memory.py). They are never joined, so neither
# choice changes how the others are computed, nor any bit of the results.
MOST_ELEMENTS = 1023

# Operations that compute each element from the operands' elements at the same
# position; operands of the shape () count for all positions.
_ELEMENTWISE = frozenset(
  "abs add add_any and atan2 cbrt ceil clamp convert_element_type copy copy_p "
  "cos cosh div eq erf erfc exp exp2 expm1 floor ge gt integer_pow is_finite "
  "le lgamma log log1p logistic lt max min mul ne neg nextafter not or pow rem "
  "round rsqrt select_n sign sin sinh sqrt square sub tan tanh xor".split()
)


class _Chain:
  """Elementwise operations that share arrays, all of one shape.

  Attributes:
    indices: positions of the operations in their program.
    eqns: the operations.
    arrays: the chain's arrays, in the order in which they appear.
    inputs: those that no operation of the chain computes.
    kind: equal for chains that differ only in arrays and their shape.
  """

  def __init__(self, indices: Sequence[int], eqns: Sequence[Any]):
    self.indices = indices
    self.eqns = eqns
    numbers: dict[Any, int] = {}

    def name(v: Any) -> Any:
      if v.aval.shape == ():
        return v
      return numbers.setdefault(v, len(numbers))

    self.kind = _kind(eqns, name)
    self.arrays = list(numbers)
    made = {v for eqn in eqns for v in eqn.outvars}
    self.inputs = [v for v in self.arrays if v not in made]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the arrays."""
    return tuple(self.arrays[0].aval.shape)


def _kind(eqns: Sequence[Any], name: Callable[[Any], Any]) -> tuple[Any, ...]:
  """What operations do, without shapes; `name` is of a variable."""

  def operand(x: Any) -> Any:
    aval = x.aval
    if isinstance(x, core.Literal):
      return "literal", repr(x.val), str(aval.dtype)
    return name(x), str(aval.dtype), aval.shape == ()

  return tuple(
    (_operation(e), *map(operand, e.invars), "to", *map(name, e.outvars))
    for e in eqns
  )


def _operation(eqn: Any) -> tuple[Any, ...]:
  """What one operation does, without shapes."""
  if eqn.primitive.name == "broadcast_in_dim":  # Of a scalar.
    return ("broadcast_in_dim",)
  if (inner := _inner(eqn)) is None:
    params = sorted((key, repr(value)) for key, value in eqn.params.items())
    return eqn.primitive.name, *params
  numbers: dict[Any, int] = {}
  name = lambda v: numbers.setdefault(v, len(numbers))
  inputs = [(name(v), str(v.aval.dtype)) for v in inner.invars]
  kind = _kind(inner.eqns, name)
  outputs = [
    repr(v.val) if isinstance(v, core.Literal) else name(v)
    for v in inner.outvars
  ]
  return "jit", *inputs, kind, *outputs


def _inner(eqn: Any) -> Any:
  """The jaxpr of a jitted function without constants, or None."""
  closed = eqn.params.get("jaxpr") if eqn.primitive.name == "jit" else None
  return None if closed is None or closed.consts else closed.jaxpr


def _is_elementwise(eqn: Any, shape: tuple[int, ...]) -> bool:
  """Whether an operation is elementwise, on arrays of a shape and scalars."""
  if eqn.effects or any(v.aval.shape != shape for v in eqn.outvars):
    return False
  shapes = {x.aval.shape for x in eqn.invars} - {()}
  if eqn.primitive.name == "broadcast_in_dim":
    return not shapes
  if not shapes <= {shape}:
    return False
  if (inner := _inner(eqn)) is None:
    return eqn.primitive.name in _ELEMENTWISE
  return all(
    _is_elementwise(e, shape) or _is_elementwise(e, ()) for e in inner.eqns
  )


def _chains(jaxpr: Any, joins: Mapping[Any, bool | None]) -> list[_Chain]:
  """The chains that may be joined with others, by the arrays of the state."""
  parents: dict[Any, Any] = {}

  def root(v: Any) -> Any:
    while parents.setdefault(v, v) is not v:
      parents[v] = v = parents[parents[v]]
    return v

  elementwise = []
  for i, eqn in enumerate(jaxpr.eqns):
    first: Any = eqn.outvars[0] if eqn.outvars else None
    shape = first.aval.shape if first is not None else ()
    small = 0 < math.prod(shape) <= MOST_ELEMENTS and shape != ()
    if small and _is_elementwise(eqn, shape):
      elementwise.append(i)
      for x in (*eqn.invars, *eqn.outvars):
        aval: Any = x.aval
        if isinstance(x, core.Var) and aval.shape == shape:
          parents[root(x)] = root(first)
  by_root: dict[Any, list[int]] = collections.defaultdict(list)
  for i in elementwise:
    by_root[root(jaxpr.eqns[i].outvars[0])].append(i)
  chains = [_Chain(m, [jaxpr.eqns[i] for i in m]) for m in by_root.values()]

  def may_join(chain: _Chain) -> bool:
    answers = [joins.get(v) for v in chain.inputs]
    return any(answers) and False not in answers

  return list(filter(may_join, chains))


class _Group:
  """Chains of one kind.

  Attributes:
    chains: the chains.
    starts: where the arrays of each chain start in a joined vector.
    size: number of elements of such a vector.
  """

  def __init__(self, chains: Sequence[_Chain]):
    self.chains = chains
    sizes = [math.prod(chain.shape) for chain in chains]
    self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
    self.size = sum(sizes)


class Plan:
  """A program, with the operations of equal chains merged."""

  def __init__(self, jaxpr: Any, joins: Mapping[Any, bool | None]):
    self.jaxpr = jaxpr
    kinds = collections.defaultdict(list)
    for chain in _chains(jaxpr, joins):
      kinds[chain.kind].append(chain)
    groups = [_Group(chains) for chains in kinds.values() if len(chains) > 1]
    try:
      self._set_order(groups)
    except graphlib.CycleError:  # One chain needs the result of another.
      groups = []
      self._set_order(groups)
    # (group, chain, array) of each array that is part of a vector.
    self.owners = {
      v: (group, i, number)
      for group in groups
      for i, chain in enumerate(group.chains)
      for number, v in enumerate(chain.arrays)
      if v not in chain.inputs
    }

  def _set_order(self, groups: Sequence[_Group]) -> None:
    """Orders the operations: (group, number of its operation) or an eqn."""
    merged: dict[int, tuple[_Group, int]] = {
      i: (group, k)
      for group in groups
      for chain in group.chains
      for k, i in enumerate(chain.indices)
    }
    eqns = self.jaxpr.eqns
    makers = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    sorter: graphlib.TopologicalSorter[Any] = graphlib.TopologicalSorter()
    for i, eqn in enumerate(eqns):
      needs = [
        makers[x] for x in eqn.invars if isinstance(x, core.Var) and x in makers
      ]
      sorter.add(merged.get(i, i), *[merged.get(n, n) for n in needs])
    self.order = list(sorter.static_order())

  def run(self, consts: Sequence[Any]) -> "Values":
    """Computes everything."""
    values = Values(self.owners)
    values.update(zip(self.jaxpr.constvars, consts))
    for node in self.order:
      if isinstance(node, int):
        values.compute(self.jaxpr, self.jaxpr.eqns[node])
      else:
        values.compute_joined(*node)
    return values


class Values(dict[Any, Any]):
  """The value of each variable; parts of vectors are cut when asked for."""

  def __init__(self, owners: Mapping[Any, tuple[_Group, int, int]]):
    super().__init__()
    self._owners = owners
    self._vectors: dict[tuple[int, int], Any] = {}  # By group's id and array.

  def __missing__(self, v: Any) -> Any:
    group, i, number = self._owners[v]
    vector = self._vectors[id(group), number]
    self[v] = part(vector, group.starts[i], group.chains[i].shape)
    return self[v]

  def compute(self, jaxpr: Any, eqn: Any) -> None:
    """Computes an operation that is not merged."""
    inputs = list(
      dict.fromkeys(x for x in eqn.invars if isinstance(x, core.Var))
    )
    program = jaxpr.replace(
      constvars=[],
      invars=inputs,
      eqns=[eqn],
      outvars=list(eqn.outvars),
      debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    call = core.jaxpr_as_fun(core.ClosedJaxpr(program, ()))
    self.update(zip(eqn.outvars, call(*[self[v] for v in inputs])))

  def compute_joined(self, group: _Group, k: int) -> None:
    """Computes operation k of all chains of a group."""
    first = group.chains[0]
    eqn = first.eqns[k]

    def operand(x: Any) -> Any:
      if isinstance(x, core.Literal) or x.aval.shape == ():
        return x.val if isinstance(x, core.Literal) else self[x]
      number = first.arrays.index(x)
      key = id(group), number
      if key not in self._vectors:
        each = (self[chain.arrays[number]] for chain in group.chains)
        self._vectors[key] = end_to_end(each)
      return self._vectors[key]

    with jax.named_scope("small_arrays"):
      results = _bind(eqn, [operand(x) for x in eqn.invars], group.size)
    for v, result in zip(eqn.outvars, results):
      self._vectors[id(group), first.arrays.index(v)] = result

  def joined(self, outputs: Sequence[Any], structure: Any) -> Joined:
    """The tree of these variables, without splitting the vectors."""
    variables = [v for v in outputs if isinstance(v, core.Var)]
    counts = collections.Counter(variables)
    vectors: dict[tuple[int, int], int] = {}
    places, alone = [], []
    for v in outputs:
      owner = self._owners.get(v) if isinstance(v, core.Var) else None
      if owner:
        group, i, number = owner
        # All parts must be there, or `Joined.like` could not join a tree.
        if all(counts[chain.arrays[number]] == 1 for chain in group.chains):
          vector = vectors.setdefault((id(group), number), len(vectors))
          shape = group.chains[i].shape
          places.append(Place(vector, group.starts[i], shape))
          continue
      places.append(Place(None, 0, ()))
      alone.append(v.val if isinstance(v, core.Literal) else self[v])
    made = tuple(self._vectors[key] for key in vectors)
    return Joined(tuple(alone), made, Layout(structure, tuple(places)))


def _bind(eqn: Any, operands: Sequence[Any], size: int) -> list[Any]:
  """Results of an elementwise operation on vectors of a size."""
  shapes = {x.aval.shape for x in eqn.outvars}
  if eqn.primitive.name == "broadcast_in_dim" and shapes != {()}:
    return [jax.lax.broadcast(operands[0], (size,))]
  if (inner := _inner(eqn)) is None:
    return [eqn.primitive.bind(*operands, **eqn.params)]
  values = dict(zip(inner.invars, operands))
  read = lambda x: x.val if isinstance(x, core.Literal) else values[x]
  for e in inner.eqns:
    values.update(zip(e.outvars, _bind(e, [read(x) for x in e.invars], size)))
  return [read(x) for x in inner.outvars]
