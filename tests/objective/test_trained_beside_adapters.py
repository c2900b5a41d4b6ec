"""What trains beside adapters of kernels: embeddings, tokens, biases, heads."""

import json
import os
import pathlib
import re

import numpy as np
import pytest
from flax import traverse_util
from support import cases

import bigtrain
from bigtrain import main
from bigtrain.config.errors import ConfigError
from bigtrain.tools import checkpoint, parameters

FOLDERS = pathlib.Path(__file__).parents[1] / "golden"
LLAMA, TIED = FOLDERS / "peft" / "base_llama", FOLDERS / "published" / "qwen3"
QUERY = r".*/query/kernel"


def config_of(folder, adapters, **others):
  features = {"tokens": "int32[8] < 64", "targets": "int32[8] < 64"}
  return (
    dict(
      seed=0,
      total_steps=2,
      log_steps=1,
      ckpt_steps=1,
      mesh=dict(replica=1, fsdp=-1),
      task="language_modeling",
      input=dict(data=dict(type="synthetic", features=features), batch_size=8),
      model_name="decoder",
      model=dict(published=str(folder)),
      model_init=str(folder),
      adapters=dict(rank=2, alpha=5) | adapters,
      optimizer=dict(name="sgd", momentum=None),
      schedule=dict(decay_type="constant"),
      lr=0.5,
    )
    | others
  )


def losses_of(workdir):
  with open(os.path.join(workdir, "metrics.jsonl")) as file:
    rows = [json.loads(line) for line in file]
  return [row["loss"] for row in rows if "loss" in row]


def params_of(workdir):
  variables = bigtrain.load(workdir).variables
  flat = {
    name: traverse_util.flatten_dict(variables[name], sep="/")
    for name in ("params", "base")
  }
  return flat["params"], flat["base"]


ADAPTERS = {
  "embedding": dict(targets=["token_embedding", QUERY]),
  "tokens": dict(targets=QUERY, tokens=[3, 7, 66]),
  "bias": dict(targets=QUERY, lora_bias=True),
}


@pytest.mark.parametrize("name", cases.quick(ADAPTERS, "tokens"))
def test_the_mesh_changes_nothing(name, tmp_path):
  config = config_of(TIED, ADAPTERS[name])
  main.train(config, str(tmp_path / "eight"))
  tensor = config | dict(mesh=dict(replica=1, fsdp=4, tensor=2))
  main.train(tensor, str(tmp_path / "tensor"))
  eight = losses_of(tmp_path / "eight")
  assert len(eight) == 2 and eight[0] != eight[1]
  np.testing.assert_allclose(losses_of(tmp_path / "tensor"), eight, rtol=1e-5)


@pytest.mark.parametrize("folder", [LLAMA, TIED])
def test_tokens_alone_train(folder, tmp_path):
  workdir = str(tmp_path / "run")
  main.train(config_of(folder, ADAPTERS["tokens"]), workdir)
  params, base = params_of(workdir)
  rows = params["token_embedding_adapter/lora_rows"]
  assert rows.shape == (3, 16)
  before = np.asarray(base["token_embedding"])[[3, 7, 66]]
  moved = np.abs(np.asarray(rows) - before).max(axis=1)
  # The token 66 is not in the data; with a tied head it has a loss.
  assert (moved[:2] > 1e-5).all()
  assert (moved[2] > 0) == (folder == TIED)


def test_a_resumed_run_is_the_whole_one(tmp_path):
  adapters = dict(targets="token_embedding", tokens={}, train=["norm/scale"])
  config = config_of(LLAMA, adapters)
  main.train(config, str(tmp_path / "whole"))
  main.train(config | dict(stop_at_steps=1), str(tmp_path / "parts"))
  main.train(config, str(tmp_path / "parts"))
  whole, _ = params_of(tmp_path / "whole")
  parts, _ = params_of(tmp_path / "parts")
  assert whole.keys() == parts.keys()
  for name, x in whole.items():
    np.testing.assert_array_equal(parts[name], x, err_msg=name)


def classifier(**others):
  features = {"tokens": "int32[8] < 64", "labels": "int32 < 3"}
  config = config_of(LLAMA, dict(targets=QUERY, train="score/.*"))
  return config | dict(
    task="classification",
    input=dict(data=dict(type="synthetic", features=features), batch_size=8),
    model=dict(published=str(LLAMA), num_classes=3),
    model_init=dict(path=str(LLAMA), allow_missing=["score/.*"]),
    total_steps=1,
    lr=1e-3,
    **others,
  )


def test_a_classifier_trains_its_head_at_its_own_rate(tmp_path, capsys):
  """PEFT's adapters of classifiers always have a saved head, "score"."""
  heads = {}
  for name, factor in (("one", 1.0), ("ten", 10.0)):
    workdir = str(tmp_path / name)
    main.train(classifier(lr_mults=[("score/.*", factor)]), workdir)
    heads[name] = np.asarray(params_of(workdir)[0]["score/kernel"])
  before = classifier(lr_mults=[("score/.*", 1e-9)])
  main.train(before, str(tmp_path / "before"))
  start = np.asarray(params_of(tmp_path / "before")[0]["score/kernel"])
  moved = {name: np.abs(x - start).max() for name, x in heads.items()}
  np.testing.assert_allclose(moved["ten"], 10 * moved["one"], rtol=1e-3)

  workdir, out = str(tmp_path / "ten"), str(tmp_path / "peft")
  assert checkpoint.main(["export", workdir, out, "--format=peft"]) == 0
  about = json.loads((tmp_path / "peft/adapter_config.json").read_text())
  assert about["task_type"] == "SEQ_CLS"
  assert about["modules_to_save"] == ["score"]
  batch = {"tokens": np.arange(12, dtype=np.int32).reshape(2, 6)}
  want = bigtrain.load(workdir).run("logits", batch)
  # The folder is that of a language model, without the head.
  got = bigtrain.load(LLAMA, adapter=out).run("logits", batch)
  assert want.shape == (2, 3)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_the_tool_shows_what_trains(tmp_path, capsys):
  config = classifier(lr_mults=[("score/.*", 10.0)])
  path = tmp_path / "config.json"
  path.write_text(json.dumps(config))
  arguments = [f"--config={path}", "--config.adapters.rank=3"]
  assert parameters.main(arguments) == 0
  lines = [re.split("  +", x) for x in capsys.readouterr().out.splitlines()]
  assert lines[1:4] == [
    ["blocks_*/attention/query/lora_a (2 x)", "[16, 3]", "96", "0.001", "-"],
    ["blocks_*/attention/query/lora_b (2 x)", "[3, 4, 4]", "96", "0.001", "-"],
    ["score/kernel", "[16, 3]", "48", "0.01", "-"],
  ]
  assert lines[-2][0].startswith("trained: 240 values in 5 arrays")
  assert lines[-1][0].startswith("frozen (base): 4,992 values in 20 arrays")
  assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
  ("adapters", "message"),
  [
    (dict(tokens=[3, 99]), "adapters.tokens: expected .*at most 66"),
    (dict(tokens=[3, 3]), "expected different ids"),
    (dict(tokens={"heads": [3]}), "adapters.tokens.*heads"),
    (
      dict(tokens=[3], train="token_embedding"),
      "'token_embedding' is also in config.adapters.train",
    ),
    (
      dict(tokens=[3], targets="token_embedding"),
      "'token_embedding' is also in config.adapters.targets",
    ),
    (
      dict(targets=QUERY, dora=True, lora_bias=True),
      "lora_bias: expected False",
    ),
    (dict(targets=QUERY, init="x"), "init"),
  ],
)
def test_mistakes_are_named(adapters, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    main.train(config_of(LLAMA, adapters), str(tmp_path / "run"))
