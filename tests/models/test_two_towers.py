"""The two towers against numpy, published counts and released files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_two_towers, make_vit
from support import rounding

from bigtrain import metrics
from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.config.errors import ConfigError
from bigtrain.models import two_towers
from bigtrain.models.layers import pooling
from bigtrain.tasks import contrastive

pytestmark = pytest.mark.golden

TINY = dict(width=16, depth=2, num_heads=2)


def shapes(model, size=224, length=64, **options):
  image = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  text = jax.ShapeDtypeStruct((1, length), jnp.int32)
  variables = jax.eval_shape(model.init, jax.random.key(0), image, text)
  return dict(trees.flatten_with_names(variables["params"]))


def init_flat(model, **sizes):
  """Returns random parameters, drawn without compiling."""
  rng = np.random.default_rng(0)
  return {
    name: rng.normal(name.endswith("scale"), 0.3, p.shape).astype(np.float32)
    for name, p in shapes(model, **sizes).items()
  }


@pytest.fixture(scope="module")
def golden():
  inputs, outputs = make_two_towers.make()
  with np.load(make_two_towers.FILE) as file:
    return inputs, outputs, dict(file)


def golden_model(case, **changes):
  options = make_two_towers.CASES[case]
  text = {k: v for k, v in make_vit.SIZES.items() if k != "patch_size"}
  return two_towers.Model(
    image={**make_vit.SIZES, **options["image"], **changes},
    text={
      **text,
      **options["text"],
      **changes,
      "vocab_size": make_two_towers.VOCAB,
    },
    out_dim=options["dims"],
  )


def test_the_script_makes_the_golden_file(golden):
  _, outputs, stored = golden
  assert outputs.keys() == stored.keys()
  for name, value in stored.items():
    np.testing.assert_allclose(outputs[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("case", "scan"), [("siglip", False), ("head", True)])
def test_matches_numpy(golden, case, scan):
  """A failure means that results of the model or of the loss have changed.

  After an intended change, change tests/golden/make_two_towers.py alike and run
  it.
  """
  inputs, _, stored = golden
  model = golden_model(case, scan=scan)
  prefix = f"{case}/params/"
  flat = {
    name.removeprefix(prefix): value
    for name, value in inputs.items()
    if name.startswith(prefix)
  }
  batch = {"image": inputs[f"{case}/image"], "labels": inputs[f"{case}/text"]}
  variables = jax.eval_shape(
    model.init, jax.random.key(0), **contrastive.inputs(batch)
  )
  like = dict(trees.flatten_with_names(variables["params"]))
  flat = two_towers.from_published(flat, like)
  assert {n: p.shape for n, p in flat.items()} == {
    n: p.shape for n, p in like.items()
  }
  params = trees.from_flat(flat)

  @jax.jit
  def run(params):
    z, _ = contrastive.embed_fn(
      {"params": params}, batch, None, model=model, train=False
    )
    losses = {
      kind: metrics.means(
        contrastive.embeddings_loss_fn(params, z, batch, kind=kind)
      )["loss"]
      for kind in contrastive.KINDS
    }
    return {"image_z": z["image"], "text_z": z["text"], **losses}

  names = ("image_z", "text_z", *contrastive.KINDS)
  expected = {name: stored[f"{case}/{name}"] for name in names}
  rounding.assert_close(run, params, expected)


# google/siglip-base-patch16-224 and -large-patch16-256, as counted by
# transformers.
@pytest.mark.parametrize(
  ("image", "text", "dim", "size", "published"),
  [
    ("B/16", "B", 768, 224, 203_155_970),
    ("L/16", "L", 1024, 256, 652_150_786),
  ],
)
def test_variants_have_the_published_number_of_parameters(
  image, text, dim, size, published
):
  model = two_towers.Model(
    image=dict(variant=image, pool_type="map", scan=True),
    text=dict(variant=text, scan=True),
    out_dim=(None, dim),
  )
  assert sum(p.size for p in shapes(model, size).values()) == published


SIGLIP = dict(
  image=dict(patch_size=8, pool_type="map", **TINY),
  text=dict(vocab_size=9, **TINY),
  out_dim=(None, 16),
)
BLOCK = [
  *("LayerNorm_0/bias", "LayerNorm_1/scale"),
  "MlpBlock_0/Dense_1/kernel",
  "MultiHeadDotProductAttention_0/query/kernel",
]


def test_released_files_load_by_name(tmp_path):
  """Names as in SigLIP's files, with a prefix and stacked blocks."""
  model = two_towers.Model(**SIGLIP)
  stacked = two_towers.Model(
    image={**SIGLIP["image"], "scan": True},
    text={**SIGLIP["text"], "scan": True},
    out_dim=(None, 16),
  )
  flat = init_flat(stacked, size=16, length=4)
  for name in (
    *("t", "b", "img/pos_embedding", "img/embedding/kernel"),
    *("img/MAPHead_0/probe", "img/MAPHead_0/MlpBlock_0/Dense_0/bias"),
    *(f"img/Transformer/encoderblock/{part}" for part in BLOCK),
    *("txt/Embed_0/embedding", "txt/pos_embedding", "txt/head/kernel"),
    *("img/Transformer/encoder_norm/bias", "txt/Encoder_0/encoder_norm/scale"),
    *(f"txt/Encoder_0/encoderblock/{part}" for part in BLOCK),
  ):
    assert name in flat, name
  assert not any(name.startswith("img/head") for name in flat)
  # Some releases have position embeddings in two parts, and scalars of another
  # shape.
  second = np.full_like(flat["txt/pos_embedding"], 0.5)
  flat["txt/Encoder_0/pos_embedding"] = second
  flat["t"] = flat["t"][0]
  path = tmp_path / "siglip.npz"
  np.savez(path, **{f"params/{name}": value for name, value in flat.items()})

  like = jax.eval_shape(
    model.init,
    jax.random.key(0),
    jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32),
    jax.ShapeDtypeStruct((1, 4), jnp.int32),
  )["params"]
  params, lines = warm_start.load_params(
    str(path), like, convert=two_towers.from_published
  )
  loaded = dict(trees.flatten_with_names(jax.device_get(params)))
  assert {line.status for line in lines} == {"loaded", "converted"}
  for tower in ("img/Transformer", "txt/Encoder_0"):
    name = "LayerNorm_0/bias"
    for i in range(2):
      np.testing.assert_array_equal(
        loaded[f"{tower}/encoderblock_{i}/{name}"],
        flat[f"{tower}/encoderblock/{name}"][i],
      )
  np.testing.assert_allclose(
    loaded["txt/pos_embedding"], flat["txt/pos_embedding"] + second
  )
  assert loaded["t"] == [flat["t"]]


def test_a_vit_file_loads_into_the_image_tower(tmp_path):
  """As for LiT, where the image tower is a locked ViT."""
  model = two_towers.Model(**SIGLIP)
  flat = init_flat(model, size=16, length=4)
  like = {
    name: jax.ShapeDtypeStruct(value.shape, value.dtype)
    for name, value in flat.items()
  }
  image = {n[4:]: v for n, v in flat.items() if n.startswith("img/")}
  path = tmp_path / "vit.npz"
  np.savez(path, **image)
  spec = dict(
    path=str(path),
    rename=[("(.*)", r"img/\1")],
    allow_missing=["txt/.*", "t", "b"],
  )
  params, _ = warm_start.load_params(
    spec,
    trees.from_flat(like),
    init=lambda: trees.from_flat(flat),
    convert=two_towers.from_published,
  )
  np.testing.assert_array_equal(
    params["img"]["embedding"]["kernel"], flat["img/embedding/kernel"]
  )
  # Positions of texts are on no grid, so they are not resampled.
  flat["txt/pos_embedding"] = np.zeros((1, 9, 16), np.float32)
  converted = two_towers.from_published(flat, like)
  assert converted["txt/pos_embedding"].shape == (1, 9, 16)


def test_token_ids_outside_the_vocabulary_give_nan():
  model = two_towers.Model(**SIGLIP)
  params = trees.from_flat(init_flat(model, size=16, length=3))
  text = np.array([[0, 8, 1], [0, 9, 1], [-1, 0, 0]], np.int32)
  _, z, _ = jax.jit(model.apply)({"params": params}, None, text)
  np.testing.assert_array_equal(np.isnan(z).all(1), [False, True, True])


def test_embeddings_are_float32_of_length_1_with_finite_gradients():
  z = jnp.asarray([[3.0, 4.0], [0.0, 0.0]], jnp.bfloat16)
  normalised = pooling.normalise(z)
  assert normalised.dtype == jnp.float32
  np.testing.assert_allclose(normalised, [[0.6, 0.8], [0, 0]], rtol=1e-6)
  grad = jax.grad(lambda z: pooling.normalise(z).sum())(jnp.zeros((1, 2)))
  assert np.isfinite(grad).all()


def test_the_image_head_does_not_start_at_zero():
  model = two_towers.Model(
    image=dict(patch_size=8, **TINY), text=dict(vocab_size=9, **TINY), out_dim=4
  )
  (_, options) = model._towers()["img"]
  assert options == {
    "num_classes": 4,
    "head_zeroinit": False,
    "patch_size": 8,
    **TINY,
  }


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(image_model="vti"), "config.model.image_model: .* mean 'vit'"),
    (dict(image=dict(varient="B/16")), "config.model.image.varient: unknown"),
    (dict(text=dict(depth=2)), "config.model.text.width: missing"),
    (dict(text=dict(variant="Q")), "config.model.text.variant: unknown 'Q'"),
    (
      dict(text=dict(variant="B", vocab_size=0)),
      "config.model.text.vocab_size: expected a whole number at least 1",
    ),
    (
      dict(text=dict(variant="B", pool_type="lsat")),
      "config.model.text.pool_type: .* mean 'last'",
    ),
    (dict(out_dim=(1, 2, 3)), "config.model.out_dim: expected one number"),
    (dict(temperature_init=0), "config.model.temperature_init: expected a num"),
  ],
)
def test_wrong_options_are_errors(changes, message):
  with pytest.raises(ConfigError, match=message):
    two_towers.Model(
      **{"image": dict(variant="B/16"), "text": dict(variant="B"), **changes}
    )


@pytest.mark.slow
def test_one_tower_embeds_images_and_pictures_of_text():
  tower = dict(width=16, depth=1, num_heads=2, patch_size=4, pool_type="map")
  model = two_towers.Model(
    image=tower, text_model=None, out_dim=8, bias_init=None
  )
  rng = np.random.default_rng(0)
  image, text = rng.normal(size=(2, 3, 8, 8, 3)).astype(np.float32)
  variables = jax.jit(model.init)(jax.random.key(0), image, text)
  assert {*variables["params"]} == {"img", "t"} and model.vocab_size is None
  apply = jax.jit(model.apply)
  image_BE, text_BE, out = apply(variables, image, text)
  np.testing.assert_allclose(
    text_BE, apply(variables, text)[0], rtol=1e-5, atol=1e-6
  )
  assert not np.allclose(image_BE, text_BE) and "txt/head_input" in out
  # A list of texts has an embedding of each.
  lists = np.stack([text, image], axis=1)
  both = contrastive.predict_fns(model)["text"](variables, {"labels": lists})
  np.testing.assert_allclose(both[:, 0], text_BE, rtol=1e-5, atol=1e-6)
  assert both.shape == (3, 2, 8)
