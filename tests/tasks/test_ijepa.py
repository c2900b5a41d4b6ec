"""I-JEPA: its loss by numpy in float64, any mesh, teachers, collapses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from support import any_mesh, objectives

from bigtrain import main
from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.losses import block_masks
from bigtrain.models import ijepa as models
from bigtrain.models.layers import positions
from bigtrain.tasks import ijepa

D, E, HEADS = 16, 8, 2
MODEL = dict(
  patch_size=1,
  width=D,
  depth=2,
  mlp_dim=20,
  num_heads=HEADS,
  predictor_width=E,
  predictor_depth=1,
  predictor_mlp_dim=12,
)
MASKS = dict(
  num_targets=3,
  target_area=(0.1, 0.25),
  target_aspect=(0.75, 1.5),
  context_area=(0.7, 0.9),
  max_context=0.6,
  min_context=4,
)


# A transformer in numpy.


def norm(x, scale=1.0, bias=0.0, eps=1e-6):
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
  return x * scale + bias


def softmax(x):
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


def gelu(x):
  return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def dense(p, x):
  return np.tensordot(x, p["kernel"], 1) + p["bias"]


def transformer(p, x, depth):
  """Blocks with norms before their branches, of one sequence [L, D]."""
  for i in range(depth):
    block = p[f"encoderblock_{i}"]
    y = norm(x, **block["LayerNorm_0"])
    attention = block["MultiHeadDotProductAttention_0"]
    q, k, v = (dense(attention[n], y) for n in ("query", "key", "value"))
    scores = np.einsum("lhk,shk->hls", q, k) / np.sqrt(q.shape[-1])
    y = np.einsum("hls,shk->lhk", softmax(scores), v)
    out = attention["out"]
    x = x + np.tensordot(y, out["kernel"], 2) + out["bias"]
    y = norm(x, **block["LayerNorm_1"])
    mlp = block["MlpBlock_0"]
    x = x + dense(mlp["Dense_1"], gelu(dense(mlp["Dense_0"], y)))
  return norm(x, **p["encoder_norm"])


def expected_loss(student, teacher, image, masks, distance):
  """The loss of one example, whose patches are pixels."""
  side = image.shape[0]
  posemb = {w: positions.sincos_2d((side, side), w)[0] for w in (D, E)}

  def embedded(p):
    kernel = p["embedding"]["kernel"][0, 0]
    return image.reshape(side * side, -1) @ kernel + p["embedding"]["bias"]

  taught = transformer(
    teacher["Transformer"], embedded(teacher) + posemb[D], MODEL["depth"]
  )
  wanted = norm(taught, eps=1e-5)
  kept = masks.context_BK[masks.context_real_BK]
  seen = transformer(
    student["Transformer"],
    (embedded(student) + posemb[D])[kept],
    MODEL["depth"],
  )
  p = student["predictor"]
  context = dense(p["embed"], seen) + posemb[E][kept]
  losses = []
  for target, real in zip(masks.target_BNT, masks.target_real_BNT):
    target = target[real]
    x = np.concatenate([context, p["mask_token"][0] + posemb[E][target]])
    y = transformer(p["Transformer"], x, MODEL["predictor_depth"])
    difference = dense(p["out_proj"], y[len(kept) :]) - wanted[target]
    size = np.abs(difference)
    smooth = np.where(size < 1, size**2 / 2, size - 0.5)
    losses.append((smooth if distance == "smooth_l1" else size**2).mean())
  return np.mean(losses)


@pytest.mark.parametrize("distance", ["smooth_l1", "l2"])
def test_the_loss_is_that_of_numpy_with_the_same_masks(distance):
  with any_mesh.precision({"model": {"dtype": "float64"}}):
    rng = np.random.default_rng(0)
    image = rng.normal(size=(3, 6, 6, 2))
    model = models.Model(**MODEL, dtype="float64")
    init = jax.eval_shape(model.init, jax.random.key(0), image)["params"]
    draw = functools.partial(
      trees.map_with_names,
      lambda name, x: jnp.asarray(0.5 * rng.normal(size=x.shape)),
    )
    student, teacher = draw(init), draw(init)
    keys = jax.vmap(jax.random.key)(np.arange(3))
    loss_fn = functools.partial(
      ijepa.loss_fn, model=model, train=True, distance=distance, **MASKS
    )
    result, _ = jax.jit(loss_fn)(
      {"params": student},
      {"image": jnp.asarray(image), "_keys": keys},
      jax.random.key(0),
      state={"teacher": teacher},
    )
    masks = jax.jit(lambda keys: block_masks.draw(keys, (6, 6), **MASKS))(keys)
    # Padding in all of them, which numpy leaves out.
    assert not masks.context_real_BK.all() and not masks.target_real_BNT.all()
    losses = [
      expected_loss(
        *jax.device_get((student, teacher)),
        image[i],
        block_masks.Masks(*(np.asarray(x[i]) for x in masks)),
        distance,
      )
      for i in range(3)
    ]
  total, weight = result["loss"]
  assert weight == 3
  # Metrics are float32.
  assert float(total / weight) == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.fixture(scope="module")
def arrays():
  return {"image": np.random.default_rng(0).normal(size=(16, 8, 8, 1))}


@pytest.mark.slow
def test_gradients_are_equal_on_any_mesh_in_any_microbatches(arrays):
  def of(microbatches, **sizes):
    config = dict(
      total_steps=10,
      input=dict(data=dict(type="arrays", arrays=arrays), batch_size=16),
      microbatches=microbatches,
      model_name="ijepa",
      model=MODEL | dict(patch_size=2, dtype="float64", depth=1),
      task="ijepa",
      loss=MASKS,
    )
    return objectives.gradients(config, **sizes)

  expected, sums = of(1, fsdp=1)
  grads, other = of(2, replica=2, fsdp=4)
  largest = max(abs(x).max() for x in expected.values())
  assert largest > 1e-3
  for name, x in grads.items():
    np.testing.assert_allclose(
      x, expected[name], rtol=1e-5, atol=1e-5 * largest, err_msg=name
    )
  assert other["loss"][0] == pytest.approx(sums["loss"][0], rel=1e-5)


def config(tiny_config, **changes):
  changes = {
    "task": "ijepa",
    "model_name": "ijepa",
    "model": MODEL | dict(patch_size=2, depth=1),
    "loss": MASKS | dict(momentum=0.9),
    "evals": {},
    "log_steps": 1,
    "keep_ckpts": 9,
  } | changes
  return tiny_config(changes)


@pytest.mark.slow
def test_a_run_continues_bit_for_bit_and_its_teacher_follows(
  tiny_config, tmp_path
):
  one = config(tiny_config)
  main.train(one, str(tmp_path / "whole"))
  for stop in (2, None):
    main.train(one | {"stop_at_steps": stop}, str(tmp_path / "cut"))
  first, second = tiny.arrays(tmp_path / "whole"), tiny.arrays(tmp_path / "cut")
  tiny.assert_same(second, first)
  rows = tiny.rows(tmp_path / "whole")
  assert tiny.rows(tmp_path / "cut") == rows
  assert rows[6]["effective_rank"] > 1 and 4 <= rows[6]["context_patches"] <= 9
  name = "predictor/out_proj/kernel"
  teacher, student = first[f"tasks/teacher/{name}"], first[f"params/{name}"]
  assert 0 < np.abs(teacher - student).max() < 0.1


@pytest.mark.slow
def test_a_collapse_made_on_purpose_ends_the_run(tiny_config, tmp_path):
  # A decay that leaves nothing of the kernels, so that all images look alike.
  one = config(
    tiny_config,
    total_steps=200,
    lr=0.1,
    wd=0.5,
    loss=MASKS | dict(momentum=0.5),
    schedule=dict(decay_type="constant"),
  )
  with pytest.raises(RuntimeError, match=r"step \d+: the teacher's features"):
    main.train(one, str(tmp_path))
  off = {**one["loss"], "stop_on_collapse": False}
  main.train(one | dict(loss=off, total_steps=20), str(tmp_path / "off"))


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"loss": MASKS | dict(distance="l1")}, "config.loss.distance: unknown"),
    ({"loss": MASKS | dict(momentun=1)}, "config.loss.momentun.*'momentum'"),
    ({"loss": MASKS | dict(min_context=15)}, "min_context=15: a context"),
    ({"loss": MASKS | dict(target_aspect=(-1, 1))}, "target_aspect: expected"),
    ({"model.posemb": "learn"}, "config.model.posemb='learn': expected 'sinc"),
    ({"model.predictor_depth": 0}, "config.model.predictor_depth: expected"),
    ({"model.predictor_num_heads": 3}, "predictor_num_heads=3: does not div"),
  ],
)
def test_mistakes_have_their_line(tiny_config, tmp_path, changes, message):
  one = config(tiny_config, **{"model": dict(MODEL, patch_size=2)} | changes)
  with pytest.raises(ConfigError, match=message):
    main.train(one, str(tmp_path))
