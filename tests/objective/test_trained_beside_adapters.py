"""What trains beside adapters of kernels: embeddings, tokens, biases, heads."""

import json
import os
import pathlib

import numpy as np
import pytest
from flax import traverse_util

import bigtrain
from bigtrain import main

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


TIED_AND_NOT = pytest.mark.parametrize("folder", [LLAMA, TIED])
ADAPTERS = {
  "embedding": dict(targets=["token_embedding", QUERY]),
  "tokens": dict(targets=QUERY, tokens=[3, 7, 66]),
  "bias": dict(targets=QUERY, lora_bias=True),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_eight_devices_train_what_one_does(name, tmp_path):
  config = config_of(TIED, ADAPTERS[name])
  main.train(config, str(tmp_path / "eight"))
  one = config | dict(mesh=dict(replica=1, fsdp=1), expect_devices=1)
  one.pop("expect_devices")
  tensor = config | dict(mesh=dict(replica=1, fsdp=4, tensor=2))
  main.train(tensor, str(tmp_path / "tensor"))
  eight = losses_of(tmp_path / "eight")
  assert len(eight) == 2 and eight[0] != eight[1]
  np.testing.assert_allclose(losses_of(tmp_path / "tensor"), eight, rtol=1e-5)


@TIED_AND_NOT
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
