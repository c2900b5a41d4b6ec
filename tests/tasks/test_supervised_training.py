"""Training on supervised texts: the same however they are packed or split."""

import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tiny
from support import any_mesh

import bigtrain
from bigtrain import main, sharding
from bigtrain.arrays import trees
from bigtrain.config import loading, settings
from bigtrain.config.errors import ConfigError
from bigtrain.data import supervised
from bigtrain.inference import saved
from bigtrain.inputs import pipeline
from bigtrain.models import decoder, t5
from bigtrain.tasks import language_modeling, seq2seq
from bigtrain.text import tokenizers
from bigtrain.tools import generate
from bigtrain.tools.report import report, texts

CHATS = pathlib.Path(__file__).parents[1] / "golden" / "chat_masks"
ROWS = [
  {"prompt": f"{i}+1=", "completion": "x" * (i % 7 + 1), "weight": 1 + i % 2}
  for i in range(12)
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows(path, content):
  path.write_text("".join(json.dumps(row) + "\n" for row in content))
  return str(path)


MODELS = {
  "decoder": (
    language_modeling,
    24,
    decoder.Model(
      variant="llama",
      vocab_size=259,
      width=16,
      depth=1,
      num_heads=2,
      mlp_dim=24,
    ),
  ),
  "encoder-decoder": (
    seq2seq,
    (24, 24),
    t5.Model(vocab_size=259, width=16, depth=1, num_heads=2, mlp_dim=24),
  ),
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_and_unpacked_have_the_same_loss_and_gradients(name, tmp_path):
  task, length, model = MODELS[name]
  path = rows(tmp_path / "rows.jsonl", ROWS)
  results = []
  for pack in (False, True):
    source = supervised.Source("bytes", length, path, pack=pack)
    batch = source.read(np.arange(len(source)))
    if not results:
      inputs = task.inputs({k: x[:1] for k, x in batch.items()})
      params = jax.jit(model.init)(jax.random.key(0), **inputs)["params"]

    def loss(params, batch=batch):
      pairs, _ = task.loss_fn(
        {"params": params}, batch, None, model=model, train=False
      )
      total, weight = pairs["loss"]
      return total / weight, pairs

    (value, pairs), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
      params
    )
    results.append((len(source), value, pairs, grads))
  (apart, *unpacked), (together, *packed) = results
  assert together < apart == len(ROWS)
  np.testing.assert_allclose(packed[0], unpacked[0], rtol=1e-5)
  # Answers and their ends; every other row counts twice.
  ends = [len(row["completion"]) + 1 for row in ROWS]
  assert float(packed[1]["supervised_tokens"].total) == sum(ends)
  weights = [n * row["weight"] for n, row in zip(ends, ROWS)]
  assert float(packed[1]["loss"][1]) == sum(weights)
  for (key, a), (_, b) in zip(
    *(trees.flatten_with_names(grads) for *_, grads in (packed, unpacked))
  ):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5, err_msg=key)


@functools.cache
def steps(sizes, microbatches):
  config = any_mesh.load("sft:runlocal", vocab_size=320, small=True, dropout=0)
  return any_mesh.train(config, dict(sizes), microbatches)


@pytest.mark.parametrize(
  ("sizes", "microbatches"),
  [
    ((("fsdp", 1),), 4),
    pytest.param((("replica", 2), ("fsdp", 4)), 1, marks=pytest.mark.slow),
  ],
)
def test_microbatches_and_devices_change_nothing(sizes, microbatches):
  want_pairs, want_grads, want_state = steps((("fsdp", 1),), 1)
  pairs, grads, state = steps(sizes, microbatches)
  for ours, theirs in zip(pairs, want_pairs, strict=True):
    assert ours.keys() == theirs.keys() >= {"supervised_tokens", "loss"}
    assert ours["supervised_tokens"][0] == theirs["supervised_tokens"][0] > 100
    for key, pair in ours.items():
      np.testing.assert_allclose(pair, theirs[key], 1e-5, err_msg=key)
  for got, want in ((grads, want_grads), (state, want_state)):
    for (key, a), (_, b) in zip(
      *(trees.flatten_with_names(tree) for tree in (got, want))
    ):
      a, b = np.asarray(a, float), np.asarray(b, float)
      np.testing.assert_allclose(a, b, 1e-4, 1e-5, err_msg=key)


def tiny_run(**changes):
  config = loading.load(f"{any_mesh.CONFIGS}/sft.py:runlocal")
  config["model"] |= dict(width=16, depth=1, mlp_dim=24)
  config["evals"] = {}
  config |= dict(log_steps=1, ckpt_steps=2, compile_cache=False)
  return config | dict(tensorboard=False) | changes


@pytest.mark.slow
def test_a_resumed_run_equals_a_whole_one(tmp_path):
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  main.train(tiny_run(), str(whole))
  for stop in (2, None):
    main.train(tiny_run(stop_at_steps=stop), str(cut))
  tiny.assert_same(tiny.arrays(whole), tiny.arrays(cut))
  assert tiny.rows(whole) == tiny.rows(cut)
  for step in range(1, 5):
    assert tiny.rows(whole)[step]["supervised_tokens"] > 500
  # What has a loss is in the log, and marked in the report.
  info = json.loads((whole / "run.json").read_text())
  first = info["starts"][-1]["first_example"]
  assert first[0] == ["abc.ABC()\n", False]
  assert first[1][0].endswith("inheritance.<eos>") and first[1][1]
  page = texts.section(report.read([str(whole)])[0])
  assert "abc.ABC()\n<mark>Helper class" in page
  assert "inheritance.&lt;eos&gt;</mark>" in page


def make_input(data, run):
  config = settings.Config({"input": dict(data=data, batch_size=8), **run})
  mesh = sharding.make_mesh()
  return pipeline.make_train(config.input, seed=0, mesh=mesh, run=config)


def test_another_tokenizer_than_the_models_is_refused(tmp_path):
  folder = tmp_path / "model"
  shutil.copytree(CHATS, folder)
  path = rows(tmp_path / "rows.jsonl", ROWS)
  data = dict(type="supervised", path=path, length=32)
  run = dict(total_steps=1, model_init=str(folder))
  assert make_input(data | dict(tokenizer=str(CHATS)), run).num_examples == 12
  message = r"config.input: its tokenizer 'bytes' .259 ids. is not that of "
  message += r"config.model_init='.*model' .392 ids."
  with pytest.raises(ConfigError, match=message):
    make_input(data | dict(tokenizer="bytes"), run)
  with pytest.raises(ConfigError, match=message):
    init = dict(path=str(folder), allow_missing=["head"])
    make_input(data | dict(tokenizer="bytes"), run | dict(model_init=init))
  # The program also refuses ids beyond the model's vocabulary.
  model = dict(tokens=300, targets=300)
  train = make_input(data | dict(tokenizer=str(CHATS)), run)
  with pytest.raises(ConfigError, match="go up to 391, but .* has 300"):
    train.limit_ids(model)


@pytest.mark.slow
def test_a_trained_model_is_asked_as_in_its_training(tmp_path):
  messages = [
    dict(role="user", content="Hi"),
    dict(role="assistant", content="H"),
  ]
  path = rows(tmp_path / "rows.jsonl", [{"messages": messages}] * 8)
  data = dict(type="supervised", path=path, length=32, tokenizer=str(CHATS))
  config = tiny_run(total_steps=1)
  config["input"]["data"] = data | dict(template="phi3")
  config["model"]["vocab_size"] = 392
  main.train(config, str(tmp_path / "run"))
  checkpoint = saved.find(str(tmp_path / "run"), None)
  coder = tokenizers.get(str(CHATS))
  ids = checkpoint.ids_of_chat(coder, messages[:1])
  assert coder.spell(ids) == "<|user|>\nHi<|end|>\n<|assistant|>\n"
  # The tokenizer's end of a text, </s>, ends no answer.
  assert checkpoint.generation == {"eos_id": [coder.spellings["<|end|>"]]}
  answer = bigtrain.load(str(tmp_path / "run")).chat(messages[:1], max_new=2)
  assert {*answer} == {"text"}


@pytest.mark.slow
def test_a_prefix_model_trains_and_answers(tmp_path):
  path = rows(tmp_path / "rows.jsonl", ROWS)
  config = tiny_run(total_steps=1)
  config["input"]["data"] = dict(
    type="supervised", path=path, length=32, tokenizer="bytes", prefix=True
  )
  main.train(config, str(tmp_path / "run"))
  model = bigtrain.load(str(tmp_path / "run"))
  seen = {}
  run = model.run
  model.run = lambda pred, batch, **kw: (
    seen.update(batch) or run(pred, batch, **kw)
  )
  assert {*model.generate("1+1=", max_new=2)} == {"text"}
  assert "prefix" in seen
  with pytest.raises(ConfigError, match="use bigtrain.load"):
    next(generate.generate(str(tmp_path / "run"), "1+1="))
