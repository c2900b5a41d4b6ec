"""SAM and GSAM: equal to big_vision's, on any number of devices."""

import importlib.util
import pathlib

import jax
import numpy as np
import optax
import pytest
import tiny
from support import cases, rounding

from bigtrain import main, metrics, sharding
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.objective import gradients, sharpness

pytestmark = pytest.mark.golden

_PATH = pathlib.Path(__file__).parents[1] / "golden" / "make_gsam.py"
_SPEC = importlib.util.spec_from_file_location("make_gsam", _PATH)
golden = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(golden)


def loss_fn(variables, batch, rng):
  one = lambda x, y: golden.loss(variables["params"], x[None], y[None])
  losses = jax.vmap(one)(batch["inputs"], batch["targets"])
  return {"loss": metrics.pair(losses)}, {}


@pytest.mark.parametrize("microbatches", cases.quick([1, 2], 2))
@pytest.mark.parametrize("devices", cases.quick([1, 8], 8))
@pytest.mark.parametrize("name", golden.CASES)
def test_four_steps_equal_big_vision(name, devices, microbatches):
  mesh = sharding.make_mesh(1, devices, devices=jax.devices()[:devices])
  params, batches = golden.problem()
  trainable = jax.tree.map(lambda _: True, params)
  options = golden.CASES[name] | dict(lr_min=0.02)
  config = settings.Config(dict(gsam=options, lr=0.4))
  compute = gradients.make(
    loss_fn, trainable=trainable, mesh=mesh, microbatches=microbatches
  )
  compute = jax.jit(sharpness.from_config(config, compute, trainable))

  def trained(params):
    for step, (lr, (inputs, targets)) in enumerate(zip(golden.LRS, batches)):
      batch = jax.device_put(
        dict(inputs=inputs, targets=targets), sharding.batch(mesh)
      )
      state = {"params": params, "step": step, "lr": {"lr": lr}}
      grads, sums, _ = compute(jax.device_put(state), batch)
      clean = golden.loss(params, inputs, targets)
      # A mean of 16 numbers.
      np.testing.assert_allclose(sums["loss"][0] / 16, clean, rtol=1e-5)
      steps = jax.tree.map(lambda g, lr=lr: -lr * g, grads)
      params = optax.apply_updates(params, steps)
      params = jax.device_get(params)
    return params

  with np.load(golden.GOLDEN / "gsam.npz") as file:
    expected = {key: file[f"{name}/{key}"] for key in params}
  rounding.assert_close(trained, params, expected)


def test_a_run_of_microbatches_resumes(tiny_config, tmp_path):
  changes = {"gsam": dict(rho_max=0.6, rho_min=0.1, alpha=0.6)}
  changes["optimizer"] = dict(name="sgd")  # Adam would enlarge the rounding.
  main.train(tiny_config(changes), tmp_path / "whole")
  changes["microbatches"] = 2
  main.train(tiny_config(changes | {"stop_at_steps": 3}), tmp_path / "parts")
  main.train(tiny_config(changes), tmp_path / "parts")
  del changes["gsam"], changes["microbatches"]
  main.train(tiny_config(changes), tmp_path / "plain")
  whole, parts, plain = (
    tiny.arrays(tmp_path / name) for name in ("whole", "parts", "plain")
  )
  for name, value in whole.items():
    np.testing.assert_allclose(parts[name], value, rtol=1e-4, atol=1e-5)
  kernels = [n for n in whole if n.endswith("kernel")]
  assert not any(np.allclose(whole[n], plain[n]) for n in kernels)


@pytest.mark.parametrize(
  "options, message",
  [
    (
      dict(rho_mxa=0.1),
      r"config.gsam.rho_mxa: unknown key. Did you mean 'rho_max'",
    ),
    (dict(), "config.gsam.rho_max: missing"),
    (dict(rho_max=-1), "config.gsam.rho_max: expected .* got -1"),
  ],
)
def test_mistakes_are_told(options, message, tiny_config, tmp_path):
  config = tiny_config({"gsam": dict(alpha=0.1) | options})
  with pytest.raises(ConfigError, match=message):
    main.train(config, tmp_path)


def test_a_floor_of_rho_needs_one_schedule(tiny_config, tmp_path):
  schedule = [
    (".*kernel", dict(decay_type="constant")),
    (".*", dict(decay_type="cosine")),
  ]
  options = dict(rho_max=0.1, rho_min=0.05)
  config = tiny_config({"gsam": options, "schedule": schedule})
  with pytest.raises(ConfigError, match="config.gsam.rho_min: .* schedule"):
    main.train(config, tmp_path)
