"""Each published family against transformers: golden/published.

golden/make_published.py made the folders: small models, their logits, the
gradients of their losses, and the tokens that they generate.
"""

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.published.folders import (
  GOLDEN,
  export,
  opened,
  shapes_of,
  variables_of,
  write,
)
from support import cases, rounding

from bigtrain.arrays import trees
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config.errors import ConfigError
from bigtrain.models import decoder
from bigtrain.models.published import decoder_families, mxfp4
from bigtrain.models.published.decoders import kimi_linear
from bigtrain.models.published.decoders.missing_parts import MISSING_PARTS
from bigtrain.tasks import language_modeling

pytestmark = pytest.mark.golden

PUBLISHED = GOLDEN / "published"
FAMILIES = sorted(path.name for path in PUBLISHED.iterdir())
# What differs most from the others is in `make test`.
QUICK = {
  "gemma3_text",
  "gemma4_devices",
  "glm4_moe",
  "gpt_oss",
  "kimi_linear",
  "llama4_text",
  "qwen3_next",
}
CASES = [
  family
  if family in QUICK
  else pytest.param(family, marks=pytest.mark.slow, id=family)
  for family in FAMILIES
]
# Without gradients: kernels of four bits.
TRAINED = [name for name in FAMILIES if name != "gpt_oss_mxfp4"]
# {family: layout} of models that another family expresses too.
LAYOUTS = {
  "gemma4_unified": "gemma4_unified_text",
  "gpt_bigcode_heads": "gpt_bigcode",
} | {
  name: name
  for name in (
    "aria_text",
    "qwen3_5_moe_text",
    "cwm",
    "granitemoehybrid",
    "internlm3",
    "iquestcoder",
    "solar_open",
    "youtu",
  )
}


@functools.cache
def reference(family):
  return dict(np.load(PUBLISHED / family / "reference.npz"))


@functools.cache
def loss_and_logits(model):
  """Function of (variables, tokens): gradients of the mean loss, logits."""

  def loss(params, rest, tokens):
    logits, _ = model.apply({"params": params, **rest}, tokens)
    logp = jax.nn.log_softmax(logits[:, :-1])
    picked = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)
    return -jnp.mean(picked), logits

  return jax.jit(jax.grad(loss, has_aux=True))


@functools.cache
def loaded(family):
  """(model, variables), with layers that are not stacked."""
  module, model = opened(PUBLISHED / family)
  return model, variables_of(module, model, PUBLISHED / family)


@pytest.mark.parametrize("family", CASES)
def test_logits(family):
  model, variables = loaded(family)
  expected = reference(family)
  tokens, prompt = expected["tokens"], expected["prompt"]
  text = np.concatenate([prompt, expected["generated"]], axis=1)
  # One program for both, since no logit depends on later tokens.
  length = max(tokens.shape[1], text.shape[1])
  rows = [np.pad(x, ((0, 0), (0, length - x.shape[1]))) for x in (tokens, text)]
  both = np.concatenate(rows)
  apply = jax.jit(lambda v: model.apply(v, both)[0])
  logits = lambda v: [apply(v)[: len(tokens), : tokens.shape[1]]]
  rounding.assert_close(logits, variables, [expected["logits"]])
  end = text.shape[1]
  next_logits = lambda v: np.asarray(apply(v))[
    len(tokens) :, prompt.shape[1] - 1 : end - 1
  ]
  rounding.assert_clear(next_logits, variables)
  best = np.argmax(next_logits(variables), axis=-1)
  np.testing.assert_array_equal(best, expected["generated"])


@pytest.mark.parametrize(
  "family", cases.quick(FAMILIES, "gemma4_devices", "gpt_oss")
)
def test_generated_tokens(family):
  """With a cache. test_logits shows that rounding changes none of them."""
  model, variables = loaded(family)
  expected = reference(family)
  generate = functools.partial(
    language_modeling.generate,
    model=model,
    max_new=expected["generated"].shape[1],
    eos_id=None,
    pad_id=-1,
  )
  new = jax.jit(generate)(variables, {"tokens": expected["prompt"]})
  np.testing.assert_array_equal(new, expected["generated"])


@pytest.mark.parametrize(
  "family",
  cases.quick(TRAINED, "gpt_oss", "phi3"),
)
def test_gradients_of_stacked_layers(family):
  folder = PUBLISHED / family
  module, model = opened(folder, scan=True)
  rest = dict(variables_of(module, model, folder))
  params = rest.pop("params")
  expected = reference(family)
  file = folder / "gradients.safetensors"
  published = variables_of(module, model, file, ["params"])["params"]

  def run(params):
    grads, logits = loss_and_logits(model)(params, rest, expected["tokens"])
    return {"grads": grads, "logits": logits}

  published = {"grads": published, "logits": expected["logits"]}
  rounding.assert_close(run, params, published)


def old_config(values):
  """A config.json as transformers 4 wrote it."""
  values = dict(values)
  rope = values.pop("rope_parameters")
  if "sliding_attention" in rope:
    local = rope["sliding_attention"]["rope_theta"]
    rope = rope["full_attention"]
    if values["model_type"] == "gemma3_text":
      values["rope_local_base_freq"] = local
  rope = dict(rope)
  values["rope_theta"] = rope.pop("rope_theta")
  if "partial_rotary_factor" in rope:
    values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
  if values["model_type"] == "gpt_neox":
    values["rotary_emb_base"] = values.pop("rope_theta")
    values["rotary_pct"] = values.pop("partial_rotary_factor")
  plain = rope.get("rope_type") == "default"
  if "rope_type" in rope and values["model_type"] == "phi3":
    rope["type"] = rope.pop("rope_type")
  values["rope_scaling"] = None if plain else rope
  if values["model_type"] in ("gemma3_text", "cohere2"):
    types = values.pop("layer_types")
    values["sliding_window_pattern"] = types.index("full_attention") + 1
    values.pop("_sliding_window_pattern", None)
  elif values["model_type"] in ("gemma2", "qwen2", "qwen2_moe", "qwen3"):
    values.pop("layer_types")
  if values["model_type"] == "minimax_m2":
    values["rotary_dim"] = int(
      values["head_dim"] * values.pop("partial_rotary_factor")
    )
  return values


@pytest.mark.parametrize(
  # Newer families, and a model that does not rotate, have no older form.
  "family",
  [
    name
    for name in FAMILIES
    if not name.startswith("gemma4")
    and name
    not in (
      "olmo_hybrid_nope",
      "mellum",
      "gptj",
      "gpt2_scaled",
      "gpt_bigcode",
      "gpt_bigcode_heads",
      "gpt_neo",
      "kimi_linear",
    )
  ],
)
def test_old_and_new_configs_are_one_model(family, tmp_path):
  values = json.loads((PUBLISHED / family / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps(old_config(values)))
  _, new = opened(PUBLISHED / family)
  _, old = opened(tmp_path)
  assert old == new


# {family: (keys of its config.json, those of another form)}.
OTHER_FORMS = {
  "gpt_neox": (
    dict(rope_parameters=None),
    dict(rotary_pct=0.5, rotary_emb_base=10000),
  ),
  "lfm2": (
    dict(intermediate_size=None, tie_word_embeddings=None, layer_types=None),
    dict(block_ff_dim=36, tie_embedding=False, full_attn_idxs=[2]),
  ),
  "exaone4": (dict(layer_types=None), dict(sliding_window_pattern=2)),
  "ernie4_5_moe": (
    dict(moe_num_experts=None, moe_k=None),
    dict(num_experts=6, num_experts_per_tok=2),
  ),
  "hunyuan_v1_dense": (
    dict(rope_parameters=None),
    dict(
      rope_theta=10000.0,
      rope_scaling=dict(type="dynamic", alpha=9.0, factor=1.0, beta_fast=32),
    ),
  ),
}


@pytest.mark.parametrize("family", OTHER_FORMS)
def test_other_forms_of_a_config_are_the_same_model(family, tmp_path):
  without, instead = OTHER_FORMS[family]
  values = json.loads((PUBLISHED / family / "config.json").read_text())
  other = {x: y for x, y in values.items() if x not in without} | instead
  (tmp_path / "config.json").write_text(json.dumps(other))
  assert opened(tmp_path)[1] == opened(PUBLISHED / family)[1]


def test_growing_queries_have_their_own_length(tmp_path):
  """The library takes it from the rotation, whatever the kind of scaling."""
  values = json.loads((PUBLISHED / "ministral3" / "config.json").read_text())
  values["rope_parameters"] = dict(
    rope_type="dynamic",
    factor=2.0,
    rope_theta=1e4,
    original_max_position_embeddings=8,
    llama_4_scaling_beta=0.3,
  )
  (tmp_path / "config.json").write_text(json.dumps(values))
  module, model = opened(tmp_path)
  assert model.query_scale["original_len"] == 8
  assert model.rope_scaling["original_len"] == 64
  shapes = shapes_of_decoder(model)
  config, _ = module.to_published(model, shapes, "ministral3")
  (tmp_path / "config.json").write_text(json.dumps(config))
  assert canonical(opened(tmp_path)[1]) == canonical(model)


def test_layers_that_never_rotate_are_written_with_a_base(tmp_path):
  """The library computes the frequencies even if no layer uses them."""
  values = json.loads((PUBLISHED / "smollm3" / "config.json").read_text())
  values["no_rope_layers"] = [0] * values["num_hidden_layers"]
  (tmp_path / "config.json").write_text(json.dumps(values))
  module, model = opened(tmp_path)
  config, _ = module.to_published(model, shapes_of_decoder(model), "smollm3")
  assert config["rope_theta"] == 2e6
  assert config["no_rope_layers"] == values["no_rope_layers"]


# {family: (key, a value that the decoder does not compute)}.
REFUSED = {
  "hunyuan_v1_dense": ("rope_parameters", dict(rope_type="axial")),
  "falcon": ("alibi", True),
  "granitemoehybrid": ("layer_types", ["mamba"] * 3),
  "cohere2": ("use_qk_norm", True),
  "lfm2_moe": ("layer_types", None),
  "apertus": ("hidden_act", "silu"),
  "exaone4": ("attention_bias", True),
  "solar_open": ("partial_rotary_factor", 0.5),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_computed_is_refused_by_name(family, tmp_path):
  key, value = REFUSED[family]
  values = json.loads((PUBLISHED / family / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps(values | {key: value}))
  name = "rope_type" if key == "rope_parameters" else key
  with pytest.raises(ConfigError, match=f"{name}="):
    opened(tmp_path)


def shapes_of_decoder(model):
  """{name: shape} of a model's parameters."""
  shapes = shapes_of(model, jnp.zeros((1, 2), jnp.int32))["params"]
  return {name: x.shape for name, x in trees.flatten_with_names(shapes)}


def canonical(model):
  fields = {n: getattr(model, n) for n in type(model).__dataclass_fields__}
  return decoder_families.canonical(fields)


@pytest.mark.parametrize("family", CASES)
def test_exports_equal_what_was_read(family, tmp_path):
  folder = PUBLISHED / family
  module, model = opened(folder, scan=True)
  variables = variables_of(module, model, folder)
  config, arrays = export(
    module, model, variables, tmp_path, LAYOUTS.get(family)
  )
  published = json.loads((folder / "config.json").read_text())
  for key in ("model_type", "architectures", "vocab_size"):
    assert config[key] == published[key]
  _, again = opened(tmp_path, scan=True)
  assert canonical(again) == canonical(model)
  expected = mxfp4.joined(safetensors_files.read(str(folder)))
  expected = kimi_linear.with_names_of_mlps(expected)
  # The library reads GPT's names without the prefix, too.
  expected = {
    name.removeprefix("transformer."): x for name, x in expected.items()
  }
  assert set(arrays) == set(expected)
  for name, array in expected.items():
    array = array[(slice(None),) * len(array.shape)].astype(np.float32)
    np.testing.assert_array_equal(arrays[name], array, name)


def test_kernels_that_the_library_split_in_equal_parts(tmp_path):
  """It saves those of queries, keys and values of OLMo Hybrid as one array."""
  folder = PUBLISHED / "olmo_hybrid"
  module, model = opened(folder)
  arrays = dict(safetensors_files.read(str(folder)))
  start = "model.layers.1.linear_attn."
  names = [f"{start}{x}_conv1d.weight" for x in "qkv"]
  joined = np.concatenate([arrays[name] for name in names])
  moved = dict(zip(names, np.split(joined, [5, 31])))
  # The releases have the names that other families have.
  renamed = {
    name.replace("feedforward_layer_norm", "post_attention_layernorm"): x
    for name, x in {**arrays, **moved}.items()
  }
  file = write(
    tmp_path, {n: np.ascontiguousarray(x) for n, x in renamed.items()}
  )
  expected = variables_of(module, model, folder)
  loaded = variables_of(module, model, file)
  jax.tree.map(np.testing.assert_array_equal, loaded, expected)


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "glm4_moe"])
def test_experts_that_are_one_array(family, tmp_path):
  """As in the releases of Qwen 3.5 and 3.6, and in memory in all families."""
  folder = PUBLISHED / family
  arrays = {}
  experts = {}  # {name without the number: matrices by expert}.
  for name, x in safetensors_files.read(str(folder)).items():
    match = re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)\.weight", name)
    if match is None:
      arrays[name] = x
    else:
      matrices = experts.setdefault(match[1] + match[3], {})
      matrices[int(match[2])] = x[...]
  stacked = {
    name: np.stack([x for _, x in sorted(matrices.items())])
    for name, matrices in experts.items()
  }
  for name, x in stacked.items():
    stem = name.removesuffix("gate_proj")
    if name.endswith("down_proj"):
      arrays[name] = x
    elif stem != name:
      both = x, stacked[stem + "up_proj"]
      arrays[stem + "gate_up_proj"] = np.concatenate(both, axis=1)
  file = write(tmp_path, arrays)
  module, model = opened(folder)
  expected = variables_of(module, model, folder)
  loaded = variables_of(module, model, file)
  jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_a_limit_above_a_dynamic_scaling_is_exported(tmp_path):
  """Files have one key for the limit and for the length that it begins at."""
  folder = PUBLISHED / "internlm3"
  module, model = opened(folder, max_len=96)
  config, _ = module.to_published(model, shapes_of_decoder(model), "internlm3")
  assert config["max_position_embeddings"] == 24


def test_the_text_part_of_a_model_that_sees_images(tmp_path):
  """As the releases of Qwen 3.5 are, whose rotation has three positions."""
  folder = PUBLISHED / "qwen3_5_moe_text"
  text = json.loads((folder / "config.json").read_text())
  text["rope_parameters"] |= dict(
    mrope_section=[1, 0, 0], mrope_interleaved=True
  )
  text |= dict(attn_output_gate=True, mtp_num_hidden_layers=1)
  del text["layer_types"]
  config = dict(
    model_type="qwen3_5_moe",
    text_config=text | dict(full_attention_interval=2),
    vision_config=dict(depth=1),
    image_token_id=60,
    tie_word_embeddings=True,
  )
  (tmp_path / "config.json").write_text(json.dumps(config))
  arrays = dict(safetensors_files.read(str(folder)))
  nested = {
    name.replace("model.", "model.language_model.", 1): x
    for name, x in arrays.items()
  }
  for name in ("model.visual.pos_embed.weight", "mtp.fc.weight"):
    nested[name] = np.ones((2, 3), np.float32)
  file = write(tmp_path, nested)
  module, model = opened(file)
  _, plain = opened(folder)
  assert model == plain
  expected = variables_of(module, plain, folder)
  loaded = variables_of(module, model, file)
  jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_the_text_part_of_llama4(tmp_path):
  """As the releases are, with the layers' kinds by their defaults."""
  folder = PUBLISHED / "llama4_text"
  text = json.loads((folder / "config.json").read_text())
  for key in ("layer_types", "moe_layers", "no_rope_layers"):
    del text[key]
  text |= dict(attn_temperature_tuning=4, for_llm_compressor=False)
  config = dict(
    model_type="llama4",
    text_config=text,
    vision_config=dict(depth=1),
    image_token_index=60,
    tie_word_embeddings=False,
  )
  (tmp_path / "config.json").write_text(json.dumps(config))
  arrays = dict(safetensors_files.read(str(folder)))
  nested = {f"language_model.{name}": x for name, x in arrays.items()}
  for name in (
    "vision_model.class_embedding",
    "multi_modal_projector.linear_1.weight",
  ):
    nested[name] = np.ones((2, 3), np.float32)
  file = write(tmp_path, nested)
  module, model = opened(file)
  _, plain = opened(folder)
  assert model == plain
  expected = variables_of(module, plain, folder)
  loaded = variables_of(module, model, file)
  jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_layers_of_kimi_linear_in_both_forms(tmp_path):
  """Lists of numbers, as in the releases, or the library's types of layers."""
  folder = PUBLISHED / "kimi_linear"
  values = json.loads((folder / "config.json").read_text())
  del values["layer_types"], values["mlp_layer_types"]
  values["linear_attn_config"] = dict(
    full_attn_layers=[3],
    kda_layers=[1, 2, 4, 5],
    num_heads=values.pop("linear_num_heads"),
    head_dim=values.pop("linear_head_dim"),
    short_conv_kernel_size=values.pop("linear_conv_kernel_dim"),
  )
  values |= dict(
    first_k_dense_replace=1,
    mla_use_nope=True,
    moe_layer_freq=1,
    moe_router_activation_func="sigmoid",
    use_grouped_topk=True,
    rope_theta=1e4,
    rope_scaling=None,
    num_nextn_predict_layers=0,
  )
  (tmp_path / "config.json").write_text(json.dumps(values))
  assert opened(tmp_path) == opened(folder)
  rotating = values | dict(mla_use_nope=False)
  (tmp_path / "config.json").write_text(json.dumps(rotating))
  with pytest.raises(ConfigError, match="mla_use_nope=False: .* only True"):
    opened(tmp_path)


def test_heads_of_gemma4_in_both_forms(tmp_path):
  """Keys for global layers, or a list of all layers as the library saves it."""
  folder = PUBLISHED / "gemma4_moe"
  values = json.loads((folder / "config.json").read_text())
  del values["per_layer_config"]
  values |= dict(global_head_dim=8, num_global_key_value_heads=1)
  values["use_bidirectional_attention"] = "vision"
  (tmp_path / "config.json").write_text(json.dumps(values))
  assert opened(tmp_path) == opened(folder)


@pytest.mark.parametrize("name", ["bloom", "mamba2", "gemma3n"])
def test_a_family_that_is_known_is_refused_with_the_part_it_needs(
  name, tmp_path
):
  values = dict(model_type=name, text_config=dict(hidden_size=8))
  (tmp_path / "config.json").write_text(json.dumps(values))
  part = re.escape(MISSING_PARTS[name])
  with pytest.raises(ConfigError, match=f"'{name}' .* It needs {part}."):
    opened(tmp_path)


def test_the_page_lists_families_and_what_others_need():
  page = pathlib.Path("docs/published.md").read_text()
  computed, _, others = page.partition("### Families that are not computed")
  for name in decoder_families.LAYOUTS:
    assert f"`{name}`" in computed, name
    assert name not in MISSING_PARTS, name
  for name, part in MISSING_PARTS.items():
    row = next(line for line in others.splitlines() if f"`{name}`" in line)
    assert row.startswith(f"| {part} |")


def test_keys_that_no_layer_reads_are_left_out(tmp_path):
  """As in the releases of Gemma 4's models for devices, which also hear."""
  folder = PUBLISHED / "gemma4_devices"
  arrays = dict(safetensors_files.read(str(folder)))
  for layer in (3, 6):
    start = f"model.layers.{layer}.self_attn."
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
      arrays[start + name] = np.ones((2, 3), np.float32)
  arrays = {
    name.replace("model.", "model.language_model.", 1): x
    for name, x in arrays.items()
  }
  for name in ("audio_tower.layers.0.norm", "embed_audio.projection"):
    arrays[f"model.{name}.weight"] = np.ones((2, 3), np.float32)
  file = write(tmp_path, arrays)
  for scan in (False, True):
    module, model = opened(folder, scan=scan)
    expected = variables_of(module, model, folder)
    loaded = variables_of(module, model, file)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_the_backend_of_a_recurrence_is_no_difference():
  def made(**changes):
    return decoder.Model(variant="qwen3_5_mu", vocab_size=64, **changes)

  backend = dict(linear=dict(deltanet=dict(backend="xla")))
  other_gate = dict(linear=dict(deltanet=dict(gate="sigmoid")))
  assert canonical(made(kinds=backend)) == canonical(made())
  assert canonical(made(kinds=other_gate)) != canonical(made())
