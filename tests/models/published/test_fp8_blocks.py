"""Matrices in FP8 with scales of blocks, as DeepSeek V3 is published."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from models.published.folders import (
  export,
  like_of,
  opened,
  variables_of,
  write,
)

from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder
from bigtrain.models.published import fp8_blocks

FP8 = dict(
  quant_method="fp8",
  fmt="e4m3",
  activation_scheme="dynamic",
  weight_block_size=[128, 128],
)


def quantised(matrix):
  """(float8 matrix, scales), block by block."""
  rows, columns = (-(-size // 128) for size in matrix.shape)
  scales = np.zeros((rows, columns), np.float32)
  values = np.zeros(matrix.shape, ml_dtypes.float8_e4m3fn)
  for i in range(rows):
    for j in range(columns):
      block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
      scales[i, j] = np.abs(matrix[block]).max() / 448
      values[block] = (matrix[block] / scales[i, j]).astype(values.dtype)
  return values, scales


def dequantised(values, scales):
  result = np.zeros(values.shape, np.float32)
  for i, row in enumerate(values):
    for j, value in enumerate(row):
      result[i, j] = np.float32(value) * scales[i // 128, j // 128]
  return result


def matrix_of(rows, columns, seed=0):
  rng = np.random.default_rng(seed)
  weight, scales = quantised(rng.normal(size=(rows, columns)))
  # Scales that differ a lot show blocks at the wrong place.
  scales *= rng.integers(1, 9, scales.shape)
  flat = {"a.weight": weight, "a.weight_scale_inv": scales}
  whole = dequantised(weight, scales)
  return fp8_blocks.joined(flat)["a.weight"], whole


def test_parts_are_decoded_where_they_are_read():
  matrix, whole = matrix_of(140, 300)
  assert matrix.shape == (140, 300) and matrix.dtype == np.float32
  np.testing.assert_array_equal(matrix[...], whole)
  np.testing.assert_array_equal(matrix[120:135], whole[120:135])
  np.testing.assert_array_equal(matrix[:3, 250:], whole[:3, 250:])
  assert matrix[2:2].shape == (0, 300)
  kernel = matrix.swapaxes(-1, -2)
  np.testing.assert_array_equal(kernel[100:200, 5:], whole.T[100:200, 5:])
  # Outputs of several parameters, and heads of both sides.
  part = kernel[..., 20:132].reshape((300, 4, 28))
  expected = whole.T[:, 20:132].reshape(300, 4, 28)
  np.testing.assert_array_equal(part[...], expected)
  index = slice(100, 140), slice(1, 3), slice(3, 9)
  np.testing.assert_array_equal(part[index], expected[index])
  out = kernel.reshape((3, 100, 140))
  expected = whole.T.reshape(3, 100, 140)
  index = slice(1, 3), slice(0, 90), slice(100, None)
  np.testing.assert_array_equal(out[index], expected[index])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder with blocks that are whole, partial and smaller than 128."""
  out = tmp_path_factory.mktemp("fp8")
  options = dict(
    variant="deepseek_mu",
    vocab_size=31,
    width=136,
    num_heads=4,
    mlp_dim=260,
    mla=dict(q_rank=40, kv_rank=130, nope_dim=30, rope_dim=4, v_dim=36),
    head_dim=34,
  )
  model = decoder.Model(**options)
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), int))
  rng = np.random.default_rng(0)
  variables = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), shapes
  )
  config, arrays = export(decoder, model, variables, out)
  result, expected = {}, {}
  for name, x in arrays.items():
    result[name] = expected[name] = x
    is_quantised = x.ndim == 2 and "layers" in name and "mlp.gate." not in name
    if is_quantised:
      weight, scales = quantised(x)
      result |= {name: weight, f"{name}_scale_inv": scales}
      expected[name] = dequantised(weight, scales)
  assert sum("scale_inv" in name for name in result) > 20
  write(out, result)
  config["quantization_config"] = FP8
  (out / "config.json").write_text(json.dumps(config))
  plain = tmp_path_factory.mktemp("plain")
  write(plain, expected)
  del config["quantization_config"]
  (plain / "config.json").write_text(json.dumps(config))
  return out, plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_loads_as_its_values(folder, dtype):
  both = []
  for path in folder:
    module, model = opened(path, scan=True, dtype=dtype)
    both.append(variables_of(module, model, path))
  jax.tree.map(np.testing.assert_array_equal, *both)


def test_devices_read_their_parts(folder):
  _, model = opened(folder[0], scan=True)
  both = [
    warm_start.load_params(
      dict(path=str(path), allow_unused=[".*correction_bias"]),
      like_of(model, devices=8),
      convert=decoder.from_published,
    )[0]
    for path in folder
  ]
  leaves = [dict(trees.flatten_with_names(tree)) for tree in both]
  split = [x for x in leaves[0].values() if not x.is_fully_replicated]
  assert len(split) > 10
  for name, x in leaves[0].items():
    np.testing.assert_array_equal(x, leaves[1][name], name)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (dict(weight_block_size=[64, 128]), r"weight_block_size=\[64, 128\]"),
    (dict(weight_block_size=None), r"expected \[128, 128\] with quant_method"),
    (dict(quant_method="compressed-tensors"), "'compressed-tensors': expected"),
    (dict(quant_method="fbgemm_fp8"), "quant_method='fbgemm_fp8': expected"),
    (dict(quant_method="modelopt"), "quant_method='modelopt': expected"),
    (dict(activation_scheme="static"), "activation_scheme='static': expected"),
    (dict(fmt="e5m2"), "fmt='e5m2': expected 'e4m3' with quant_method='fp8'"),
  ],
)
def test_other_formats_are_refused_by_name(folder, tmp_path, changes, message):
  config = json.loads((folder[0] / "config.json").read_text())
  config["quantization_config"] = FP8 | changes
  (tmp_path / "config.json").write_text(json.dumps(config))
  with pytest.raises(ConfigError, match=message):
    opened(tmp_path)


def test_arrays_that_do_not_fit_are_refused_by_name():
  weight = np.zeros((140, 300), ml_dtypes.float8_e4m3fn)
  with pytest.raises(ConfigError, match=r"scales \(2, 3\) of .*, got \(1, 1\)"):
    scales = np.ones((1, 1), np.float32)
    fp8_blocks.joined({"a.weight": weight, "a.weight_scale_inv": scales})
  with pytest.raises(ConfigError, match="a.weight: float8_e4m3fn without a.we"):
    fp8_blocks.joined({"a.weight": weight})


def test_files_have_the_dtype_of_the_library(folder):
  arrays = safetensors_files.read(str(folder[0]))
  name = "model.layers.1.self_attn.kv_b_proj.weight"
  assert arrays[name].dtype == ml_dtypes.float8_e4m3fn
  assert arrays[f"{name}_scale_inv"].shape == (3, 2)
