"""The modules of a published layout that PEFT adapts, and our kernels in them.

A module may consist of several of our kernels: GPT-2's c_attn, for instance, is
query, key and value in one. Its inputs and outputs may also be in a different
order. So each `Module` lists its parts.

transformers keeps the experts of a layer in two parameters of a module
`experts`, gate_up_proj and down_proj, whatever the layout of the files. PEFT
adapts such parameters, and routers, by its option target_parameters. Before
transformers 5, each expert had separate modules; such adapters can be read.

Axes: I inputs, O outputs, E experts.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain.arrays import dims
from bigtrain.models.layers.lora import Shape, is_table

LINEAR, EMBEDDING, EXPERTS = "linear", "embedding", "experts"
# Top modules, which have no prefix in models whose other modules have one.
_HEADS = ("lm_head", "score", "classifier")
_EXPERT_KERNEL = re.compile(r".*\bmoe/(gate|up|down)/kernel")
_EXPERTS_OF_LAYER = re.compile(r"(.*\.layers\.\d+)\.(mlp|block_sparse_moe)\..*")
# {end of a router's name in files: its end in transformers' models}.
_ROUTERS = {
  ".block_sparse_moe.gate": ".mlp.gate",
  ".block_sparse_moe.router.layer": ".block_sparse_moe.router",
}


class Part(NamedTuple):
  """One of our kernels, which is a module or a part of one."""

  kernel: str
  stack: tuple[int, ...]  # Index among layers and experts.
  inputs: np.ndarray  # Input i of the module is input inputs[i] of the kernel.
  # Output place[i] of the module is output outputs[i] of the kernel.
  place: np.ndarray
  outputs: np.ndarray


class Module(NamedTuple):
  """A matrix of the published layout, or one for each expert."""

  name: str  # In PEFT's files, without the wrappers of `experts`.
  parts: Sequence[Part]  # Those of expert 0, if there are experts.
  kind: str = LINEAR
  # Name of the matrix in the module, if it is adapted as a parameter.
  parameter: str = ""
  num_experts: int = 1
  is_old: bool = False  # Whether transformers 5 has another module instead.

  @property
  def full_name(self) -> str:
    """The name that PEFT's patterns of ranks and alphas match."""
    return f"{self.name}.{self.parameter}" if self.parameter else self.name

  def parts_of(self, expert: int) -> list[Part]:
    if self.kind != EXPERTS:
      return list(self.parts)
    return [part._replace(stack=(*part.stack, expert)) for part in self.parts]


class Published(NamedTuple):
  """A model's parameters in its published layout."""

  tensors: Sequence[Any]  # See models/published/tables.py.
  shapes: Mapping[str, Sequence[int]]  # Shapes of our parameters.
  table: dims.Table  # The model's `param_dims`.
  prefix: str = ""  # Put before the names of modules in the layout.

  def shape(self, name: str) -> Shape:
    return Shape.of(name, self.shapes[name], self.table)

  def name_of(self, tensor: Any) -> str:
    """The name of an array in transformers' model."""
    if tensor.name.partition(".")[0] in _HEADS:
      return str(tensor.name)
    module, dot, last = (self.prefix + tensor.name).rpartition(".")
    for old, new in _ROUTERS.items():
      if module.endswith(old):
        module = module.removesuffix(old) + new
    return module + dot + last

  def modules(self) -> Iterator[Module]:
    # {module of experts: {its parameter: parts of expert 0}}.
    experts: dict[str, dict[str, list[Part]]] = {}
    num_experts = 0
    known: dict[Any, list[Part]] = {}
    for tensor in self.tensors:
      names = [name for name, _ in tensor.parts]
      if len(names) == 1 and is_table(names[0]) and len(tensor.shape) == 2:
        yield self._table(tensor)
        continue
      if not all(name.endswith("/kernel") for name in names):
        continue
      if len(tensor.shape) not in (2, 3):
        continue
      # All layers have the same parts, so they are found once.
      key = (re.sub(r"\d+", "#", tensor.name), tuple(tensor.shape))
      if key not in known:
        known[key] = self._parts(tensor)
      parts = [
        part._replace(kernel=name, stack=self._stack(name, index))
        for part, (name, index) in zip(known[key], tensor.parts)
      ]
      name = self.name_of(tensor).removesuffix(".weight")
      layer = _EXPERTS_OF_LAYER.fullmatch(name)
      if layer and all(map(_EXPERT_KERNEL.fullmatch, names)):
        if parts[0].stack[-1] == 0:
          inside = "block_sparse_moe" if "_linear" in name else "mlp"
          module = experts.setdefault(f"{layer[1]}.{inside}.experts", {})
          parameter = "down_proj" if "/down/" in names[0] else "gate_up_proj"
          _add(module.setdefault(parameter, []), parts)
          num_experts = self.shape(names[0]).stack[-1]
        if len(tensor.shape) == 2:
          yield Module(name, parts, is_old=True)
      elif len(tensor.shape) == 2 and tensor.name.endswith(".weight"):
        is_router = layer and parts[0].kernel.endswith("moe/router/kernel")
        yield Module(name, parts, parameter="weight" if is_router else "")
        old = (self.prefix + tensor.name).removesuffix(".weight")
        if is_router and old != name:
          yield Module(old, parts, is_old=True)
    for name, by_parameter in experts.items():
      for parameter in ("gate_up_proj", "down_proj"):
        if parameter in by_parameter:
          parts = by_parameter[parameter]
          yield Module(name, parts, EXPERTS, parameter, num_experts)

  def _table(self, tensor: Any) -> Module:
    ((name, _),) = tensor.parts
    shape = self.shape(name)
    columns = np.arange(shape.columns)
    part = Part(name, (), np.arange(shape.rows), columns, columns)
    module = self.name_of(tensor).removesuffix(".weight")
    return Module(module, [part], EMBEDDING)

  def _stack(self, name: str, index: Sequence[slice]) -> tuple[int, ...]:
    """The first layer and expert of a part."""
    sizes = zip(index, self.shape(name).stack)
    return tuple(s.indices(size)[0] for s, size in sizes)

  def _parts(self, tensor: Any) -> list[Part]:
    """Finds the inputs and outputs of each kernel in a module.

    The layout can build a module's array from our kernels. Here it builds two
    arrays: one from kernels whose elements are the numbers of their inputs, and
    one from kernels whose elements are the numbers of their outputs. For
    experts, the first one stands for all.
    """
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    starts = []  # (kernel, number of its first output, number of outputs).
    first = 0
    for name, index in tensor.parts:
      shape = [
        len(range(*s.indices(size)))
        for s, size in zip(index, self.shapes[name])
      ]
      I, O = self.shape(name).rows, self.shape(name).columns
      row_IO, column_IO = np.mgrid[:I, first : first + O]
      for numbers_IO, arrays in ((row_IO, rows), (column_IO, columns)):
        stacked = np.broadcast_to(numbers_IO, (_size(shape) // (I * O), I, O))
        arrays.append(stacked.reshape(shape))
      starts.append((name, first, O))
      first += O
    input_OI, output_OI = tensor.build(rows), tensor.build(columns)
    if len(tensor.shape) == 3:
      input_OI, output_OI = input_OI[0], output_OI[0]
    # Some modules are (inputs, outputs).
    if np.ptp(input_OI[0]) == 0 and input_OI.shape[1] > 1:
      input_OI, output_OI = input_OI.T, output_OI.T
    output_O = output_OI[:, 0]
    result = []
    for name, start, O in starts:
      place = np.flatnonzero((output_O >= start) & (output_O < start + O))
      outputs = output_O[place] - start
      result.append(Part(name, (), input_OI[0], place, outputs))
    return result


def _size(shape: Sequence[int]) -> int:
  return int(np.prod(shape))


def _add(module: list[Part], parts: Sequence[Part]) -> None:
  """Adds the parts of an array to the outputs of a module of experts."""
  first = sum(len(part.place) for part in module)
  for part in parts:
    stack = part.stack[:-1]  # Without the expert.
    module.append(part._replace(stack=stack, place=first + part.place))
