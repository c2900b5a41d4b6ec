"""Low-rank adapters of kernels, on a base that does not change.

  config.adapters = dict(
    targets=r".*attention/(query|value)/kernel",  # one regex or a list
    rank=16,
    alpha=32,
    base="nf4",  # or "float32", "bfloat16", "int8": how the base is kept
  )

A layer computes x W + s (x A) B, with s = alpha / rank (LoRA,
https://arxiv.org/abs/2106.09685) or alpha / sqrt(rank) (`rslora`, 2312.03732).
`dora` scales each output to a learned norm (2402.09353). A dense layer never
forms W + s A B, so W needs no gradient. Heads, experts and the embedding table,
which are not flax layers, use the merged kernel.

In place of the kernel, the collection "params" has lora_a (inputs, rank) and
lora_b (rank, outputs), with `dora` also lora_magnitude (outputs) and with
`lora_bias` lora_bias (outputs), each preceded by any dimensions of layers and
experts. For an embedding or a head of which only some `tokens` are trained, it
has lora_rows (tokens, width). All other parameters are in the collection
"base".

`adapted` wraps a model's class: its `init` splits the parameters into the two
collections, and its `apply` intercepts the layers that have an adapter. Both
are methods of `Layers`. The functions at the end do the arithmetic.
"""

import functools
import math
import re
import threading
import types
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from flax.core import meta

from bigtrain.arrays import dims, trees
from bigtrain.config import errors
from bigtrain.config.errors import (
  ConfigError,
  check_choice,
  check_kwargs,
  check_number,
  did_you_mean,
)
from bigtrain.models.layers import block_quantization
from bigtrain.models.layers.block_quantization import Quantized
from bigtrain.models.layers.options import subclass

BASES = ("float32", "bfloat16", *block_quantization.KINDS)
# The parameters of an adapter.
A = "lora_a"
B = "lora_b"
MAGNITUDE = "lora_magnitude"
BIAS = "lora_bias"
ROWS = "lora_rows"
FACTORS = (A, B, MAGNITUDE, BIAS, ROWS)

_KERNEL = "kernel"
# The embeddings of tokens: a parameter of the model itself, not of a layer.
_TABLE = "token_embedding"
_OF_TABLE = "_adapter"  # Added to the table's name, below which factors are.
# Parameters of which single tokens may be trained.
TABLES = (_TABLE, "head/kernel")
# Key of a head's bias, times its scale, among what the head's layer returns.
_SCALED_BIAS = "scaled_lora_bias"
# One value for all kernels, or pairs of (regex, value).
_ByName = Any


class Options(NamedTuple):
  """Options of config.adapters."""

  # Regular expressions of whole names of kernels, or "token_embedding".
  targets: Any = ()
  # A number, or (regex, number) pairs; the first match decides.
  rank: _ByName = 16
  alpha: _ByName = 32.0
  dropout: float = 0.0  # Rate on the inputs of A.
  rslora: bool = False  # Whether alpha is divided by sqrt(rank).
  dora: bool = False  # Whether the norms of outputs are learned.
  lora_bias: bool = False  # Whether s (x A) B has a bias, as B in PEFT.
  train: Any = ()  # Names of parameters that train in full, such as a head's.
  # Ids of the only tokens whose embeddings are trained; or {"token_embedding":
  # ids, "head/kernel": ids}.
  tokens: Any = ()
  # Dtype of the base. With int8 or nf4, kernels that do not match `quantized`,
  # and other parameters, are bfloat16.
  base: str = "float32"
  quantized: str = r".*blocks?(_?\d+)?/(?!.*router/).*kernel"
  double_quantization: bool = False  # Of the scales of blocks as well.

  def kernel_rank(self, name: str) -> int:
    return _first(self.rank, name)

  def scale(self, name: str) -> float:
    """The factor s of a kernel's adapter."""
    rank = self.kernel_rank(name)
    alpha = _first(self.alpha, name)
    return alpha / (math.sqrt(rank) if self.rslora else rank)

  def tokens_of(self, name: str) -> tuple[int, ...]:
    """Ids of the tokens that are trained in a table or a head."""
    if isinstance(self.tokens, Mapping):
      return tuple(self.tokens.get(name, ()))
    return tuple(self.tokens) if name == _TABLE else ()


def is_table(name: str) -> bool:
  """Whether a parameter is an embedding table rather than a kernel."""
  return name.split("/")[-1] == _TABLE


def layer_of(name: str) -> str:
  """Name of the module that has the factors of a kernel or of a table.

  >>> layer_of("blocks/mlp/up/kernel"), layer_of("token_embedding")
  ('blocks/mlp/up', 'token_embedding_adapter')
  """
  return name + _OF_TABLE if is_table(name) else name.removesuffix("/kernel")


def adapted_name(layer: str) -> str:
  """The inverse of `layer_of`."""
  if layer.endswith(_TABLE + _OF_TABLE):
    return layer.removesuffix(_OF_TABLE)
  return f"{layer}/kernel"


def _first(value: _ByName, name: str) -> Any:
  """The value for a kernel, by the first regular expression that matches."""
  if not isinstance(value, list | tuple):
    return value
  for regex, result in value:
    if re.fullmatch(regex, name):
      return result
  raise ConfigError(f"config.adapters: {value} has no match for {name!r}.")


def read(given: Mapping[str, Any], key: str = "config.adapters") -> Options:
  check_kwargs(Options, given, key)
  options = Options(**given)
  check_choice(f"{key}.base", options.base, BASES)
  check_number(f"{key}.dropout", options.dropout, least=0.0, below=1.0)
  options = options._replace(
    targets=_as_tuple(options.targets), train=_as_tuple(options.train)
  )
  if not options.targets and not options.train and not options.tokens:
    raise ConfigError(f"{key}.targets: expected the names of kernels.")
  if options.dora and options.lora_bias:
    raise ConfigError(f"{key}.lora_bias: expected False with dora=True.")
  _check_tokens(f"{key}.tokens", options.tokens)
  quantizes = options.base in block_quantization.KINDS
  if options.double_quantization and not quantizes:
    raise ConfigError(f"{key}.double_quantization: the base is not quantized.")
  regexes = [*options.targets, *options.train, options.quantized]
  for regex, rank in _pairs(f"{key}.rank", options.rank):
    check_number(f"{key}.rank", rank, least=1, whole=True)
    regexes.append(regex)
  for regex, alpha in _pairs(f"{key}.alpha", options.alpha):
    check_number(f"{key}.alpha", alpha, above=0)
    regexes.append(regex)
  for regex in regexes:
    errors.regex(key, regex)
  return options


def _check_tokens(key: str, tokens: Any) -> None:
  by_name = tokens if isinstance(tokens, Mapping) else {_TABLE: tokens}
  for name, ids in by_name.items():
    check_choice(key, name, TABLES)
    if not isinstance(ids, list | tuple) or len(set(ids)) != len(ids):
      raise ConfigError(f"{key}: expected different ids, got {ids!r}.")
    for token in ids:
      check_number(key, token, least=0, whole=True)


def _as_tuple(names: str | Sequence[str] | None) -> tuple[str, ...]:
  return (names,) if isinstance(names, str) else tuple(names or ())


def _pairs(key: str, given: _ByName) -> list[tuple[str, Any]]:
  """The (regex, value) pairs of an option; ".*" if it has one value."""
  if not isinstance(given, list | tuple):
    return [(".*", given)]
  for pair in given:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
      raise ConfigError(
        f"{key}: expected a number or (regex, number) pairs, got {pair!r} in "
        "it."
      )
  return [(regex, value) for regex, value in given]


def adapted(
  module: Any, cls: type[nn.Module], given: Mapping[str, Any], key: str
) -> tuple[Any, type[nn.Module]]:
  """Returns the module and its Model, with adapters."""
  layers = Layers(read(given, key), key)
  param_dims = getattr(module, "param_dims", None)

  def init(self: Any, rngs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    variables = dict(cls.init(self, rngs, *args, **kwargs))
    rng = rngs["params"] if isinstance(rngs, Mapping) else rngs
    table = param_dims(self) if param_dims else {}
    params, base = layers.split(variables.pop("params"), table, rng)
    return {"params": params, "base": base, **variables}

  @functools.wraps(cls.apply)
  def apply(self: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
    variables = dict(variables)
    factors = layers.scaled(variables.pop("params"))
    params = trees.merge(variables.pop("base", {}), factors)
    variables["params"] = layers.with_whole_tables(params)
    with nn.intercept_methods(layers.intercept):
      return cls.apply(self, variables, *args, **kwargs)

  members: dict[str, Any] = dict(
    init=nn.nowrap(init), apply=nn.nowrap(apply), adapters=layers
  )
  head_parts = getattr(cls, "head_name", "head").split("/")
  if hasattr(cls, "head_kernel"):

    def head_kernel(self: Any, params: Mapping[str, Any]) -> jax.Array:
      merged_params = layers.with_merged_head(params, head_parts)
      return cls.head_kernel(self, merged_params)

    members["head_kernel"] = nn.nowrap(head_kernel)
  if callable(getattr(cls, "head_bias", None)):
    layers.has_head_bias = True

    def head_bias(self: Any, params: Mapping[str, Any]) -> jax.Array | None:
      own = cls.head_bias(self, params)  # type: ignore[attr-defined]
      added = layers.added_head_bias(params, head_parts)
      if added is None:
        return own
      added = self.logits_multiplier * added
      return added if own is None else own + added

    members["head_bias"] = nn.nowrap(head_bias)

  # A copy of the module, whose param_dims knows the factors.
  copy = types.ModuleType(module.__name__, module.__doc__)
  vars(copy).update(vars(module))
  if param_dims:

    def dims_with_factors(model: Any) -> dict[str, str]:
      return with_factors(param_dims(model))

    vars(copy)["param_dims"] = dims_with_factors
  return copy, subclass(cls, members)


def reference(variables: Mapping[str, Any]) -> dict[str, Any]:
  """The variables with adapters turned off: the model before training."""
  return {**variables, "params": {}}


def in_full(params: Any) -> Any:
  """The parameters that train in full, excluding the adapters' factors."""
  flat = traverse_util.flatten_dict(params, sep="/")
  return trees.from_flat(
    {name: x for name, x in flat.items() if name.split("/")[-1] not in FACTORS}
  )


def unquantized(base: Any) -> Any:
  """The base, dequantized; its leaves are arrays or ShapeDtypeStructs."""

  def is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)

  def dequantized(x: Any) -> Any:
    if not is_quantized(x):
      return x
    stack = x.codes.shape[:-1]
    if isinstance(x.codes, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct((*stack, *x.shape), jnp.bfloat16)
    if stack:
      return jax.vmap(Quantized.dequantized)(x)
    return x.dequantized()

  return jax.tree.map(dequantized, base, is_leaf=is_quantized)


def check(model: nn.Module) -> None:
  """Call after tracing: raises an error if a layer does not use its adapter."""
  layers = getattr(model, "adapters", None)
  if layers is not None:
    layers.check()


def with_factors(table: dims.Table) -> dict[str, str]:
  """Returns the dimensions of kernels, and those of their factors.

  >>> with_factors({".*/up/kernel": "D -> F"})[".*/up/lora_b"]
  'rank -> F'
  """
  result = {}
  for pattern, text in table.items():
    is_adapted = pattern.endswith(f"/{_KERNEL}") or is_table(pattern)
    if not is_adapted or "->" not in text:
      continue
    stack, _, array = text.rpartition(";")
    inputs, outputs = (x.strip() for x in array.split("->"))
    stack = f"{stack}; " if stack else ""
    root = f"{layer_of(pattern)}/"
    width = outputs if is_table(pattern) else inputs  # Of a token's row.
    result[root + A] = f"{stack}{inputs} -> rank"
    result[root + B] = f"{stack}rank -> {outputs}"
    result[root + MAGNITUDE] = f"{stack}{outputs}"
    result[root + BIAS] = f"{stack}{outputs}"
    result[root + ROWS] = f"tokens -> {width}"
  # Last, the table, whose pattern for biases may match a factor's name.
  return {**result, **table}


class Layers:
  """The adapters of a model: their initial values, and layers that use them."""

  def __init__(self, options: Options, key: str):
    self.options = options
    self._key = key
    self._lock = threading.Lock()  # Evaluations are traced in a thread.
    self.has_head_bias = False  # Whether the model asks for a head's bias.
    self._names: set[str] = set()  # Kernels with adapters.
    # Kernels that a traced layer has used, without the numbers of blocks.
    self._used: set[str] = set()

  def split(
    self, params: Any, table: dims.Table, rng: jax.Array
  ) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (the parameters that train, the base).

    What trains are the adapters' factors and the parameters of `train`.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    kernels = [name for name in flat if name.split("/")[-1] == _KERNEL]
    tables = [name for name in flat if is_table(name)]
    targets = self.options.targets
    self._names = self._matches(kernels, targets, "targets", tables)
    in_full = self._matches(list(flat), self.options.train, "train")
    self._check_tokens(flat, in_full)
    trained, base = {}, {}
    for name, boxed in flat.items():
      if name in in_full:
        trained[name] = boxed
        continue
      factors = {}
      if name in self._names:
        # The key depends on the name, not on which other kernels are targets.
        key = jax.random.fold_in(rng, zlib.crc32(name.encode()))
        factors = self._factors(name, meta.unbox(boxed), table, key)
      if self.options.tokens_of(name):
        factors[ROWS] = self._rows(name, meta.unbox(boxed))
      for factor, x in factors.items():
        trained[f"{layer_of(name)}/{factor}"] = x
      base[name] = self.stored(name, boxed, table)
    return trees.from_flat(trained), trees.from_flat(base)

  def _check_tokens(
    self, flat: Mapping[str, Any], in_full: Collection[str]
  ) -> None:
    """Checks that `tokens` are ids of a table that is otherwise frozen."""
    for name in TABLES:
      ids = self.options.tokens_of(name)
      if not ids:
        continue
      key = f"{self._key}.tokens"
      if name not in flat:
        raise ConfigError(f"{key}: the model has no {name!r}.")
      if name in in_full or name in self._names:
        field = "train" if name in in_full else "targets"
        raise ConfigError(
          f"{key}: {name!r} is also in {self._key}.{field}; expected it in one "
          "of them."
        )
      shape = meta.unbox(flat[name]).shape
      size = shape[0 if is_table(name) else -1]
      check_number(key, max(ids), most=size - 1)

  def _rows(self, name: str, value: Any) -> jax.Array:
    """The trained rows of a table, or the trained columns of a head."""
    ids = jnp.asarray(self.options.tokens_of(name))
    rows = value[ids] if is_table(name) else value[:, ids].T
    return rows.astype(jnp.float32)

  def _matches(
    self,
    names: Sequence[str],
    regexes: Sequence[str],
    field: str,
    others: Sequence[str] = (),
  ) -> set[str]:
    """The names that match. Each regular expression has to match a name.

    An expression that matches none of `names` may match one of `others`.
    """
    result: set[str] = set()
    for regex in regexes:
      matches = {name for name in names if re.fullmatch(regex, name)}
      matches = matches or {x for x in others if re.fullmatch(regex, x)}
      if not matches:
        hint = did_you_mean(regex, names)
        what = "kernel" if field == "targets" else "parameter"
        raise ConfigError(
          f"{self._key}.{field}: {regex!r} matches no {what}.{hint}"
        )
      result |= matches
    return result

  def stored(self, name: str, boxed: Any, table: dims.Table) -> Any:
    """A parameter of the base, as the base keeps it."""
    value = meta.unbox(boxed)
    quantization = self.quantization(name, value.shape, table)
    if quantization:
      return block_quantization.quantize(value, **quantization)
    dtype = "float32" if self.options.base == "float32" else "bfloat16"
    return jax.tree.map(lambda x: x.astype(dtype), boxed)

  def quantization(
    self, name: str, shape: Sequence[int], table: dims.Table
  ) -> dict[str, Any]:
    """Options of block_quantization.quantize; {} for other parameters."""
    options = self.options
    if options.base not in block_quantization.KINDS or len(shape) < 2:
      return {}
    if not name.endswith(_KERNEL) or not re.fullmatch(options.quantized, name):
      return {}
    sizes = Shape.of(name, shape, table)
    return dict(
      kind=options.base,
      double=options.double_quantization,
      stacked=len(sizes.stack) - sizes.arrays,  # Layers in a loop.
    )

  def with_values_of_base(self, params: Any, base: Any) -> Any:
    """Sets the adapters' parameters that begin with values of the base.

    These are DoRA's magnitudes, which are the norms of the base with the
    adapters, and the embeddings of the trained tokens.
    """
    flat = traverse_util.flatten_dict(params, sep="/")
    flat_base = traverse_util.flatten_dict(unquantized(base), sep="/")
    for name in list(flat):
      layer, _, last = name.rpartition("/")
      if last not in (MAGNITUDE, ROWS):
        continue
      adapted = adapted_name(layer)
      kernel = flat_base[adapted]
      if last == ROWS:
        flat[name] = self._rows(adapted, kernel)
        continue
      factors = flat[f"{layer}/{A}"], flat[f"{layer}/{B}"]
      flat[name] = norms(kernel, *factors, self.options.scale(adapted))
    return trees.from_flat(flat)

  def _factors(
    self, name: str, kernel: jax.Array, table: dims.Table, key: jax.Array
  ) -> dict[str, jax.Array]:
    """Initial factors. The product A B is 0, so a model begins as its base."""
    shape = Shape.of(name, kernel.shape, table)
    rank = self.options.kernel_rank(name)
    # As in PEFT: PyTorch's kaiming_uniform_ with a = sqrt(5).
    bound = 1 / math.sqrt(shape.rows)
    a = jax.random.uniform(
      key, (*shape.stack, *shape.inputs, rank), jnp.float32, -bound, bound
    )
    b = jnp.zeros((*shape.stack, rank, *shape.outputs), jnp.float32)
    if is_table(name):  # Also as in PEFT: each token has a row of A.
      a, b = jnp.zeros_like(a), jax.random.normal(key, b.shape, jnp.float32)
    factors = {A: a, B: b}
    if self.options.dora:
      factors[MAGNITUDE] = norms(kernel, a, b, 0.0)
    if self.options.lora_bias and not is_table(name):
      factors[BIAS] = jnp.zeros((*shape.stack, *shape.outputs), jnp.float32)
    return factors

  def scaled(self, params: Any) -> Any:
    """Multiplies A and biases by their scales; equal layers are traced once."""

    def scale(name: str, x: jax.Array) -> jax.Array:
      layer, _, last = name.rpartition("/")
      if last not in (A, BIAS):
        return x
      return self.options.scale(adapted_name(layer)) * x

    return trees.map_with_names(scale, params)

  def with_whole_tables(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merges scaled factors into the tables of a model's parameters."""
    flat = traverse_util.flatten_dict(params, sep="/")
    adapted = {adapted_name(name.rpartition("/")[0]) for name in flat}
    tables = sorted(name for name in adapted if is_table(name))
    if not tables:
      return params
    for name in tables:
      self._note(name)
      factors = {
        factor: flat.pop(f"{layer_of(name)}/{factor}")
        for factor in FACTORS
        if f"{layer_of(name)}/{factor}" in flat
      }
      flat[name] = self.whole(name, flat[name], factors, 1.0)
    return trees.from_flat(flat)

  def whole(
    self, name: str, kernel: Any, factors: Mapping[str, Any], scale: float
  ) -> jax.Array:
    """A kernel or table with its factors. Accepts numpy arrays too."""
    if A in factors:
      return merged(kernel, factors, scale)
    ids = jnp.asarray(self.options.tokens_of(name))
    rows = jnp.asarray(factors[ROWS])
    kernel = jnp.asarray(kernel, rows.dtype)
    if is_table(name):
      return kernel.at[ids].set(rows)
    return kernel.at[:, ids].set(rows.T)

  def intercept(
    self,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
  ) -> Any:
    """Computes a layer with its adapter, or with its dequantized kernel."""
    layer = context.module
    if layer.scope is None:  # A method that only reads fields.
      return call(*args, **kwargs)
    params = dict(layer.variables.get("params", {}))
    factors = {name: params.pop(name) for name in FACTORS if name in params}
    kernel = params.get(_KERNEL)
    if not factors and not isinstance(kernel, Quantized):
      return call(*args, **kwargs)
    if context.method_name != "__call__":
      return call(*args, **kwargs)
    self._note("/".join((*layer.path, _KERNEL)))
    if isinstance(kernel, Quantized):
      params[_KERNEL] = kernel.dequantized()

    # Copies of the layer compute, because flax checks the shapes of parameters.
    if isinstance(layer, nn.Dense | nn.DenseGeneral):
      product = layer.dot_general or jax.lax.dot_general
      if factors:
        key = None
        if self.options.dropout and layer.has_rng("dropout"):
          key = layer.make_rng("dropout")
        product = _low_rank(product, factors, self.options.dropout, key)
      dense = layer.clone(parent=None, name=None, dot_general=product)
      return dense.apply({"params": params}, *args, **kwargs)

    # The other layers return their kernel, for the product of a caller.
    name = "/".join((*layer.path, _KERNEL))
    if factors:
      params[_KERNEL] = self.whole(name, params[_KERNEL], factors, 1.0)
    holder = layer.clone(parent=None, name=None)
    result = holder.apply({"params": params}, *args, **kwargs)
    if not isinstance(result, Mapping) or _KERNEL not in result:
      raise ConfigError(
        f"{self._key}: {'/'.join(layer.path)!r} is not a dense layer, a head "
        "or experts; expected a kernel of one of these."
      )
    if BIAS not in factors:
      return result
    if layer.path != ("head",) or not self.has_head_bias:
      raise ConfigError(
        f"{self._key}.lora_bias: {name!r} takes no bias; expected the kernels "
        "of dense layers as targets."
      )
    return {**result, _SCALED_BIAS: factors[BIAS]}

  def _note(self, name: str) -> None:
    with self._lock:
      self._used.add(_without_numbers(name))

  def with_merged_head(
    self, params: Mapping[str, Any], parts: Sequence[str]
  ) -> Mapping[str, Any]:
    """Parameters whose head, if it has an adapter, is merged.

    A tied head is the table of embeddings beside it. `parts` are the parts of
    the head's name, such as ["head"] or ["llm", "head"].
    """
    *folder, head_name = parts
    own = _below(params, folder)
    prefix = "".join(f"{part}/" for part in folder)
    new: dict[str, Any] = {}
    factors = own.get(layer_of(_TABLE))
    if factors:
      new[_TABLE] = self._merged(prefix + _TABLE, own[_TABLE], factors)
    head = own.get(head_name, {})
    if A in head or ROWS in head:
      name = f"{prefix}{head_name}/{_KERNEL}"
      kernel = self._merged(name, head[_KERNEL], head)
      new[head_name] = {**head, _KERNEL: kernel}
    return _replaced(params, folder, {**own, **new}) if new else params

  def _merged(
    self, name: str, kernel: Any, factors: Mapping[str, Any]
  ) -> jax.Array:
    self._note(name)
    scale = self.options.scale(name) if A in factors else 1.0
    return self.whole(name, kernel, factors, scale)

  def added_head_bias(
    self, params: Mapping[str, Any], parts: Sequence[str]
  ) -> jax.Array | None:
    """The bias of the head's adapter, times its scale."""
    head = _below(params, parts)
    if BIAS in head:
      return self.options.scale("/".join((*parts, _KERNEL))) * head[BIAS]
    return head.get(_SCALED_BIAS)

  def check(self) -> None:
    unused = sorted(
      name for name in self._names if _without_numbers(name) not in self._used
    )
    if unused:
      raise ConfigError(
        f"{self._key}.targets: {unused[0]!r} is not the kernel of a dense "
        f"layer, of a head or of experts; expected such kernels."
      )


def _below(tree: Mapping[str, Any], parts: Sequence[str]) -> Any:
  """The subtree below some keys, or {} if there is none."""
  for part in parts:
    tree = tree.get(part, {})
  return tree


def _replaced(tree: Any, parts: Sequence[str], new: Any) -> Any:
  """A copy of a tree with another value below the keys `parts`."""
  if not parts:
    return new
  first, *rest = parts
  return {**tree, first: _replaced(tree[first], rest, new)}


def _without_numbers(name: str) -> str:
  # Blocks that are alike share a trace, so that only one of them is noted.
  return re.sub(r"\d+", "#", name)


class Shape(NamedTuple):
  """Sizes of a kernel's dimensions: of layers and experts, inputs, outputs.

  `arrays` is the number of dimensions in `stack` that are not layers.
  """

  stack: tuple[int, ...]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  arrays: int

  @property
  def rows(self) -> int:
    return math.prod(self.inputs)

  @property
  def columns(self) -> int:
    return math.prod(self.outputs)

  @classmethod
  def of(cls, name: str, shape: Sequence[int], table: dims.Table) -> "Shape":
    shape = tuple(shape)
    roles = dims.find(table, name)
    if roles is not None:
      num_inputs, num_outputs = len(roles.inputs), len(roles.outputs)
      arrays = len(roles.stack)
    else:  # A model without a table: as flax's layers have their kernels.
      is_projection = re.fullmatch(r"(.*/)?(query|key|value)/kernel", name)
      num_outputs = 2 if is_projection and len(shape) == 3 else 1
      num_inputs = len(shape) - num_outputs
      arrays = 0
    end_of_inputs = len(shape) - num_outputs
    end_of_stack = end_of_inputs - num_inputs
    return cls(
      stack=shape[:end_of_stack],
      inputs=shape[end_of_stack:end_of_inputs],
      outputs=shape[end_of_inputs:],
      arrays=arrays,
    )


def _times_b(low: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
  """low @ B, with a gradient of B that transposes the narrow `low`.

  jax would transpose the wide gradient of the outputs, which takes a tenth of a
  step on CPUs.
  """

  @jax.custom_vjp
  def times(low: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.tensordot(low, b, 1, **options)

  def forward(low: jax.Array, b: jax.Array) -> tuple[jax.Array, Any]:
    return times(low, b), (low, b)

  def backward(
    kept: tuple[jax.Array, jax.Array], grads: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    low, b = kept
    rows = tuple(range(low.ndim - 1))
    rank_last = jnp.moveaxis(b, 0, -1)
    grad_low = jnp.tensordot(grads, rank_last, b.ndim - 1, **options)
    grad_b = jnp.tensordot(low, grads, (rows, rows), **options)
    return grad_low, grad_b

  times.defvjp(forward, backward)
  return times(low, b)


def _low_rank(
  product: Callable[..., jax.Array],
  factors: Mapping[str, jax.Array],
  rate: float,
  key: jax.Array | None,
) -> Callable[..., jax.Array]:
  """A dot_general that adds the path through the factors: x W + (x A) B."""

  def dot_general(
    x: jax.Array, kernel: jax.Array, numbers: Any, **options: Any
  ) -> jax.Array:
    y = product(x, kernel, numbers, **options)
    a, b = factors[A].astype(x.dtype), factors[B].astype(x.dtype)
    if key is not None:
      keep = jax.random.bernoulli(key, 1 - rate, x.shape)
      x = jnp.where(keep, x / (1 - rate), 0)
    low = jax.lax.dot_general(x, a, numbers, **options)
    y = y + _times_b(low, b, **options)
    if BIAS in factors:
      y = y + factors[BIAS].astype(y.dtype)
    if MAGNITUDE in factors:
      norm = norms(kernel, factors[A], factors[B], 1.0)
      y = y * (factors[MAGNITUDE] / norm).astype(y.dtype)
    return y

  return dot_general


def merged(kernel: Any, factors: Mapping[str, Any], scale: float) -> jax.Array:
  """The kernel with its adapter, in float32. Accepts numpy arrays too."""
  whole = _sum(kernel, factors[A], factors[B], scale)
  if MAGNITUDE in factors:
    norm = jax.lax.stop_gradient(jnp.linalg.norm(whole, axis=1))
    whole *= (factors[MAGNITUDE].reshape(norm.shape) / norm)[:, None]
  return whole.reshape(kernel.shape)


def norms(kernel: Any, a: Any, b: Any, scale: float) -> jax.Array:
  """Norms of a kernel's outputs over its inputs, without a gradient."""
  whole = jax.lax.stop_gradient(_sum(kernel, a, b, scale))
  stack = a.ndim + b.ndim - 2 - kernel.ndim
  shape = (*a.shape[:stack], *b.shape[stack + 1 :])
  return jnp.linalg.norm(whole, axis=1).reshape(shape)


def _sum(kernel: Any, a: Any, b: Any, scale: float) -> jax.Array:
  """W + scale A B as float32 [stack, inputs, outputs]."""
  stack = a.ndim + b.ndim - 2 - kernel.ndim
  number, rank = math.prod(a.shape[:stack]), a.shape[-1]
  a = jnp.asarray(a, jnp.float32).reshape(number, -1, rank)
  b = jnp.asarray(b, jnp.float32).reshape(number, rank, -1)
  whole = jnp.asarray(kernel, jnp.float32).reshape(number, a.shape[1], -1)
  return whole + scale * jnp.matmul(a, b, precision="highest")
