"""The captioner against published counts and names, numpy, and itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_cappa, make_vit
from support import rounding

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import cappa

pytestmark = pytest.mark.golden

SIZES = make_cappa.SIZES
V, L = SIZES["vocab"], make_cappa.TEXT_LEN
KW = dict(
  vocab_size=V,
  max_len=SIZES["max_len"],
  patch_size=make_vit.SIZES["patch_size"],
  width=make_vit.SIZES["width"],
  depth=make_vit.SIZES["depth"],
  mlp_dim=make_vit.SIZES["mlp_dim"],
  num_heads=make_vit.SIZES["num_heads"],
  decoder_width=SIZES["width"],
  decoder_depth=SIZES["depth"],
  decoder_mlp_dim=SIZES["mlp_dim"],
  decoder_num_heads=SIZES["num_heads"],
)


def build(case, **kw):
  options = make_cappa.CASES[case]
  return cappa.Model(
    **KW,
    posemb=options["posemb"],
    decoder_bias=options["bias"],
    mask_token=options["mask_token"],
    **kw,
  )


def like(model, size=make_vit.IMAGE_SHAPE[1:]):
  image = jnp.zeros((1, *size))
  text = jnp.zeros((1, model.max_len), jnp.int32)
  spec = jax.eval_shape(model.init, jax.random.key(0), image, text)
  return dict(trees.flatten_with_names(spec["params"]))


@pytest.fixture(scope="module")
def golden():
  inputs, outputs = make_cappa.make()
  with np.load(make_cappa.FILE) as file:
    stored = dict(file)
  return inputs, outputs, stored


@pytest.fixture(scope="module")
def case(golden):
  """Returns a function: (variables, image, text, masked) of a case."""

  def of(name, model):
    prefix = f"{name}/params/"
    flat = {
      key.removeprefix(prefix): value
      for key, value in golden[0].items()
      if key.startswith(prefix)
    }
    flat = cappa.from_published(flat, like(model))
    inputs = (golden[0][f"{name}/{key}"] for key in ("image", "text", "masked"))
    return {"params": trees.from_flat(flat)}, *map(jnp.asarray, inputs)

  return of


def test_the_script_makes_the_golden_file(golden):
  _, outputs, stored = golden
  assert outputs.keys() == stored.keys()
  for name, value in stored.items():
    np.testing.assert_allclose(outputs[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  ("name", "scan"),
  [("cap", False), ("cappa", False), ("cappa", True), ("sincos", True)],
)
def test_matches_numpy(golden, case, name, scan):
  """A failure means that the model's results have changed.

  After an intended change, change tests/golden/make_cappa.py alike and run it.
  """
  model = build(name, scan=scan)
  variables, image, text, masked = case(name, model)
  expected = golden[2]

  @jax.jit
  def run(variables):
    logits = {"logits": model.apply(variables, image, text)[0]}
    if not model.mask_token:
      return logits
    parallel = jnp.array(make_cappa.PARALLEL)
    mixed = model.apply(
      variables, image, text, parallel_B=parallel, masked_BL=masked
    )
    return logits | {"mixed": mixed[0]}

  assert jax.eval_shape(run, variables)["logits"].dtype == jnp.float32
  kinds = ("logits", "mixed")[: 1 + model.mask_token]
  expected = {kind: expected[f"{name}/{kind}"] for kind in kinds}
  rounding.assert_close(run, variables, expected)


@pytest.mark.parametrize(
  "scan", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_decoding_with_the_cache_gives_the_same_logits(case, scan):
  model = build("cappa", scan=scan)
  variables, image, text, _ = case("cappa", model)
  encoded = model.apply(variables, image, method="encode")

  def by_steps(variables):
    source, cache = model.apply(variables, encoded, L, method="begin")
    assert {x.shape[0] for x in jax.tree.leaves(cache)} == {len(text)}
    inputs = jnp.pad(text, ((0, 0), (1, 0)))[:, :L].T

    def step(cache, x):
      logits, cache = model.apply(variables, source, cache, *x, method="step")
      return cache, logits

    return jax.lax.scan(step, cache, (inputs, jnp.arange(L)))[1]

  expected = jax.jit(
    lambda v: model.apply(v, encoded, text, method="decode").logits()
  )(variables)
  logits = jax.jit(by_steps)(variables)
  np.testing.assert_allclose(logits.swapaxes(0, 1), expected, atol=2e-5)


@pytest.mark.slow
def test_several_texts_per_image_give_the_same_logits(case):
  model = build("cap", scan=True)
  variables, image, text, _ = case("cap", model)
  encoded = model.apply(variables, image, method="encode")
  other = jnp.flip(text, 1)
  decode = jax.jit(
    lambda e, t: model.apply(variables, e, t, method="decode").logits()
  )
  together = decode(encoded, jnp.stack([text, other], 1).reshape(-1, L))
  together = together.reshape(len(text), 2, L, V)
  np.testing.assert_allclose(together[:, 0], decode(encoded, text), atol=1e-5)
  np.testing.assert_allclose(together[:, 1], decode(encoded, other), atol=1e-5)


def sensitivity(model, variables, image, **options):
  """Returns [B, L, L]: how much output i of a text depends on its token j."""
  # Each position has its own token, and so its own row of the table.
  row = jnp.broadcast_to(jnp.arange(L) + 1, (len(image), L))
  params = jax.tree.map(jnp.asarray, variables["params"])
  table = params["decoder"]["EmbedTargets"]["embedding"]

  def outputs(table):
    params["decoder"]["EmbedTargets"]["embedding"] = table
    states = model.apply(
      {"params": params}, image, row, **options, method="states"
    )
    return jnp.sum(jnp.sin(states.hidden_BLD), -1)

  jacobian = jax.jit(jax.jacrev(outputs))(table)
  return np.abs(jacobian).sum(-1)[:, :, 1 : L + 1]


@pytest.mark.slow
def test_only_parallel_prediction_sees_later_tokens(case):
  model = build("cappa", scan=True)
  assert V > L  # Each position has its own token.
  variables, image, _, _ = case("cappa", model)
  (alone,) = sensitivity(model, variables, image[:1])
  mixed, parallel = sensitivity(
    model,
    variables,
    image[:2],
    parallel_B=jnp.array([False, True]),
    masked_BL=jnp.zeros((2, L), bool),
  )
  # Output i predicts token i: it may only depend on earlier tokens.
  for in_order in (alone, mixed):
    assert (in_order[np.triu_indices(L)] == 0).all()
    assert (in_order[np.tril_indices(L, -1)] > 1e-6).all()
  assert (parallel > 1e-6).all()


def test_masked_positions_hide_their_token(case):
  model = build("cappa", scan=True)
  variables, image, text, _ = case("cappa", model)
  run = jax.jit(
    lambda text: model.apply(
      variables, image, text, parallel_B=jnp.ones(3, bool)
    )[0]
  )
  # By default all positions are masked, so the caption has no influence.
  np.testing.assert_array_equal(run(text), run(jnp.flip(text, 1)))


# Numbers of parameters of big_vision's model.
@pytest.mark.parametrize(
  "mask_token, published",
  [
    (True, 191_669_504),
    (False, 191_668_736),
  ],
)
def test_variants_have_the_published_number_of_parameters(
  mask_token, published
):
  model = cappa.Model(
    32_000,
    variant="B/16",
    decoder_depth=6,
    decoder_bias=False,
    mask_token=mask_token,
    scan=True,
  )
  shapes = like(model, (224, 224, 3))
  assert sum(p.size for p in shapes.values()) == published


def test_from_published_reads_stacked_blocks(case):
  """The files of big_vision stack the decoder along the second axis."""
  model, scanned = build("cappa"), build("cappa", scan=True)
  flat = dict(trees.flatten_with_names(case("cappa", model)[0]["params"]))
  ours = cappa.from_published(flat, like(scanned))
  assert {n: v.shape for n, v in ours.items()} == {
    n: p.shape for n, p in like(scanned).items()
  }
  theirs = {
    f"params/{n}": np.moveaxis(v, 0, 1) if "EncDecBlock/" in n else v
    for n, v in ours.items()
  }
  kernel = "decoder/EncDecBlock/CrossAttn/key/kernel"
  assert theirs[f"params/{kernel}"].shape == (16, 3, 3, 4)
  for converted, expected in (
    (cappa.from_published(theirs, like(model)), flat),
    (cappa.from_published(theirs, like(scanned)), ours),
    (cappa.from_published(ours, like(model)), flat),
  ):
    assert converted.keys() == expected.keys()
    for name, value in expected.items():
      np.testing.assert_array_equal(converted[name], value, err_msg=name)


def test_from_published_keeps_unknown_names_and_shapes(case):
  model = build("cappa")
  flat = dict(trees.flatten_with_names(case("cappa", model)[0]["params"]))
  flat["decoder/unknown"] = np.zeros(3)
  converted = cappa.from_published(flat, like(build("cap")))
  assert converted["decoder/unknown"].shape == (3,)
  # The row of the mask token is not cut off for a model without one.
  assert converted["decoder/EmbedTargets/embedding"].shape == (V + 1, 12)


@pytest.mark.slow
def test_bfloat16_computation_keeps_float32_logits(case):
  model = build(
    "cappa", dtype="bfloat16", scan=True, remat_policy="nothing_saveable"
  )
  variables, image, text, _ = case("cappa", model)
  logits, out = jax.jit(model.apply)(variables, image, text)
  assert logits.dtype == jnp.float32
  assert out["states"].hidden_BLD.dtype == jnp.bfloat16
  exact = jax.jit(build("cappa", scan=True).apply)(variables, image, text)[0]
  assert 1e-4 < np.abs(logits - exact).max() < 0.5


@pytest.mark.parametrize(
  ("kw", "message"),
  [
    (dict(decoder_num_heads=5), "decoder_num_heads: 5 does not divide .* 12"),
    (dict(max_len=0), "max_len: expected a whole number at least 1, got 0"),
    (
      dict(decoder_dropout=1.5),
      "decoder_dropout: expected a number at least 0 and below 1",
    ),
    (dict(patch_size=None), "patch_size: missing"),
    (dict(posemb="sincos"), "posemb: .*'sincos2d'"),
  ],
)
def test_wrong_options_are_errors(kw, message):
  with pytest.raises(ConfigError, match=f"config.model.{message}"):
    cappa.Model(**{**KW, **kw})


def test_sizes_of_the_decoder_default_to_the_encoders():
  model = cappa.Model(9, variant="S/8", decoder_depth=3)
  sizes = model.decoder_width, model.decoder_mlp_dim, model.decoder_num_heads
  assert sizes == (384, 1536, 6) and model.decoder_depth == 3


def test_inputs_that_do_not_fit_the_model_are_errors(case):
  model = build("cap")
  variables, image, text, _ = case("cap", model)
  with pytest.raises(ConfigError, match="max_len: 7 is less"):
    model.apply(variables, image, jnp.ones((3, 8), jnp.int32))
  with pytest.raises(ConfigError, match="mask_token: parallel"):
    model.apply(variables, image, text, parallel_B=jnp.ones(3, bool))
