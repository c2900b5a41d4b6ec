"""FlexiViT: equal to big_vision's at five sizes, and sizes drawn by step."""

import importlib.util
import pathlib

import jax
import numpy as np
import pytest
import tiny
from support import rounding

from bigtrain import main, metrics, sharding
from bigtrain.arrays import trees
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.models import vit
from bigtrain.objective import gradients, model_variants

pytestmark = pytest.mark.golden

_PATH = pathlib.Path(__file__).parents[1] / "golden" / "make_flexivit.py"
_SPEC = importlib.util.spec_from_file_location("make_flexivit", _PATH)
golden = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(golden)


@pytest.mark.parametrize("seqhw", golden.SEQHWS)
def test_kernels_and_logits_equal_big_vision(seqhw):
  model = vit.Model(
    golden.CLASSES,
    posemb_grid=golden.GRID,
    pool_type="tok",
    seqhw=seqhw,
    **golden.SIZES,
  )
  images = np.zeros((1, 60, 60, 3), np.float32)
  spec = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
  shapes = {name: p.shape for name, p in trees.flatten_with_names(spec)}
  image, params = golden.inputs(shapes)

  @jax.jit
  def run(params):
    logits, _ = model.apply({"params": trees.from_flat(params)}, image)
    size = (60 // seqhw,) * 2
    kernel = vit._resized_kernel(params["embedding/kernel"], size)
    return {"kernel": kernel[..., 0], "logits": logits}

  with np.load(golden.GOLDEN / "flexivit.npz") as file:
    expected = {name: file[f"{name}/{seqhw}"] for name in ("kernel", "logits")}
  rounding.assert_close(run, params, expected)


@pytest.fixture
def flexi_config(tiny_config):
  """A run that draws from three sizes; options as of tiny.config."""
  changes = {
    "model_name": "vit",
    "model": dict(
      **dict(num_classes=10, patch_size=4, seqhw=2, posemb_grid=2),
      **dict(head_zeroinit=False, width=16, depth=1, mlp_dim=16, num_heads=2),
    ),
    "flexi": dict(seqhw=dict(values=(1, 2, 4))),
    "optimizer": dict(name="sgd"),  # Adam would enlarge the rounding.
    "lr": 0.1,
    "log_steps": 1,
    "evals.val.pred": "logits_seqhw=4",
  }
  return lambda **more: tiny_config(changes | more)


def losses(workdir):
  rows = tiny.rows(workdir)
  return np.asarray([rows[step]["loss"] for step in sorted(rows)])


@pytest.mark.slow
def test_sizes_follow_the_step_alone(flexi_config, tmp_path):
  main.train(flexi_config(), tmp_path / "whole")
  cut = dict(mesh=dict(replica=2, fsdp=4), microbatches=2)
  main.train(flexi_config(**cut, stop_at_steps=3), tmp_path / "cut")
  main.train(flexi_config(**cut), tmp_path / "cut")
  whole = losses(tmp_path / "whole")
  np.testing.assert_allclose(losses(tmp_path / "cut"), whole, rtol=1e-4)


@pytest.mark.parametrize("weights", [None, (1, 0, 2)])
def test_draws_follow_the_weights(weights):
  mesh = sharding.make_mesh(1, 8)
  values = dict(values=(1, 2, 4), weights=weights)
  config = settings.Config(
    dict(flexi=dict(seqhw=values), input=dict(batch_size=8))
  )
  model = vit.Model(5, seqhw=2, posemb_grid=3, **golden.SIZES)
  variants = model_variants.from_config(config, model)

  def loss_of(seqhw):
    return lambda variables, batch, rng: (
      {"loss": metrics.pair(seqhw * variables["params"]["a"] + batch["x"])},
      {},
    )

  computes = [
    gradients.make(loss_of(v.model.seqhw), trainable={"a": True}, mesh=mesh)
    for v in variants
  ]
  compute = gradients.of_step(config, variants, computes, {"a": True})
  state = lambda step: {"params": {"a": 0.0}, "step": step, "seed": 3}
  batch = {"x": np.zeros(8, np.float32)}
  draw = jax.jit(jax.vmap(lambda step: compute(state(step), batch)[0]["a"]))
  drawn = np.asarray(draw(np.arange(600)))
  shares = [np.mean(drawn == seqhw) for seqhw in (1, 2, 4)]
  expected = np.asarray(weights or (1, 1, 1))
  np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.06)
  np.testing.assert_array_equal(draw(np.arange(300, 310)), drawn[300:310])


@pytest.mark.parametrize(
  "change, message",
  [
    ({"flexi": dict(seqhv=dict(values=[1]))}, "config.flexi.*'seqhw'"),
    (
      {"flexi": dict(seqhw=dict(values=[1, 2], weights=[1]))},
      "config.flexi.seqhw: expected values and one weight for each",
    ),
    ({"model.seqhw": 3}, "config.model.seqhw: patches of"),
    ({"model.posemb_grid": None}, "config.model.posemb_grid: missing"),
    ({"evals.val.pred": "logits_seqhw=3"}, "logits_seqhw=4"),
  ],
)
def test_mistakes_are_told(change, message, flexi_config, tmp_path):
  with pytest.raises(ConfigError, match=message):
    main.train(flexi_config(**change), tmp_path)
