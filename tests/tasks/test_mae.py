"""MAE: transformers' loss and gradients, masks, a ViT that starts from it."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from support import any_mesh

from bigtrain import main
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import mae as models
from bigtrain.tasks import mae

GOLDEN = pathlib.Path(__file__).parent.parent / "golden/mae.npz"
SIZES = dict(patch_size=4, width=16, depth=2, mlp_dim=24, num_heads=2)
DECODER = dict(
  decoder_width=12, decoder_depth=1, decoder_num_heads=3, decoder_mlp_dim=20
)
FIXED = ("vit.embeddings.position_embeddings", "decoder.decoder_pos_embed")

# (their name, ours).
NAMES = [
  (r"vit\.embeddings\.cls_token", "cls"),
  (r"vit\.embeddings\.position_embeddings", "pos_embedding"),
  (r"vit\.embeddings\.patch_embeddings\.projection", "embedding"),
  (r"vit\.layernorm", "Transformer/encoder_norm"),
  (r"vit\.layers", "Transformer/encoderblock"),
  (r"decoder\.mask_token", "decoder/mask_token"),
  (r"decoder\.decoder_pos_embed", "decoder/pos_embedding"),
  (r"decoder\.decoder_embed", "decoder/embed"),
  (r"decoder\.decoder_norm", "decoder/Transformer/encoder_norm"),
  (r"decoder\.decoder_pred", "decoder/pixels"),
  (r"decoder\.decoder_layers", "decoder/Transformer/encoderblock"),
  (r"encoderblock\.(\d+)\.", r"encoderblock_\1/"),
  (r"attention\.([qkvo])_proj", r"MultiHeadDotProductAttention_0/\1"),
  (r"_0/q\b", "_0/query"),
  (r"_0/k\b", "_0/key"),
  (r"_0/v\b", "_0/value"),
  (r"_0/o\b", "_0/out"),
  (r"layernorm_before", "LayerNorm_0"),
  (r"layernorm_after", "LayerNorm_1"),
  (r"mlp\.fc1", "MlpBlock_0/Dense_0"),
  (r"mlp\.fc2", "MlpBlock_0/Dense_1"),
  (r"(norm|Norm_\d)\.weight", r"\1/scale"),
  (r"\.weight", "/kernel"),
  (r"\.bias", "/bias"),
]


def ours(arrays, shapes):
  """Their parameters with our names and shapes."""
  result = {}
  for theirs, x in arrays.items():
    name = theirs
    for pattern, replacement in NAMES:
      name = re.sub(pattern, replacement, name)
    if x.ndim == 4:  # The projection of patches.
      x = x.transpose(2, 3, 1, 0)
    elif name.endswith("/kernel"):
      x = x.T
    result[name] = x.reshape(shapes[name])
  return result


@pytest.mark.golden
def test_loss_and_gradients_are_those_of_transformers():
  golden = dict(np.load(GOLDEN))
  with any_mesh.precision({"model": {"dtype": "float64"}}):
    model = models.Model(
      **SIZES,
      **DECODER,
      mlp="gelu_erf",
      norm_eps=1e-12,
      posemb_class=True,
      dtype="float64",
    )
    batch = {name: jnp.float64(golden[name]) for name in ("image", "noise")}
    init = jax.eval_shape(model.init, jax.random.key(0), batch["image"])
    named = trees.flatten_with_names(init["params"])
    shapes = {name: x.shape for name, x in named}
    params = ours(
      {n: x for n, x in golden.items() if n.startswith(("vit.", "decoder."))},
      shapes,
    )
    assert params.keys() == shapes.keys()

    def loss(params):
      variables = {"params": trees.from_flat(params)}
      key = jax.random.key(0)
      result, _ = mae.loss_fn(variables, batch, key, model=model, train=True)
      return result["loss"][0] / result["loss"][1]

    params = {name: jnp.float64(x) for name, x in params.items()}
    value, grads = jax.jit(jax.value_and_grad(loss))(params)
  assert value == pytest.approx(golden["loss"], rel=1e-6)
  prefix = "gradient of "
  theirs = {
    name.removeprefix(prefix): x
    for name, x in golden.items()
    if name.startswith(prefix)
  }
  expected = ours(theirs, shapes)
  # Their positions are constants.
  fixed = {"pos_embedding", "decoder/pos_embedding"}
  assert expected.keys() == grads.keys() - fixed
  atol = 1e-6 * max(np.abs(x).max() for x in expected.values())
  for name, x in expected.items():
    np.testing.assert_allclose(grads[name], x, 1e-5, atol, err_msg=name)


def test_a_share_of_the_patches_is_hidden_and_each_example_has_its_own():
  keys = jax.vmap(jax.random.key)(np.arange(64))
  kept, hidden = mae.mask({"_keys": keys}, 16, 0.75)
  assert kept.shape == (64, 4) and (hidden.sum(1) == 12).all()
  for kept_K, hidden_P in zip(kept, hidden):
    assert not hidden_P[kept_K].any() and len(set(kept_K.tolist())) == 4
  assert 40 < hidden.sum(0).min() and len({*map(str, kept.tolist())}) > 60


def config(tiny_config, **changes):
  model = dict(**SIZES, **DECODER, posemb="sincos2d")
  model |= dict(num_heads=4, decoder_num_heads=2, decoder_width=8, patch_size=2)
  changes = {
    "task": "mae",
    "model_name": "mae",
    "model": model,
    "evals": {},
    "log_steps": 1,
    "optimizer": dict(name="sgd"),
    "lr": 0.1,
  } | changes
  return tiny_config(changes)


@pytest.mark.slow
def test_meshes_and_microbatches_change_rounding_only(tiny_config, tmp_path):
  states = []
  for changes in (
    {"mesh": dict(fsdp=8)},
    {"mesh": dict(replica=4, fsdp=2), "microbatches": 2},
  ):
    folder = tmp_path / str(len(states))
    main.train(config(tiny_config, **changes), str(folder))
    states.append(tiny.arrays(folder))
  for name, x in states[0].items():
    atol = 1e-5 * max(np.abs(x).max(), 1e-2)
    np.testing.assert_allclose(states[1][name], x, 1e-4, atol, err_msg=name)
  rows = tiny.rows(tmp_path / "0")
  assert rows[6]["loss"] < rows[1]["loss"] and rows[1]["feature_std"] > 0


@pytest.mark.slow
def test_a_collapse_made_on_purpose_ends_the_run(tiny_config, tmp_path):
  # A decay that leaves nothing of the kernels, so that all images look alike.
  one = config(
    tiny_config,
    total_steps=200,
    optimizer=dict(name="adam"),
    wd=0.5,
    schedule=dict(decay_type="constant"),
  )
  named = r"step \d+: the class token's features of all images are equal"
  with pytest.raises(RuntimeError, match=named):
    main.train(one, str(tmp_path))


@pytest.mark.slow
def test_a_vit_starts_from_the_encoder(tiny_config, tmp_path):
  main.train(config(tiny_config, total_steps=1), str(tmp_path / "mae"))
  model = dict(**SIZES, posemb="sincos2d", pool_type="tok", num_classes=10)
  one = tiny_config(
    {
      "model_name": "vit",
      "model": model | dict(num_heads=4, patch_size=2),
      "model_init": dict(
        path=str(tmp_path / "mae"),
        allow_unused=["decoder/.*"],
        allow_missing=["head/.*"],
      ),
      "evals": {},
      "save_at_start": True,
      "stop_at_steps": 1,
    }
  )
  main.train(one, str(tmp_path / "vit"))
  source, started = (
    tiny.arrays(tmp_path / "mae"),
    tiny.arrays(tmp_path / "vit", 0),
  )
  name = "params/Transformer/encoderblock_1/MlpBlock_0/Dense_0/kernel"
  np.testing.assert_array_equal(started[name], source[name])


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"loss": dict(mask_ratio=1.0)}, "config.loss.mask_ratio: expected"),
    ({"loss": dict(mask_ratio=0.99)}, "mask_ratio: number of patches.*got 0"),
    ({"loss": dict(mask_ratio=0.0)}, "mask_ratio: number of patches.*at most"),
    ({"model.decoder_num_heads": 5}, "model.decoder_num_heads=5: does not"),
    (
      {"model.pool_type": "gap"},
      "config.model.pool_type='gap': expected 'tok'",
    ),
    (
      {"model.decoder_width": 0},
      "config.model.decoder_width: expected a whole",
    ),
    ({"model.rope": dict(theta=10.0)}, "config.model.rope=.*: expected none"),
  ],
)
def test_mistakes_have_their_line(tiny_config, tmp_path, changes, message):
  with pytest.raises(ConfigError, match=message):
    main.train(config(tiny_config, **changes), str(tmp_path))
