"""No array of a published file is added, removed or changed in silence."""

import jax
import ml_dtypes
import numpy as np
import pytest
from models.published import folders
from models.published.folders import MODELS, arrays_of, like_of, model_of
from support import cases

from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.config.errors import ConfigError

# Of each layout so many arrays, chosen at random, are removed and changed.
NUMBER = 4


def open_folder(layout, folder, model, like=None, **options):
  """Returns ({name: array}, {name: line}), or raises ConfigError."""
  like = like or like_of(model)
  params, lines = warm_start.load_params(
    dict(path=str(folder), **options),
    like,
    convert=folders.module_of(layout).from_published,
    init=lambda: jax.tree.map(lambda x: np.zeros(x.shape), like),
  )
  # Copies, because the arrays may be maps of a file that is written again.
  flat = {n: np.array(x) for n, x in trees.flatten_with_names(params)}
  return flat, {line.name: line for line in lines}


def changed(array, how, rng):
  """Returns an array that differs in shape, dtype or values."""
  if how == "longer":
    return np.concatenate([array, array[-1:]])
  if how == "wider":
    return np.repeat(array, 2, axis=-1)
  if how == "flat":
    return array.reshape(1, -1) if array.ndim == 1 else array.reshape(-1)
  if how == "integer":
    return array.astype(np.int32)
  assert how == "values"
  result = array.copy()
  result.flat[rng.integers(array.size)] += 1
  return result


@pytest.mark.parametrize("scan", cases.quick([False, True], True))
@pytest.mark.parametrize("layout", MODELS)
def test_every_array_is_loaded_or_named(layout, scan, tmp_path):
  model = model_of(layout, scan=scan)
  original = arrays_of(layout)
  like = like_of(model)
  folders.write(tmp_path, original)
  expected, _ = open_folder(layout, tmp_path, model, like)
  rng = np.random.default_rng(scan)
  prefix = "transformer." if layout == "gpt2" else ""
  for name in rng.choice(sorted(original), NUMBER, replace=False):
    short = name.removeprefix(prefix)
    for how in ("removed", "longer", "wider", "flat", "integer", "values"):
      arrays = dict(original)
      array = arrays.pop(name)
      if how != "removed":
        arrays[name] = changed(array, how, rng)
      folders.write(tmp_path, arrays)
      if how != "values":
        with pytest.raises(ConfigError) as e:
          open_folder(layout, tmp_path, model, like)
        assert short in str(e.value), (name, how)
        continue
      flat, _ = open_folder(layout, tmp_path, model, like)
      differ = [n for n in flat if not np.array_equal(flat[n], expected[n])]
      assert len(differ) == 1, name
  for name in ("model.layers.9.mlp.up_proj.weight", "unknown", "wte.weight"):
    folders.write(tmp_path, original | {name: np.ones(3, np.float32)})
    with pytest.raises(ConfigError, match=f"unused +{name} "):
      open_folder(layout, tmp_path, model, like)


def tied(layout):
  """Returns (model with a tied head, arrays, name of the embedding)."""
  arrays = arrays_of(layout)
  (name,) = [
    n
    for n in arrays
    if n.endswith(("wte.weight", "embed_tokens.weight", "shared.weight"))
  ]
  return model_of(layout, tied_head=True), arrays, name


@pytest.mark.parametrize("layout", MODELS)
def test_a_head_that_differs_from_the_embedding_is_refused(layout, tmp_path):
  model, arrays, name = tied(layout)
  head = arrays[name].copy()
  arrays["lm_head.weight"] = head
  like = like_of(model)
  folders.write(tmp_path, arrays)
  flat, lines = open_folder(layout, tmp_path, model, like)
  assert lines["lm_head.weight"].status == "merged"
  assert "head/kernel" not in flat
  head[-1, -1] += 0.125
  folders.write(tmp_path, arrays)
  with pytest.raises(
    ConfigError, match=r"lm_head.* config\.model\.tied_head=F"
  ):
    open_folder(layout, tmp_path, model, like)
  flat, lines = open_folder(
    layout, tmp_path, model, like, allow_unused=["lm_head.weight"]
  )
  assert lines["lm_head.weight"].status == "unused"
  # The way out.
  untied = model_of(layout, tied_head=False)
  flat, _ = open_folder(layout, tmp_path, untied)
  np.testing.assert_array_equal(flat["head/kernel"], head.T)


def test_copies_of_the_embedding_and_constants_are_listed(tmp_path):
  model, arrays, name = tied("t5")
  copies = [f"{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")]
  unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias"
  arrays |= dict.fromkeys(copies, arrays[name])
  arrays[f"{unused}.weight"] = np.ones((8, 3), np.float32)
  _, lines = open_folder("t5", folders.write(tmp_path, arrays), model)
  assert {lines[copy].status for copy in copies} == {"merged"}
  assert lines[f"{unused}.weight"].status == "ignored"
  arrays[copies[1]] = arrays[name] + 1
  with pytest.raises(ConfigError, match=f"unused +{copies[1]} .* differs"):
    open_folder("t5", folders.write(tmp_path, arrays), model)

  mask = "transformer.h.1.attn.bias"
  arrays = arrays_of("gpt2") | {mask: np.ones((1, 1, 48, 48), bool)}
  model = model_of("gpt2")
  _, lines = open_folder("gpt2", folders.write(tmp_path, arrays), model)
  assert lines[mask].status == "ignored"


def test_layers_of_two_float_types_load(tmp_path):
  arrays = arrays_of("llama")
  name = "model.layers.1.mlp.up_proj.weight"
  half = arrays[name].astype(ml_dtypes.bfloat16)
  model = model_of("llama", scan=True)
  folders.write(tmp_path, arrays | {name: half})
  flat, _ = open_folder("llama", tmp_path, model)
  np.testing.assert_array_equal(
    flat["blocks/mlp/up/kernel"][1], half.T.astype(np.float32)
  )


def test_an_array_in_two_files_is_an_error(tmp_path):
  folders.write(tmp_path, arrays_of("llama"))
  (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
  with pytest.raises(ConfigError, match="both model.safetensors and"):
    open_folder("llama", tmp_path, model_of("llama"))


def test_another_vocabulary_is_listed_and_stays_fresh(tmp_path, caplog):
  larger = model_of("llama", vocab_size=70)
  options = dict(allow_reshaped=["token_embedding", "head/kernel"])
  folder = folders.write(tmp_path, arrays_of("llama"))
  with pytest.raises(ConfigError, match="stay freshly initialised"):
    open_folder("llama", folder, larger)
  flat, lines = open_folder("llama", folder, larger, **options)
  for name in ("token_embedding", "head/kernel"):
    assert lines[name].status == "reshaped"
    assert lines[name].what.endswith("; keeps its fresh initialisation")
    assert not flat[name].any()
  assert "2 of 21 arrays keep their fresh initialisation" in caplog.text
  assert flat["norm/scale"].any()
