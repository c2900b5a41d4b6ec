"""config.json beside published weights: compared with the model, and used."""

import json

import pytest
from models.published import folders
from models.published.folders import GOLDEN, MODELS, model_of, module_of

from bigtrain.checkpoints import warm_start
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.objective import building, published_sizes

V4_SCALING = dict(type="linear", factor=2.0)


def check(layout, path=None, **changes):
  """Compares a model with the config.json of a folder."""
  path = path or GOLDEN / f"hf_{layout}"
  spec = dict(path=str(path), **changes.pop("options", {}))
  model = model_of(layout, **changes)
  warm_start.check_published(spec, module_of(layout), model)


def resolved(layout, path=None, model_init=None, **options):
  """config.model, after the sizes of a folder are in place of its path."""
  path = str(path or GOLDEN / f"hf_{layout}")
  config = settings.Config(
    {
      "model_name": folders.name_of(layout),
      "model": {"published": path, **options},
      "model_init": model_init,
    }
  )
  return published_sizes.with_published_sizes(config)


@pytest.mark.parametrize("layout", MODELS)
def test_the_golden_folders_agree_with_their_models(layout):
  check(layout)


@pytest.mark.parametrize(
  "layout, changes, message",
  [
    ("gpt2", dict(num_heads=4), "num_heads=4, but config.json has 3 .n_head"),
    ("gpt2", dict(norm_eps=1e-6), "norm_eps=1e-06, .* 1e-05 .layer_norm_eps"),
    ("gpt2", dict(window=8), "window=8, .* None"),
    ("gpt2", dict(width=12), "width=12, .* 24 .n_embd"),
    ("llama", dict(num_heads=4, num_kv_heads=4), "num_heads=4, .* 6"),
    ("llama", dict(num_kv_heads=3), "num_kv_heads=3, .* 2 .num_key_value_h"),
    ("llama", dict(rope_theta=5e5), "rope_theta=500000.0, .* 10000.0"),
    ("llama", dict(rope_scaling=V4_SCALING), "'linear', .* 'llama3'"),
    ("llama", dict(norm="layernorm"), "norm='layernorm', .* 'rmsnorm'"),
    ("llama", dict(mlp="gelu"), "mlp='gelu', .* 'swiglu'"),
    ("llama", dict(logits_softcap=30.0), "logits_softcap=30.0, .* None"),
    ("llama", dict(tied_head=True), "tied_head=True, .* False .tie_word"),
    ("llama", dict(vocab_size=70), "vocab_size=70, .* 61"),
    ("mixtral", dict(window=8), "window=8, .* None .sliding_window"),
    ("mixtral", dict(moe=None), "moe=None, .*'num_experts': 4"),
    (
      "mixtral",
      dict(moe=dict(num_experts=4, top_k=1)),
      "'top_k': 1, .*'top_k': 2",
    ),
    ("t5", dict(num_heads=5), "num_heads=5, .* 3 .num_heads"),
    ("t5", dict(max_distance=128), "max_distance=128, .* 20"),
    ("t5", dict(mlp="geglu"), "mlp='geglu', .* 'relu' .feed_forward_proj"),
    ("t5", dict(tied_head=False), "tied_head=False, .* True"),
    ("t5_1_1", dict(tied_head=True), "tied_head=True, .* False"),
    (
      "switch",
      dict(moe=dict(num_experts=4, top_k=1)),
      "'every': 1.*, .*'every': 2",
    ),
  ],
)
def test_fields_that_differ_are_errors_with_both_values(
  layout, changes, message
):
  with pytest.raises(ConfigError, match=rf"config\.json.*{message}"):
    check(layout, **changes)


@pytest.mark.parametrize(
  "layout, changes, message",
  [
    # Keys as in the folders of transformers 4.
    ("llama", dict(rope_parameters=None, rope_theta=5e5), "500000.0 .rope_th"),
    ("llama", dict(rope_parameters=V4_SCALING), "'linear'"),
    ("llama", dict(rms_norm_eps=1e-6), "norm_eps=1e-05, .* 1e-06"),
    (
      "llama",
      dict(model_type="mistral", sliding_window=16),
      "window=None, .* 16",
    ),
    ("llama", dict(model_type="mistral"), "window=None, .* 4096"),
    ("mixtral", dict(sliding_window=16), "window=None, .* 16"),
    ("mixtral", dict(num_experts_per_tok=1), "'top_k': 2.*, .*'top_k': 1"),
    ("t5", dict(relative_attention_max_distance=64), "max_distance=20, .* 64"),
    ("t5", dict(layer_norm_epsilon=1e-5), "norm_eps=1e-06, .* 1e-05"),
    # What the model does not compute.
    (
      "llama",
      dict(model_type="gemma4"),
      "does not compute .*'gemma4'.* llama, mistral",
    ),
    ("gpt2", dict(model_type="llama"), "activation_function=.*unknown key"),
    ("t5", dict(model_type="umt5"), "the architecture 'umt5'"),
    (
      "llama",
      dict(rope_parameters=dict(rope_type="linaer")),
      "'linaer'.*'linear'",
    ),
    ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    ("llama", dict(hidden_act="mish"), "hidden_act='mish': .* only 'silu'"),
    ("llama", dict(attention_bias=True), "use_bias=.*'qkv', 'out'"),
    ("mixtral", dict(attention_bias=True), "attention_bias=True"),
    ("gpt2", dict(activation_function="mish"), "'mish': .* only 'gelu_new'"),
    (
      "gpt2",
      dict(scale_attn_by_inverse_layer_idx=True),
      "attention_scale=.* (scale_attn_by_inverse_layer_idx)",
    ),
    ("t5", dict(feed_forward_proj="gated-silu"), "'gated-silu': .* 'relu' or"),
    ("switch", dict(num_sparse_encoder_layers=1), "every second layer"),
    ("switch", dict(router_bias=True), "router_bias=True"),
  ],
)
def test_changes_of_the_file_are_errors(layout, changes, message, tmp_path):
  remove = [key for key, value in changes.items() if value is None]
  folder = folders.copy(layout, tmp_path, remove, **changes)
  for path in (folder, folder / "model.safetensors"):
    with pytest.raises(ConfigError, match=rf"config\.json.*{message}"):
      check(layout, path)


def test_what_may_differ(tmp_path, caplog):
  # Of rotary models max_len is a mere limit; sizes show in the arrays.
  check("llama", max_len=None)
  check("llama", max_len=9999)
  check("llama", vocab_size=70, options=dict(allow_reshaped=["head/.*"]))
  check("llama", rope_theta=5e5, options=dict(allow_changed=["rope_theta"]))
  with pytest.raises(ConfigError, match="Did you mean 'rope_theta'"):
    check("llama", options=dict(allow_changed=["rope_teta"]))
  # A head in the file outweighs tie_word_embeddings; without one it does not.
  untied = folders.copy("llama", tmp_path, tie_word_embeddings=True)
  check("llama", untied)
  without = tmp_path / "without"
  without.mkdir()
  folders.copy("llama", without, tie_word_embeddings=True)
  arrays = folders.arrays_of("llama")
  arrays.pop("lm_head.weight")
  folders.write(without, arrays)
  with pytest.raises(ConfigError, match="tied_head=False, .* True"):
    check("llama", without)
  # The config.json of a workdir, and none at all.
  (tmp_path / "config.json").write_text('{"model": {}}')
  check("llama", tmp_path, norm_eps=1.0)
  (tmp_path / "config.json").unlink()
  check("llama", tmp_path, norm_eps=1.0)
  assert "there is no config.json beside" in caplog.text


@pytest.mark.parametrize("layout", MODELS)
def test_models_take_their_sizes_from_a_folder(layout):
  module, expected = module_of(layout), model_of(layout)
  config = resolved(layout, scan=True)
  _, model = building.model(config)
  assert model.scan
  plain = config.to_dict()["model"]
  assert "published" not in plain and json.loads(json.dumps(plain)) == plain
  fields = module.published_fields(str(GOLDEN / f"hf_{layout}"))
  for name in {*MODELS[layout], *fields} - {"variant", "moe"}:
    ours, theirs = getattr(model, name), getattr(expected, name)
    assert ours == theirs and type(ours) is type(theirs), name
  if expected.moe:
    plain = dict(jitter=expected.moe.jitter, normalize=model.moe.normalize)
    assert model.moe._replace(**plain) == expected.moe._replace(
      normalize=expected.moe.normalizes()
    )


def test_options_beside_a_published_folder(tmp_path):
  model = resolved("mixtral", moe=dict(capacity_factor=1.5), max_len=16)
  plain = model.to_dict()["model"]
  assert plain["max_len"] == 16
  assert plain["moe"]["capacity_factor"] == 1.5
  assert plain["moe"]["num_experts"] == 4
  allowed = dict(path="x", allow_changed=["rope_theta"])
  changed = resolved("llama", rope_theta=5e5, model_init=allowed)
  assert changed.to_dict()["model"]["rope_theta"] == 5e5
  for options, message in (
    (dict(rope_theta=5e5), "rope_theta=500000.0, but .* 10000.0"),
    (dict(num_heads=3), "num_heads=3, but config.json has 6"),
    (
      dict(variant="llama_8b"),
      "config.model.variant='llama_8b': expected none",
    ),
    (dict(moe=dict(num_experts=2)), "num_experts"),
    (dict(path=tmp_path), r"config\.model\.published: expected the folder"),
  ):
    with pytest.raises(ConfigError, match=message):
      resolved("llama", **options)
  config = settings.Config(dict(model_name="cappa", model=dict(published="x")))
  with pytest.raises(ConfigError, match="'cappa' takes no sizes"):
    published_sizes.with_published_sizes(config)
  options = dict(published=str(GOLDEN / "hf_t5"), num_heads=5)
  teacher = dict(model_name="t5", model=options)
  config = settings.Config(dict(model_name="vit", model={}, teacher=teacher))
  with pytest.raises(
    ConfigError, match="config.teacher.model.num_heads=5, but"
  ):
    published_sizes.with_published_sizes(config)
  del options["num_heads"]
  config = settings.Config(dict(model_name="vit", model={}, teacher=teacher))
  plain = published_sizes.with_published_sizes(config).to_dict()
  assert plain["model"] == {} and plain["teacher"]["model"]["num_heads"] == 3
