"""The contrastive captioner against Modalities, a count, and itself."""

import importlib.util
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import rounding

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import coca
from bigtrain.tasks import contrastive as task

pytestmark = pytest.mark.golden

_PATH = pathlib.Path(__file__).parents[1] / "golden" / "make_coca.py"
_SPEC = importlib.util.spec_from_file_location("make_coca", _PATH)
golden = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(golden)
IMAGE, TEXT = map(jnp.asarray, golden.inputs())
B, L = TEXT.shape
SIZES = dict(
  vocab_size=golden.V,
  max_len=L,
  patch_size=golden.PATCH_SIZE,
  width=golden.D,
  depth=golden.DEPTH,
  mlp_dim=golden.F,
  num_heads=golden.H,
  num_queries=golden.N,
  out_dim=golden.D,
  decoder_bias=False,
)


def make(pool="cascade", **fields):
  """A model, and parameters drawn by their names."""
  model = coca.Model(**{**SIZES, "pool": pool, **fields})
  spec = jax.eval_shape(model.init, jax.random.key(0), IMAGE, TEXT)["params"]
  flat = {n: golden.draw(n, x.shape) for n, x in trees.flatten_with_names(spec)}
  return model, {"params": trees.from_flat(flat)}


def test_outputs_loss_and_gradients_are_those_of_modalities():
  model, variables = make("parallel", mlp="gelu_erf")
  batch = dict(image=IMAGE, labels=TEXT)

  def loss(variables):
    options = dict(kind="softmax", caption_weight=2.0, train=False)
    pairs, _ = task.loss_fn(variables, batch, None, model=model, **options)
    return pairs["loss"][0] / pairs["loss"][1]

  # Modalities has no biases after the decoder.
  absent = ("decoder/LayerNorm/bias", "decoder/LogitsDense/bias")
  trained = lambda tree: {
    n: x for n, x in trees.flatten_with_names(tree["params"]) if n not in absent
  }

  @jax.jit
  def run(variables):
    image, text, out = model.apply(variables, IMAGE, TEXT)
    value, grads = jax.value_and_grad(loss)(variables)
    logits = out["states"].logits()[np.asarray(TEXT) != 0]
    outputs = dict(image=image, text=text, logits=logits, loss=value)
    return {"grads": trained(grads), **outputs}

  with np.load(golden.GOLDEN / "coca.npz") as file:
    expected = dict(file)
  flat = expected.pop("gradients")
  sizes = {name: x.size for name, x in trained(variables).items()}
  names = sorted(sizes)
  ends = np.cumsum([sizes[name] for name in names])
  assert ends[-1] == flat.size
  parts = dict(zip(names, np.split(flat, ends[:-1])))
  shapes = trained(variables)
  grads = {name: parts[name].reshape(shapes[name].shape) for name in names}
  rounding.assert_close(run, variables, {"grads": grads, **expected})


def test_a_cascade_pools_what_is_pooled_for_the_captions():
  model, variables = make()
  out = jax.jit(lambda v: model.apply(v, IMAGE, method="encode"))(variables)
  x_BND, params = out["encoded"], variables["params"]["contrastive_pool"]
  project = lambda x, part: (
    np.einsum(
      "...d,dhk->...hk",
      x,
      params["MultiHeadDotProductAttention_0"][part]["kernel"],
    )
    + params["MultiHeadDotProductAttention_0"][part]["bias"]
  )
  q_HK = project(params["probe"][0, 0], "query")
  scores_BNH = np.einsum("hk,bnhk->bnh", q_HK, project(x_BND, "key"))
  weights_BNH = np.exp(scores_BNH / math.sqrt(q_HK.shape[-1]))
  weights_BNH /= weights_BNH.sum(1, keepdims=True)
  o_BHK = np.einsum("bnh,bnhk->bhk", weights_BNH, project(x_BND, "value"))
  of_out = params["MultiHeadDotProductAttention_0"]["out"]
  y_BD = np.einsum("bhk,hkd->bd", o_BHK, of_out["kernel"]) + of_out["bias"]
  y_BD -= y_BD.mean(-1, keepdims=True)
  y_BD /= np.sqrt((y_BD**2).mean(-1, keepdims=True) + golden.EPSILON)
  y_BD = y_BD * params["LayerNorm_0"]["scale"] + params["LayerNorm_0"]["bias"]
  assert x_BND.shape == (B, golden.N, golden.D)
  assert out["patches"].shape == (B, 4, golden.D)
  np.testing.assert_allclose(out["pre_logits"], y_BD, atol=1e-5)


def test_decoding_with_the_cache_gives_the_same_logits():
  model, variables = make(scan=True, text_depth=3)
  # A text has no zeros before its padding, which the class token alone skips.
  text = jnp.asarray(np.random.RandomState(1).randint(1, golden.V, (B, L)))

  def run(variables):
    encoded = model.apply(variables, IMAGE, method="encode")
    whole = model.apply(variables, encoded, text, method="decode").logits()
    source, cache = model.apply(variables, encoded, L, method="begin")

    def step(cache, x):
      logits, cache = model.apply(variables, source, cache, *x, method="step")
      return cache, logits

    before = jnp.pad(text, ((0, 0), (1, 0)))[:, :L].T
    by_steps = jax.lax.scan(step, cache, (before, jnp.arange(L)))[1]
    return whole, by_steps.swapaxes(0, 1)

  whole, by_steps = jax.jit(run)(variables)
  np.testing.assert_allclose(by_steps, whole, atol=2e-5)


# Table 1 of the paper: CoCa-Base has 86 million parameters in the encoder and
# 297 million in the decoders. Poolers and heads have 6 million more.
def test_the_base_model_has_the_published_number_of_parameters():
  model = coca.Model(64_000, variant="B/18", out_dim=768, scan=True)
  image, text = jnp.zeros((1, 288, 288, 3)), jnp.zeros((1, 64), jnp.int32)
  spec = jax.eval_shape(model.init, jax.random.key(0), image, text)["params"]
  millions = lambda *names: round(
    sum(x.size for n in names for x in jax.tree.leaves(spec[n])) / 1e6
  )
  assert millions("encoder") == 86
  assert millions("text", "decoder", "pos_embedding_decoder") == 297
  assert millions(*spec) - 86 - 297 == 6


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (dict(pool="parralel"), "pool: .*Did you mean 'parallel'"),
    (dict(num_queries=0), "num_queries: expected a whole number at least 1"),
    (dict(out_dim=0), "out_dim: expected a whole number at least 1"),
    (dict(text_depth=0), "text_depth: expected a whole number at least 1"),
    (dict(temperature_init=0), "temperature_init: expected a number above 0"),
    (dict(decoder_num_heads=3), "decoder_num_heads: 3 does not divide"),
  ],
)
def test_wrong_options_are_errors(fields, message):
  with pytest.raises(ConfigError, match=f"config.model.{message}"):
    coca.Model(**{**SIZES, **fields})


def test_longer_texts_are_errors():
  model, variables = make()
  with pytest.raises(ConfigError, match="max_len: 6 is less than"):
    model.apply(variables, IMAGE, jnp.ones((B, L + 1), jnp.int32))
