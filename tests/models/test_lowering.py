"""Every config can be compiled for TPUs and for NVIDIA's GPUs.

Two blocks of each model are lowered, with the lengths, widths and dtypes of the
config, forward and backward. That runs the checks of the kernels, which refuse
some shapes, without a device.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest
import test_configs
from support import absent_mesh

from bigtrain.config import piecewise
from bigtrain.config.modules import find_module
from bigtrain.inputs.named_features import Features
from bigtrain.models import decoder

DEVICES = {"tpu": "TPU v5", "cuda": "NVIDIA H100 80GB HBM3"}
# Configs share the first two; a student is a model of another config, and so
# are those that learn preferences and from rewards.
OTHERS = ("decoder_lm", "t5_c4", "digits_distill", "dpo", "grpo")
CONFIGS = [name for name in test_configs.NAMES if name not in OTHERS]
# Lowering takes a second or two each.
QUICK = ("gpt2_124m",)


def _shallow(options):
  """Options of a model with two blocks in each stack."""
  shallow = {}
  for name, value in options.items():
    if isinstance(value, dict):
      value = _shallow(value)
    shallow[name] = value
  # Beside two blocks that repeat, those that come first and are of other kinds.
  variant = decoder.VARIANTS.get(options.get("variant", ""), {})
  depth = max(2, 1 + len(variant.get("first_layers", ())))
  if "variant" in options or "width" in options:
    shallow["depth"] = depth
  for name in ("depth", "decoder_depth"):
    if name in options:
      shallow[name] = depth
  if "feature_layer" in options:
    shallow["feature_layer"] = depth - 1
  if "taps" in options:
    shallow["taps"] = (0, 1)
  return shallow


def gradient_of(config):
  """(gradient of the config's loss, shapes of its arguments)."""
  module = find_module("models", config["model_name"], "model_name")
  options = config["model"]
  if config["model_name"] != "resnet":  # Its depth is a list of sizes.
    options = _shallow(options)
  model = module.Model(**options)
  example = test_configs.example_of(config)
  batch = {
    name: jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype)
    for name, x in example.items()
  }
  batch["_keys"] = jax.eval_shape(lambda: jax.random.split(jax.random.key(0)))
  if config["task"] == "classification":
    batch["labels"] = jax.ShapeDtypeStruct((2, model.num_classes), jnp.float32)
  if config["task"] == "flow_matching":
    batch["labels"] = jax.ShapeDtypeStruct((2,), jnp.int32)
  variables = test_configs.variables_of(config, model, example)
  taught = {}
  if teacher := config.get("teacher"):
    module = find_module("models", teacher["model_name"], "teacher")
    taught["teacher"] = module.Model(**_shallow(teacher["model"]))
    image = example.get("teacher_image", example["image"])
    variables["teacher"] = jax.eval_shape(
      taught["teacher"].init, jax.random.key(0), image
    )

  parts = []  # A task, its options, and its state.
  for entry in test_configs.tasks_of(config):
    task, options, state = entry.module, entry.part.kwargs("loss"), {}
    if hasattr(task, "init_state"):
      names = inspect.signature(task.init_state).parameters
      given = options | {"model": model}
      given = {name: x for name, x in given.items() if name in names}
      init_state = functools.partial(task.init_state, **given)
      state["state"] = jax.eval_shape(init_state, variables["params"])
    # What other functions of the task read, and what follows a schedule, has a
    # default.
    names = inspect.signature(task.loss_fn).parameters
    options = {
      name: x
      for name, x in options.items()
      if name in names and not piecewise.is_schedule(x)
    }
    parts.append((task, options, state))

  def loss(params, variables, states, batch, key):
    sum_of_tasks = 0.0
    for (task, options, _), state in zip(parts, states):
      pairs, _ = task.loss_fn(
        {**variables, "params": params},
        Features(batch, "config.input"),
        key,
        model=model,
        train=True,
        **taught,
        **options,
        **state,
      )
      total, weight = pairs["loss"]
      sum_of_tasks += total / weight
    return sum_of_tasks

  key = jax.eval_shape(lambda: jax.random.key(0))
  states = [state for _, _, state in parts]
  return jax.grad(loss), (variables["params"], variables, states, batch, key)


def lower(gradient, shapes, platform, **mesh):
  """The text of a function for a platform."""
  device = "gpu" if platform == "cuda" else platform
  with absent_mesh.use(DEVICES[platform], device, **mesh):
    # A function of its own, because jax keeps what it has traced.
    traced = jax.jit(lambda *args: gradient(*args)).trace(*shapes)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
  "name",
  [
    n if n in QUICK else pytest.param(n, marks=pytest.mark.slow)
    for n in CONFIGS
  ],
)
def test_a_config_can_be_lowered(traces_cudnn, name):
  function = gradient_of(test_configs.load(name))
  for platform in DEVICES:
    assert "func.func public @main" in lower(*function, platform), platform


def test_a_class_token_keeps_cudnn(traces_cudnn):
  config = test_configs.load("vit_i1k")
  config["model"] |= dict(pool_type="tok", dtype="bfloat16")
  text = lower(*gradient_of(config), "cuda")
  assert "__cudnn$fmhaSoftmaxBackward" in text
  assert "197x197" not in text and "198x198" not in text


def test_stages_call_cudnn_with_the_part_of_a_device(traces_cudnn):
  """Inside of stages, XLA cannot split the call: it has no sharding there."""
  config = test_configs.load("gpt2_124m")
  config["model"]["scan"] = True
  text = lower(*gradient_of(config), "cuda", pipeline=2)
  assert "__cudnn$fmhaSoftmaxBackward" in text
  assert "CustomSPMDPartitioning" not in text
