"""Preferences and rewards of answers to prompts with pictures."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from PIL import Image
from support import any_mesh

from bigtrain import main
from bigtrain.config import loading
from bigtrain.config.errors import DataError
from bigtrain.config.settings import Config
from bigtrain.data import digit_pairs, prompts, supervised
from bigtrain.losses import answers
from bigtrain.objective import building
from bigtrain.tasks import language_modeling, policy_gradient, preference

PICTURES = dict(tokens=4, pp="value_range(-1, 1)")
NUM_ROWS = 16
NEW = 5


def longer(texts, row):
  """A reward that depends on the picture as well."""
  assert len(row["images"]) == 2
  return [len(text) + 0.1 * len(row["prompt"]) for text in texts]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
  """Rows with two pictures and two answers, in a file."""
  folder = tmp_path_factory.mktemp("rows")
  lines = []
  found = zip(range(NUM_ROWS), digit_pairs.questions("train"))
  for i, (_, row) in found:
    names = [f"{i}-{n}.png" for n in range(2)]
    for name, pixels in zip(names, row["images"]):
      Image.fromarray(pixels).save(folder / name)
    one = dict(prompt=row["prompt"], images=names)
    lines.append(dict(one, chosen=row["completion"], rejected="no idea"))
  path = folder / "rows.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return path


def config_of(rows, task, **changes):
  config = loading.load(f"{any_mesh.CONFIGS}/vlm_digits.py:runlocal")
  small = dict(width=16, depth=1, num_heads=2, mlp_dim=24)
  config["model"]["image"] |= small | dict(dropout=0.0)
  config["model"]["text"] |= small
  data = dict(tokenizer="bytes", path=str(rows), length=48, pictures=PICTURES)
  if task == "preference":
    data |= dict(type="supervised", preferences=True)
    config["loss"] = dict(kind="orpo")
  elif task == "policy_gradient":
    data |= dict(type="prompts", rewards=f"{__name__}.longer")
    config["loss"] = dict(samples=2, max_new=NEW)
  config |= dict(
    task=task,
    input=dict(data=data, batch_size=8),
    evals={},
    log_steps=1,
    ckpt_steps=2,
    total_steps=4,
    tensorboard=False,
  )
  return config | changes


def model_of(rows):
  _, model = building.model(Config(config_of(rows, "preference")))
  return model


def test_a_prompts_pictures_are_read_once_for_all_answers(rows):
  model = model_of(rows)
  source = supervised.Source(
    "bytes", 48, str(rows), pictures=PICTURES, preferences=True
  )
  batch = source.read(np.arange(3))
  assert batch["image"].shape == (3, 2, 8, 8, 3)
  assert batch["tokens"].shape == (3, 2, 48)
  inputs = answers.inputs(batch)
  params = jax.jit(model.init)(jax.random.key(0), **inputs)
  apply = jax.jit(model.apply)
  logits = apply(params, **inputs)[0]
  for k in range(2):
    alone = {n: x[k::2] for n, x in inputs.items() if n != "image"}
    want = apply(params, **alone, image=batch["image"])[0]
    np.testing.assert_allclose(logits[k::2], want, rtol=0, atol=1e-5)
  # The other pictures give other logits.
  other = dict(inputs, image=batch["image"][::-1])
  assert np.abs(apply(params, **other)[0] - logits).max() > 1e-3
  # The log-probabilities of a loss are those of each answer alone.
  log_probs = jax.jit(
    lambda params, batch: answers.log_probs(model, params, batch, chunk=None)[0]
  )(params, batch)
  score = jax.jit(language_modeling.predict_fns(model)["score"])
  for k in range(2):
    one = {n: batch[n][:, k] for n in ("tokens", "targets", "loss_mask")}
    scores = score(params, dict(one, image=batch["image"]))
    got = jnp.sum(log_probs[:, k], axis=1)
    np.testing.assert_allclose(got, scores["log_likelihood"], rtol=1e-5)


def test_different_pictures_of_a_pairs_answers_are_refused(rows, monkeypatch):
  source = supervised.Source(
    "bytes", 48, str(rows), pictures=PICTURES, preferences=True
  )
  kept = source._rows.pictures
  others = lambda row: kept(row)[::-1] if row % 2 else kept(row)
  monkeypatch.setattr(source._rows, "pictures", others)
  with pytest.raises(DataError, match="rows.jsonl, row 0.*same pictures for"):
    source.read(np.arange(1))


@pytest.mark.slow
def test_rollouts_are_drawn_with_the_losses_log_probs(rows):
  model = model_of(rows)
  source = prompts.Source(
    "bytes", 48, f"{__name__}.longer", path=str(rows), pictures=PICTURES
  )
  batch = source.read(np.arange(4))
  assert batch["image"].shape == (4, 2, 8, 8, 3)
  params = model.init(jax.random.key(0), **policy_gradient.inputs(batch))
  options = dict(model=model, eos_ids=(2,))
  made = policy_gradient.rollout(
    params, batch, jax.random.key(1), samples=3, max_new=NEW, **options
  )
  assert made["image"] is batch["image"] and made["tokens"].shape[:2] == (4, 3)
  scored = policy_gradient.score(params, made, None, **options)
  mask = made["loss_mask"] != 0
  assert mask.sum() > 30
  np.testing.assert_allclose(
    np.where(mask, made["log_probs"], 0), scored, rtol=0, atol=1e-5
  )


@pytest.mark.slow
@pytest.mark.parametrize("task", ["preference", "policy_gradient"])
def test_resumed_runs_and_other_meshes_equal_whole_runs(rows, task, tmp_path):
  config = config_of(rows, task)
  if task == "preference":  # DPO, with the base of adapters as reference.
    base = tmp_path / "base"
    main.train(config | dict(total_steps=1), str(base))
    config |= dict(
      model_init=str(base),
      adapters=dict(targets=r".*(query|value)/kernel", rank=2, alpha=4),
      loss=dict(kind="sigmoid"),
    )
  else:  # Killed within a set of answers.
    config["rollouts"] = dict(minibatches=2, iterations=2)
    config |= dict(total_steps=6, ckpt_steps=3)
  stop = config["ckpt_steps"]
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  main.train(config, str(whole))
  main.train(config | dict(stop_at_steps=stop), str(cut))
  main.train(config, str(cut))
  tiny.assert_same(tiny.arrays(whole), tiny.arrays(cut))
  assert tiny.rows(whole) == tiny.rows(cut)
  assert len({row["loss"] for row in tiny.rows(whole).values()}) > 2
  if task == "preference":
    other = tmp_path / "other"
    mesh = dict(replica=2, fsdp=2, tensor=2)
    main.train(config | dict(mesh=mesh, microbatches=2), str(other))
    for step, row in tiny.rows(other).items():
      want = tiny.rows(whole)[step]["loss"]
      assert row["loss"] == pytest.approx(want, rel=2e-4)


def test_a_reward_model_reads_pictures(rows):
  config = config_of(rows, "preference")
  config["model"]["text"]["num_classes"] = 1
  _, model = building.model(Config(config))
  source = supervised.Source(
    "bytes", 48, str(rows), pictures=PICTURES, preferences=True
  )
  batch = source.read(np.arange(3))
  params = model.init(jax.random.key(0), **preference.inputs(batch))
  rewards = preference.rewards(params, batch, model=model)
  assert rewards.shape == (3, 2)
  other = preference.rewards(
    params, dict(batch, image=batch["image"][::-1]), model=model
  )
  assert np.abs(other - rewards).max() > 1e-6
