"""Tables of families: config.json in, patterns of layers, exported folders."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest
from models.published.folders import (
  GOLDEN,
  export,
  opened,
  variables_of,
  write,
)

from bigtrain.checkpoints import checkpointer, warm_start
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.checkpoints.manifest import HostState
from bigtrain.config.errors import ConfigError
from bigtrain.models import (
  convnext,
  decoder,
  resnet,
  swin,
  t5,
  text_transformer,
  two_towers,
  vit,
)
from bigtrain.models.published import (
  bert_families,
  decoder_families,
  layer_patterns,
  mxfp4,
  stage_families,
  t5_families,
  two_tower_families,
  vit_families,
)
from bigtrain.models.published.decoders.llama import LLAMA
from bigtrain.models.published.layer_patterns import ByLayer
from bigtrain.tools import checkpoint as tool

PUBLISHED = GOLDEN / "published"
DOCS = pathlib.Path(__file__).parents[3] / "docs" / "published.md"


def config_of(family, **changes):
  values = json.loads((PUBLISHED / family / "config.json").read_text())
  values |= changes
  return {key: x for key, x in values.items() if x != "absent"}


def model_of(folder, values):
  (folder / "config.json").write_text(json.dumps(values))
  return opened(folder)[1]


@pytest.mark.slow
def test_a_new_family_is_one_definition_and_a_test(tmp_path):
  section = DOCS.read_text().partition("### A new family")[2]
  definition, test = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
  assert len(definition.splitlines()) <= 40
  names = dict(json=json, jax=jax, np=np, opened=opened, export=export)
  names["variables_of"] = variables_of
  try:
    exec(definition + test, names)
    names["test_pebble"](tmp_path)
  finally:
    decoder_families.LAYOUTS.pop("pebble", None)


@pytest.mark.parametrize(
  "families, model",
  [
    (decoder_families.LAYOUTS, decoder.Model),
    (t5_families.LAYOUTS, t5.Model),
    (vit_families.LAYOUTS, vit.Model),
    (bert_families.FAMILIES, text_transformer.Model),
    (stage_families.BIT.families, resnet.Model),
    (stage_families.CONVNEXT.families, convnext.Model),
    (stage_families.SWIN.families, swin.Model),
    (two_tower_families.FAMILIES, two_towers.Model),
  ],
)
def test_families_determine_fields_of_their_model(families, model):
  known = {*model.__dataclass_fields__, "image_size"}
  for family in families.values():
    assert family.fields() | {*family.neutral} <= known, family.model_type


def test_mistakes_in_a_family_are_errors():
  with pytest.raises(ValueError, match="mine: defaults: vocab_sizes: .*_size'"):
    LLAMA.but("mine", "Mine", defaults={"vocab_sizes": 99})
  with pytest.raises(ValueError, match="mine: without: mlp_dims: .*mlp_dim'"):
    LLAMA.but("mine", "Mine", without=("mlp_dims",))
  with pytest.raises(ValueError, match=r"mine: constants: mlp: .*\('mlp',\)"):
    LLAMA.but("mine", "Mine", constants={"mlp": "relu"})
  with pytest.raises(ValueError, match="mine: constants: depth: the base"):
    LLAMA.but("mine", "Mine", constants={"depth": 3})
  family = LLAMA.but("m", "M", without=("mlp",), constants={"mlp": "relu"})
  assert family.read("file", {})["mlp"].value == "relu"


@pytest.mark.parametrize(
  "family, changes, message",
  [
    ("qwen3", dict(sliding_windw=3), "sliding_windw=3: unknown key .*window'"),
    ("llama", dict(quantization_config=dict(quant_method="awq")), "'awq'"),
    ("gemma2", dict(use_bidirectional_attention=True), "bidirectional_att"),
    ("gemma2", dict(layer_types=["full_attention"]), "each of the 5 layers"),
    ("gemma2", dict(layer_types=["chunked_attention"] * 5), "'full_attention'"),
    ("cohere2", dict(use_qk_norm=True), "use_qk_norm=True: .* only False"),
    ("glm4", dict(rope_parameters=dict(rope_typ="yarn")), "rope_typ: unknown"),
    ("olmo3", dict(rope_parameters=dict(rope_theta=1e4)), "each type of layer"),
    ("phi3", dict(rope_parameters=dict(rope_type="longrope")), "short_factor"),
    ("nemotron", dict(hidden_act="tanh"), "hidden_act='tanh': .* 'relu2'"),
    ("minimax_m2", dict(scoring_func="softmax"), "scoring_func='softmax'"),
    ("llama", dict(rope_interleaved=True), "rope_interleaved=True"),
    ("phi3", dict(lm_head_bias=True), "lm_head_bias=True: .* only False"),
  ],
)
def test_keys_that_are_not_computed_are_refused(
  family, changes, message, tmp_path
):
  with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
    model_of(tmp_path, config_of(family, **changes))


def test_unknown_keys_can_be_left_out(tmp_path):
  values = config_of("qwen3", my_key=1)
  (tmp_path / "config.json").write_text(json.dumps(values))
  with pytest.raises(ConfigError, match=r"allow_unread=\['my_key'\]"):
    opened(tmp_path)
  fields = decoder.published_fields(str(tmp_path), ["my_key"])
  assert fields["qk_norm"].value == "head"
  model = opened(PUBLISHED / "qwen3")[1]
  write(tmp_path, {"x": np.ones(1, np.float32)})
  with pytest.raises(ConfigError, match="my_key"):
    warm_start.check_published(str(tmp_path), decoder, model)
  source = dict(path=str(tmp_path), allow_unread=["my_key"])
  warm_start.check_published(source, decoder, model)


def test_keys_of_files_that_people_publish(tmp_path):
  others = {"transformers.js_config": {}, "is_llama_config": True}
  others |= dict(rope_interleaved=False, torch_dtype="bfloat16", use_cache=True)
  _, expected = opened(PUBLISHED / "llama")
  assert model_of(tmp_path, config_of("llama", **others)) == expected


def test_what_is_stored_but_never_applied(tmp_path):
  model = model_of(
    tmp_path, config_of("gemma3_text", attn_logit_softcapping=50.0)
  )
  assert model.attention_softcap is None
  values = config_of("qwen2", use_sliding_window=False, layer_types="absent")
  model = model_of(tmp_path, values)
  assert model.window is None and not model.kinds
  model = model_of(tmp_path, config_of("minimax_m2", sliding_window=3))
  assert model.window is None


FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = dict(rope_type="default", rope_theta=1e4)
YARN = PLAIN | dict(
  rope_type="yarn", factor=4.0, original_max_position_embeddings=16
)


@pytest.mark.parametrize(
  "family, changes, field, expected",
  [
    # Zeros of these options are as if they were absent.
    (
      "qwen3",
      dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0)),
      "mscale_all_dim",
      None,
    ),
    # A key beside the rotation comes first.
    (
      "qwen3",
      dict(rope_parameters=YARN, original_max_position_embeddings=8),
      "original_len",
      8,
    ),
    # By type of layer, "truncate" is read only beside the types.
    (
      "olmo3",
      dict(rope_parameters={SLIDING: PLAIN, FULL: YARN | dict(truncate=False)}),
      "truncate",
      None,
    ),
    (
      "internlm3",
      dict(rope_scaling=dict(type="dynamic", factor=6.0)),
      "original_len",
      24,
    ),
    (
      "gemma4_unified",
      dict(rope_parameters={SLIDING: YARN, FULL: PLAIN}),
      "factor",
      4.0,
    ),
  ],
)
def test_options_of_rotations(family, changes, field, expected, tmp_path):
  model = model_of(tmp_path, config_of(family, **changes))
  kinds = [{"rope_scaling": model.rope_scaling}, *(model.kinds or {}).values()]
  scalings = [x["rope_scaling"] for x in kinds if x.get("rope_scaling")]
  assert [x.get(field) for x in scalings] == [expected]


def test_queries_grow_without_a_scaling_too(tmp_path):
  rope = PLAIN | dict(
    llama_4_scaling_beta=0.3, original_max_position_embeddings=8
  )
  values = config_of("ministral3", rope_parameters=rope)
  model = model_of(tmp_path, values)
  assert model.query_scale["original_len"] == 8 and model.rope_scaling is None
  written = decoder_families.PUBLISHED.config_json(
    "key",
    decoder_families.LAYOUTS["ministral3"],
    canonical(model),
  )
  assert model_of(tmp_path, written) == model


def test_a_model_without_the_scaling_that_its_family_has_by_default(tmp_path):
  model = model_of(tmp_path, config_of("apertus", rope_parameters=PLAIN))
  written = decoder_families.PUBLISHED.config_json(
    "key", decoder_families.LAYOUTS["apertus"], canonical(model)
  )
  assert written["rope_scaling"] == {"rope_type": "default"}


def canonical(model):
  fields = {n: getattr(model, n) for n in type(model).__dataclass_fields__}
  return decoder_families.canonical(fields) | {"shapes": {}}


def test_keys_that_the_library_ignores(tmp_path):
  values = config_of("gpt_neox", rope_parameters="absent", rotary_pct=0.5)
  model = model_of(tmp_path, values | dict(rope_theta=7.0))
  assert (model.rope_theta, model.rope_fraction) == (1e4, 0.5)
  values = config_of("ministral3", rope_parameters="absent", rope_theta=7.0)
  assert model_of(tmp_path, values).rope_theta == 1e6
  values = config_of("kimi_linear", tie_word_embeddings=True)
  assert not model_of(tmp_path, values).tied_head


def test_no_shared_experts(tmp_path):
  """Then files have arrays without numbers."""
  values = config_of("glm4_moe", n_shared_experts=0)
  (tmp_path / "config.json").write_text(json.dumps(values))
  arrays = {
    name: np.zeros((0, 16), np.float32) if "shared_experts" in name else x
    for name, x in safetensors_files.read(str(PUBLISHED / "glm4_moe")).items()
  }
  module, model = opened(tmp_path)
  params = variables_of(module, model, write(tmp_path, arrays))["params"]
  assert model.moe.shared_experts == 0
  assert "shared_experts" not in params["blocks_1"]


def test_absent_keys_have_the_values_of_the_family(tmp_path):
  model = model_of(tmp_path, dict(model_type="gemma3_text"))
  assert (model.num_heads, model.num_kv_heads, model.head_dim) == (8, 4, 256)
  local = model.kinds["local"]
  assert (local["window"], local["rope_theta"]) == (4096, 1e4)
  assert model.rope_theta == 1e6 and len(model.layers) == 6
  model = model_of(tmp_path, dict(model_type="gpt_oss"))
  assert not model.rope_scaling["truncate"] and model.rope_theta == 150_000


def test_the_text_part_of_a_larger_model(tmp_path):
  text = config_of("gemma3_text")
  values = dict(model_type="gemma3", vision_config={}, text_config=text)
  folder = PUBLISHED / "gemma3_text"
  module, model = opened(folder)
  assert model_of(tmp_path, values) == model
  arrays = safetensors_files.read(str(folder))
  arrays = {f"language_model.{name}": x for name, x in arrays.items()}
  arrays["vision_tower.patch.weight"] = np.ones(3, np.float32)
  one = variables_of(module, model, write(tmp_path, arrays))
  two = variables_of(module, model, folder)
  jax.tree.map(np.testing.assert_array_equal, one, two)


def test_layers_that_predict_several_tokens_are_ignored(tmp_path):
  folder = PUBLISHED / "glm4_moe"
  module, model = opened(folder)
  arrays = dict(safetensors_files.read(str(folder)))
  extra = ("eh_proj", "input_layernorm", "mlp.gate")
  start = f"model.layers.{model.depth}"
  arrays |= {f"{start}.{n}.weight": np.ones((4, 4), np.float32) for n in extra}
  variables_of(module, model, write(tmp_path, arrays))
  del arrays[f"{start}.eh_proj.weight"]
  with pytest.raises(ConfigError, match="unused +model.layers.3.mlp.gate"):
    variables_of(module, model, write(tmp_path, arrays))


def test_any_layers_are_found_again_in_their_pattern():
  rng = np.random.default_rng(0)
  for _ in range(100):
    depth = int(rng.integers(1, 14))
    period = rng.integers(0, 3, rng.integers(1, 5))
    kinds = [int(period[i % len(period)]) for i in range(depth)]
    for i in range(int(rng.integers(0, 3))):
      kinds[i % depth] = 3
    windows = ByLayer([None, 4, 8, 16][kind] for kind in kinds)
    moe = ByLayer(None if kind % 2 else dict(num_experts=2) for kind in kinds)
    fields = layer_patterns.fields(dict(window=windows, moe=moe, depth=depth))
    layers = layer_patterns.by_layer(fields)
    assert tuple(layer["window"] for layer in layers) == windows
    assert tuple(layer["moe"] for layer in layers) == moe
    first, rest = layer_patterns.periodic([str(kind) for kind in kinds])
    assert len(first) + len(rest) <= depth


@pytest.mark.parametrize("family", ["glm4_moe", "phi3"])
def test_exported_folders(family, tmp_path, capsys):
  """In shards of bfloat16, with state and the tokenizer of the beginning."""
  folder = tmp_path / "published"
  folder.mkdir()
  source = PUBLISHED / family
  write(folder, safetensors_files.read(str(source)))
  values = config_of(family, eos_token_id=[3, 4], bos_token_id=2)
  (folder / "config.json").write_text(json.dumps(values))
  (folder / "tokenizer.json").write_text("{}")
  module, model = opened(folder, scan=True)
  variables = dict(variables_of(module, model, folder))
  state = {"params": variables.pop("params"), "step": np.int32(1)}
  state |= {"mutable": variables} if variables else {}
  fields = decoder.published_fields(str(folder))
  options = fields.merge({}, (), "config.model")
  config = dict(model_name="decoder", model=options | dict(scan=True))
  config["model_init"] = dict(path=str(folder))
  workdir, out = str(tmp_path / "run"), tmp_path / "out"
  saver = checkpointer.Checkpointer(workdir)
  saver.save(1, state, HostState(config=config))
  saver.close()
  command = ["export", workdir, str(out), "--format=hf", "--overwrite"]
  assert tool.main(command) == 0
  assert {path.name for path in out.glob("model*")} == {"model.safetensors"}
  most = 2000
  options = ["--dtype=bfloat16", f"--max_shard_bytes={most}"]
  assert tool.main([*command, *options]) == 0
  files = sorted(out.glob("*.safetensors"))
  assert len(files) > 5 and files[0].name.startswith("model-00001-of-000")
  written = json.loads((out / "config.json").read_text())
  assert written["model_type"] == family and written["dtype"] == "bfloat16"
  assert written["eos_token_id"] == [3, 4] and written["bos_token_id"] == 2
  assert (out / "tokenizer.json").read_text() == "{}"
  arrays = safetensors_files.read(str(out))
  index = json.loads((out / safetensors_files.INDEX).read_text())
  total = sum(x.nbytes for x in arrays.values())
  assert index["metadata"]["total_size"] == total
  for file in files:
    of_file = safetensors_files.read(str(file))
    size = sum(x.nbytes for x in of_file.values())
    assert size <= most or len(of_file) == 1
  for name, value in safetensors_files.read(str(source)).items():
    is_state = name.endswith("correction_bias")
    dtype = "float32" if is_state else "bfloat16"
    assert arrays[name].dtype.name == dtype
    np.testing.assert_array_equal(arrays[name], value.astype(dtype))
  again = variables_of(module, model, out)
  assert set(again) == {"params", *variables}


def test_mxfp4_blocks_are_decoded_where_they_are_read():
  rng = np.random.default_rng(0)
  blocks = rng.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8)
  scales = rng.integers(120, 130, (2, 6, 3)).astype(np.uint8)
  matrices = mxfp4.joined({"x_blocks": blocks, "x_scales": scales})["x"]
  assert matrices.shape == (2, 96, 6)
  whole = matrices[:, :, :].astype(np.float32)
  # Byte 5 of group 1 has inputs 32 + 10 and 32 + 11; E2M1, biased by 1.
  byte = int(blocks[1, 4, 1, 5])
  for nibble, value in zip((byte & 15, byte >> 4), whole[1, 42:44, 4]):
    exponent, mantissa = (nibble >> 1) & 3, nibble & 1
    size = (
      mantissa / 2 if not exponent else (1 + mantissa / 2) * 2 ** (exponent - 1)
    )
    sign = -1 if nibble & 8 else 1
    assert value == sign * size * 2.0 ** (int(scales[1, 4, 1]) - 127)
  part = matrices[..., 1::2][slice(1, 2), slice(40, 50), slice(0, 2)]
  np.testing.assert_array_equal(part, whole[1:2, 40:50, 1:5:2])
