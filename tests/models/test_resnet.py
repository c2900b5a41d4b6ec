"""The ResNet against published counts and numpy."""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import rounding

from bigtrain.arrays import trees
from bigtrain.config.errors import ConfigError
from bigtrain.models import resnet

pytestmark = pytest.mark.golden

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = dict(num_classes=3, depth=26, width=1 / 32)


@pytest.fixture(scope="module")
def golden():
  path = GOLDEN / "make_resnet.py"
  spec = importlib.util.spec_from_file_location("make_resnet", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  inputs, outputs = module.make()
  with np.load(module.FILE) as file:
    stored = dict(file)
  return inputs, outputs, stored


def collection(inputs, prefix):
  prefix += "/"
  names = [name for name in inputs if name.startswith(prefix)]
  return trees.from_flat({n.removeprefix(prefix): inputs[n] for n in names})


def variables_of(inputs, version):
  return {
    name: collection(inputs, f"v{version}/{name}")
    for name in ("params", "batch_stats")
  }


def run(model, variables, image):
  eval_logits, _ = model.apply(variables, image)
  (logits, out), updates = model.apply(
    variables, image, train=True, mutable=["batch_stats"]
  )
  return eval_logits, logits, out, updates["batch_stats"]


@pytest.mark.parametrize(
  ("depth", "version", "published"),
  # As counted by torchvision (version 1) and timm (version 2).
  [
    (50, 1, 25_557_032),
    (101, 1, 44_549_160),
    (152, 1, 60_192_808),
    (50, 2, 25_549_352),
  ],
)
def test_variants_have_the_published_number_of_parameters(
  depth, version, published
):
  model = resnet.Model(1000, depth, version)
  image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
  variables = jax.eval_shape(model.init, jax.random.key(0), image)
  assert variables.keys() == {"params", "batch_stats"}
  assert sum(p.size for p in jax.tree.leaves(variables["params"])) == published


def test_the_script_makes_the_golden_file(golden):
  _, outputs, stored = golden
  assert outputs.keys() == stored.keys()
  for name, value in stored.items():
    np.testing.assert_allclose(outputs[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("version", "num_devices"), [(1, 1), (1, 4), (2, 1)])
def test_matches_numpy(golden, version, num_devices):
  """A failure means that the model's results have changed.

  After an intended change, change tests/golden/make_resnet.py alike and run it.
  """
  inputs, _, stored = golden
  model = resnet.Model(**TINY, version=version)
  variables = variables_of(inputs, version)
  image = inputs[f"v{version}/image"]
  init_shapes = jax.eval_shape(model.init, jax.random.key(0), image)
  assert jax.tree.map(jnp.shape, variables) == jax.tree.map(
    jnp.shape, init_shapes
  )

  mesh = Mesh(np.array(jax.devices()[:num_devices]), "fsdp")
  image = jax.device_put(image, NamedSharding(mesh, PartitionSpec("fsdp")))

  prefix = f"v{version}/"
  expected = {n: v for n, v in stored.items() if n.startswith(prefix)}
  assert len(expected) == 6

  @jax.jit
  def outputs(variables):
    eval_logits, logits, _, stats = run(model, variables, image)
    actual = {
      f"{prefix}eval/logits": eval_logits,
      f"{prefix}train/logits": logits,
    }
    for name, value in trees.flatten_with_names(stats):
      actual[f"{prefix}train/batch_stats/{name}"] = value
    return {name: actual[name] for name in expected}

  rounding.assert_close(outputs, variables, expected)


@pytest.mark.parametrize("version", [1, 2])
def test_blocks_start_as_identities_and_have_gradients(version):
  layers = resnet.Layers("batch", 32, True, "float32")
  block = (resnet.BlockV1, resnet.BlockV2)[version - 1](2, 1, layers)
  x = jax.random.uniform(jax.random.key(1), (2, 5, 5, 8))
  key = jax.random.key(0, impl="unsafe_rbg")  # Compiles fast.
  variables = jax.jit(block.init)(key, x)

  def loss(params):
    y, _ = block.apply(
      {**variables, "params": params}, x, mutable=["batch_stats"]
    )
    return jnp.sum(y**2), y

  grads, y = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
  np.testing.assert_allclose(y, x, atol=1e-6)
  zero = grads["bn3"]["scale"] if version == 1 else grads["conv3"]["kernel"]
  assert np.abs(zero).min() > 1e-3


def test_bfloat16_gives_float32_logits_and_statistics(golden):
  inputs, _, stored = golden
  model = resnet.Model(**TINY, dtype="bfloat16")
  variables, image = variables_of(inputs, 1), inputs["v1/image"]
  logits, out = jax.jit(model.apply)(variables, image)
  assert logits.dtype == out["pre_logits"].dtype == jnp.float32
  assert out["encoded"].dtype == jnp.bfloat16
  error = np.abs(logits - stored["v1/eval/logits"])
  assert 1e-4 < error.max() < 0.5
  step = functools.partial(run, model)
  *_, stats = jax.eval_shape(step, variables, image)
  assert {s.dtype for s in jax.tree.leaves(stats)} == {jnp.dtype("float32")}


def test_no_head_gives_features():
  model = resnet.Model(depth=26, width=1 / 32)
  shapes, _ = jax.eval_shape(
    model.init_with_output, jax.random.key(0), jnp.zeros((2, 64, 64, 3))
  )
  x, out = shapes
  assert x.shape == out["pre_logits"].shape == (2, 64)
  assert out["encoded"].shape == (2, 2, 2, 64)


@pytest.mark.parametrize(
  ("kw", "message"),
  [
    (dict(depth=51), "depth: unknown 51.*50"),
    (dict(version=3), "version: unknown 3"),
    (dict(dtype="fp32"), "dtype: unknown 'fp32'"),
    (dict(width=0.01), "width: .*0.01"),
  ],
)
def test_wrong_options_are_errors(kw, message):
  with pytest.raises(ConfigError, match=f"config.model.{message}"):
    resnet.Model(**kw)
