"""The decoder's parameters in Hugging Face's layouts: GPT-2, Llama, Mixtral.

A table for each layout says what their arrays are made of. Read in one
direction it loads a published model, in the other it exports one. Nothing is
copied to load: the arrays that come out are views of the file, or put together
from views when a device asks for its share.

Axes: D model width, H heads, K head width, F hidden width, V vocabulary, N
layers, E experts.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bigtrain import settings


class Entry(NamedTuple):
  """An array of theirs, and what it is made of.

  Attributes:
    theirs: its name; {i} is the layer, {e} the expert.
    ours: parameters that are joined along their output axes; those of a layer
      without the block's name.
    inputs: how many of our axes, the first ones, are inputs; 0 for vectors.
    transposed: whether theirs multiply from the left: (outputs, inputs).
  """

  theirs: str
  ours: tuple[str, ...]
  inputs: int = 0
  transposed: bool = False


def _linear(theirs: str, *ours: str, inputs: int = 1) -> Entry:
  """A torch.nn.Linear's weight."""
  return Entry(f"{theirs}.weight", ours, inputs, transposed=True)


def _gpt2_layer(theirs: str, *ours: str, inputs: int = 1) -> list[Entry]:
  """A weight (inputs, outputs) and a bias."""
  kernels = tuple(f"{name}/kernel" for name in ours)
  biases = tuple(f"{name}/bias" for name in ours)
  return [
    Entry(f"h.{{i}}.{theirs}.weight", kernels, inputs),
    Entry(f"h.{{i}}.{theirs}.bias", biases),
  ]


def _gpt2_norm(theirs: str, ours: str) -> list[Entry]:
  return [
    Entry(f"{theirs}.weight", (f"{ours}/scale",)),
    Entry(f"{theirs}.bias", (f"{ours}/bias",)),
  ]


_QKV = ("attention/query", "attention/key", "attention/value")
_GPT2 = [
  Entry("wte.weight", ("token_embedding",), 1),
  Entry("wpe.weight", ("pos_embedding",), 1),
  *_gpt2_norm("h.{i}.ln_1", "attention_norm"),
  *_gpt2_layer("attn.c_attn", *_QKV),
  *_gpt2_layer("attn.c_proj", "attention/out", inputs=2),
  *_gpt2_norm("h.{i}.ln_2", "mlp_norm"),
  *_gpt2_layer("mlp.c_fc", "mlp/up"),
  *_gpt2_layer("mlp.c_proj", "mlp/down"),
  *_gpt2_norm("ln_f", "norm"),
]
_LAYER = "model.layers.{i}."
_EXPERT = _LAYER + "block_sparse_moe.experts.{e}."
_LLAMA_ATTENTION = [
  Entry("model.embed_tokens.weight", ("token_embedding",), 1),
  _linear(_LAYER + "self_attn.q_proj", "attention/query/kernel"),
  _linear(_LAYER + "self_attn.k_proj", "attention/key/kernel"),
  _linear(_LAYER + "self_attn.v_proj", "attention/value/kernel"),
  _linear(_LAYER + "self_attn.o_proj", "attention/out/kernel", inputs=2),
  Entry(_LAYER + "input_layernorm.weight", ("attention_norm/scale",)),
  Entry(_LAYER + "post_attention_layernorm.weight", ("mlp_norm/scale",)),
  Entry("model.norm.weight", ("norm/scale",)),
]
_LLAMA_HEAD = _linear("lm_head", "head/kernel")
_LLAMA_MLP = [
  _linear(_LAYER + "mlp.gate_proj", "mlp/gate/kernel"),
  _linear(_LAYER + "mlp.up_proj", "mlp/up/kernel"),
  _linear(_LAYER + "mlp.down_proj", "mlp/down/kernel"),
]
_MIXTRAL_MOE = [
  _linear(_LAYER + "block_sparse_moe.gate", "moe/router/kernel"),
  _linear(_EXPERT + "w1", "moe/gate/kernel"),
  _linear(_EXPERT + "w3", "moe/up/kernel"),
  _linear(_EXPERT + "w2", "moe/down/kernel"),
]
LAYOUTS = {
  "gpt2": _GPT2,
  "llama": [*_LLAMA_ATTENTION, *_LLAMA_MLP, _LLAMA_HEAD],
  "mixtral": [*_LLAMA_ATTENTION, *_MIXTRAL_MOE, _LLAMA_HEAD],
}

_BLOCK = re.compile(r"blocks(_(?P<layer>\d+))?/(?P<inner>.+)")
# Files also hold constants that the program computes itself.
_CONSTANTS = re.compile(
  r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq|.*\.position_ids"
)
# Each has in its files what the others lack.
_SIGNS = {
  "gpt2": "h.0.attn.c_attn.weight",
  "llama": "model.layers.0.mlp.gate_proj.weight",
  "mixtral": "model.layers.0.block_sparse_moe.gate.weight",
}


class Stack:
  """Arrays of one shape along a new first axis, joined when they are read."""

  def __init__(self, parts: Sequence[Any]):
    self._parts = parts
    self.shape = (len(parts), *parts[0].shape)
    self.dtype = parts[0].dtype

  def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
    first, *rest = index
    return np.stack([part[tuple(rest)] for part in self._parts[first]])


def load(
  flat: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, Any] | None:
  """A published model's arrays under our names and in our shapes.

  Args:
    flat: what a file has; GPT-2's names may begin with "transformer.".
    like: our parameters by name; for their shapes, and whether layers are
      stacked.

  Returns:
    {name: array or `Stack`}, of which those that nothing here uses keep their
    names and shapes; or None for a file of none of these layouts.
  """
  flat = {name.removeprefix("transformer."): x for name, x in flat.items()}
  layout = next((k for k, sign in _SIGNS.items() if sign in flat), None)
  if layout is None:
    return None
  left = {n: x for n, x in flat.items() if not _CONSTANTS.fullmatch(n)}
  if "head/kernel" not in like:
    left.pop("lm_head.weight", None)  # The embedding, once more.
  taken: set[str] = set()
  result: dict[str, Any] = {}
  for name, want in like.items():
    shape = tuple(want.shape)
    block = _BLOCK.fullmatch(name)
    inner = block["inner"] if block else name
    entry = next((e for e in LAYOUTS[layout] if inner in e.ours), None)
    if entry is None:
      continue
    get = functools.partial(_get, flat, taken, entry, inner)
    if block is None:
      value = get({}, shape)
    elif block["layer"]:
      value = get({"i": int(block["layer"])}, shape)
    else:
      value = _stack([get({"i": i}, shape[1:]) for i in range(shape[0])])
    if value is not None:
      result[name] = value
  return result | {n: x for n, x in left.items() if n not in taken}


def _get(
  flat: Mapping[str, Any],
  taken: set[str],
  entry: Entry,
  inner: str,
  where: Mapping[str, int],
  shape: tuple[int, ...],
) -> Any:
  """A parameter of ours; None if theirs is not there."""
  if "{e}" in entry.theirs and "e" not in where:
    return _stack(
      [
        _get(flat, taken, entry, inner, {**where, "e": e}, shape[1:])
        for e in range(shape[0])
      ]
    )
  name = entry.theirs.format(**where)
  if name not in flat:
    return None
  taken.add(name)
  value = flat[name].T if entry.transposed else flat[name]
  if len(entry.ours) > 1:
    parts = np.split(value, len(entry.ours), axis=-1)
    value = parts[entry.ours.index(inner)]
  # Another size is for the caller to report.
  return value.reshape(shape) if value.size == math.prod(shape) else value


def _stack(parts: Sequence[Any]) -> Stack | None:
  return None if any(part is None for part in parts) else Stack(parts)


class Tensor(NamedTuple):
  """One array of an exported file, see tools/published.py."""

  name: str
  shape: tuple[int, ...]
  parts: list[tuple[str, tuple[slice, ...]]]
  build: Callable[[list[np.ndarray]], np.ndarray]


def export(
  model: Any, shapes: Mapping[str, Sequence[int]], layout: str
) -> tuple[dict[str, Any], list[Tensor]]:
  """What a published folder holds; see tools/published.py.

  Args:
    model: the decoder.
    shapes: of its parameters, by name.
    layout: a name in LAYOUTS.

  Raises:
    ConfigError: no such layout, or one that the model does not fit.
  """
  if layout not in LAYOUTS:
    hint = settings.did_you_mean(layout, LAYOUTS)
    raise settings.ConfigError(f"--layout: unknown {layout!r}.{hint}")
  config = _config(model, layout)
  tensors = []
  used: set[str] = set()
  for entry in LAYOUTS[layout]:
    layers = range(model.depth) if "{i}" in entry.theirs else (None,)
    for i in layers:
      names = [_ours(name, i, shapes) for name in entry.ours]
      if any(name not in shapes for name, _ in names):
        continue  # Such as the head of a model whose head is tied.
      used |= {name for name, _ in names}
      tensors += _tensors(entry, i, names, shapes)
  left = sorted(set(shapes) - used)
  if left:
    raise settings.ConfigError(
      f"--layout={layout} has no place for {', '.join(left[:3])}."
    )
  return config, tensors


def _ours(
  inner: str, i: int | None, shapes: Mapping[str, Any]
) -> tuple[str, tuple[slice, ...]]:
  """(our name, which part of its leading axis)."""
  if i is None:
    return inner, ()
  if f"blocks/{inner}" in shapes:
    return f"blocks/{inner}", (slice(i, i + 1),)
  return f"blocks_{i}/{inner}", ()


def _tensors(
  entry: Entry,
  i: int | None,
  names: Sequence[tuple[str, tuple[slice, ...]]],
  shapes: Mapping[str, Sequence[int]],
) -> list[Tensor]:
  """One array of theirs, or one for each expert."""
  inner = [tuple(shapes[name])[len(at) :] for name, at in names]
  experts: Sequence[int | None] = [None]
  if "{e}" in entry.theirs:
    experts = range(inner[0][0])
    inner = [shape[1:] for shape in inner]
  flat = [_flat(shape, entry.inputs) for shape in inner]
  joined = (*flat[0][:-1], sum(shape[-1] for shape in flat))

  def build(parts: list[np.ndarray]) -> np.ndarray:
    parts = [part.reshape(shape) for part, shape in zip(parts, flat)]
    value = np.concatenate(parts, axis=-1)
    return value.T if entry.transposed else value

  tensors = []
  for e in experts:
    of_expert = () if e is None else (slice(e, e + 1),)
    parts = []
    for (name, at), shape in zip(names, inner):
      rest = (slice(None),) * len(shape)
      parts.append((name, (*at, *of_expert, *rest)))
    name = entry.theirs.format(i=i, e=e)
    shape = joined[::-1] if entry.transposed else joined
    tensors.append(Tensor(name, shape, parts, build))
  return tensors


def _flat(shape: Sequence[int], inputs: int) -> tuple[int, ...]:
  """The shape as a matrix (inputs, outputs), or as a vector."""
  outputs = math.prod(shape[inputs:])
  return (math.prod(shape[:inputs]), outputs) if inputs else (outputs,)


# What a model must be to be one of a layout, as the layout has no place for
# anything else.
_PLAIN = dict(qk_norm=False, attention_softcap=None, logits_softcap=None)
_NEEDS: dict[str, dict[str, Any]] = {
  "gpt2": dict(
    posemb="learn",
    norm="layernorm",
    mlp="gelu",
    use_bias=True,
    tied_head=True,
    window=None,
    **_PLAIN,
  ),
  "llama": dict(
    posemb="rope",
    norm="rmsnorm",
    mlp="swiglu",
    use_bias=False,
    window=None,
    **_PLAIN,
  ),
  "mixtral": dict(
    posemb="rope", norm="rmsnorm", mlp="swiglu", use_bias=False, **_PLAIN
  ),
}


def _config(model: Any, layout: str) -> dict[str, Any]:
  """config.json of a model in this layout."""
  for field, value in _NEEDS[layout].items():
    if getattr(model, field) != value:
      raise settings.ConfigError(
        f"--layout={layout} is for models with {field}={value!r}; this one has "
        f"{getattr(model, field)!r}."
      )
  if (model.moe is not None) != (layout == "mixtral"):
    raise settings.ConfigError(
      f"--layout={layout}: models with experts are for the layout mixtral, and "
      "only they."
    )
  if layout == "gpt2":
    heads = (model.num_kv_heads, model.num_heads * model.head_dim)
    if heads != (model.num_heads, model.width):
      raise settings.ConfigError(
        "--layout=gpt2 is for models without grouped queries whose heads fill "
        "the width."
      )
    return {
      "architectures": ["GPT2LMHeadModel"],
      "model_type": "gpt2",
      "vocab_size": model.vocab_size,
      "n_positions": model.max_len,
      "n_embd": model.width,
      "n_layer": model.depth,
      "n_head": model.num_heads,
      "n_inner": model.mlp_dim,
      "activation_function": "gelu_new",
      "layer_norm_epsilon": model.norm_eps,
      "tie_word_embeddings": True,
      "bos_token_id": None,
      "eos_token_id": None,
    }
  scaling = model.rope_scaling and dict(model.rope_scaling)
  if scaling:
    scaling["rope_type"] = scaling.pop("type")
    if "original_len" in scaling:
      old = scaling.pop("original_len")
      scaling["original_max_position_embeddings"] = old
  config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": model.vocab_size,
    "max_position_embeddings": model.max_len or 2048,
    "hidden_size": model.width,
    "intermediate_size": model.mlp_dim,
    "num_hidden_layers": model.depth,
    "num_attention_heads": model.num_heads,
    "num_key_value_heads": model.num_kv_heads,
    "head_dim": model.head_dim,
    "hidden_act": "silu",
    "rms_norm_eps": model.norm_eps,
    "rope_theta": model.rope_theta,
    "rope_scaling": scaling,
    "tie_word_embeddings": model.tied_head,
    "bos_token_id": None,
    "eos_token_id": None,
  }
  if layout == "llama":
    return config
  experts = {
    "num_local_experts": model.moe.num_experts,
    "num_experts_per_tok": model.moe.top_k,
  }
  return config | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "sliding_window": model.window,
    **experts,
  }
