"""Adapters of PEFT's files compute what PEFT computes, in both directions."""

import json
import os
import pathlib
import subprocess

import jax
import numpy as np
import pytest
from flax import traverse_util
from support import cases, rounding

from bigtrain import sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.checkpoints.foreign import peft_files, safetensors_files
from bigtrain.checkpoints.foreign.peft_modules import EMBEDDING, EXPERTS
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError
from bigtrain.losses import token_losses
from bigtrain.models.layers import lora
from bigtrain.objective import building, published_sizes, trained_adapters

pytestmark = pytest.mark.golden

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "peft"
ALL = sorted(path.parent.name for path in GOLDEN.glob("*/reference.npz"))
CASES = cases.quick(ALL, *"gpt2 phi3 saved tied_head mixtral classes".split())
_START = "grad/base_model.model."  # Of gradients in reference.npz.
# Adapters whose factors have one gradient each, with ours and with PEFT.
WITH_GRADIENTS = cases.quick(
  "lora rslora dora phi3 glm4 all_biases lora_bias embedding embedding_dora "
  "saved tied_head tied_saved_head tokens gpt2".split(),
  *("phi3", "lora_bias", "tokens"),
)


def base_of(name):
  about = json.loads((GOLDEN / name / peft_files.CONFIG).read_text())
  return str((GOLDEN / name / about["base_model_name_or_path"]).resolve())


def loaded(path, scan=True):
  """(config of a published folder, its variables)."""
  options = dict(published=path, scan=scan)
  config = dict(model_name="decoder", model=options, model_init=path)
  config = published_sizes.with_published_sizes(settings.Config(config))
  module, model = building.model(config)
  tokens = np.zeros((1, 4), np.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
  places, _ = sharding.state_shardings(shapes, mesh())
  like = sharding.with_shardings(shapes, places)
  variables = warm_start.load_variables(path, like, init=dict, module=module)
  return config.to_dict(), variables


def mesh():
  return sharding.make_mesh(devices=jax.devices()[:1])


def opened(name, scan=True):
  """(config with the adapter, {"params": adapters, "base": base})."""
  config, variables = loaded(base_of(name), scan)
  base = variables.pop("params")
  config, params, base = trained_adapters.read_peft(
    str(GOLDEN / name), config, base, mesh()
  )
  return config, {**variables, "params": params, "base": base}


def reference(name):
  return dict(np.load(GOLDEN / name / "reference.npz"))


def logits_of(config, variables, tokens):
  model = trained_adapters.Adapted.of(config).model
  return model.apply(variables, tokens[:, :-1])[0]


def layout_of(config, variables):
  params = {
    **flat(variables["base"]),
    **flat(lora.in_full(variables["params"])),
  }
  return trained_adapters.published(
    config, {name: x.shape for name, x in params.items()}
  )


def flat(tree):
  return dict(trees.flatten_with_names(tree))


@pytest.mark.parametrize(
  "scan", [False, pytest.param(True, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_peft(name, scan):
  config, variables = opened(name, scan)
  expected = reference(name)
  run = jax.jit(lambda x: [logits_of(config, x, expected["tokens"])])
  rounding.assert_close(run, variables, [expected["logits"]])
  (off,) = run(without(config, variables))
  assert np.abs(off - expected["logits"]).max() > 1e-2


def without(config, variables):
  """The variables with adapters that do nothing."""

  def zero(name, x):
    return x * (name.rpartition("/")[2] not in (lora.B, lora.ROWS))

  return {
    **variables,
    "params": trees.map_with_names(zero, variables["params"]),
  }


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_are_those_of_peft(name):
  config, variables = opened(name, scan=False)
  expected = reference(name)
  tokens = expected["tokens"]
  layout = layout_of(config, variables)

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

  loss_and_grads = jax.jit(
    lambda x: jax.value_and_grad(loss_fn)(x["params"], x)
  )

  def run(variables):
    loss, grads = loss_and_grads(variables)
    return {"loss": loss, **named_as_peft(grads, layout, name)}

  result = run(variables)
  assert len(result) > 2
  wanted = {key: expected[key] for key in result}
  rounding.assert_close(run, variables, wanted)


def named_as_peft(grads, layout, name):
  """Gradients by PEFT's names, in its shapes.

  Kernels that a module joins have copies of its A, whose gradients add up, and
  their parts of its B.
  """
  given, result = flat(grads), {}
  for module in layout.modules():
    layers = [lora.layer_of(part.kernel) for part in module.parts]
    if module.kind == EXPERTS or module.is_old:
      continue
    start = f"{_START}{module.name}."
    if f"{layers[0]}/lora_a" in given:
      names = "lora_A.weight", "lora_B.weight"
      if module.kind == EMBEDDING:
        names = "lora_embedding_A", "lora_embedding_B"
      a_RI, b_OR = _joined_gradients(given, layout, module.parts, layers)
      result |= {f"{start}{names[0]}": a_RI, f"{start}{names[1]}": b_OR}
    for factor, ending in (
      (lora.MAGNITUDE, "lora_magnitude_vector.weight"),
      (lora.BIAS, "lora_B.bias"),
    ):
      if f"{layers[0]}/{factor}" in given:
        value = given[f"{layers[0]}/{factor}"].reshape(-1)
        result[f"{start}{ending}"] = value
    if f"{layers[0]}/{lora.ROWS}" in given:
      ending = "token_adapter.trainable_tokens_delta"
      result[f"{start}{ending}"] = given[f"{layers[0]}/{lora.ROWS}"]
  return result | _gradients_in_full(given, layout, set(reference(name)))


def _joined_gradients(given, layout, parts, layers):
  num_outputs = sum(len(part.place) for part in parts)
  rank = given[f"{layers[0]}/lora_a"].shape[-1]
  a_RI, b_OR = 0, np.zeros((num_outputs, rank), np.float32)
  for part, layer in zip(parts, layers):
    shape = layout.shape(part.kernel)
    a_IR = np.asarray(given[f"{layer}/lora_a"]).reshape(shape.rows, -1)
    a_RI = a_RI + a_IR[part.inputs].T
    b_RO = np.asarray(given[f"{layer}/lora_b"]).reshape(-1, shape.columns)
    b_OR[part.place] = b_RO[:, part.outputs].T
  return a_RI, b_OR


def _gradients_in_full(given, layout, names_of_peft):
  result = {}
  for tensor in layout.tensors:
    if all(part in given for part, _ in tensor.parts):
      value = tensor.build([given[part][i] for part, i in tensor.parts])
      module, _, last = layout.name_of(tensor).rpartition(".")
      names = [
        f"{_START}{module}.{wrapper}{last}"
        for wrapper in ("", "base_layer.", "modules_to_save.")
      ]
      # Of a saved MLP, PEFT has the gradients as of the whole.
      parent, _, own = module.rpartition(".")
      names.append(f"{_START}{parent}.modules_to_save.{own}.{last}")
      (key,) = names_of_peft & set(names)
      result[key] = value
  return result


def save(config, variables, folder):
  base = flat(variables["base"])
  saved = {"arrays": {n: [str(x.dtype), x.shape] for n, x in base.items()}}
  trained_adapters.write_peft(str(folder), config, variables["params"], saved)


@pytest.mark.parametrize("name", CASES)
def test_written_files_are_those_of_peft(name, tmp_path):
  # With stacked layers, a layer may have another layer's scale in its B.
  config, variables = opened(name, scan=name in ("lora", "mixtral"))
  save(config, variables, tmp_path)
  theirs = safetensors_files.read(str(GOLDEN / name / peft_files.ARRAYS))
  ours = safetensors_files.read(str(tmp_path / peft_files.ARRAYS))
  frozen = {x for x in theirs if x.endswith("base_layer.weight")}
  assert set(ours) == set(theirs) - frozen
  for key, value in ours.items():
    np.testing.assert_array_equal(value, theirs[key], err_msg=key)
  content = json.loads((tmp_path / peft_files.CONFIG).read_text())
  expected = json.loads((GOLDEN / name / peft_files.CONFIG).read_text())
  same = "fan_in_fan_out use_dora use_rslora lora_bias bias r lora_alpha"
  for key in (*same.split(), "task_type"):
    assert content[key] == expected[key], key
  tied = content.get("ensure_weight_tying", False)
  assert tied == expected["ensure_weight_tying"]
  targets = {x.rpartition(".")[2] for x in content["target_modules"]}
  assert targets == {x.rpartition(".")[2] for x in expected["target_modules"]}


@pytest.mark.parametrize("name", cases.quick(ALL, "phi3", "mixtral"))
def test_trained_adapters_return_as_they_were(name, tmp_path):
  """Also if the projections of a module no longer have the same A."""
  config, variables = trained(name)
  save(config, variables, tmp_path)
  base = loaded(base_of(name))
  again, params, rest = trained_adapters.read_peft(
    str(tmp_path), base[0], base[1].pop("params"), mesh()
  )
  tokens = reference(name)["tokens"]
  want = logits_of(config, variables, tokens)
  got = logits_of(again, {**base[1], "params": params, "base": rest}, tokens)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def trained(name):
  """An adapter of which each number has changed."""
  config, variables = opened(name)
  rng = np.random.default_rng(0)
  noisy = lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(x.dtype)
  params = jax.tree.map(noisy, variables["params"])
  return config, {**variables, "params": params}


@pytest.mark.published
def test_peft_opens_trained_adapters(tmp_path):
  expected = {}
  for name in ALL:
    config, variables = trained(name)
    config["model_init"] = base_of(name)
    save(config, variables, tmp_path / name)
    tokens = reference(name)["tokens"]
    np.save(tmp_path / name / "tokens.npy", tokens[:, :-1])
    expected[name] = logits_of(config, variables, tokens)
  python = os.environ.get("PUBLISHED_PYTHON", "build/published/bin/python")
  script = str(GOLDEN.parent / "open_adapters.py")
  folders = [str(tmp_path / name) for name in ALL]
  subprocess.run([os.path.abspath(python), script, *folders], check=True)
  for name, want in expected.items():
    got = np.load(tmp_path / name / "logits.npy")
    atol = 1e-5 * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=name)


MERGED = (
  "lora rslora dora gpt2 phi3 embedding_dora saved tokens mixtral".split()
)


@pytest.mark.parametrize("name", cases.quick(MERGED, "lora", "tokens"))
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


def test_a_bias_without_a_place_is_not_merged():
  config, variables = opened("lora_bias")
  with pytest.raises(ConfigError, match="has no bias, so its adapter"):
    trained_adapters.merged(config, variables)


@pytest.mark.parametrize(
  ("name", "value"), [("peft_type", "LOHA"), ("init_lora_weights", "pissa")]
)
def test_files_with_other_methods_are_refused(name, value, tmp_path):
  content = json.loads((GOLDEN / "lora" / peft_files.CONFIG).read_text())
  (tmp_path / peft_files.CONFIG).write_text(
    json.dumps({**content, name: value})
  )
  with pytest.raises(ConfigError, match=f"{name}='{value}'"):
    peft_files.open_folder(str(tmp_path))


def changed(folder, name, **arrays):
  """Copies a case with other arrays, of which None removes one."""
  given = safetensors_files.read(str(GOLDEN / name / peft_files.ARRAYS))
  given = {n: x for n, x in {**given, **arrays}.items() if x is not None}
  specs = {n: (x.shape, str(x.dtype)) for n, x in given.items()}
  path = str(folder / peft_files.ARRAYS)
  safetensors_files.write(path, specs, given.values(), {"format": "pt"})
  content = (GOLDEN / name / peft_files.CONFIG).read_text()
  (folder / peft_files.CONFIG).write_text(content)
  return str(folder)


_EMBED = "base_model.model.model.embed_tokens"


@pytest.mark.parametrize(
  ("name", "arrays", "message"),
  [
    (
      "saved",
      {f"{_EMBED}.weight": np.zeros((70, 16), np.float32)},
      "model.embed_tokens has at least 70 tokens, more than the 67",
    ),
    (
      "embedding",
      {f"{_EMBED}.base_layer.weight": np.zeros((70, 16), np.float32)},
      "embed_tokens.* at least 70 tokens, more than the 67",
    ),
    (
      "embedding",
      {f"{_EMBED}.base_layer.weight": np.zeros((67, 16), np.float32)},
      "embed_tokens.weight differs from the model's",
    ),
    (
      "lora",
      {"base_model.model.model.other.weight": np.zeros(3, np.float32)},
      "model.other.weight is neither an adapter nor an array",
    ),
  ],
)
def test_arrays_of_other_models_are_refused(name, arrays, message, tmp_path):
  folder = changed(tmp_path, name, **arrays)
  config, variables = loaded(base_of(name))
  with pytest.raises(ConfigError, match=message):
    trained_adapters.read_peft(folder, config, variables["params"], mesh())


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
  folder = changed(tmp_path, "tied_tokens")
  path = tmp_path / peft_files.CONFIG
  content = json.loads(path.read_text()) | {"trainable_token_indices": [3, 99]}
  path.write_text(json.dumps(content))
  config, variables = loaded(base_of("tied_tokens"))
  with pytest.raises(
    ConfigError, match="at least 100 tokens, more than the 67"
  ):
    trained_adapters.read_peft(folder, config, variables["params"], mesh())
