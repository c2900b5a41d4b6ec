"""Adapters of PEFT's files compute what PEFT computes, in both directions."""

import json
import pathlib

import jax
import numpy as np
import pytest
from flax import traverse_util
from support import cases, rounding

from bigtrain import sharding
from bigtrain.checkpoints import warm_start
from bigtrain.checkpoints.foreign import peft_files, safetensors_files
from bigtrain.config.errors import ConfigError
from bigtrain.losses import token_losses
from bigtrain.models import decoder
from bigtrain.models.layers import lora
from bigtrain.objective import trained_adapters

pytestmark = pytest.mark.golden

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "peft"
CASES = cases.quick(["lora", "rslora", "dora", "gpt2"], "lora", "dora", "gpt2")
_LLAMA = dict(
  variant="llama",
  vocab_size=67,
  width=16,
  mlp_dim=24,
  num_heads=4,
  num_kv_heads=2,
  norm_eps=1e-6,
)
_GPT2 = dict(variant="gpt2", vocab_size=67, width=16, num_heads=4)


def opened(name, scan=True):
  """(config with the adapter, {"params": adapters, "base": base})."""
  is_gpt2 = name == "gpt2"
  options = dict(_GPT2 if is_gpt2 else _LLAMA, depth=2, max_len=64, scan=scan)
  config = {"model_name": "decoder", "model": options}
  model = decoder.Model(**options)
  tokens = np.zeros((1, 4), np.int32)
  like = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  path = GOLDEN / ("base_gpt2" if is_gpt2 else "base_llama")
  base, _ = warm_start.load_params(
    str(path), like, convert=decoder.from_published
  )
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  config, params = trained_adapters.read_peft(
    str(GOLDEN / name), config, base, mesh
  )
  return config, {"params": params, "base": base}


def reference(name):
  return dict(np.load(GOLDEN / name / "reference.npz"))


def logits_of(config, variables, tokens):
  model = trained_adapters.Adapted.of(config).model
  return model.apply(variables, tokens[:, :-1])[0]


@pytest.mark.parametrize(
  "scan", [False, pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_peft(name, scan):
  config, variables = opened(name, scan)
  expected = reference(name)
  tokens = expected["tokens"]

  def loss_fn(params, variables):
    losses = token_losses.model_losses(
      {**variables, "params": params},
      {"tokens": tokens[:, :-1]},
      tokens[:, 1:],
      np.ones((2, tokens.shape[1] - 1), np.float32),
      model=trained_adapters.Adapted.of(config).model,
    )
    total, weight = losses.metrics["loss"]
    return total / weight

  published = _published(config, variables)

  def theirs(grads):
    """Gradients by PEFT's names, in its shapes."""
    flat, result = traverse_util.flatten_dict(grads, sep="/"), {}
    if name == "gpt2":
      return result  # Its A is ours three times, and its B has other zeros.
    for module, (part,) in published.modules():
      root = part.kernel.removesuffix("kernel")
      if root + "lora_a" not in flat:
        continue
      if scan and module == "model.layers.1.self_attn.q_proj":
        continue  # In a stack, its B has the ratio of its scale to layer 0's.
      shape = published.shape(part.kernel)
      of = f"grad/base_model.model.{module}."
      a = flat[root + "lora_a"][part.stack].reshape(shape.rows, -1).T
      b = flat[root + "lora_b"][part.stack].reshape(-1, shape.columns).T
      for key, x in ((of + "lora_A.weight", a), (of + "lora_B.weight", b)):
        rows, columns = expected[key].shape
        result[key] = x[:rows, :columns]
      if name == "dora":
        magnitude = flat[root + "lora_magnitude"][part.stack]
        result[of + "lora_magnitude_vector.weight"] = magnitude.reshape(-1)
    return result

  @jax.jit
  def run(variables):
    logits = logits_of(config, variables, tokens)
    loss, grads = jax.value_and_grad(loss_fn)(variables["params"], variables)
    return {"logits": logits, "loss": loss, **theirs(grads)}

  names = ("logits", "loss", *theirs(variables["params"]))
  wanted = {key: expected[key] for key in names}
  rounding.assert_close(run, variables, wanted)


def _published(config, variables):
  flat = traverse_util.flatten_dict(variables["base"], sep="/")
  return trained_adapters.published(
    config, {n: x.shape for n, x in flat.items()}
  )


@pytest.mark.parametrize("name", CASES)
def test_written_files_are_those_of_peft(name, tmp_path):
  config, variables = opened(name)
  flat = traverse_util.flatten_dict(variables["base"], sep="/")
  saved = {"arrays": {n: [str(x.dtype), x.shape] for n, x in flat.items()}}
  config["model_init"] = "base"
  trained_adapters.write_peft(str(tmp_path), config, variables["params"], saved)
  theirs = safetensors_files.read(str(GOLDEN / name / peft_files.ARRAYS))
  ours = safetensors_files.read(str(tmp_path / peft_files.ARRAYS))
  assert set(ours) == {n for n in theirs if "base_layer" not in n}
  content = json.loads((tmp_path / peft_files.CONFIG).read_text())
  assert content["fan_in_fan_out"] == (name == "gpt2")
  assert content["use_dora"] == (name == "dora")
  if name == "lora":
    assert content["target_modules"] == ["q_proj", "v_proj"]
    assert (content["r"], content["lora_alpha"]) == (4, 8)
    for key, value in theirs.items():
      np.testing.assert_array_equal(ours[key], value)
  # Whatever the ranks and scales in the files, they compute the same.
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  again, params = trained_adapters.read_peft(
    str(tmp_path), config, variables["base"], mesh
  )
  tokens = reference(name)["tokens"]
  want = logits_of(config, variables, tokens)
  got = logits_of(again, {**variables, "params": params}, tokens)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_merged_is_unmerged(name):
  config, variables = opened(name)
  tokens = reference(name)["tokens"]
  want = logits_of(config, variables, tokens)
  plain = trained_adapters.plain(config)

  def of_merged(variables):
    merged = traverse_util.unflatten_dict(
      trained_adapters.merged(config, variables), sep="/"
    )
    return [logits_of(plain, {"params": merged}, tokens)]

  rounding.assert_close(of_merged, variables, [want])
  off = logits_of(config, lora.reference(variables), tokens)
  base = logits_of(plain, {"params": variables["base"]}, tokens)
  np.testing.assert_array_equal(off, base)
  assert np.abs(off - want).max() > 1e-2


@pytest.mark.parametrize(
  ("name", "value"), [("peft_type", "LOHA"), ("init_lora_weights", "pissa")]
)
def test_files_with_other_methods_are_refused(name, value, tmp_path):
  config, variables = opened("lora")
  content = json.loads((GOLDEN / "lora" / peft_files.CONFIG).read_text())
  content[name] = value
  (tmp_path / peft_files.CONFIG).write_text(json.dumps(content))
  with pytest.raises(ConfigError, match=f"{name}='{value}'"):
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    trained_adapters.read_peft(str(tmp_path), config, variables["base"], mesh)
