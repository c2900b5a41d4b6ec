"""Figure 32: parts of models on a GPU against the same on the CPU.

Each part computes a scalar and its gradients, on the CPU in float32 and on the
first device in float32 and bfloat16. A figure is the distance of the results,
relative to the CPU's: the largest over the gradients. In float32 a GPU's matrix
units keep 10 bits of a factor's mantissa (TF32), in bfloat16 7.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import measure

# The CPU has to be there beside the first device.
os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")

import jax
import jax.numpy as jnp
import numpy as np

from bigtrain import sharding
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.losses import linear_xent
from bigtrain.models.layers import (
  attention,
  block_quantization,
  masks,
)
from bigtrain.objective import building

# Rounding to the 8 bits of bfloat16 changes a value by 2**-8 at most and by
# 0.0016 as a rule. A gradient of two layers depends on some 50 roundings in a
# row, half of them forward, and independent errors add up by their squares:
# 0.0016 * 50**0.5 = 0.011. The bound is 2.7 times this, because the figure is
# the largest of many gradients, some of them differences of larger terms. TF32
# has 3 bits more, but may cut off the rest instead of rounding, so that its
# errors are up to a quarter of bfloat16's. Only a continuous function has such
# a bound: see _clear_choices.
_TOLERANCES = {"float32": 7.5e-3, "bfloat16": 3e-2}
# The gradients of a recurrence's decay are sums over all positions with both
# signs, and there are only four of them.
_RECURRENT = {name: 2 * limit for name, limit in _TOLERANCES.items()}
# Rounding to 8 bits changes where a value that lies between two steps falls:
# with the CPU's own bfloat16, int8 is 0.03 and fp8 0.09 away.
_INT8 = {"float32": 0.06, "bfloat16": 0.06}
_FP8 = {"float32": 0.15, "bfloat16": 0.15}

# On the CPU, most of the time is LLVM's, and each program runs once.
_FAST_COMPILE = {
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}

# Backends of attention that do not compute in float32.
_HALF_PRECISION = ("cudnn", "tokamax")

# A scalar function of the trees' arrays, in a dtype and by a backend.
Part = Callable[[Any, str, str], jax.Array]


@dataclasses.dataclass
class Case:
  """A part, its arrays in float32, and how the device may compute it."""

  part: Part
  arrays: dict[str, np.ndarray]
  backends: tuple[str, ...] = ("",)
  tolerances: Mapping[str, float] = dataclasses.field(
    default_factory=lambda: _TOLERANCES
  )


def main() -> None:
  """Prints a figure per part, dtype and backend."""
  args = measure.arguments(
    __doc__,
    only="parts of models, separated by semicolons",
    part="1/3: the first third of these, and so on",
  )
  names = args.only.split(";") if args.only else [*_CASES]
  if not {*names} <= {*_CASES}:
    sys.exit(f"--only={args.only}: expected some of {', '.join(_CASES)}.")
  for name in measure.part(names, args.part):
    case = _CASES[name]()
    expected = _compute(case, "float32", "xla", jax.devices("cpu")[0])
    for dtype, limit in case.tolerances.items():
      for backend in case.backends:
        if dtype == "float32" and backend in _HALF_PRECISION:
          continue
        label = f"GPU / CPU, relative distance: {name}, {dtype}"
        label += f", {backend}" if backend else ""
        try:
          result = _compute(case, dtype, backend or "xla", jax.devices()[0])
        except ConfigError as e:  # A backend that cannot.
          measure.skip(32, label, str(e).partition(": ")[2] or str(e))
        except Exception as e:
          measure.skip(32, label, f"failed: {type(e).__name__}: {e}"[:400])
        else:
          value = max(_distances(result, expected))
          target = f"<= {limit:g}"
          # 0 on the CPU itself, which has no ratio.
          measure.report(32, label, [max(value, 1e-9)], target=target)


def _compute(case: Case, dtype: str, backend: str, device: Any) -> Any:
  """Returns (value, gradients) of a part on a device, as float64 arrays."""
  mesh = sharding.make_mesh(replica=1, fsdp=1, devices=[device])
  with jax.set_mesh(mesh):
    arrays = jax.device_put(case.arrays, sharding.replicated(mesh))
    fn = functools.partial(case.part, dtype=dtype, backend=backend)
    trained = {k: x for k, x in arrays.items() if x.dtype == jnp.float32}
    others = {k: x for k, x in arrays.items() if k not in trained}
    run = jax.jit(
      jax.value_and_grad(lambda t, o: fn({**t, **o})),
      compiler_options=_FAST_COMPILE if device.platform == "cpu" else None,
    )
    results = jax.device_get(run(trained, others))
  return jax.tree.map(lambda x: np.asarray(x, np.float64), results)


def _distances(result: Any, expected: Any) -> list[float]:
  pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected))
  distances = []
  for a, b in pairs:
    size = np.linalg.norm(b)
    distances.append(float(np.linalg.norm(a - b) / size) if size else 0.0)
  return [np.inf if np.isnan(x) else x for x in distances]


def _random(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  return {
    name: rng.normal(size=shape).astype(np.float32)
    for name, shape in shapes.items()
  }


def _attention(kind: str, length: int = 256) -> Case:
  """Grouped queries, with the mask of a kind of text or picture."""
  arrays = _random(
    q=(2, length, 2, 2, 64), k=(2, length, 2, 64), v=(2, length, 2, 64)
  )
  arrays["mix"] = _random(mix=(2, length, 2, 2, 64))["mix"]
  segments_BL = np.arange(length)[None] // np.asarray([[60], [100]])
  real_BS = np.arange(length)[None] < np.asarray([[length], [length - 27]])
  mask = {
    "causal": masks.Mask(causal=True),
    "window": masks.Mask(causal=True, window=40),
    "packed": masks.Mask(
      causal=True, segments_BL=segments_BL, segments_BS=segments_BL
    ),
    "padded": masks.Mask(real_BS=real_BS),
    "full": masks.Mask(),
  }[kind]

  def part(arrays: Any, dtype: str, backend: str) -> jax.Array:
    q, k, v = (arrays[name].astype(dtype) for name in "qkv")
    o = attention.attend(q, k, v, mask, backend=backend)
    weights = jax.lax.stop_gradient(arrays["mix"])
    return jnp.sum(o.astype(jnp.float32) * weights) / 100

  return Case(part, arrays, ("xla", "blockwise", "cudnn", "tokamax"))


def _linear_xent() -> Case:
  arrays: dict[str, Any] = _random(hidden=(2, 64, 128), kernel=(128, 1000))
  arrays["kernel"] /= 10
  rng = np.random.default_rng(1)
  arrays["targets"] = rng.integers(0, 1000, (2, 64)).astype(np.int32)

  def part(arrays: Any, dtype: str, backend: str) -> jax.Array:
    del backend
    return (
      linear_xent.linear_softmax_xent(
        arrays["hidden"].astype(dtype),
        arrays["kernel"],
        arrays["targets"],
        chunk=24,
        dtype=dtype,
      ).total
      / 128
    )

  return Case(part, arrays)


def _clear_choices(arrays: dict[str, np.ndarray]) -> None:
  """Changes tokens and routers so that no choice of experts is a close one.

  A choice between experts with almost equal scores depends on rounding, and
  moves a token's whole gradient to another expert. Here each token has its own
  two experts: the first channels of its embedding have their numbers, and the
  routers read these channels. Logits of up to 2.5 then differ by 1 as a rule
  and by 0.3 at least, thirty times as much as bfloat16 changes them.
  """
  routers = [x for name, x in arrays.items() if "['router']" in name]
  for kernel_DE in routers:
    num_experts = kernel_DE.shape[1]
    kernel_DE[:num_experts] += 0.5 * np.eye(num_experts, dtype=np.float32)
    embedding_VD = arrays["['params']['token_embedding']"]
    tokens_V1 = np.arange(len(embedding_VD))[:, None]
    place_VE = (tokens_V1 + np.arange(num_experts)) % num_experts
    embedding_VD[:, :num_experts] = np.select(
      [place_VE == 0, place_VE == 1], [0.2, 0.1]
    )


def _decoder(
  tolerances: Mapping[str, float] = _TOLERANCES,
  quantize: Any = None,
  variant: str = "llama_mu",
  **options: Any,
) -> Case:
  """Loss of a small decoder with options of the model."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 64, (4, 32)).astype(np.int32)

  def build(dtype: str) -> Any:
    model = dict(variant=variant, vocab_size=64, max_len=32)
    config: dict[str, Any] = dict(
      model_name="decoder", model=model | options | dict(dtype=dtype)
    )
    if quantize:
      config["quantize"] = quantize
    return building.model(settings.Config(config))[1]

  with jax.default_device(jax.devices("cpu")[0]):
    variables = build("float32").init(jax.random.key(0), jnp.asarray(tokens))
    flat = {
      jax.tree_util.keystr(path): np.array(x)
      for path, x in jax.tree_util.tree_leaves_with_path(variables)
    }
  treedef = jax.tree.structure(variables)
  _clear_choices(flat)

  def part(arrays: Any, dtype: str, backend: str) -> jax.Array:
    del backend
    leaves = [arrays[name] for name in flat]
    model = build(dtype)
    logits = model.apply(jax.tree.unflatten(treedef, leaves), tokens)[0]
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32)[:, :-1])
    targets = tokens[:, 1:, None]
    return -jnp.mean(jnp.take_along_axis(logprobs, targets, axis=-1))

  return Case(part, flat, tolerances=tolerances)


def _nf4() -> Case:
  """A product with a kernel kept in four bits."""
  arrays = _random(x=(16, 256))
  kernel = _random(kernel=(256, 192))["kernel"]

  def part(arrays: Any, dtype: str, backend: str) -> jax.Array:
    del backend
    kept = block_quantization.quantize(jnp.asarray(kernel), "nf4", double=True)
    product = arrays["x"].astype(dtype) @ kept.dequantized().astype(dtype)
    return jnp.mean(jnp.square(product.astype(jnp.float32)))

  return Case(part, arrays)


_MOE: Mapping[str, Any] = dict(num_experts=4, top_k=2)
_CASES: dict[str, Callable[[], Case]] = {
  "attention, causal": lambda: _attention("causal"),
  "attention, window": lambda: _attention("window"),
  "attention, packed": lambda: _attention("packed"),
  "attention, padded": lambda: _attention("padded"),
  "attention, full, odd length": lambda: _attention("full", 197),
  "linear cross-entropy": _linear_xent,
  "dense decoder": _decoder,
  "gated DeltaNet": lambda: _decoder(
    _RECURRENT, variant="qwen3_5_mu", depth=2, layers=("linear", "full")
  ),
  "latent attention": lambda: _decoder(variant="deepseek_mu"),
  "experts, dropless": lambda: _decoder(moe=dict(_MOE)),
  "experts, capacity": lambda: _decoder(
    moe=dict(_MOE, capacity_factor=1.25, serve="choice")
  ),
  "int8 products": lambda: _decoder(_INT8, quantize=[(".*", "int8")]),
  "fp8 products": lambda: _decoder(_FP8, quantize=[(".*", "fp8")]),
  "NF4 kernel": _nf4,
}

if __name__ == "__main__":
  main()
