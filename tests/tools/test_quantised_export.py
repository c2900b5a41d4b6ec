"""`tools.checkpoint export --quantize`: files in blocks with scales."""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from models.published.folders import variables_of
from models.published.test_transformers import run

from bigtrain.arrays import trees
from bigtrain.checkpoints import checkpointer
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.checkpoints.manifest import HostState
from bigtrain.config import settings
from bigtrain.models.published import fp8_blocks, mxfp4
from bigtrain.objective import building, published_sizes
from bigtrain.tools import checkpoint as tool

GOLDEN = pathlib.Path(__file__).parents[1] / "golden/published"
# Blocks that are whole, partial, and smaller than 128.
DEEPSEEK = dict(
  variant="deepseek_mu",
  vocab_size=31,
  width=136,
  num_heads=4,
  mlp_dim=260,
  mla=dict(q_rank=40, kv_rank=130, nope_dim=30, rope_dim=4, v_dim=36),
  head_dim=34,
)


def saved(workdir, model_options, path=None):
  """Saves a run with the arrays of a folder, or random ones."""
  config = settings.Config(dict(model_name="decoder", model=model_options))
  config = published_sizes.with_published_sizes(config)
  module, model = building.model(config)
  if path:
    variables = variables_of(module, model, path)
  else:
    tokens = jnp.zeros((1, 2), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    rng = np.random.default_rng(0)
    draw = lambda x: rng.normal(size=x.shape).astype(np.float32)
    variables = dict(jax.tree.map(draw, shapes))
  params = variables.pop("params")
  state = {"params": params, "step": np.int32(1), "mutable": variables}
  saver = checkpointer.Checkpointer(str(workdir))
  saver.save(1, state, HostState(config=config.to_dict()))
  saver.close()
  return {"params": params, **variables}


def export(workdir, out, *options):
  arguments = ["export", str(workdir), str(out), "--format=hf", *options]
  assert tool.main([*arguments, "--overwrite"]) == 0
  config = json.loads((out / "config.json").read_text())
  return config, safetensors_files.read(str(out))


def opened(folder):
  model = dict(published=str(folder))
  config = settings.Config(dict(model_name="decoder", model=model))
  return building.model(published_sizes.with_published_sizes(config))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("deepseek") / "run"
  return workdir, saved(workdir, DEEPSEEK)


def test_fp8_is_written_in_deepseeks_format(deepseek, tmp_path):
  workdir, _ = deepseek
  _, plain = export(workdir, tmp_path / "plain")
  config, arrays = export(workdir, tmp_path / "fp8", "--quantize=fp8")
  quantisation = config["quantization_config"]
  assert quantisation["weight_block_size"] == [128, 128]
  kept = {f"{name}.weight" for name in quantisation["modules_to_not_convert"]}
  scales = {n for n in arrays if n.endswith("_scale_inv")}
  assert len(scales) > 20 and arrays.keys() - scales == plain.keys()
  by_us = fp8_blocks.joined(arrays)
  for name, x in plain.items():
    if f"{name}_scale_inv" not in scales:
      assert x.ndim < 2 or name in kept or "embed_tokens" in name
      np.testing.assert_array_equal(arrays[name], x)
      continue
    assert name not in kept and arrays[name].dtype == ml_dtypes.float8_e4m3fn
    # The published formula: each block times its factor.
    factors = np.repeat(arrays[f"{name}_scale_inv"], 128, axis=0)
    factors = np.repeat(factors, 128, axis=1)[: x.shape[0], : x.shape[1]]
    values = arrays[name].astype(np.float32) * factors
    np.testing.assert_array_equal(by_us[name][...], values)
    # Three bits of mantissa; the smallest steps are 2^-9 of a block's scale.
    bound = np.maximum(np.abs(x) * 2.0**-4, factors * 2.0**-10) * 1.01
    assert (np.abs(values - x) <= bound).all()
    largest = np.abs(arrays[name].astype(np.float32)).max()
    assert largest == 448  # The whole range is used.
  # Routers choose, and are not rounded.
  assert any("mlp.gate.weight" in name for name in kept)


def test_fp8_is_read_again(deepseek, tmp_path):
  workdir, variables = deepseek
  _, arrays = export(workdir, tmp_path / "fp8", "--quantize=fp8")
  module, model = opened(tmp_path / "fp8")
  again = variables_of(module, model, tmp_path / "fp8")
  ours = dict(trees.flatten_with_names(variables))
  for name, x in trees.flatten_with_names(again):
    error = np.abs(np.asarray(x, np.float64) - ours[name]).max()
    assert error <= 0.07 * np.abs(ours[name]).max(), name
  # In several files, with all arrays in the index.
  options = ("--quantize=fp8", "--max_shard_bytes=400000", "--dtype=bfloat16")
  _, parts = export(workdir, tmp_path / "parts", *options)
  assert len([*(tmp_path / "parts").glob("model-*")]) > 1
  for name, x in arrays.items():
    if x.dtype == np.float32 and not name.endswith(("_scale_inv", "bias")):
      x = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(parts[name], x, name)


def decoded(blocks, scales):
  """MXFP4 by its definition, a number at a time."""
  positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
  values = np.array([*positive, *(-x for x in positive)])
  E, outputs, groups, _ = blocks.shape
  result = np.zeros((E, 32 * groups, outputs))
  for e, o, g, i in np.ndindex(*blocks.shape):
    scale = 2.0 ** (int(scales[e, o, g]) - 127)
    for half, bits in enumerate(
      (blocks[e, o, g, i] & 15, blocks[e, o, g, i] >> 4)
    ):
      result[e, 32 * g + 2 * i + half, o] = values[bits] * scale
  return result


def test_mxfp4_of_a_published_folder_survives_bit_for_bit(tmp_path):
  folder = GOLDEN / "gpt_oss_mxfp4"
  saved(tmp_path / "run", dict(published=str(folder)), folder)
  config, arrays = export(
    tmp_path / "run", tmp_path / "out", "--quantize=mxfp4"
  )
  assert config["quantization_config"]["quant_method"] == "mxfp4"
  original = safetensors_files.read(str(folder))
  assert arrays.keys() == original.keys()
  num_matrices = 0
  for name, x in original.items():
    if name.endswith("_blocks"):
      num_matrices += 1
      start = name.removesuffix("_blocks")
      pair = [arrays[start + end] for end in ("_blocks", "_scales")]
      assert all(part.dtype == np.uint8 for part in pair)
      np.testing.assert_array_equal(
        decoded(*pair), decoded(x, original[f"{start}_scales"])
      )
    elif not name.endswith("_scales"):
      np.testing.assert_array_equal(arrays[name], x)
  assert num_matrices >= 4
  module, model = opened(tmp_path / "out")
  both = [variables_of(module, model, p) for p in (folder, tmp_path / "out")]
  jax.tree.map(np.testing.assert_array_equal, *both)


def test_mxfp4_rounds_to_the_nearest_number():
  rng = np.random.default_rng(0)
  matrices = rng.normal(size=(2, 64, 3)).astype(np.float32)
  matrices *= 2.0 ** rng.integers(-20, 20, (2, 1, 3))
  matrices[0, :32, 0] = 0
  blocks, scales = mxfp4.encoded(matrices)
  values = decoded(blocks, scales)
  exponents = np.repeat(scales, 32, axis=-1).swapaxes(1, 2).astype(int) - 127
  positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  scaled = np.abs(matrices / 2.0**exponents)
  nearest = np.abs(scaled[..., None] - positive).min(-1)
  np.testing.assert_allclose(
    np.abs(values - matrices) / 2.0**exponents, nearest, atol=1e-6
  )
  # A block's largest number takes the two largest exponents of 4 bits.
  largest = scaled.reshape(2, 2, 32, 3).max(axis=2)
  assert ((largest >= 4) & (largest < 8) | (largest == 0)).all()


@pytest.mark.parametrize(
  "model, options, message",
  [
    (
      dict(variant="gpt2", width=8, depth=1, num_heads=2, max_len=8),
      ["--quantize=fp8"],
      "--quantize=fp8: expected a layout that is published in this format, got "
      "'gpt2'",
    ),
    (
      dict(variant="llama", width=8, depth=1, num_heads=2, mlp_dim=8),
      ["--quantize=mxfp4"],
      "--quantize=mxfp4: expected a layout that is published in this format, "
      "got 'llama'",
    ),
    (
      dict(variant="gpt_oss_mu", width=40),
      ["--quantize=mxfp4"],
      "has 40 inputs; expected a multiple of 32",
    ),
    (
      dict(variant="gpt_oss_mu"),
      ["--quantize=fp8"],
      "has all experts of a layer; expected a layout with an array for each",
    ),
  ],
)
def test_models_without_such_a_format_are_refused(
  model, options, message, tmp_path, capsys
):
  saved(tmp_path / "run", dict(vocab_size=31) | model)
  out = str(tmp_path / "out")
  arguments = ["export", str(tmp_path / "run"), out, "--format=hf", *options]
  assert tool.main(arguments) == 2
  assert message in capsys.readouterr().err


def test_the_option_is_of_published_folders(tmp_path, capsys):
  arguments = ["export", str(tmp_path), str(tmp_path / "x.npz")]
  assert tool.main([*arguments, "--quantize=fp8"]) == 2
  assert "--quantize: only with --format=hf" in capsys.readouterr().err


@pytest.mark.published
def test_transformers_opens_them_with_our_logits(tmp_path):
  """Without a GPU it decodes the blocks when it loads them."""
  families = dict(
    deepseek_v3="fp8", qwen3="fp8", qwen3_moe="fp8", gpt_oss_mxfp4="mxfp4"
  )
  ours = {}
  for name, method in families.items():
    workdir, folder = tmp_path / f"{name}-run", GOLDEN / name
    saved(workdir, dict(published=str(folder)), folder)
    export(workdir, tmp_path / name, f"--quantize={method}")
    module, model = opened(tmp_path / name)
    variables = variables_of(module, model, tmp_path / name)
    with np.load(folder / "reference.npz") as reference:
      tokens = reference["tokens"]
    ours[name] = jax.jit(model.apply)(variables, tokens)[0]
    np.savez(tmp_path / name / "inputs.npz", input_ids=tokens.astype(np.int64))
  run("open_exports.py", *[tmp_path / name for name in families])
  for name, logits in ours.items():
    theirs = np.load(tmp_path / name / "logits.npy")
    np.testing.assert_allclose(logits, theirs, rtol=0, atol=1e-4, err_msg=name)
