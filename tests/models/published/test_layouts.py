"""Hugging Face's layouts: golden logits, devices, import and export."""

import json

import jax
import numpy as np
import pytest
from models.published.folders import (
  GOLDEN,
  MODELS,
  like_of,
  load,
  model_of,
  module_of,
  name_of,
)
from support import rounding

from bigtrain.arrays import trees
from bigtrain.checkpoints import checkpointer
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.checkpoints.manifest import HostState
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder
from bigtrain.tools import checkpoint as tool

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("layout", MODELS)
def test_logits_equal_those_of_transformers(layout):
  model = model_of(layout, scan=layout not in ("gpt2", "t5"))
  golden = dict(np.load(GOLDEN / f"hf_{layout}" / "golden.npz"))
  expected = golden.pop("logits")
  params = load(layout, model)
  run = jax.jit(lambda params: [model.apply({"params": params}, **golden)[0]])
  rounding.assert_close(run, params, [expected])


QUICK = (("gpt2", False), ("llama", True), ("t5_1_1", False), ("switch", True))


@pytest.mark.parametrize("layout", MODELS)
def test_eight_devices_load_the_same_as_one(layout):
  model = model_of(layout, scan=True)
  one, eight = load(layout, model), load(layout, model, devices=8)
  halves = 0
  for name, kernel in trees.flatten_with_names(eight):
    split = kernel.addressable_shards[0].data.size < kernel.size
    assert len({s.device for s in kernel.addressable_shards}) == 8
    divides = any(size % 8 == 0 for size in kernel.shape)
    assert split == divides, name
    halves += split
  assert halves
  jax.tree.map(np.testing.assert_array_equal, one, eight)


# Keys of config.json that we cannot know, or write differently.
DIFFERENT_KEYS = {
  "gpt2": ("bos_token_id", "eos_token_id", "n_inner"),
  "llama": ("bos_token_id", "eos_token_id"),
  "mixtral": ("bos_token_id", "eos_token_id", "head_dim"),
  "t5": ("eos_token_id",),
  # transformers 5 writes tie_word_embeddings=True for all models.
  "t5_1_1": ("eos_token_id", "tie_word_embeddings"),
  "switch": ("eos_token_id", "expert_capacity"),
}


@pytest.mark.parametrize(
  ("layout", "scan"),
  [
    (name, scan)
    if (name, scan) in QUICK
    else pytest.param(name, scan, marks=pytest.mark.slow)
    for name in MODELS
    for scan in (False, True)
  ],
)
def test_export_restores_the_imported_folder(layout, scan, tmp_path, capsys):
  model = model_of(layout, scan=scan)
  params = load(layout, model, devices=8)
  workdir, out = str(tmp_path / "run"), str(tmp_path / "out")
  config = {
    "model_name": name_of(layout),
    "model": MODELS[layout] | {"scan": scan},
  }
  saver = checkpointer.Checkpointer(workdir)
  state = {"params": params, "step": np.int32(1)}
  saver.save(1, state, HostState(config=config))
  saver.close()

  assert tool.main(["export", workdir, out, f"--layout={layout}"]) == 0
  assert "arrays" in capsys.readouterr().out
  published = safetensors_files.read(str(GOLDEN / f"hf_{layout}"))
  exported = safetensors_files.read(out)
  prefix = "transformer." if layout == "gpt2" else ""
  assert {prefix + name for name in exported} == set(published)
  for name, array in exported.items():
    np.testing.assert_array_equal(array, published[prefix + name])
  theirs = json.loads((GOLDEN / f"hf_{layout}" / "config.json").read_text())
  ours = json.loads((tmp_path / "out" / "config.json").read_text())
  same = set(ours) & set(theirs) - set(DIFFERENT_KEYS[layout])
  assert {"architectures", "model_type", "vocab_size", "dtype"} <= same
  assert {k: ours[k] for k in same} == {k: theirs[k] for k in same}
  again = load(layout, model, path=out)
  jax.tree.map(np.testing.assert_array_equal, params, again)


def test_load_from_several_files_with_an_index(tmp_path):
  """Large models have an index with the file of each array."""
  arrays = safetensors_files.read(str(GOLDEN / "hf_llama"))
  names = sorted(arrays)
  weight_map = {}
  for number, part in enumerate((names[::2], names[1::2])):
    specs = {n: (arrays[n].shape, "float32") for n in part}
    file = f"model-{number}.safetensors"
    values = [arrays[n] for n in part]
    safetensors_files.write(str(tmp_path / file), specs, values, {})
    weight_map |= dict.fromkeys(part, file)
  index = tmp_path / safetensors_files.INDEX
  index.write_text(json.dumps({"weight_map": weight_map}))
  model = model_of("llama", scan=True)
  whole, parts = load("llama", model), load("llama", model, path=tmp_path)
  jax.tree.map(np.testing.assert_array_equal, whole, parts)
  weight_map["lost"] = "model-0.safetensors"
  index.write_text(json.dumps({"weight_map": weight_map}))
  with pytest.raises(ConfigError, match="'lost' of model.safetensors.index"):
    load("llama", model, path=tmp_path)


def test_only_the_share_of_a_device_is_read():
  """Stacks join only the layers that are read."""
  flat = safetensors_files.read(str(GOLDEN / "hf_llama"))
  model = model_of("llama", scan=True)
  like = dict(trees.flatten_with_names(like_of(model)))
  params = decoder.from_published(flat, like)
  for name, value in params.items():
    if name.startswith("blocks/"):
      assert not isinstance(value, np.ndarray)
      part = value[(slice(1, 2), *[slice(None)] * (len(value.shape) - 1))]
      assert part.shape == (1, *like[name].shape[1:])
    else:  # A view, not a copy.
      assert not value.flags.owndata


def test_loading_into_another_model_lists_the_differences(tmp_path):
  small = model_of("llama", depth=1, num_kv_heads=1)
  with pytest.raises(ConfigError) as e:
    load("llama", small)
  assert "unused    model.layers.1.mlp.up_proj.weight" in str(e.value)
  assert "reshaped  blocks_0/attention/key/kernel" in str(e.value)


@pytest.mark.parametrize(
  "kind, changes, layout, message",
  [
    ("llama", {}, "llamma", "--layout: unknown 'llamma'.*'llama'"),
    ("llama", {}, "gpt2", "posemb='learn', got 'rope'"),
    ("llama", dict(qk_norm=True), "llama", "qk_norm=None, got 'head'"),
    (
      "mixtral",
      dict(moe=dict(num_experts=4, shared_experts=1)),
      "mixtral",
      "'shared_dim': 0.*, got .'shared_dim': 40",
    ),
    ("t5", {}, "t5_1_1", "mlp='geglu', got 'relu'"),
    ("switch", {}, "t5", "moe=None"),
    ("switch", dict(moe=dict(num_experts=4)), "switch", "'top_k': 1"),
    (
      "mixtral",
      dict(moe=dict(num_experts=4, top_k=1)),
      "mixtral",
      "'normalize': True",
    ),
  ],
)
def test_exports_that_the_layout_cannot_represent_are_errors(
  kind, changes, layout, message
):
  model = model_of(kind, **changes)
  shapes = {n: x.shape for n, x in trees.flatten_with_names(like_of(model))}
  with pytest.raises(ConfigError, match=message):
    module_of(kind).to_published(model, shapes, layout)


@pytest.mark.parametrize(
  "layout, stacked_name, single_name",
  [
    ("llama", "blocks/mlp/up/kernel", "blocks_1/mlp/up/kernel"),
    (
      "switch",
      "encoder/blocks/0/mlp/up/kernel",
      "encoder/blocks_2/mlp/up/kernel",
    ),
    (
      "switch",
      "encoder/blocks/1/moe/up/kernel",
      "encoder/blocks_3/moe/up/kernel",
    ),
  ],
)
def test_stacked_and_single_layers_load_each_other(
  layout, stacked_name, single_name, tmp_path
):
  rng = np.random.default_rng(0)
  models = [model_of(layout, scan=scan) for scan in (True, False)]
  stacked = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(x.dtype), like_of(models[0])
  )

  def save(params, name):
    np.savez(tmp_path / name, **dict(trees.flatten_with_names(params)))
    return tmp_path / name

  single = load(layout, models[1], path=save(stacked, "stacked.npz"))
  np.testing.assert_array_equal(
    dict(trees.flatten_with_names(single))[single_name],
    dict(trees.flatten_with_names(stacked))[stacked_name][1],
  )
  again = load(layout, models[0], path=save(single, "single.npz"))
  jax.tree.map(np.testing.assert_array_equal, again, stacked)
