"""Decoders with experts of random options: loops, caches and meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigtrain import sharding
from bigtrain.models import decoder
from bigtrain.models.layers import block_quantization, lora

L, V = 12, 19
SEEDS = [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 8))]


@functools.cache
def fields(seed):
  """Fields of a decoder, of which half of the layers have experts."""
  rng = np.random.default_rng(seed)
  pick = lambda *choices: choices[rng.integers(len(choices))]
  experts = dict(
    num_experts=8,
    top_k=pick(1, 3),
    score=pick("softmax", "sigmoid", "softmax_of_top"),
    scale=pick(1.0, 2.5),
    selection_bias=pick(True, False),
    groups=pick(None, dict(num=4, top=2, score=pick("max", "top2"))),
    mlp_dim=pick(None, 4),
    router_init_std=1.0,
  )
  experts |= pick({}, dict(shared_experts=1), dict(shared_dim=8))
  if "shared_dim" in experts:
    experts |= dict(shared_gate=True)
  if experts["score"] != "softmax_of_top":
    experts |= dict(normalize=pick(None, True, False))
  sites = [n for n in ("mlp", "experts", "router") if pick(True, False)]
  mlp = pick("swiglu", "relu2", "gelu_erf")
  clip = pick(None, dict(limit=0.3, alpha=1.7, up_offset=1))
  return dict(
    variant="llama",
    vocab_size=V,
    width=16,
    depth=4,
    num_heads=2,
    mlp_dim=8,
    mlp=mlp,
    mlp_clip=clip if mlp == "swiglu" else None,
    moe=experts | dict(every=2),
    use_bias=tuple(sites),
    init_std=0.3,
  )


TOKENS = np.random.default_rng(0).integers(0, V, (4, L))


def made(seed, scan=True):
  """Returns (model, variables), in which no bias is zero."""
  model = decoder.Model(**fields(seed), scan=scan)
  variables = jax.device_get(jax.jit(model.init)(jax.random.key(0), TOKENS))
  rng = np.random.default_rng(seed)
  return model, jax.tree.map(
    lambda x: x if x.any() else rng.normal(0, 0.2, x.shape).astype(x.dtype),
    variables,
  )


def unrolled(tree):
  """Variables of a loop over two periods of two layers, as of no loop."""
  result = {name: x for name, x in tree.items() if name != "blocks"}
  for place, arrays in tree["blocks"].items():
    for i in range(2):
      layer = jax.tree.map(lambda x, i=i: x[i], arrays)
      result[f"blocks_{2 * i + int(place)}"] = layer
  return result


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_cache_and_no_loop_give_the_same_logits(seed):
  model, variables = made(seed)
  want, out = jax.jit(lambda v: model.apply(v, TOKENS))(variables)
  assert np.isfinite(want).all() and out["moe"]["dropped"] == 0
  plain = model.clone(scan=False)
  flat = {name: unrolled(tree) for name, tree in variables.items()}
  logits, _ = jax.jit(lambda v: plain.apply(v, TOKENS))(flat)
  np.testing.assert_allclose(logits, want, atol=2e-5)

  # A capacity drops tokens in training, none where texts are generated.
  limited = model.clone(moe=model.moe._replace(capacity_factor=0.5))
  step = jax.jit(lambda t, c, s: limited.apply(variables, t, cache=c, start=s))
  logits, out = step(TOKENS[:, :5], limited.init_cache(4, L), 0)
  parts = [logits]
  for i in range(5, L):
    logits, out = step(TOKENS[:, i : i + 1], out["cache"], i)
    parts.append(logits)
  np.testing.assert_allclose(jnp.concatenate(parts, 1), want, atol=2e-5)


@pytest.mark.slow
def test_adapters_of_quantized_experts_with_biases():
  options = dict(targets=r".*moe/(up|down)/kernel", rank=2, base="nf4")
  _, adapted = lora.adapted(decoder, decoder.Model, options, "config.adapters")
  changes = dict(mlp="swiglu", use_bias=("experts", "router"))
  model = adapted(**fields(0) | changes, scan=True)
  variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
  up = variables["base"]["blocks"]["1"]["moe"]["up"]
  assert isinstance(up["kernel"], block_quantization.Quantized)
  up["bias"] += 1.0
  run = jax.jit(lambda v: model.apply(v, TOKENS)[0])
  dense = {**variables, "base": lora.unquantized(variables["base"])}
  got = run(variables)
  np.testing.assert_allclose(got, run(dense), atol=1e-5)
  up["bias"] -= 1.0
  assert np.abs(run(variables) - got).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_mesh_has_the_gradients_of_one_device(seed):
  model, variables = made(seed)
  factor = (None, 1.0)[seed // 3]  # Both, with experts along each axis.
  axis = (None, "fsdp", "tensor")[seed % 3]
  experts = model.moe._replace(axis=axis, capacity_factor=factor)
  model = model.clone(moe=experts)
  state = {name: x for name, x in variables.items() if name != "params"}

  def run(**sizes):
    number = int(np.prod([*sizes.values()]))
    mesh = sharding.make_mesh(**sizes, devices=jax.devices()[:number])

    @jax.jit
    def gradients(params, tokens):
      def loss(params):
        logits, out = model.apply({"params": params, **state}, tokens)
        return jnp.sum(jnp.sin(logits)) + out["moe"]["load_balance"]

      return jax.grad(loss)(params)

    with jax.set_mesh(mesh):
      params = jax.device_put(variables["params"], sharding.replicated(mesh))
      tokens = jax.device_put(TOKENS, sharding.batch(mesh))
      return jax.device_get(gradients(params, tokens))

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, 0, 2e-5 * abs(b).max()),
    run(fsdp=2, sequence=2, tensor=2),
    run(fsdp=1),
  )
