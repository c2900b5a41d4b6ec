"""Flow matching: the paper's loss, samples, meshes, resuming, mistakes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from models import test_dit
from support import any_mesh

from bigtrain import main
from bigtrain.config.errors import ConfigError
from bigtrain.losses import flows
from bigtrain.models import dit
from bigtrain.tasks import flow_matching

SIZES = test_dit.SIZES
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("predicts", ["image", "velocity"])
def test_the_loss_is_the_papers_formula(predicts):
  with any_mesh.precision({"model": {"dtype": "float64"}}):
    model = dit.Model(
      **SIZES, predicts=predicts, noise_scale=2.0, dtype="float64"
    )
    variables = {"params": jax.tree.map(jnp.asarray, test_dit.drawn(model))}
    keys = jax.vmap(jax.random.key)(np.arange(50))
    batch = {
      "image": RNG.uniform(-1, 1, (50, *model.shape)),
      "labels": RNG.integers(0, 3, 50),
      "_keys": keys,
      "_mask": np.arange(50) < 48,
    }
    options = dict(time_mean=0.5, time_std=2.0, class_drop=0.5)
    run = lambda batch: flow_matching.loss_fn(
      variables, batch, keys[0], model=model, train=True, **options
    )[0]
    result = jax.jit(run)(batch)
    # The draws, by the key of each example and the use.
    fold = lambda n: jax.vmap(lambda key: jax.random.fold_in(key, n))(keys)
    t = np.asarray(flows.times(fold(0), "logit_normal", 0.5, 2.0))
    noise = 2.0 * np.asarray(flows.noise(fold(1), model.shape))
    dropped = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5))(fold(2))
    labels = np.where(dropped, 3, batch["labels"])
    x, t4 = batch["image"], t[:, None, None, None]
    z = t4 * x + (1 - t4) * noise
    apply = jax.jit(model.apply)
    out = np.asarray(apply(variables, z, jnp.asarray(t), labels)[0])
  assert (t > 0.95).sum() > 3 and 10 < dropped.sum() < 40
  v, predicted = x - noise, out
  if predicts == "image":  # Equation 6, with 1 - t of at least 0.05.
    v = (x - z) / np.maximum(1 - t4, 0.05)
    predicted = (out - z) / np.maximum(1 - t4, 0.05)
  error = ((v - predicted) ** 2).mean((1, 2, 3))[:48]
  total, weight = result["loss"]
  assert weight == 48 and total / weight == pytest.approx(error.mean(), 1e-6)


@pytest.mark.slow
def test_samples_follow_from_their_numbers_alone():
  model = dit.Model(**SIZES | dict(depth=2))
  params = jax.tree.map(jnp.float32, test_dit.drawn(model))
  samples = flow_matching.predict_fns(model)["samples"]

  def made(index, labels=None, **options):
    batch = {"_index": jnp.asarray(index)}
    if labels is not None:
      batch["labels"] = jnp.asarray(labels)
    fn = jax.jit(functools.partial(samples, steps=3, **options))
    return np.asarray(fn({"params": params}, batch))

  together = made([0, 1, 5])
  np.testing.assert_allclose(made([5]), together[2:], 1e-4, 1e-4)
  assert together.shape == (3, *model.shape) and abs(together).max() <= 1
  # Another seed or class makes another sample; guidance needs classes.
  assert abs(made([5], seed=1) - together[2:]).max() > 1e-2
  assert abs(made([5], labels=[1]) - together[2:]).max() > 1e-3
  assert abs(made([5], guidance=3.0) - together[2:]).max() > 1e-3
  with pytest.raises(ConfigError, match="pred_kw.sampler: unknown 'ode'"):
    made([5], sampler="ode")
  plain = dit.Model(**SIZES | dict(num_classes=None, class_tokens=0))
  with pytest.raises(ConfigError, match="guidance=2.0: needs config.model.num"):
    flow_matching.predict_fns(plain)["samples"](
      {"params": params}, {"_index": jnp.zeros(1, int)}, guidance=2.0
    )


def config(tiny_config, **changes):
  model = dict(
    image_size=8, channels=1, num_classes=10, patch_size=2, width=16, depth=2,
    num_heads=4, class_tokens=2, class_tokens_at=1,
  )  # fmt: skip
  changes = {
    "task": "flow_matching",
    "model_name": "dit",
    "model": model,
    "evals": {},
    "log_steps": 1,
    "optimizer": dict(name="sgd"),
    "lr": 0.1,
    "ema_width": 0.2,
  } | changes
  return tiny_config(changes)


@pytest.mark.slow
def test_meshes_and_microbatches_change_rounding_only(tiny_config, tmp_path):
  states = []
  for changes in (
    {"mesh": dict(fsdp=8)},
    {"mesh": dict(replica=2, fsdp=2, tensor=2), "microbatches": 2},
  ):
    folder = tmp_path / str(len(states))
    main.train(config(tiny_config, **changes), str(folder))
    states.append(tiny.rows(folder))
  for rows in states[1:]:
    for step, row in rows.items():
      for name in ("loss", "grad_norm"):
        assert row[name] == pytest.approx(states[0][step][name], 1e-4)
  assert states[0][6]["loss"] < states[0][1]["loss"]


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_one(tiny_config, tmp_path):
  one = config(tiny_config)
  main.train(one, str(tmp_path / "whole"))
  main.train(one | {"stop_at_steps": 3}, str(tmp_path / "cut"))
  main.train(one, str(tmp_path / "cut"))
  whole = tiny.arrays(tmp_path / "whole")
  assert any(name.startswith("ema/") for name in whole)
  tiny.assert_same(tiny.arrays(tmp_path / "cut"), whole)
  assert tiny.rows(tmp_path / "cut") == tiny.rows(tmp_path / "whole")


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"loss": dict(times="cosine")}, "config.loss.times: unknown 'cosine'"),
    ({"loss": dict(class_drop=2.0)}, "config.loss.class_drop: expected"),
    ({"model.image_size": 16}, r"model is for images of shape \(16, 16, 1\), "),
    ({"model.latents": True}, "config.teacher: missing; config.model.latents"),
  ],
)
def test_mistakes_have_their_line(tiny_config, tmp_path, changes, message):
  with pytest.raises(ConfigError, match=message):
    main.train(config(tiny_config, **changes), str(tmp_path))
