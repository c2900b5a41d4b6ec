"""DINO: its loss by a formula, exactness on any mesh, and named collapses."""

import types

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from support import objectives

from bigtrain import main
from bigtrain.config.errors import ConfigError
from bigtrain.tasks import dinov2

B, S, E, K, M = 6, 3, 4, 5, 2
SIZES = dict(patch_size=2, width=16, depth=1, mlp_dim=16, num_heads=2)
MODEL = dict(
  **SIZES,
  posemb="sincos2d",
  num_prototypes=8,
  patch_prototypes=6,
  head_hidden=16,
  head_out=8,
)
LOSS = dict(
  num_small=2,
  small_size=4,
  small_area=(0.2, 0.5),
  teacher_temperature=dict(at_percent=[0, 50], values=[0.04, 0.07]),
)


def softmax(x):
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


def sinkhorn(scores):
  q = np.exp(scores - scores.max())
  for _ in range(3):
    q /= q.sum(0, keepdims=True) * q.shape[1]
    q /= q.sum(1, keepdims=True) * q.shape[0]
  return q * q.shape[0]


def vectors(rng, *shape):
  x = rng.normal(size=shape)
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_the_loss_is_that_of_the_papers():
  rng = np.random.default_rng(0)
  kernels = {
    name: {
      which: {"kernel": rng.normal(size=(E, K))}
      for which in ("class_prototypes", "patch_prototypes")
    }
    for name in ("student", "teacher")
  }
  z = {
    "student_BGE": vectors(rng, B, 2, E),
    "teacher_BGE": vectors(rng, B, 2, E),
    "small_BSE": vectors(rng, B, S, E),
    "features_BGD": rng.normal(size=(B, 2, 7)),
    "teacher_features_BGD": rng.normal(size=(B, 2, 7)),
    "student_BGME": vectors(rng, B, 2, M, E),
    "teacher_BGME": vectors(rng, B, 2, M, E),
    "weight_BGM": np.tile([[1.0, 0.0], [0.5, 0.5]], (B, 1, 1)),
  }
  z["weight_BGM"][3] = 0.0  # An image without masks.

  def scores(of, which, x):
    kernel = kernels[of][which]["kernel"]
    return x @ (kernel / np.linalg.norm(kernel, axis=0))

  state = {
    "teacher": kernels["teacher"],
    "centre": {"class": 0.0, "patch": 0.0},
  }
  result, sums = dinov2.embeddings_loss_fn(
    kernels["student"],
    {name: jnp.float32(x) for name, x in z.items()},
    {},
    state=state,
    patch_weight=0.7,
    koleo_weight=0.1,
  )
  # The class loss: all pairs of a large crop and another view.
  taught = scores("teacher", "class_prototypes", z["teacher_BGE"])
  target = sinkhorn(taught.reshape(2 * B, K) / 0.07).reshape(B, 2, K)
  seen = np.concatenate([z["student_BGE"], z["small_BSE"]], 1)
  log_p = np.log(softmax(scores("student", "class_prototypes", seen) / 0.1))
  pairs = [
    -(target[:, g] * log_p[:, v]).sum(-1)
    for g in range(2)
    for v in range(2 + S)
    if v != g
  ]
  class_loss = np.mean(pairs)
  # The patch loss: the mean over masked patches, then over large crops.
  masked = z["weight_BGM"] > 0
  taught = scores("teacher", "patch_prototypes", z["teacher_BGME"])
  target = np.zeros((B, 2, M, K))
  target[masked] = sinkhorn(taught[masked] / 0.07)
  p = softmax(scores("student", "patch_prototypes", z["student_BGME"]) / 0.1)
  losses = -(target * np.log(p)).sum(-1)
  patch_loss = (losses * z["weight_BGM"]).sum() / (2 * B)
  # KoLeo, of each large crop.
  koleo = 0.0
  for g in range(2):
    x = z["features_BGD"][:, g]
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    distance = np.linalg.norm(x[:, None] - x[None], axis=-1) + 9 * np.eye(B)
    koleo -= np.log(distance.min(1)).mean()
  mean = lambda name: float(result[name][0] / result[name][1])
  assert mean("class_loss") == pytest.approx(class_loss, rel=1e-4)
  assert mean("patch_loss") == pytest.approx(patch_loss, rel=1e-4)
  assert mean("koleo_loss") == pytest.approx(koleo, rel=1e-4)
  expected = class_loss + 0.7 * patch_loss + 0.1 * koleo
  assert mean("loss") == pytest.approx(expected, rel=1e-4)
  assert sums["class"][1] == 2 * B and sums["patch"][1] == masked.sum()


@pytest.fixture(scope="module")
def arrays():
  rng = np.random.default_rng(0)
  return {"image": rng.normal(size=(16, 8, 8, 1))}


@pytest.mark.slow
def test_gradients_are_equal_on_any_mesh_in_any_microbatches(arrays):
  def of(microbatches, **sizes):
    config = dict(
      total_steps=10,
      input=dict(data=dict(type="arrays", arrays=arrays), batch_size=16),
      microbatches=microbatches,
      model_name="dinov2",
      model=MODEL | dict(dtype="float64"),
      task="dinov2",
      loss=LOSS,
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
  for name in ("loss", "teacher_entropy", "used_prototypes"):
    assert other[name][0] == pytest.approx(sums[name][0], rel=1e-5), name


def config(tiny_config, **changes):
  changes = {
    "task": "dinov2",
    "model_name": "dinov2",
    "model": MODEL,
    "loss": LOSS,
    "evals": {},
    "log_steps": 1,
    "keep_ckpts": 9,
  } | changes
  return tiny_config(changes)


@pytest.mark.slow
def test_a_run_continues_bit_for_bit(tiny_config, tmp_path):
  one = config(tiny_config)
  main.train(one, str(tmp_path / "whole"))
  for stop in (2, None):
    main.train(one | {"stop_at_steps": stop}, str(tmp_path / "cut"))
  first, second = tiny.arrays(tmp_path / "whole"), tiny.arrays(tmp_path / "cut")
  tiny.assert_same(second, first)
  rows = tiny.rows(tmp_path / "whole")
  assert tiny.rows(tmp_path / "cut") == rows
  signs = ("teacher_entropy", "used_prototypes", "effective_rank")
  assert all(rows[6][name] > 0 for name in (*signs, "view_distance"))
  assert any(name.startswith("tasks/teacher/class_head") for name in first)


GRAM = dict(
  large_size=8,
  gram_size=16,
  gram_weight=dict(at_steps=[0, 4], values=[0.0, 2.0], shape="stair"),
  gram_copies=dict(at_steps=[0, 2, 4], values=[0, 1, 2], shape="stair"),
)


@pytest.mark.slow
def test_gram_anchoring_begins_by_its_schedule(tiny_config, tmp_path):
  momentum = dict(momentum=0.5)
  model = MODEL | dict(patch_prototypes=None)
  changes = dict(model=model, ckpt_steps=1, log_steps=1)
  plain = config(tiny_config, loss=LOSS | momentum, **changes)
  main.train(plain, str(tmp_path / "plain"))
  one = config(tiny_config, loss=LOSS | momentum | GRAM, **changes)
  for stop in (3, None):
    main.train(one | {"stop_at_steps": stop}, str(tmp_path / "gram"))

  def of(step, prefix):
    arrays = tiny.arrays(tmp_path / "gram", step)
    return {
      name.removeprefix(prefix): x
      for name, x in arrays.items()
      if name.startswith(prefix)
    }

  # Steps 3 and 5 copy the teacher. Until then there is that of the start.
  teachers = {step: of(step, "tasks/teacher/") for step in range(1, 7)}
  grams = {step: of(step, "tasks/gram/teacher/") for step in range(1, 7)}
  tiny.assert_same(grams[2], grams[1])
  tiny.assert_same(grams[3], teachers[3])
  tiny.assert_same(grams[4], grams[3])
  tiny.assert_same(grams[5], teachers[5])
  tiny.assert_same(grams[6], grams[5])
  assert of(6, "tasks/gram/")["copies"] == 2

  # Its weight is 0 until step 5, whose loss has twice the difference.
  ours, without = tiny.rows(tmp_path / "gram"), tiny.rows(tmp_path / "plain")
  for step in range(1, 5):
    assert ours[step]["gram_loss"] == 0
    assert ours[step]["loss"] == pytest.approx(without[step]["loss"], rel=1e-5)
  parts = ours[5]["class_loss"] + 0.1 * ours[5]["koleo_loss"]
  assert ours[5]["gram_loss"] > 1e-4
  wanted = parts + 2 * ours[5]["gram_loss"]
  assert ours[5]["loss"] == pytest.approx(wanted, rel=1e-5)
  assert "gram_loss" not in without[5]


def ready_crops(num_large, num_small):
  rng = np.random.default_rng(0)
  return {
    "large_crops": rng.normal(size=(16, num_large, 8, 8, 1)),
    "small_crops": rng.normal(size=(16, num_small, 4, 4, 1)),
  }


@pytest.mark.parametrize(
  "num_large, num_small, message",
  [
    (2, 3, "num_small=4: more than the 3 small crops that the batch has"),
    (3, 4, "expected 2 large crops of each image, got 'large_crops' with 3"),
  ],
)
def test_more_crops_than_the_batch_has(
  tiny_config, tmp_path, num_large, num_small, message
):
  arrays = ready_crops(num_large, num_small)
  one = config(tiny_config, loss=dict(num_small=4))
  one["input"] = dict(data=dict(type="arrays", arrays=arrays), batch_size=16)
  with pytest.raises(ConfigError, match=message):
    main.train(one, str(tmp_path))


@pytest.mark.slow
def test_the_gram_teacher_sees_ready_crops(tiny_config, tmp_path):
  arrays = ready_crops(2, 3)
  plain = dict(gram_weight=1.0, num_small=0, mask_prob=0.0)
  given = {
    "same": arrays["large_crops"],
    "other": arrays["large_crops"].repeat(2, 2).repeat(2, 3)[..., ::-1, :],
  }
  model = MODEL | dict(dtype="float64")
  losses = {}
  for name, crops in given.items():
    data = dict(type="arrays", arrays=arrays | {"gram_crops": crops})
    one = config(tiny_config, loss=plain, model=model)
    one["input"] = dict(data=data, batch_size=16)
    _, sums = objectives.gradients(one)
    total, weight = sums["gram_loss"]
    losses[name] = total / weight
  # In the first step, the Gram teacher is the student.
  assert losses["same"] == pytest.approx(0, abs=1e-9)
  assert losses["other"] > 1e-4

  one["model"] = MODEL
  one["loss"]["gram_size"] = 16
  with pytest.raises(ConfigError, match="need the feature 'gram_crops'"):
    main.train(one, str(tmp_path / "size"))


HEALTHY = dict(
  teacher_entropy=1.0,
  used_prototypes=7.0,
  effective_rank=9.0,
  image_distance=1.0,
)


@pytest.mark.parametrize(
  "values, reason",
  [
    ({}, None),
    (dict(used_prototypes=1.01), "all images to one prototype"),
    (dict(teacher_entropy=np.log(8) - 1e-4), "uniform over all 8 prototypes"),
    (dict(effective_rank=1.01), "on one line"),
    (dict(image_distance=1e-5), "vectors of all images are equal"),
  ],
)
def test_a_collapse_has_a_name(values, reason):
  model = types.SimpleNamespace(num_prototypes=8)
  named = dinov2.problem(HEALTHY | values, model=model)
  assert named is None if reason is None else reason in named
  off = dinov2.problem(HEALTHY | values, model=model, stop_on_collapse=False)
  assert off is None


@pytest.mark.slow
def test_a_collapse_made_on_purpose_ends_the_run(tiny_config, tmp_path):
  # A teacher whose assignments are flat teaches the uniform distribution.
  loss = LOSS | dict(
    centering="mean", teacher_temperature=100.0, koleo_weight=0.0
  )
  one = config(tiny_config, loss=loss, total_steps=200)
  with pytest.raises(RuntimeError, match="step 3: .* uniform over all"):
    main.train(one, str(tmp_path))


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"loss": LOSS | dict(centering="none")}, "config.loss.centering: unknown"),
    ({"loss": LOSS | dict(momentun=1)}, "config.loss.momentun.*'momentum'"),
    ({"loss": LOSS | dict(mask_ratio=(0.0, 0.01))}, "masks none of 16 patches"),
    ({"loss": LOSS | dict(mask_ratio=(0.5, 0.1))}, "mask_ratio: expected two"),
    ({"model.posemb": "learn"}, "config.model.posemb_grid: missing"),
    ({"model.pool_type": "gap"}, "config.model: expected pool_type='tok'"),
    ({"loss": LOSS | dict(stop_on_collaps=1)}, "'stop_on_collapse'"),
    (
      {"loss": LOSS | dict(num_large=1, num_small=0)},
      "config.loss.num_large=1: expected small crops",
    ),
  ],
)
def test_mistakes_have_their_line(tiny_config, tmp_path, changes, message):
  one = config(tiny_config, **{"model": dict(MODEL)} | changes)
  with pytest.raises(ConfigError, match=message):
    main.train(one, str(tmp_path))


def test_one_large_crop_teaches_the_small_ones_and_its_own_patches():
  """SigLIP 2's losses: local to global, and masked patches of one view."""
  rng = np.random.default_rng(3)
  names = ("class_prototypes", "patch_prototypes")
  student, teacher = (
    {name: {"kernel": rng.normal(size=(E, K))} for name in names}
    for _ in range(2)
  )
  z = {
    "student_BGE": vectors(rng, B, 1, E),
    "teacher_BGE": vectors(rng, B, 1, E),
    "small_BSE": vectors(rng, B, S, E),
    "features_BGD": rng.normal(size=(B, 1, 7)),
    "teacher_features_BGD": rng.normal(size=(B, 1, 7)),
    "student_BGME": vectors(rng, B, 1, M, E),
    "teacher_BGME": vectors(rng, B, 1, M, E),
    "weight_BGM": np.full((B, 1, M), 1 / M),
  }

  def scores(params, name, x):
    kernel = params[name]["kernel"]
    return x @ (kernel / np.linalg.norm(kernel, axis=0))

  centre = {"class": jnp.zeros(K), "patch": jnp.zeros(K)}
  result, _ = dinov2.embeddings_loss_fn(
    student,
    {name: jnp.asarray(x) for name, x in z.items()},
    {},
    state={"teacher": teacher, "centre": centre},
    patch_weight=0.25,
    koleo_weight=0.0,
  )
  target = sinkhorn(scores(teacher, names[0], z["teacher_BGE"][:, 0]) / 0.07)
  p = softmax(scores(student, names[0], z["small_BSE"]) / 0.1)
  class_loss = -(target[:, None] * np.log(p)).sum(-1).mean()
  taught = scores(teacher, names[1], z["teacher_BGME"].reshape(-1, E))
  target = sinkhorn(taught / 0.07)
  p = softmax(scores(student, names[1], z["student_BGME"].reshape(-1, E)) / 0.1)
  patch_loss = -(target * np.log(p)).sum(-1).mean()
  mean = lambda name: float(result[name][0] / result[name][1])
  assert mean("class_loss") == pytest.approx(class_loss, rel=1e-4)
  assert mean("patch_loss") == pytest.approx(patch_loss, rel=1e-4)
  expected = class_loss + 0.25 * patch_loss
  assert mean("loss") == pytest.approx(expected, rel=1e-4)
  distance = np.linalg.norm(
    z["student_BGE"][:, 0] - z["small_BSE"][:, 0], axis=-1
  )
  assert mean("view_distance") == pytest.approx(distance.mean(), rel=1e-4)


def test_a_teacher_of_some_parameters_follows_these():
  params = {"img": {"a": jnp.ones(3)}, "txt": {"b": jnp.ones(2)}}
  model = types.SimpleNamespace(num_prototypes=4, patch_prototypes=None)
  state = dinov2.init_state(params, model=model, teacher="img/.*")
  assert state["teacher"].keys() == {"img"}
  student = {"img": {"a": jnp.full(3, 3.0)}, "txt": {"b": jnp.zeros(2)}}
  sums = {"class": (jnp.zeros(4), jnp.ones(()))}
  new = dinov2.update_state(state, params=student, sums=sums, momentum=0.5)
  np.testing.assert_allclose(new["teacher"]["img"]["a"], 2.0)
