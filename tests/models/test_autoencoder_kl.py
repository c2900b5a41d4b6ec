"""The autoencoder against diffusers, and latents in training and sampling."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from support import any_mesh

from bigtrain import main
from bigtrain.arrays import trees
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config.errors import ConfigError
from bigtrain.losses import flows
from bigtrain.models import autoencoder_kl, dit
from bigtrain.tasks import flow_matching
from bigtrain.tools import sample

FOLDER = pathlib.Path(__file__).parents[1] / "golden/autoencoder"


def loaded(dtype="float32"):
  """(model, params) of the golden folder."""
  fields = autoencoder_kl.published_fields(str(FOLDER))
  model = autoencoder_kl.Model(**fields.merge({"dtype": dtype}, (), "model"))
  shapes = jax.eval_shape(
    model.init, jax.random.key(0), jnp.zeros((1, 8, 8, 3))
  )
  like = dict(trees.flatten_with_names(shapes["params"]))
  flat = safetensors_files.read(str(FOLDER))
  arrays = autoencoder_kl.from_published(flat, like)
  assert arrays.keys() == like.keys()
  for name, x in arrays.items():
    assert x.shape == like[name].shape, name
  return model, trees.from_flat(arrays)


@pytest.mark.golden
def test_latents_and_images_are_those_of_diffusers():
  golden = np.load(FOLDER / "outputs.npz")
  with any_mesh.precision({"model": {"dtype": "float64"}}):
    model, params = loaded("float64")
    params = jax.tree.map(jnp.float64, params)
    image = jnp.float64(golden["image"])
    mean, std = jax.jit(lambda *args: model.apply(*args, method="encode"))(
      {"params": params}, image
    )
    decoded, out = model.apply({"params": params}, image)
  np.testing.assert_allclose(mean, golden["mean"], 1e-9, 1e-9)
  np.testing.assert_allclose(std, golden["std"], 1e-9, 1e-9)
  np.testing.assert_allclose(decoded, golden["decoded"], 1e-9, 1e-9)
  np.testing.assert_allclose(out["encoded"], mean, 1e-9, 1e-9)
  mean = np.asarray(mean)
  np.testing.assert_allclose(model.scaled(mean), (mean - 0.1) * 0.5)
  np.testing.assert_allclose(model.unscaled(model.scaled(mean)), mean, 1e-12)


def test_older_names_of_the_attention():
  _, params = loaded()
  old = {}
  for name, x in safetensors_files.read(str(FOLDER)).items():
    for new, older in (
      ("to_q", "query"), ("to_k", "key"), ("to_v", "value"),
      ("to_out.0", "proj_attn"),
    ):  # fmt: skip
      name = name.replace(new, older)
    old[name] = x
  like = dict(trees.flatten_with_names(params))
  arrays = autoencoder_kl.from_published(old, like)
  for name, x in like.items():
    np.testing.assert_array_equal(arrays[name], x)


def config(tiny_config, **changes):
  model = dict(image_size=4, channels=4, num_classes=10, latents=True)
  model |= dict(variant="DiT-S/2", width=16, depth=1, num_heads=2, mlp_dim=32)
  changes = {
    "task": "flow_matching",
    "model_name": "dit",
    "model": model,
    "loss": dict(times="uniform"),
    "input.pp": "value_range(-1,1,0,16)|copy('label','labels')|"
    "keep('image','labels')",
    "teacher": dict(
      model_name="autoencoder_kl",
      model=dict(published=str(FOLDER)),
      model_init=str(FOLDER),
    ),
    "evals": dict(
      made=dict(
        type="samples", pred="samples", pred_kw=dict(steps=2), num_samples=4
      )
    ),
    "log_steps": 1,
  } | changes
  return tiny_config(changes)


def pictures(config):
  """The config with pictures of three channels in place of its digits."""
  rng = np.random.default_rng(0)
  image = rng.uniform(0, 16, (64, 8, 8, 3)).astype(np.float32)
  arrays = dict(image=image, label=np.arange(64) % 10)
  config["input"]["data"] = dict(type="arrays", arrays=arrays)
  return config


@pytest.mark.slow
def test_a_latent_flow_learns_and_its_samples_are_images(
  tiny_config, tmp_path, capsys
):
  shutil.copytree(FOLDER, tmp_path / "encoder")
  one = pictures(config(tiny_config))
  one["teacher"]["model"]["published"] = str(tmp_path / "encoder")
  one["teacher"]["model_init"] = str(tmp_path / "encoder")
  workdir = tmp_path / "run"
  main.train(one, str(workdir))
  rows = tiny.rows(workdir)
  assert all(np.isfinite(row["loss"]) for row in rows.values())
  assert (workdir / rows[6]["made/samples"]).exists()
  # The autoencoder is no part of the checkpoint, and does not train.
  assert not any("encoder" in name for name in tiny.arrays(workdir))
  two = pictures(config(tiny_config)) | {"microbatches": 2, "stop_at_steps": 1}
  main.train(two | {"mesh": dict(replica=2, fsdp=4)}, str(tmp_path / "two"))
  expected = rows[1]["loss"]
  assert tiny.rows(tmp_path / "two")[1]["loss"] == pytest.approx(expected, 1e-4)
  assert sample.main([f"--workdir={workdir}", "--num_samples=3"]) == 0
  results = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert (workdir / "evaluate" / results["sample/samples"]).exists()


def test_the_flow_leads_to_scaled_latents_drawn_from_the_encoder():
  autoencoder, params = loaded()
  model = dit.Model(
    variant="DiT-S/2", image_size=4, channels=4, latents=True, width=16,
    depth=1, num_heads=2, mlp_dim=32,
  )  # fmt: skip
  image = np.random.default_rng(0).uniform(-1, 1, (5, 8, 8, 3))
  image = jnp.float32(image)
  variables = model.init(jax.random.key(0), image)
  keys = jax.vmap(jax.random.key)(jnp.arange(5))
  result, _ = flow_matching.loss_fn(
    {**variables, "teacher": {"params": params}},
    {"image": image, "_keys": keys},
    None,
    model=model,
    teacher=autoencoder,
    train=False,
  )
  fold = lambda n: jax.vmap(lambda key: jax.random.fold_in(key, n))(keys)
  apply = lambda x: autoencoder.apply({"params": params}, x, method="encode")
  mean, std = apply(image)
  latents = (mean + std * flows.noise(fold(3), model.shape) - 0.1) * 0.5
  # At the start, the model predicts a velocity of 0.
  velocity = latents - flows.noise(fold(1), model.shape)
  total, weight = result["loss"]
  assert total / weight == pytest.approx(float((velocity**2).mean()), rel=1e-4)


@pytest.mark.parametrize(
  "changes, message",
  [
    (
      {"model.latents": False},
      "config.teacher: expected none, or config.model.",
    ),
    ({"model.image_size": 8}, r"for latents of shape \(8, 8, 4\), got \(4, 4"),
  ],
)
def test_mistakes_have_their_line(tiny_config, tmp_path, changes, message):
  changes = {"evals": {}} | changes
  with pytest.raises(ConfigError, match=message):
    main.train(pictures(config(tiny_config, **changes)), str(tmp_path))


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"_class_name": "VQModel"}, "expected _class_name='AutoencoderKL', got"),
    ({"act_fn": "gelu"}, "act_fn: expected 'silu', got 'gelu'"),
    ({"new_key": 1}, "new_key=1: unknown key; allow_unread="),
  ],
)
def test_folders_that_are_refused(tmp_path, changes, message):
  values = json.loads((FOLDER / "config.json").read_text()) | changes
  (tmp_path / "config.json").write_text(json.dumps(values))
  with pytest.raises(ConfigError, match=message):
    autoencoder_kl.published_fields(str(tmp_path))
