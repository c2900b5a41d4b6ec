"""bigtrain.load and tools.generate with the folder of a published model."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors import numpy
from support import rounding

import bigtrain
from bigtrain.config.errors import ConfigError
from bigtrain.inference import saved
from bigtrain.tools import generate as tool

pytestmark = pytest.mark.golden

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
SPECIAL = ("<user>", "<end>", "<stop>")
CHAT = "{% for m in messages %}<user>{{ m.content }}<end>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A published model with a tokenizer: token i below 64 is the word "wi"."""
  tokenizers = pytest.importorskip("tokenizers")
  folder = tmp_path_factory.mktemp("model") / "mistral"
  shutil.copytree(GOLDEN / "published" / "mistral", folder)
  words = {f"w{i}": i for i in range(64)}
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0"))
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.add_special_tokens(list(SPECIAL))
  made.save(str(folder / "tokenizer.json"))
  (folder / "chat_template.jinja").write_text(CHAT)
  return folder


@pytest.fixture(scope="module")
def reference():
  return np.load(GOLDEN / "published" / "mistral" / "reference.npz")


def text_of(ids):
  return " ".join(f"w{i}" for i in ids if i < 64)


@pytest.fixture(scope="module")
def model(folder):
  return bigtrain.load(folder)


def assert_close(model, run, expected):
  """Compares what run() computes with the model's own variables."""
  own = model.variables

  def with_variables(variables):
    model.variables = variables
    return [run()]

  try:
    rounding.assert_close(with_variables, own, [expected])
  finally:
    model.variables = own


def test_logits_and_greedy_tokens_are_those_of_transformers(model, reference):
  run = lambda: model.run("logits", {"tokens": reference["tokens"]})
  assert_close(model, run, reference["logits"])
  prompts = [row.tolist() for row in reference["prompt"]]
  number = reference["generated"].shape[1]
  texts = [row["text"] for row in model.generate(prompts, max_new=number)]
  assert texts == [text_of(row) for row in reference["generated"]]


def test_the_defaults_of_generation_are_the_folders(
  model, folder, tmp_path, capsys
):
  prompt, options = "w5 w7 w20", dict(max_new=10)
  words = model.generate(prompt, **options)["text"].split()
  # Of several tokens that end a text, the first one ends it.
  ends = [66, *(int(word[1:]) for word in words[5:3:-1])]
  expected = " ".join(words[: min(words.index(word) for word in words[4:6])])
  copy = shutil.copytree(folder, tmp_path / "copy")
  values = {"eos_token_id": ends, "temperature": 0.7, "do_sample": False}
  (copy / "generation_config.json").write_text(json.dumps(values))
  result = bigtrain.load(copy).generate(prompt, **options)
  assert result == {"text": expected} and expected
  arguments = [f"--model={copy}", f"--prompt={prompt}", "--max_new=10"]
  assert tool.main(arguments) == 0
  out, err = capsys.readouterr()
  assert out == f"{prompt}{expected}\n"
  assert err.splitlines()[-1] == "decoding: the most likely token"


@pytest.mark.parametrize(
  ("given", "expected"),
  [
    ({}, {}),
    (dict(do_sample=False, temperature=0.7, top_k=3), {}),
    # The library leaves out a top_k of 50, and applies it.
    (dict(do_sample=True), dict(temperature=1.0, top_k=50)),
    (
      dict(do_sample=True, temperature=0.3, top_k=None, min_p=0.15),
      dict(temperature=0.3, top_k=50, min_p=0.15),
    ),
    (
      dict(do_sample=True, top_k=0, top_p=0.9, eos_token_id=[5, 7]),
      dict(temperature=1.0, top_k=0, top_p=0.9, eos_id=[5, 7]),
    ),
  ],
)
def test_options_of_sampling_are_those_that_the_library_reads(
  given, expected, folder, tmp_path
):
  shutil.copytree(folder, copy := tmp_path / "copy")
  (copy / "generation_config.json").write_text(json.dumps(given))
  assert saved.find(str(copy), None).generation == expected


@pytest.mark.slow
def test_rules_of_generation_are_the_folders(model, folder, tmp_path, capsys):
  prompt, options = "w5 w7 w20", dict(max_new=10)
  words = model.generate(prompt, **options)["text"].split()
  ends = [66, *(int(word[1:]) for word in words[5:3:-1])]
  result = model.generate(prompt, **options, eos_id=ends)
  copy = shutil.copytree(folder, tmp_path / "copy")
  arguments = [f"--model={copy}", f"--prompt={prompt}", "--max_new=10"]
  values = {"eos_token_id": ends, "temperature": 0.7}
  values |= {"do_sample": True, "top_k": 1}
  (copy / "generation_config.json").write_text(json.dumps(values))
  assert bigtrain.load(copy).generate(prompt, **options) == result
  rules = {"repetition_penalty": 3.0, "no_repeat_ngram_size": 2}
  values |= rules | {"min_new_tokens": 10}
  (copy / "generation_config.json").write_text(json.dumps(values))
  given = model.generate(prompt, **options, eos_id=ends, **rules, min_new=10)
  assert bigtrain.load(copy).generate(prompt, **options) == given != result
  assert tool.main(arguments) == 0
  assert capsys.readouterr().out == f"{prompt}{given['text']}\n"
  values |= {"temperature": 9.0, "top_k": 50}
  (copy / "generation_config.json").write_text(json.dumps(values))
  assert bigtrain.load(copy).generate(prompt, **options) != result
  assert tool.main(arguments) == 0
  assert capsys.readouterr().out != f"{prompt}{result['text']}\n"


def test_a_prompt_may_end_in_the_token_0(model):
  for prompt in ([64, 5, 7, 0], [64, 20, 0, 0]):
    result = model.generate([prompt, [64]], max_new=6, scores=True)[0]
    # The scores are of one pass over the whole text.
    assert result["greedy"] and result["tokens"]


def test_chat_puts_messages_into_the_models_template(model, folder, capsys):
  messages = [{"role": "user", "content": "w5 w7"}]
  ids = [64, 5, 7, 65]
  expected = model.generate(ids, max_new=8)
  assert model.chat(messages, max_new=8) == expected
  assert model.chat([messages] * 2, max_new=8) == [expected] * 2
  arguments = ["--chat", "--prompt=w5 w7", "--max_new=8", "--temperature=0"]
  assert tool.main([f"--model={folder}", *arguments]) == 0
  assert capsys.readouterr().out == f"{expected['text']}\n"


def test_encoder_decoders_are_opened_too():
  folder = GOLDEN / "hf_t5"
  golden = np.load(folder / "golden.npz")
  features = {name: golden[name] for name in ("inputs", "targets")}
  model = bigtrain.load(folder)
  assert_close(model, lambda: model.run("logits", features), golden["logits"])


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(step=3), "step=3: .* has no steps"),
    (dict(weights="ema"), "weights='ema': expected 'params'"),
  ],
)
def test_what_a_folder_does_not_have(folder, options, message):
  with pytest.raises(ConfigError, match=message):
    bigtrain.load(folder, **options)


def test_an_unknown_key_is_left_out_on_request(folder, tmp_path):
  shutil.copytree(folder, copy := tmp_path / "copy")
  config = json.loads((copy / "config.json").read_text())
  (copy / "config.json").write_text(json.dumps({**config, "new_key": 1}))
  with pytest.raises(ConfigError, match="new_key=1: unknown key"):
    bigtrain.load(copy)
  model = bigtrain.load(copy, allow_unread=["new_key"])
  assert model.generate([5, 7], max_new=1)["text"]


@pytest.mark.parametrize(
  "family", ["vit", "dinov2", "convnext", "swin", "bit", "clip"]
)
def test_folders_of_vision_models_embed_pictures(family):
  folder = GOLDEN / "published_vision" / family
  reference = np.load(folder / "reference.npz")
  model = bigtrain.load(folder, pp="copy('image', 'image')")
  assert model.default_method == "embed_images"
  images = list(reference["pixel_values"].transpose(0, 2, 3, 1))
  rows = lambda: np.stack([x["embedding"] for x in model.predict(images)])
  name = "image_embeds" if family == "clip" else "pooler_output"
  expected = reference[name].reshape(len(images), -1)
  if family == "clip":  # Ours have length one.
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
  assert_close(model, rows, expected)


def test_a_vision_folder_has_its_processor_and_its_classes(tmp_path):
  pytest.importorskip("tensorflow")
  source = GOLDEN / "published_vision" / "vit"
  shutil.copytree(source, folder := tmp_path / "vit")
  processor = dict(size=dict(height=16, width=16), resample=2)
  processor |= dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
  (folder / "preprocessor_config.json").write_text(json.dumps(processor))
  config = json.loads((folder / "config.json").read_text())
  config["architectures"] = ["ViTForImageClassification"]
  config["id2label"] = {"0": "cat", "1": "dog", "2": "owl"}
  (folder / "config.json").write_text(json.dumps(config))
  arrays = numpy.load_file(folder / "model.safetensors")
  arrays = {f"vit.{n}": x for n, x in arrays.items() if "pooler" not in n}
  arrays["classifier.weight"] = np.zeros((3, 16), np.float32)
  arrays["classifier.bias"] = np.asarray([0.0, 2.0, 1.0], np.float32)
  numpy.save_file(arrays, folder / "model.safetensors")
  picture = np.full((20, 30, 3), 255, np.uint8)
  predicted = bigtrain.load(folder).predict(picture)
  assert [x["label"] for x in predicted["top"]] == ["dog", "owl", "cat"]


@pytest.mark.parametrize("name", ["convnext", "timm_deit3"])
def test_the_fast_transform_of_jpegs_moves_logits(name):
  """Two photographs; docs/truth.md has the shares of the largest logit."""
  datasets = pytest.importorskip("sklearn.datasets")
  folder = pathlib.Path(datasets.__file__).parent / "images"
  photos = sorted(folder.glob("*.jpg"))
  published = GOLDEN / "published_vision" / name
  side = json.loads((published / "config.json").read_text())
  side = side.get("image_size", 16)
  images = []
  for precise in (True, False):
    pp = f"decode(precise={precise})|resize({side},antialias=True)"
    model = bigtrain.load(published, pp=f"{pp}|value_range(-1,1)")
    images.append(model.pictures(photos)["image"])
  apply = jax.jit(model.model.apply)
  logits = [np.asarray(apply(model.variables, x)[0]) for x in images]
  moved = np.abs(logits[1] - logits[0]).max(axis=1)
  shares = moved / np.abs(logits[0]).max(axis=1)
  assert shares.min() > 0.004 and shares.max() < 0.033
