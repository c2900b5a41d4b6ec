"""The ViT against published counts, numpy, and the names of released files."""

import importlib.util
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import rounding

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import two_towers, vit
from bigtrain.models.layers import positions
from bigtrain.models.published import blocks
from bigtrain.tasks import classification, contrastive

pytestmark = pytest.mark.golden

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = dict(patch_size=4, width=16, depth=2, num_heads=2)


def shapes(model, size=224):
  image = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  params = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  return dict(trees.flatten_with_names(params))


def num_params(model, size=224):
  return sum(p.size for p in shapes(model, size).values())


def init_flat(model, size=8):
  """Random parameters, drawn without compiling; no bias or scale is 0 or 1."""
  rng = np.random.default_rng(0)
  return {
    name: rng.normal(name.endswith("scale"), 0.3, p.shape).astype(np.float32)
    for name, p in shapes(model, size).items()
  }


def apply_flat(model, flat, image, **kw):
  return jax.jit(model.apply)({"params": trees.from_flat(flat)}, image, **kw)


@pytest.fixture(scope="module")
def golden():
  path = GOLDEN / "make_vit.py"
  spec = importlib.util.spec_from_file_location("make_vit", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  inputs, outputs = module.make()
  with np.load(module.FILE) as file:
    stored = dict(file)
  return module, inputs, outputs, stored


@pytest.mark.parametrize(
  ("variant", "published"),
  # For 1000 classes and a class token at 224 px, as counted by torchvision
  # (B, L, H), DeiT (Ti, S) and timm (g, G).
  [
    ("Ti/16", 5_717_416),
    ("S/16", 22_050_664),
    ("B/16", 86_567_656),
    ("L/16", 304_326_632),
    ("H/14", 632_045_800),
    ("g/14", 1_012_611_432),
    ("G/14", 1_844_440_680),
  ],
)
def test_variants_have_the_published_number_of_parameters(variant, published):
  scan = variant != "Ti/16"  # One compiled block, and so a quick test.
  model = vit.Model(1000, variant=variant, pool_type="tok", scan=scan)
  # The published models also have a position embedding of the class token.
  assert num_params(model) + model.width == published


def test_so400m_has_the_published_number_of_parameters():
  # SigLIP's image tower, without a head, as counted by timm.
  model = vit.Model(variant="So400m/14", pool_type="map", scan=True)
  assert num_params(model) == 427_680_704


# As counted by timm.
MIXERS = {"S/16": 18_528_264, "B/16": 59_880_472, "L/16": 208_196_168}


@pytest.mark.parametrize("variant", MIXERS)
def test_mixers_have_the_published_number_of_parameters(variant):
  model = vit.Model(1000, variant=f"Mixer-{variant}", scan=True)
  assert num_params(model) == MIXERS[variant]


@pytest.mark.parametrize(
  "variant", [name for name in vit.VARIANTS if "Mixer" not in name]
)
def test_numbers_of_parameters_match_a_count_by_hand(variant):
  sizes = vit.VARIANTS[variant]
  D, depth, F = sizes["width"], sizes["depth"], sizes["mlp_dim"]
  norm, attention, mlp = 2 * D, 4 * (D * D + D), D * F + F + F * D + D
  expected = (8 * 8 * 3 * D + D) + 16 * D  # Patches of 8, their positions.
  expected += depth * (attention + mlp + 2 * norm) + norm
  expected += D * 10 + 10
  model = vit.Model(10, variant=f"{variant}/8", scan=variant != "B")
  assert num_params(model, size=32) == expected


def test_the_script_makes_the_golden_file(golden):
  _, _, outputs, stored = golden
  assert outputs.keys() == stored.keys()
  for name, value in stored.items():
    np.testing.assert_allclose(outputs[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
  ("case", "scan"),
  [
    *(("tok", False), ("gap", False), ("map", True)),
    *(
      pytest.param(case, scan, marks=pytest.mark.slow)
      for case, scan in (("tok", True), ("gap", True), ("map", False))
    ),
  ],
)
def test_matches_numpy(golden, case, scan):
  """A failure means that the model's results have changed.

  After an intended change, change tests/golden/make_vit.py alike and run it.
  """
  module, inputs, _, stored = golden
  model = vit.Model(**module.SIZES, **module.CASES[case], scan=scan)
  prefix = f"{case}/params/"
  flat = {
    name.removeprefix(prefix): value
    for name, value in inputs.items()
    if name.startswith(prefix)
  }
  image = inputs[f"{case}/image"]
  init_shapes = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  like = dict(trees.flatten_with_names(init_shapes))
  flat = vit.from_published(flat, like)
  assert {n: p.shape for n, p in flat.items()} == {
    n: p.shape for n, p in like.items()
  }

  @jax.jit
  def run(params):
    logits, out = model.apply({"params": params}, image)
    return {"logits": logits, **out}

  names = ("logits", "encoded", "head_input", "pre_logits")
  expected = {name: stored[f"{case}/{name}"] for name in names}
  rounding.assert_close(run, trees.from_flat(flat), expected)


def test_explicit_fields_override_the_variant():
  model = vit.Model(variant="S/16", depth=2, patch_size=[8, 4], num_classes=3)
  assert (model.width, model.depth, model.mlp_dim) == (384, 2, 1536)
  assert model.patch_size == (8, 4)
  assert vit.Model(variant="S", patch_size=32).patch_size == (32, 32)
  assert vit.Model(**TINY).mlp_dim == 64
  assert hash(model) == hash(model.clone())


@pytest.mark.parametrize(
  ("kw", "message"),
  [
    (dict(variant="So400/14"), "variant: .*'So400/14'.* 'So400m/14'"),
    (dict(variant="B/x"), "variant: .*'B/16', got 'B/x'"),
    (dict(variant="B"), "patch_size: missing"),
    (dict(patch_size=4, width=16, depth=2), "num_heads: missing"),
    (dict(TINY, patch_size="16"), "patch_size: .* or two, got '16'"),
    (dict(TINY, patch_size=(4, 4, 3)), "patch_size: .* or two"),
    (dict(TINY, depth=0), "depth: expected a whole number at least 1, got 0"),
    (dict(TINY, posemb="sincos"), "posemb: .*'sincos2d'"),
    (dict(TINY, pool_type="gpa"), "pool_type: .*'gap'"),
    (dict(TINY, remat_policy="nothing"), "remat_policy: unknown 'nothing'"),
    (dict(TINY, dtype="bf16"), "dtype: .*'bfloat16'"),
    (dict(TINY, drop_path=1.0), "drop_path: .*1.0"),
    (dict(TINY, dropout=-0.1), "dropout: .*-0.1"),
    (dict(TINY, mlp="gelu_tanh"), "mlp: .*Did you mean 'gelu"),
    (dict(TINY, use_bias=["qkv", "ot"]), "use_bias: .*'out'"),
    (dict(TINY, rope=dict(teta=1.0)), "rope.teta: .*'theta'"),
    (dict(TINY, rope=dict(jitter=0.5)), "rope.jitter: .* at least 1"),
    (dict(TINY, rope={}, num_heads=8), "rope: .* multiple of 4, got 2"),
    (dict(TINY, relative_bias="layer"), "class_token: relative_bias='layer'"),
    (dict(TINY, pool_type="tok", class_token=False), "class_token: pool_type"),
    (dict(TINY, posemb_grid=(4, 0)), "posemb_grid: expected a positive"),
    (
      dict(TINY, registers=1, relative_bias="layer", class_token=True),
      "registers=1: expected none",
    ),
    (dict(TINY, registers=-1), "registers: expected a whole number"),
  ],
)
def test_wrong_options_are_errors(kw, message):
  with pytest.raises(ConfigError, match=f"config.model.{message}"):
    vit.Model(**kw)


def patches_of(image, size, length):
  """Patches of an image (height, width, 3), row by row, and noise behind."""
  h, w = image.shape[0] // size, image.shape[1] // size
  rows = image.reshape(h, size, w, size, 3).transpose(0, 2, 1, 3, 4)
  noise = np.random.default_rng(3).normal(size=(length, size * size * 3))
  noise[: h * w] = rows.reshape(h * w, -1)
  return noise


@pytest.mark.parametrize(
  "options",
  [
    dict(),
    *(
      pytest.param(more, marks=pytest.mark.slow)
      for more in (
        dict(pool_type="map", scan=True),
        dict(pool_type="tok_gap", registers=2, posemb_class=True),
        dict(posemb="none", posemb_grid=None, layer_scale=0.5, mlp="swiglu"),
      )
    ),
  ],
)
def test_padded_patches_give_what_the_image_gives_alone(options):
  model = vit.Model(**TINY | dict(posemb_grid=(4, 4)) | options)
  rng = np.random.default_rng(1)
  images = [rng.normal(size=(4 * h, 4 * w, 3)) for h, w in ((2, 5), (3, 2))]
  params = trees.from_flat(init_flat(model))
  patches = np.stack([patches_of(image, 4, 12) for image in images])
  shapes = jnp.asarray([[2, 5], [3, 2]])
  apply = jax.jit(model.apply)
  together = apply({"params": params}, patches, shapes=shapes)[0]
  for i, image in enumerate(images):
    alone = apply({"params": params}, image[None])[0][0]
    np.testing.assert_allclose(together[i], alone, rtol=2e-5, atol=2e-5)


def test_images_of_several_shapes_need_resizable_positions():
  patches = jnp.zeros((1, 6, 48))
  key, shapes = jax.random.key(0), jnp.asarray([[2, 3]])
  for options, message in (
    (dict(), "posemb_grid: missing"),
    (dict(posemb="sincos2d"), "posemb='sincos2d': .*one shape"),
    (dict(posemb="none", rope={}), "rope=.*one shape"),
  ):
    model = vit.Model(**TINY, **options)
    with pytest.raises(ConfigError, match=message):
      jax.eval_shape(
        lambda model=model: model.init(key, patches, shapes=shapes)
      )


def test_resized_grids_equal_those_of_jax_image():
  rng = np.random.default_rng(0)
  table = jnp.asarray(rng.normal(size=(4, 6, 3)), jnp.float32)
  shapes = [(4, 6), (2, 3), (7, 9), (3, 8), (1, 1)]
  resized = positions.resized_grid(table, jnp.asarray(shapes), 70)
  for i, (h, w) in enumerate(shapes):
    expected = jax.image.resize(table, (h, w, 3), "bilinear", antialias=True)
    np.testing.assert_allclose(
      resized[i, : h * w], expected.reshape(-1, 3), rtol=1e-5, atol=1e-6
    )


def test_coordinates_of_rotary_positions_change_in_training_only():
  image = np.random.default_rng(0).normal(size=(2, 8, 8, 3))
  options = TINY | dict(pool_type="gap", posemb="none")
  plain = vit.Model(**options, rope={})
  moved = vit.Model(**options, rope=dict(shift=0.5, jitter=2.0, rescale=2.0))
  params = {"params": trees.from_flat(init_flat(plain))}
  apply = lambda model, seed: model.apply(
    params,
    image,
    train=seed is not None,
    rngs={"dropout": jax.random.key(seed or 0)},
  )[0]
  np.testing.assert_array_equal(apply(plain, None), apply(moved, None))
  np.testing.assert_array_equal(apply(plain, None), apply(plain, 1))
  np.testing.assert_array_equal(apply(moved, 1), apply(moved, 1))
  for other in (apply(plain, None), apply(moved, 2)):
    assert np.abs(apply(moved, 1) - other).max() > 1e-3


ALL_OPTIONS = TINY | dict(
  pool_type="tok_gap",
  registers=2,
  posemb_class=True,
  rope={},
  relative_bias=None,
  norm_eps=1e-3,
  pre_norm=True,
  norm_pooled=True,
  mlp="gelu_quick",
  use_bias=("qv", "mlp"),
  layer_scale=0.1,
)


@pytest.mark.parametrize(
  "relative_bias",
  [
    None,
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("layer", "shared")),
  ],
)
def test_a_scan_equals_separate_blocks_with_all_options(relative_bias):
  options = ALL_OPTIONS | dict(relative_bias=relative_bias)
  if relative_bias:
    options |= dict(registers=0)
  separate = vit.Model(**options)
  stacked = vit.Model(**options, scan=True)
  flat = init_flat(separate)
  image = np.random.default_rng(0).normal(size=(2, 8, 8, 3))
  restacked = blocks.restack_blocks(flat, shapes(stacked, 8))
  assert any("relative_bias" in name for name in flat) == bool(relative_bias)
  np.testing.assert_allclose(
    apply_flat(separate, flat, image)[0],
    apply_flat(stacked, restacked, image)[0],
    rtol=1e-5,
    atol=1e-5,
  )


def test_patches_that_do_not_tile_the_image_are_an_error():
  with pytest.raises(ConfigError, match="of 224x230"):
    jax.eval_shape(
      vit.Model(variant="mu/16").init,
      jax.random.key(0),
      jnp.zeros((1, 224, 230, 3)),
    )


def test_initial_values_of_heads():
  image = np.random.default_rng(0).integers(0, 255, (2, 8, 8, 3), np.uint8)

  # Random numbers of this kind compile far faster than threefry's.
  key = jax.random.key(0, impl="unsafe_rbg")
  kw = {**TINY, "depth": 1, "num_classes": 3}
  model = vit.Model(**kw, rep_size=5, head_bias_init=-7.0)
  (x, out), variables = jax.jit(model.init_with_output)(key, image)
  np.testing.assert_array_equal(x, np.full((2, 3), -7.0))
  assert out["pre_logits"].shape == (2, 5)
  assert not variables["params"]["head"]["kernel"].any()
  variables = jax.jit(vit.Model(**kw, head_zeroinit=False).init)(key, image)
  assert np.asarray(variables["params"]["head"]["kernel"]).all()


def test_without_pooling_and_head_each_patch_has_features():
  model = vit.Model(**TINY, pool_type="none")
  image = np.random.default_rng(0).normal(size=(2, 8, 8, 3))
  x, out = apply_flat(model, init_flat(model), image)
  assert x.shape == (2, 4, 16)  # Features of each patch.
  for features in out.values():
    np.testing.assert_array_equal(x, features)


@pytest.mark.parametrize("pool_type", ["gap", "map"])
def test_bfloat16_computation_keeps_float32_logits_and_parameters(pool_type):
  model = vit.Model(5, **TINY, pool_type=pool_type, dtype="bfloat16")
  flat = init_flat(model)
  image = np.random.default_rng(1).uniform(-1, 1, (3, 8, 8, 3))
  logits, out = apply_flat(model, flat, image)
  assert logits.dtype == out["pre_logits"].dtype == jnp.float32
  assert out["encoded"].dtype == jnp.bfloat16
  assert all(p.dtype == np.float32 for p in flat.values())
  expected, _ = apply_flat(model.clone(dtype="float32"), flat, image)
  assert 1e-5 < np.abs(logits - expected).max() < 0.1


def test_a_scan_in_bfloat16_keeps_no_matrix_of_scores():
  """Without remat; in float32 it keeps those of all layers."""
  image = jax.ShapeDtypeStruct((5, 12, 12, 3), jnp.float32)  # 9 patches.

  def program(dtype):
    sizes = {**TINY, "depth": 3, "num_heads": 2, "patch_size": 4}
    model = vit.Model(7, **sizes, scan=True, dtype=dtype)
    params = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
    loss = lambda params, x: model.apply({"params": params}, x)[0].sum()
    return str(jax.make_jaxpr(jax.grad(loss))(params, image))

  scores = re.compile(r"\[3,5,2,(1,)?9,(1,)?9\]")  # Of three layers.
  assert scores.search(program("float32"))
  assert not scores.search(program("bfloat16"))


@pytest.mark.parametrize(
  "options", [TINY, pytest.param(ALL_OPTIONS, marks=pytest.mark.slow)]
)
def test_eight_devices_compute_the_same_as_one(options):
  model = vit.Model(5, **{**options, "depth": 1})
  params = trees.from_flat(init_flat(model))
  image = np.random.default_rng(2).normal(size=(16, 8, 8, 3))

  def loss(params, image):
    return jnp.sum(jnp.sin(model.apply({"params": params}, image)[0]))

  step = jax.jit(jax.value_and_grad(loss))
  expected = step(params, image)
  mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "fsdp"))
  batch = NamedSharding(mesh, PartitionSpec(("replica", "fsdp")))

  def fsdp(p):
    axes = [d for d in range(p.ndim) if p.shape[d] % 4 == 0][:1]
    spec = [*[None] * axes[0], "fsdp"] if axes else []
    return NamedSharding(mesh, PartitionSpec(*spec))

  sharded = jax.device_put(params, jax.tree.map(fsdp, params))
  actual = step(sharded, jax.device_put(image, batch))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    actual,
    expected,
  )


def as_augreg(flat):
  """Returns a "tok" model's parameters as the AugReg release stores them."""
  rng = np.random.default_rng(5)
  place_D = rng.normal(size=(1, 1, flat["cls"].shape[-1])).astype(np.float32)
  old = {}
  for name, value in flat.items():
    if name == "pos_embedding":
      name = "Transformer/posembed_input/pos_embedding"
      value = np.concatenate([place_D, value], axis=1)
    elif name == "cls":
      value = value - place_D
    name = name.replace("MultiHeadDotProductAttention_0", "MHDPA_1")
    name = name.replace("LayerNorm_1", "LayerNorm_2")
    name = name.replace("MlpBlock_0", "MlpBlock_3")
    old[name.replace("MHDPA", "MultiHeadDotProductAttention")] = value
  return old


@pytest.mark.parametrize("prefix", ["", "opt/target/", "params/"])
def test_from_published_reads_augreg_files(prefix):
  model = vit.Model(5, **TINY, pool_type="tok", rep_size=True)
  flat = init_flat(model)
  old = {prefix + n: v for n, v in as_augreg(flat).items()}
  if prefix:
    old["opt/state/step"] = np.array(7)
  assert prefix + "Transformer/encoderblock_1/MlpBlock_3/Dense_1/bias" in old
  new = vit.from_published(old, shapes(model, size=8))
  if prefix:
    assert new.pop("opt/state/step") == 7  # Kept, for the caller to list.
  assert new.keys() == flat.keys()
  for name, value in flat.items():
    np.testing.assert_allclose(new[name], value, atol=1e-6, err_msg=name)


def test_from_published_stacks_blocks_and_resamples_positions():
  model = vit.Model(5, **TINY, pool_type="tok")
  flat = init_flat(model)
  like = shapes(model.clone(scan=True), size=16)
  new = vit.from_published(as_augreg(flat), like)
  assert {n: v.shape for n, v in new.items()} == {
    n: v.shape for n, v in like.items()
  }
  kernel = "MlpBlock_0/Dense_0/kernel"
  np.testing.assert_array_equal(
    new[f"Transformer/encoderblock/{kernel}"][1],
    flat[f"Transformer/encoderblock_1/{kernel}"],
  )
  corner = new["pos_embedding"].reshape(4, 4, -1)[0, 0]
  np.testing.assert_allclose(corner, flat["pos_embedding"][0, 0], rtol=1e-5)
  # And back, from a file of a scanned model.
  back = vit.from_published(new, shapes(model, size=16))
  np.testing.assert_array_equal(
    back[f"Transformer/encoderblock_1/{kernel}"],
    flat[f"Transformer/encoderblock_1/{kernel}"],
  )


def test_from_published_keeps_unknown_names():
  flat = init_flat(vit.Model(5, **TINY, rep_size=True))
  flat["Transformer/unknown/kernel"] = np.zeros(3)
  same_head = shapes(vit.Model(5, **TINY), size=8)
  new = vit.from_published(flat, same_head)
  assert new.keys() == flat.keys()  # With pre_logits and unknown.
  # A head of another shape is trained on the encoder's output.
  other_head = shapes(vit.Model(3, **{**TINY, "depth": 3}), size=8)
  new = vit.from_published(flat, other_head)
  assert flat.keys() - new.keys() == {"pre_logits/kernel", "pre_logits/bias"}
  assert new["head/kernel"].shape == (16, 5)
  # 15 positions form no square grid; 5 that fit are not 4 and a class token.
  like = {"pos_embedding": jax.ShapeDtypeStruct((1, 15, 16), jnp.float32)}
  assert vit.from_published(flat, like)["pos_embedding"].shape == (1, 4, 16)
  row = {"pos_embedding": np.ones((1, 5, 16)), "cls": np.ones((1, 1, 16))}
  new = vit.from_published(row, row)
  np.testing.assert_array_equal(new["pos_embedding"], row["pos_embedding"])
  np.testing.assert_array_equal(new["cls"], row["cls"])


def test_from_published_reads_attention_pooling_at_the_top_level():
  flat = init_flat(vit.Model(5, **TINY, pool_type="map"))
  old = {name.removeprefix("MAPHead_0/"): v for name, v in flat.items()}
  assert "probe" in old
  new = vit.from_published(old, shapes(vit.Model(5, **TINY, pool_type="map")))
  assert new.keys() == flat.keys()


def test_from_published_reads_bfloat16():
  stored = jnp.arange(8, dtype=jnp.bfloat16)
  value = np.asarray(stored).view("V2")  # As numpy.load returns it.
  new = vit.from_published({"head/bias": value}, {})
  assert new["head/bias"].dtype == jnp.bfloat16
  np.testing.assert_array_equal(new["head/bias"], np.arange(8))


@pytest.mark.parametrize(
  "task",
  [classification, pytest.param(contrastive, marks=pytest.mark.slow)],
)
def test_tasks_take_ready_patches_of_several_shapes(task):
  """Noise in the padding changes neither the loss nor its gradients."""
  tower = TINY | dict(posemb_grid=(4, 4))
  if task is classification:
    model = vit.Model(5, **tower)
    labels = jnp.asarray([1, 4])
  else:
    text = dict(variant="mu", depth=1, vocab_size=9)
    model = two_towers.Model(tower, text, out_dim=8)
    labels = jnp.asarray([[1, 4, 2], [3, 3, 1]])
  rng = np.random.default_rng(0)
  batch = {
    "image": rng.normal(size=(2, 12, 48)).astype(np.float32),
    "shapes": jnp.asarray([[2, 5], [3, 2]]),
    "labels": labels,
  }
  noisy = {**batch, "image": batch["image"].copy()}
  noisy["image"][0, 10:] += 1.0
  noisy["image"][1, 6:] -= 1.0
  variables = model.init(jax.random.key(0), **task.inputs(batch))

  @jax.jit
  @jax.value_and_grad
  def loss(variables, batch):
    key = jax.random.key(0)
    sums, _ = task.loss_fn(variables, batch, key, model=model, train=True)
    return sums["loss"][0] / sums["loss"][1]

  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
    loss(variables, batch),
    loss(variables, noisy),
  )
  with pytest.raises(ConfigError, match="need 'shapes'"):
    model.apply(
      variables, **task.inputs({k: batch[k] for k in ("image", "labels")})
    )


def test_images_of_several_shapes_are_not_blended():
  batch = {"image": jnp.zeros((2, 6, 48)), "shapes": jnp.asarray([[2, 3]] * 2)}
  batch["labels"] = jnp.zeros(2, int)
  model = vit.Model(5, **TINY, posemb_grid=(4, 4))
  with pytest.raises(ConfigError, match="mixup_alpha=0.2"):
    classification.loss_fn(
      {}, batch, jax.random.key(0), model=model, train=True, mixup_alpha=0.2
    )
