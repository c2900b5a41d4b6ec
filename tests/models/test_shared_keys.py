"""Layers that share keys and values, and layers with inputs of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import decoder_checks as checks

from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder

pytestmark = pytest.mark.usefixtures("float64_models")

LOCAL = dict(window=6)
GLOBAL = dict(head_dim=16, num_kv_heads=1, keys_as_values=True)
SHARING = dict(shares_kv=True, mlp_dim=48)
SIZES = dict(
  variant="gemma4_mu",
  vocab_size=checks.VOCAB,
  moe=None,
  init_std=0.2,
  scan=True,
  dtype="float64",
  layer_inputs=dict(dim=4, vocab_size=50),
)
MODELS = {
  # As Gemma 4's models for devices: the last four layers read from the first.
  "last layers": dict(
    kinds={
      "local": LOCAL,
      "global": GLOBAL,
      "local_sharing": LOCAL | SHARING,
      "global_sharing": GLOBAL | SHARING,
    },
    first_layers=("local", "global", "local"),
    layers=("local_sharing", "global_sharing"),
    depth=7,
  ),
  # Each pair of layers has one set of keys and values, arXiv 2405.12981.
  "pairs": dict(
    kinds={"local": LOCAL, "sharing": LOCAL | SHARING, "global": GLOBAL},
    layers=("local", "sharing", "global"),
    depth=6,
  ),
}
QUICK = "last layers"
NAMES = [
  QUICK,
  *[pytest.param(x, marks=pytest.mark.slow) for x in MODELS if x != QUICK],
]


@functools.cache
def made(name, **changes):
  model = decoder.Model(**SIZES | MODELS[name] | changes)
  return model, checks.variables(model)


@functools.cache
def on_one_device(name, packed):
  return checks.loss_and_grads(*made(name), packed, fsdp=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_generation_by_steps_and_in_parts(name):
  checks.check_generation(*made(name))


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_give_the_logits_of_single_ones(name):
  checks.check_packed(*made(name))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "mesh", "packed"),
  [
    ("last layers", dict(pipeline=2, sequence=2, tensor=2), True),
    ("pairs", dict(fsdp=2, pipeline=2, sequence=2), False),
  ],
)
def test_any_mesh_has_the_gradients_of_one_device(name, mesh, packed):
  """With rematerialisation there, and without it here."""
  model, weights = made(name)
  remat = model.clone(remat_policy="nothing_saveable")
  result = checks.loss_and_grads(remat, weights, packed, **mesh)
  checks.check_gradients(result, on_one_device(name, packed))


def test_a_sharing_layer_has_no_keys_and_no_cache():
  model, weights = made("last layers")
  params = weights["params"]
  assert {*params["blocks_1"]["attention"]} == {
    "query", "key", "query_norm", "key_norm", "out"
  }  # fmt: skip
  assert {*params["blocks"]["1"]["attention"]} == {"query", "query_norm", "out"}
  assert params["blocks"]["0"]["mlp"]["up"]["kernel"].shape == (2, 32, 48)
  local, of_globals = model.init_cache(1, 30).groups
  assert local.k_BNSGK.shape[:3] == (1, 2, 6)  # Two layers, their window.
  assert of_globals.k_BNSGK.shape[:3] == (1, 1, 30)


def test_the_table_of_inputs_has_a_vocabulary_of_its_own():
  model, weights = made("last layers")
  assert weights["params"]["layer_inputs"]["embedding"].shape == (50, 7 * 4)
  plain = model.clone(layer_inputs=dict(dim=4))
  shapes = jax.eval_shape(plain.init, jax.random.key(0), checks.tokens(1, 4))
  assert shapes["params"]["layer_inputs"]["embedding"].shape == (40, 7 * 4)


@pytest.mark.slow
def test_embeddings_in_place_of_tokens_have_inputs_of_token_0():
  model, weights = made("last layers")
  text = checks.tokens(2)
  at = np.arange(text.shape[1]) % 3 == 0
  at = jnp.broadcast_to(at, text.shape)
  table = weights["params"]["token_embedding"]
  zeros = jnp.where(at, 0, text)
  inserted = model.embed(table, zeros), at
  apply = jax.jit(model.apply)
  logits, _ = apply(weights, text, inserted=inserted)
  expected, _ = apply(weights, zeros)
  checks.assert_close(logits, expected)


WRONG = {
  "nothing to share": (
    dict(layers=("sharing",), first_layers=()),
    r"config\.model\.shares_kv: expected a layer with keys and values",
  ),
  "another width": (
    dict(first_layers=("global",), layers=("sharing",)),
    r"config\.model\.shares_kv: .* with the same num_kv_heads, head_dim",
  ),
  "from the period before": (
    dict(first_layers=("local",), layers=("sharing", "local")),
    r"in the same period, or in first_layers if the period has none",
  ),
  "recurrent": (
    dict(kinds={"a": dict(shares_kv=True, deltanet=dict(num_heads=2))}),
    r"config\.model\.kinds\.a\.shares_kv=True: expected False with .*deltanet",
  ),
  "further tokens": (
    dict(first_layers=("local",), layers=("sharing",), mtp=1),
    r"config\.model\.mtp=1: expected 0 with layer_inputs",
  ),
  "tokens without inputs": (
    dict(layer_inputs=dict(dim=4, vocab_size=30)),
    r"config\.model\.layer_inputs\.vocab_size=30: expected at least .*=40",
  ),
  "size of inputs": (
    dict(layer_inputs=dict(dim=0)),
    r"config\.model\.layer_inputs\.dim.*at least 1",
  ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_errors(case):
  changes, message = WRONG[case]
  kinds = {"local": LOCAL, "sharing": LOCAL | SHARING, "global": GLOBAL}
  if "kinds" in changes:
    changes = dict(layers=tuple(changes["kinds"])) | changes
  model = dict(kinds=kinds, layers=("local",), first_layers=()) | changes
  with pytest.raises(ConfigError, match=message):
    decoder.Model(**SIZES | model)
