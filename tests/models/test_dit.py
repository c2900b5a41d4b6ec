"""The diffusion transformer: its formula, its start, published sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import any_mesh

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import dit

SIZES = dict(
  image_size=8, channels=2, num_classes=3, patch_size=4, width=16, depth=3,
  num_heads=2, bottleneck=5, class_tokens=2, class_tokens_at=1, rope_theta=9.0,
)  # fmt: skip
RNG = np.random.default_rng(0)


def drawn(model):
  """Random variables, so that nothing is zero, in float64."""
  image = jnp.zeros((1, *model.shape))
  shapes = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
  return jax.tree.map(lambda x: RNG.normal(size=x.shape) * 0.3, shapes)


def dense(x, p):
  return x @ p["kernel"].reshape(x.shape[-1], -1) + p["bias"].reshape(-1)


def silu(x):
  return x / (1 + np.exp(-x))


def rms(x, scale):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def rotated(x_LHK, angle_LQ):
  """Pairs of neighbouring features as complex numbers, which rotate."""
  pairs = x_LHK[..., ::2] + 1j * x_LHK[..., 1::2]
  pairs = pairs * np.exp(1j * angle_LQ)[:, None]
  return np.stack([pairs.real, pairs.imag], -1).reshape(x_LHK.shape)


def block(x_LD, c_D, p, angle_LQ, heads):
  """One example in JiT's block, from the paper's description."""
  made = dense(silu(c_D), p["attention_norm"]["modulation"])
  shift, scale, gate, shift2, scale2, gate2 = np.split(made, 6)
  y = rms(x_LD, p["attention_norm"]["norm"]["scale"]) * (1 + scale) + shift
  a = p["attention"]
  split = lambda name: dense(y, a[name]).reshape(len(y), heads, -1)
  q, k, v = (split(name) for name in ("query", "key", "value"))
  q = rotated(rms(q, a["query_norm"]["scale"]), angle_LQ)
  k = rotated(rms(k, a["key_norm"]["scale"]), angle_LQ)
  scores = np.einsum("lhk,shk->hls", q, k) / np.sqrt(q.shape[-1])
  weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
  o = np.einsum("hls,shk->lhk", weights, v).reshape(len(y), -1)
  x_LD = x_LD + gate * dense(o, a["out"])
  y = rms(x_LD, p["mlp_norm"]["scale"]) * (1 + scale2) + shift2
  m = p["mlp"]
  hidden = silu(dense(y, m["gate"])) * dense(y, m["up"])
  return x_LD + gate2 * dense(hidden, m["down"])


def formula(p, image, t, label):
  """JiT of one image in numpy, with its 2 x 2 patches one by one."""
  D, heads = SIZES["width"], SIZES["num_heads"]
  omega = 10_000.0 ** -(np.arange(128) / 128)
  features = np.concatenate([np.cos(t * omega), np.sin(t * omega)])
  time = dense(silu(dense(features, p["time_0"])), p["time_1"])
  c_D = time + p["classes"][label]
  places = [(0, 0), (0, 1), (1, 0), (1, 1)]
  rows = [
    image[4 * r : 4 * r + 4, 4 * c : 4 * c + 4].reshape(-1) for r, c in places
  ]
  x = dense(np.stack(rows) @ p["squeeze"]["kernel"], p["embedding"])
  scale = 10_000.0 ** -np.linspace(0, 1, D // 4)
  for i, (r, c) in enumerate(places):
    parts = [np.sin(c * scale), np.cos(c * scale)]
    x[i] += np.concatenate([*parts, np.sin(r * scale), np.cos(r * scale)])
  turn = 9.0 ** -(np.arange(2) / 2)
  angle = np.stack([np.concatenate([r * turn, c * turn]) for r, c in places])
  x = block(x, c_D, p["block_0"], angle, heads)
  tokens = p["classes"][label] + p["class_tokens"][0]
  x = np.concatenate([tokens, x])
  angle = np.concatenate([np.zeros((2, 4)), angle])
  for i in range(2):
    x = block(x, c_D, p[f"class_block_{i}"], angle, heads)
  shift, scale = np.split(dense(silu(c_D), p["final_norm"]["modulation"]), 2)
  y = rms(x[2:], p["final_norm"]["norm"]["scale"]) * (1 + scale) + shift
  made = np.zeros_like(image)
  for (r, c), pixels in zip(places, dense(y, p["pixels"])):
    made[4 * r : 4 * r + 4, 4 * c : 4 * c + 4] = pixels.reshape(4, 4, 2)
  return made


@pytest.mark.parametrize("scan", [False, True])
def test_the_model_is_jits_formula(scan):
  with any_mesh.precision({"model": {"dtype": "float64"}}):
    model = dit.Model(**SIZES, dtype="float64")
    params = drawn(model)
    image, t, label = RNG.normal(size=(3, 8, 8, 2)), [0.1, 0.5, 0.9], [0, 2, 3]
    used = params
    if scan:
      model = model.clone(scan=True)
      used = {n: x for n, x in params.items() if "block_" not in n}
      for name, number in (("block", 1), ("class_block", 2)):
        blocks = [params[f"{name}_{i}"] for i in range(number)]
        used[name] = jax.tree.map(lambda *x: np.stack(x), *blocks)
    actual, out = jax.jit(model.apply)(
      {"params": used}, image, jnp.asarray(t), jnp.asarray(label)
    )
  assert out["encoded"].shape == (3, 4, 16)
  for i in range(3):
    expected = formula(params, image[i], t[i], label[i])
    np.testing.assert_allclose(actual[i], expected, 1e-6, 1e-6)


def test_blocks_start_as_the_identity_and_the_prediction_as_zero():
  model = dit.Model(**SIZES)
  image = RNG.normal(size=(2, 8, 8, 2)).astype(np.float32)
  variables = model.init(jax.random.key(0), image)
  args = image, jnp.asarray([0.2, 0.7]), jnp.asarray([0, 1])
  made, out = model.apply(variables, *args)
  assert not made.any()
  # As if there were no blocks, whatever the time and the class.
  shallow = dit.Model(**SIZES | dict(depth=1, class_tokens_at=1))
  _, others = shallow.apply(variables, image, jnp.zeros(2), jnp.zeros(2, int))
  np.testing.assert_array_equal(out["encoded"], others["encoded"])
  for name, x in trees.flatten_with_names(variables["params"]):
    if "modulation" in name or name.startswith("pixels"):
      assert not x.any(), name


def test_dropout_is_in_the_middle_half_of_the_blocks():
  model = dit.Model(**SIZES | dict(depth=8, dropout=0.9, class_tokens_at=3))
  params = jax.tree.map(jnp.float32, drawn(model))
  image = RNG.normal(size=(1, 8, 8, 2)).astype(np.float32)
  quiet = model.clone(dropout=0.0)

  def states(model):
    _, captured = model.apply(
      {"params": params}, image, train=True,
      rngs={"dropout": jax.random.key(1)}, capture_intermediates=True,
      mutable=["intermediates"],
    )  # fmt: skip
    captured = captured["intermediates"]
    names = [f"block_{i}" for i in range(3)]
    names += [f"class_block_{i}" for i in range(5)]
    return [captured[name]["__call__"][0][0] for name in names]

  pairs = list(zip(states(model), states(quiet)))
  same = [bool(jnp.array_equal(a, b)) for a, b in pairs]
  assert same[:3] == [True, True, False]  # Blocks 2 to 5 have dropout.
  # Blocks 6 and 7 have none: from the same input, the same output.
  options = [model._options(), quiet._options()]
  assert options[0] == options[1]


@pytest.mark.parametrize(
  "options, millions",
  [
    # Papers: JiT 131, 459 and 953; DiT 33, 130, 458 and 675.
    (dict(variant="JiT-B/16", image_size=256), 131),
    (dict(variant="JiT-L/16", image_size=256), 459),
    (dict(variant="JiT-H/16", image_size=256), 953),
    (dict(variant="DiT-S/2", image_size=32, channels=4), 33),
    (dict(variant="DiT-B/2", image_size=32, channels=4), 130),
    (dict(variant="DiT-XL/2", image_size=32, channels=4), 675),
  ],
)
def test_sizes_are_those_of_the_papers(options, millions):
  model = dit.Model(num_classes=1000, **options)
  image = jnp.zeros((1, *model.shape))
  shapes = jax.eval_shape(model.init, jax.random.key(0), image)
  number = sum(x.size for x in jax.tree.leaves(shapes)) / 1e6
  assert number == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(patch_size=3), "config.model.patch_size: patches of 3 do not tile"),
    (dict(num_heads=3), "config.model.num_heads: 3 does not divide"),
    (dict(num_classes=None), "class_tokens=2: needs num_classes"),
    (dict(class_tokens_at=4), "class_tokens_at: expected a number at most 3"),
    (dict(predicts="noise"), "config.model.predicts: unknown 'noise'"),
    (dict(width=None), "config.model.width: missing; give it, or a variant"),
    (dict(variant="JiT-Q/16"), "unknown 'JiT-Q/16'. Did you mean 'JiT-"),
    (dict(width=12, num_heads=2), "rope_theta: the width of a head must be"),
  ],
)
def test_mistakes_have_their_line(changes, message):
  with pytest.raises(ConfigError, match=message):
    dit.Model(**SIZES | changes)
