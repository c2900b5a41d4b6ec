"""Layers that are split over `tensor`, on simulated devices."""

import jax
import jax.numpy as jnp
import pytest

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.losses import token_losses
from bigtrain.models import decoder
from bigtrain.tools.plan import collectives, hlo

_B, _L, _D, _N = 4, 32, 64, 2


def _sent(**options):
  """{kind: bytes that a device sends} for the gradient of a language model."""
  model = decoder.Model(
    variant="llama_mu", vocab_size=64, width=_D, depth=_N, **options
  )
  ids = jax.ShapeDtypeStruct((_B, _L), jnp.int32)
  init = lambda: model.init(jax.random.key(0), jnp.zeros((1, _L), jnp.int32))
  params = jax.eval_shape(init)["params"]
  named = trees.flatten_with_names(params)
  shapes = {name: tuple(x.shape) for name, x in named}
  mesh = sharding.make_mesh(fsdp=1, tensor=2, devices=jax.devices()[:2])
  rules = sharding.Rules(
    of_model=sharding.place(decoder.param_dims(model), shapes, mesh.shape)
  )
  spec = sharding.state_spec(params, mesh, rules)
  ids = sharding.batch_spec({"ids": ids}, mesh)["ids"]

  def loss(params, tokens, targets):
    weight = jnp.ones(targets.shape)
    losses = token_losses.model_losses(
      {"params": params}, {"tokens": tokens}, targets, weight, model=model
    )
    return losses.metrics["loss"][0]

  places = jax.tree.map(lambda x: x.sharding, spec)
  with jax.set_mesh(mesh):
    grad = jax.jit(jax.grad(loss), out_shardings=places)
    text = grad.lower(spec, ids, ids).compile().as_text()
  sent = dict.fromkeys(collectives.KINDS, 0.0)
  for one in collectives.sent(hlo.Module(text))[0]:
    sent[one.kind] += one.sent_bytes
  return sent


@pytest.mark.parametrize(
  "options, gathers, scatters",
  [
    (dict(), 4 * _N + 2, 4 * _N + 2),
    (dict(scan=True), 6 * _N + 2, 5 * _N + 2),
    pytest.param(
      dict(scan=True, remat_policy="nothing_saveable"),
      6 * _N + 2,
      5 * _N + 2,
      marks=pytest.mark.slow,
    ),
  ],
  ids=["plain", "scan", "remat"],
)
def test_layers_send_what_the_formulae_say(options, gathers, scatters):
  """docs/meshes.md, "Tensor parallelism"."""
  sent = _sent(**options)
  part = 4 * _B * _L * _D / 2
  assert sent["all-gather"] == pytest.approx(gathers * part, rel=0.05)
  assert sent["reduce-scatter"] == pytest.approx(scatters * part, rel=0.05)
  # A few numbers for each token, and the gradients of the norms.
  assert sent["all-reduce"] < 0.05 * gathers * part
  assert sent["all-to-all"] == sent["collective-permute"] == 0
