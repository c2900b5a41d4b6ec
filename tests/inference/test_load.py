"""bigtrain.load: trained models of every task, as users call them."""

import io
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import picture_runs, processes
from support.saved_models import TOWER, saved

import bigtrain
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.pp import parse, registry
from bigtrain.tools import checkpoint


@pytest.fixture(scope="module")
def run(picture_run):
  return picture_run / "runs" / "mine"


@pytest.fixture(scope="module")
def model(run):
  return bigtrain.load(run)


@pytest.fixture(scope="module")
def files(picture_run):
  return sorted((picture_run / "val").rglob("*.png"))


def test_predictions_are_those_of_the_runs_evaluation(run, model, files):
  """The evaluation has saved its logits; its source sorts the files alike."""
  logits = np.load(run / "predictions" / "val-00000030.npz")["predictions"]
  expected = np.asarray(jax.nn.softmax(logits, axis=-1))
  results = model.predict(files, top_k=3)
  assert model.class_names == list(picture_runs.CLASSES)
  for path, row, result in zip(files, expected, results, strict=True):
    assert result["label"] == path.parent.name
    scores = {entry["index"]: entry["score"] for entry in result["top"]}
    np.testing.assert_allclose([scores[i] for i in range(3)], row, rtol=1e-5)
    assert result["score"] == result["top"][0]["score"] == max(scores.values())


def test_a_picture_may_be_a_path_bytes_an_array_or_of_pil(model, files):
  image = pytest.importorskip("PIL.Image")
  expected = model.predict(files[4])
  content = files[4].read_bytes()
  opened = image.open(io.BytesIO(content))
  pixels = np.asarray(opened)
  for picture in (str(files[4]), content, opened, pixels):
    assert model.predict(picture) == expected
  assert model.predict([pixels, pixels]) == [expected] * 2
  assert model.predict(np.stack([pixels])) == [expected]
  assert model.predict([]) == []


def test_batches_are_split_over_the_devices_and_padded(run, files, model):
  small = bigtrain.load(run, batch_size=1)
  assert small.batch_size == jax.device_count()
  scores = [[x["score"] for x in m.predict(files)] for m in (small, model)]
  np.testing.assert_allclose(*scores, rtol=1e-6)
  kernel = model.params["first"]["kernel"]
  assert len(kernel.sharding.device_set) == jax.device_count()
  assert not kernel.sharding.is_fully_replicated


def test_nothing_is_written_into_the_run(run, files):
  def listing():
    return {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}

  before = listing()
  bigtrain.load(run).predict(files[0])
  assert listing() == before


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(step=7), r"no checkpoint of step 7; there are 30"),
    (dict(weights="ema"), r"weights='ema': not in the checkpoint.*params"),
    (dict(evaluation="vall"), r"evaluation 'vall'.*mean 'val'"),
    (dict(pp="decode|rezise(6)"), r"unknown op 'rezise'.*mean 'resize'"),
    (dict(pp="decode|inception_crop(6)"), r"pp draws random numbers"),
    (dict(pp="decode|resize(6)|drop('image')"), r"pp drops it"),
    (dict(class_names=["a", "b"]), r"expected 3 names.*got 2"),
    (dict(tokenizer="none.model"), r"no such file"),
  ],
)
def test_wrong_arguments(run, files, change, message):
  with pytest.raises(ConfigError, match=message):
    loaded = bigtrain.load(run, **change)
    loaded.predict(files[0])
    assert loaded.tokenizer


def test_other_ops_and_names(run, files):
  names = ["Katze", "Hund", "Eule"]
  other = bigtrain.load(run, pp="decode|resize(6)", class_names=names)
  assert other.pictures.chain.spec == "decode|resize(6)"
  assert other.predict(files[0])["label"] in names


@pytest.mark.parametrize(
  "picture, message",
  [
    ("no.png", "no.png: No such file"),
    (b"no picture", "Unknown image file format"),
    (np.zeros((5, 5, 3)), "expected an array of uint8"),
    (np.zeros(5, np.uint8), r"expected a path.*got ndarray uint8\(5,\)"),
  ],
)
def test_unusable_pictures(model, picture, message):
  with pytest.raises(DataError, match=message):
    model.predict(picture)


def test_a_model_says_what_it_cannot_do(model):
  assert repr(model).startswith("<Predictor classification, step ")
  assert repr(model).endswith("; can embed_images, classify>")
  assert model.can == ["embed_images", "classify"]
  with pytest.raises(ConfigError, match=r"cannot do this; it can embed_images"):
    model.caption("a.png")
  with pytest.raises(ConfigError, match=r"run: pred: unknown 'logit'.*logits"):
    model.run("logit", {})


_IMPORTS = """
import json, sys
import numpy as np
import bigtrain
model = bigtrain.load(sys.argv[1])
model.predict(np.zeros((8, 8, 1), np.float32))
print(json.dumps(sorted(sys.modules)))
"""


def test_the_training_loop_and_tensorflow_are_not_imported(tmp_path):
  """Its pictures are arrays, so their ops need no tensorflow."""
  config = dict(
    task="classification",
    model_name="vit",
    model=dict(num_classes=2, patch_size=4, **TOWER),
    input=dict(data=dict(type="arrays"), batch_size=4),
  )
  saved(tmp_path, config, image=((8, 8, 1), "float32"))
  done = subprocess.run(
    [sys.executable, "-c", _IMPORTS, str(tmp_path)],
    env=processes.environment(2),
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  names = set(json.loads(done.stdout.splitlines()[-1]))
  assert "bigtrain.inference.predictor" in names
  # Models have views for optimizers, in optim/views.py, but import no other
  # module of it.
  unwanted = ("main", "step", "optim.chain", "optim.optimizers")
  unwanted += ("runtime", "reports", "tools", "inputs.pipeline")
  assert not names & {f"bigtrain.{name}" for name in unwanted}
  assert "tensorflow" not in names and "optax" not in names


TOKENIZE = "tokenize(model='bytes',max_len=12)"
IMAGE = np.random.default_rng(0).integers(
  0, 256, size=(5, 8, 8, 3), dtype=np.uint8
)
SCALED = np.float32(IMAGE) / 127.5 - 1


def tokens(texts):
  rows = np.zeros((len(texts), 12), np.int32)
  for row, text in zip(rows, texts):
    row[: len(text) + 1] = [*(np.frombuffer(text.encode(), np.uint8) + 3), 2]
  return rows


@pytest.mark.slow
def test_captions_and_classes_by_captions(tmp_path):
  pp = f"value_range(-1,1)|{TOKENIZE}|keep('image','labels')"
  config = dict(
    task="captioning",
    model_name="cappa",
    model=dict(
      vocab_size=259, max_len=12, patch_size=4, decoder_depth=1, **TOWER
    ),
    input=dict(data=dict(type="jsonl"), pp=pp, batch_size=4),
    evals={
      "captions": dict(
        type="captions",
        pred="caption",
        pred_kw=dict(max_len=5),
        data={},
        pp=pp,
        tokenizer="bytes",
      )
    },
  )
  reference = saved(
    tmp_path, config, image=((8, 8, 3), "float32"), labels=((12,), "int32")
  )
  model = bigtrain.load(tmp_path)
  assert model.can == ["caption", "embed_images", "zero_shot"]
  ids = reference("caption", {"image": SCALED}, eos_id=2, max_len=5)
  expected = [{"caption": model.tokenizer.decode(row)} for row in ids]
  assert model.predict(IMAGE) == expected
  names = ["a cat", "a dog"]
  batch = {"image": SCALED, "class_tokens": tokens(["see a cat", "see a dog"])}
  score = jax.nn.softmax(reference("score", batch), axis=-1)
  results = model.zero_shot(IMAGE, names, prompts=["see {}"])
  for row, result in zip(score, results):
    assert result["label"] == names[int(row.argmax())]
    assert result["score"] == pytest.approx(float(row.max()), rel=1e-4)
  features = model.embed_images(IMAGE[0])["embedding"]
  assert features.shape == (8,)


@pytest.mark.parametrize("kind", ["sigmoid", "softmax"])
def test_embeddings_and_zero_shot(tmp_path, kind):
  pp = f"value_range(-1,1)|choice(key='captions',key_result='text')|{TOKENIZE}"
  config = dict(
    task="contrastive",
    loss=dict(kind=kind),
    model_name="two_towers",
    model=dict(
      image=dict(patch_size=4, pool_type="gap", **TOWER),
      text=dict(vocab_size=259, **TOWER),
      out_dim=6,
      bias_init=-1.0,
    ),
    input=dict(data=dict(type="jsonl"), pp=pp, batch_size=4),
  )
  reference = saved(
    tmp_path, config, image=((8, 8, 3), "float32"), labels=((12,), "int32")
  )
  model = bigtrain.load(tmp_path)
  texts = ["a cat", "an owl"]
  both = reference("embed", {"image": SCALED, "labels": tokens(texts)})
  rows = [x["embedding"] for x in model.predict(IMAGE)]
  np.testing.assert_allclose(rows, both["image"], atol=1e-6)
  rows = [x["embedding"] for x in model.embed_texts(texts)]
  np.testing.assert_allclose(rows, both["text"], atol=1e-6)
  params = jax.device_get(model.params)
  logits = both["image"] @ both["text"].T * jnp.exp(params["t"]) + params["b"]
  score = (
    jax.nn.sigmoid(logits)
    if kind == "sigmoid"
    else jax.nn.softmax(logits, axis=-1)
  )
  for row, result in zip(score, model.zero_shot(IMAGE, texts)):
    found = {entry["label"]: entry["score"] for entry in result["top"]}
    np.testing.assert_allclose([found[t] for t in texts], row, rtol=1e-4)


def test_pictures_in_their_own_aspect_ratios(tmp_path):
  """The ops of SigLIP 2's NaFlex; training draws another number of patches."""
  naflex = "value_range(-1,1)|naflex(4,{length})"
  text = f"choice(key='captions',key_result='text')|{TOKENIZE}"
  grid = dict(posemb="learn", posemb_grid=(2, 2), pool_type="gap")
  config = dict(
    task="contrastive",
    model_name="two_towers",
    model=dict(
      image=dict(patch_size=4, **grid, **TOWER),
      text=dict(vocab_size=259, **TOWER),
      out_dim=6,
      bias_init=-1.0,
    ),
    input=dict(
      data=dict(type="jsonl"),
      pp=f"{naflex}|{text}",
      flexi=dict(length=dict(values=(4, 8))),
      batch_size=4,
    ),
  )
  reference = saved(
    tmp_path,
    config,
    image=((4, 48), "float32"),
    shapes=((2,), "int32"),
    labels=((12,), "int32"),
  )
  model = bigtrain.load(tmp_path)
  wide, tall = IMAGE[0][:4], IMAGE[1][:, :4]  # 4 x 8 and 8 x 4.
  ops = registry.compose(parse.parse(naflex.format(length=8)))
  rows = [ops.fn({"image": picture}, np.zeros(1)) for picture in (wide, tall)]
  batch = {
    "image": np.stack([row["image"] for row in rows]),
    "shapes": np.stack([row["shapes"] for row in rows]),
  }
  np.testing.assert_array_equal(batch["shapes"], [(2, 4), (4, 2)])
  texts = ["a cat", "an owl"]
  both = reference("embed", {**batch, "labels": tokens(texts)})
  rows = [x["embedding"] for x in model.predict([wide, tall])]
  np.testing.assert_allclose(rows, both["image"], atol=1e-6)
  params = jax.device_get(model.params)
  logits = both["image"] @ both["text"].T * jnp.exp(params["t"]) + params["b"]
  for row, result in zip(
    jax.nn.sigmoid(logits), model.zero_shot([wide, tall], texts)
  ):
    scores = {entry["label"]: entry["score"] for entry in result["top"]}
    np.testing.assert_allclose([scores[t] for t in texts], row, rtol=1e-4)
  model = bigtrain.load(tmp_path, pp="value_range(-1,1)|naflex(2,8)")
  expected = r"8x12 after pp, but the model takes \?x48; .*naflex\(4, 256\)"
  with pytest.raises(DataError, match=expected):
    model.predict(wide)


def test_texts_are_continued(tmp_path):
  config = dict(
    task="language_modeling",
    model_name="decoder",
    model=dict(
      variant="gpt2",
      vocab_size=259,
      width=8,
      depth=1,
      num_heads=2,
      max_len=32,
      init_std=1.0,
    ),
    input=dict(data=dict(type="text", path="x.txt"), batch_size=4),
  )
  reference = saved(tmp_path, config, tokens=((8,), "int32"))
  model = bigtrain.load(tmp_path)
  prompts = ["def f", "class Longer"]
  rows = np.zeros((2, 16), np.int32)
  for row, text in zip(rows, prompts):
    row[: len(text)] = np.frombuffer(text.encode(), np.uint8) + 3
  ids = reference("generate", {"tokens": rows}, max_new=6, eos_id=2)
  expected = [model.tokenizer.decode(row) for row in np.asarray(ids)]
  found = model.predict(prompts, max_new=6)
  for text, result in zip(expected, found):
    assert text.startswith(result["text"]) and result["text"]
  assert model.predict(prompts[0], max_new=6) == found[0]
  assert model.generate(rows[0, :5].tolist(), max_new=6) == found[0]
  assert model.generate("", max_new=1, temperature=1.0, seed=3)["text"] != 0
  with pytest.raises(
    ConfigError, match=r"are more than the model's max_len=32"
  ):
    model.generate("x" * 20, max_new=20)


@pytest.mark.slow
def test_texts_are_answered(tmp_path):
  config = dict(
    task="seq2seq",
    model_name="t5",
    model=dict(
      variant="t5_1_1", vocab_size=300, width=8, depth=1, num_heads=2, mlp_dim=8
    ),
    input=dict(
      data=dict(type="text", path="x.txt"),
      pp="span_corruption(48,sentinel=299,num_sentinels=32,eos_id=2)",
      batch_size=4,
    ),
  )
  reference = saved(
    tmp_path, config, inputs=((9,), "int32"), targets=((9,), "int32")
  )
  model = bigtrain.load(tmp_path)
  row = np.zeros((1, 16), np.int32)
  row[0, :4] = [*(np.frombuffer(b"abc", np.uint8) + 3), 2]
  ids = reference("generate", {"inputs": row}, max_len=8, eos_id=2)
  result = model.predict("abc", max_len=8)
  assert model.tokenizer.decode(ids[0]).startswith(result["text"])


def test_the_tokenizer_must_be_the_runs(tmp_path):
  config = dict(
    task="language_modeling",
    model_name="decoder",
    model=dict(variant="gpt2", vocab_size=259, width=8, depth=1, num_heads=2),
    input=dict(data=dict(type="text", path="x"), batch_size=4),
  )
  config["model"]["max_len"] = 8
  saved(tmp_path, config, tokens=((8,), "int32"))
  model = bigtrain.load(tmp_path)
  data = {"tokenizer": {"name": "bytes", "fingerprint": "other"}}
  model._saved = model._saved._replace(data=data)
  with pytest.raises(
    ConfigError, match=r"not the one that the model was train"
  ):
    model.generate("a")


def test_relative_paths(monkeypatch, run, files):
  monkeypatch.chdir(run.parent)
  relative = os.path.relpath(files[0])
  assert bigtrain.load("mine").predict(relative)["label"] == "cat"


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_an_export_is_loaded_like_the_run(run, model, files, tmp_path, kind):
  out = str(tmp_path / f"mine.{kind}")
  assert checkpoint.main(["export", str(run), out, "--prefix=params"]) == 0
  exported = bigtrain.load(out)
  assert exported.class_names == model.class_names and exported.step == 30
  assert exported.predict(files) == model.predict(files)
  os.remove(f"{out}.json")
  with pytest.raises(ConfigError, match=rf"mine.{kind}.json beside it"):
    bigtrain.load(out)
