"""New tokens: rows of embedding and head, their training and their export."""

import json
import os
import pathlib

import jax
import numpy as np
import pytest
from flax import traverse_util
from models.published import test_transformers
from support import published_models

import bigtrain
from bigtrain import main, sharding
from bigtrain.checkpoints.foreign import safetensors_files
from bigtrain.config.errors import ConfigError
from bigtrain.text import tokenizer_files, tokenizers
from bigtrain.tools import checkpoint

NEW = dict(new_tokens=[" quux"], new_special_tokens=["<call>", "</call>"])
# The models; the tied one alone takes half the time.
NAMES = [pytest.param("tied", marks=pytest.mark.slow), "untied"]
ROWS = [
  dict(prompt="one left of a", completion=" quux"),
  dict(prompt="two left of a <call>", completion=" six</call>"),
  dict(prompt="three left of quux", completion=" seven quux"),
]


def flat(tree):
  return traverse_util.flatten_dict(tree, sep="/")


def write_model(folder, **options):
  published_models.write(folder, depth=1, **options)
  return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  """{name: folder of a published model}."""
  folder = tmp_path_factory.mktemp("models")
  return {
    "tied": write_model(folder / "tied", tied_head=True),
    "untied": write_model(folder / "untied", tied_head=False),
    "padded": write_model(folder / "padded", padding=10, tied_head=True),
  }


def config_of(folder, new=NEW, **options):
  rows = pathlib.Path(folder).parent / "rows.jsonl"
  rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
  tokenizer = dict(path=folder, **new) if new else folder
  return dict(
    seed=0,
    total_steps=4,
    log_steps=1,
    ckpt_steps=2,
    keep_ckpts=9,
    save_at_start=True,
    mesh=dict(replica=1, fsdp=-1),
    task="language_modeling",
    input=dict(
      data=dict(
        type="supervised",
        path=str(rows),
        tokenizer=tokenizer,
        length=24,
        allow_special=True,
      ),
      batch_size=8,
    ),
    model_name="decoder",
    model=dict(published=folder),
    model_init=folder,
    optimizer=dict(name="adam"),
    wd=0.1,
    wd_mults=[(".*", 1.0)],
    schedule=dict(decay_type="constant"),
    lr=1e-2,
    **options,
  )


def train(folder, workdir, **options):
  main.train(config_of(folder, **options), str(workdir))
  return str(workdir)


def params_of(workdir, step=None):
  out = f"{workdir}-{step}.npz"
  if not os.path.exists(out):
    command = ["export", workdir, out, "--prefix=params"]
    checkpoint.main(command + ([f"--step={step}"] if step is not None else []))
  with np.load(out) as file:
    return {name.removeprefix("params/"): file[name] for name in file}


def old_arrays(folder):
  arrays = safetensors_files.read(folder)
  result = {"token_embedding": arrays["model.embed_tokens.weight"]}
  if "lm_head.weight" in arrays:
    result["head/kernel"] = arrays["lm_head.weight"]
  return result


def rows_of(params, name):
  """The rows of an embedding or of a head, (V, D)."""
  return params[name].T if name == "head/kernel" else params[name]


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
  """{model: workdir of a run that trains all of it}."""
  folder = tmp_path_factory.mktemp("whole")
  return {
    name: train(models[name], folder / name) for name in ("tied", "untied")
  }


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_new_rows_begin_as_the_mean_of_the_others(models, whole, name):
  first = params_of(whole[name], 0)
  old = old_arrays(models[name])
  for array, values in old.items():
    rows = rows_of(first, array)
    assert len(rows) == len(values) + 3
    np.testing.assert_array_equal(rows[:-3], values)
    mean = values.astype(np.float64).mean(axis=0)
    np.testing.assert_array_equal(rows[-3:], np.tile(mean, (3, 1)).astype("f4"))
  last = params_of(whole[name])
  for array in old:
    moved = np.abs(rows_of(last, array) - rows_of(first, array)).max(axis=1)
    assert (moved[-3:] > 1e-3).all(), "the new rows train"
    assert (moved[:-3] > 1e-6).all(), "so do the others, at least by decay"


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_exports_have_the_new_tokens(models, whole, name, tmp_path):
  out = str(tmp_path / "out")
  checkpoint.main(["export", whole[name], out, "--format=hf"])
  values = json.loads((tmp_path / "out" / "config.json").read_text())
  arrays = safetensors_files.read(out)
  size = len(old_arrays(models[name])["token_embedding"]) + 3
  assert values["vocab_size"] == size
  assert values["tie_word_embeddings"] is (name == "tied")
  assert ("lm_head.weight" in arrays) is (name == "untied")
  assert arrays["model.embed_tokens.weight"].shape[0] == size
  tokenizer = tokenizers.get(out)
  text = "one quux<call>"
  ids = tokenizer.encode(text, special=True).tolist()
  assert ids[-2:] == [size - 3, size - 2]
  assert tokenizer.decode(ids) == "one quux"  # <call> is no text.
  exported, run = bigtrain.load(out), bigtrain.load(whole[name])
  assert run.tokenizer.encode(text, special=True).tolist() == ids
  np.testing.assert_array_equal(logits_of(exported, ids), logits_of(run, ids))
  assert np.isfinite(logits_of(run, ids)).all()


def logits_of(model, ids):
  return np.asarray(model.model.apply(model.variables, np.array([ids]))[0])


@pytest.mark.parametrize("name", NAMES)
def test_only_new_rows_train(models, name, tmp_path):
  """Weight decay, clipping and momentum leave the other rows as they are."""
  options = dict(new_rows=dict(train="rows"), grad_clip_norm=0.1)
  workdir = train(models[name], tmp_path / "run", **options)
  params = params_of(workdir)
  for array, values in old_arrays(models[name]).items():
    rows = rows_of(params, array)
    np.testing.assert_array_equal(rows[:-3], values)
    mean = values.astype(np.float64).mean(axis=0)
    assert (np.abs(rows[-3:] - mean).max(axis=1) > 1e-3).all()


@pytest.mark.slow
@pytest.mark.parametrize(
  "optimizer",
  [
    dict(name="big_vision_adafactor"),
    dict(name="muon"),
    dict(name="lion"),
    dict(name="schedule_free_adamw"),
  ],
  ids=str,
)
def test_no_optimizer_moves_other_rows(optimizer, models, tmp_path):
  config = config_of(models["untied"], new_rows=dict(train="rows"))
  config["optimizer"] = optimizer
  main.train(config, str(tmp_path / "run"))
  params = params_of(str(tmp_path / "run"))
  for array, values in old_arrays(models["untied"]).items():
    rows = rows_of(params, array)
    np.testing.assert_allclose(rows[:-3], values, rtol=1e-6, atol=1e-8)
    mean = values.astype(np.float64).mean(axis=0)
    assert (np.abs(rows[-3:] - mean).max(axis=1) > 1e-4).all()


def test_adapters_train_new_rows_beside_them(models, tmp_path):
  folder = models["untied"]
  options = dict(adapters=dict(targets=".*attention/query/kernel", rank=2))
  workdir = train(folder, tmp_path / "run", **options)
  old = old_arrays(folder)
  merged = params_of(workdir)
  for array, values in old.items():
    np.testing.assert_array_equal(rows_of(merged, array)[:-3], values)
    assert np.ptp(rows_of(merged, array)[-3:], axis=0).max() > 1e-3
  out = str(tmp_path / "out")
  checkpoint.main(["export", workdir, out, "--format=hf"])
  size = len(old["token_embedding"])
  ids = [*range(2, 9), *range(size - 3, size + 3)]
  expected = logits_of(bigtrain.load(workdir), ids)
  exported = logits_of(bigtrain.load(out), ids)
  np.testing.assert_allclose(exported, expected, atol=1e-5)
  # The adapters on the published folder, whose vocabulary is smaller.
  model = bigtrain.load(folder, adapter=workdir)
  np.testing.assert_allclose(logits_of(model, ids), expected, atol=1e-5)
  text = "one quux<call>"
  assert model.tokenizer.encode(text, special=True)[-1] == size + 1


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_one(models, whole, tmp_path):
  workdir = train(models["tied"], tmp_path / "run", stop_at_steps=2)
  train(models["tied"], workdir)
  expected = params_of(whole["tied"])
  for name, x in params_of(workdir).items():
    np.testing.assert_array_equal(x, expected[name], err_msg=name)


@pytest.mark.slow
def test_adapters_resume_on_other_devices(models, tmp_path, monkeypatch):
  """The head has an adapter, so its new rows are part of the base."""
  adapters = dict(targets="(.*query|head)/kernel", rank=2)
  whole = train(models["untied"], tmp_path / "whole", adapters=adapters)
  options = dict(adapters=adapters)
  workdir = train(
    models["untied"], tmp_path / "run", stop_at_steps=2, **options
  )
  with monkeypatch.context() as patch:
    patch.setattr(sharding, "from_config", one_device)
    train(models["untied"], workdir, **options)
  expected = params_of(whole)
  for name, x in params_of(workdir).items():
    np.testing.assert_allclose(x, expected[name], atol=1e-4, err_msg=name)
  rows = rows_of(params_of(workdir), "token_embedding")
  old = old_arrays(models["untied"])["token_embedding"]
  np.testing.assert_array_equal(rows[:-3], old)


def one_device(config):
  config.kwargs("mesh")
  return sharding.make_mesh(devices=jax.devices()[:1])


@pytest.mark.parametrize("name", NAMES)
def test_one_device_trains_like_eight(
  models, whole, name, tmp_path, monkeypatch
):
  with monkeypatch.context() as patch:
    patch.setattr(sharding, "from_config", one_device)
    workdir = train(models[name], tmp_path / "run")
  expected = params_of(whole[name])
  for array, x in params_of(workdir).items():
    np.testing.assert_allclose(x, expected[array], atol=1e-4, err_msg=array)


def first_params(folder, workdir, new=NEW, **options):
  """The parameters before the first step."""
  config = config_of(folder, new, **options)
  main.train({**config, "stop_at_steps": 1}, str(workdir))
  return params_of(str(workdir), 0)


def test_rows_in_the_padding_are_those_of_new_tokens(models, tmp_path):
  """Many published embeddings have more rows than tokens."""
  params = first_params(models["padded"], tmp_path / "run")
  values = old_arrays(models["padded"])["token_embedding"]
  assert params["token_embedding"].shape == values.shape
  mean = values.astype(np.float64).mean(axis=0).astype("f4")
  expected = values.copy()
  expected[-10:-7] = mean
  np.testing.assert_array_equal(params["token_embedding"], expected)


def test_a_tokenizer_with_more_tokens_adds_rows(models, tmp_path):
  """Here one of another folder, and rows up to a multiple."""
  out = tmp_path / "tokenizer"
  out.mkdir()
  tokenizer_files.write(dict(path=models["untied"], **NEW), str(out))
  config = config_of(models["untied"], None, new_rows=dict(multiple_of=64))
  config["input"]["data"]["tokenizer"] = str(out)
  main.train({**config, "stop_at_steps": 1}, str(tmp_path / "run"))
  values = old_arrays(models["untied"])["head/kernel"]
  rows = rows_of(params_of(str(tmp_path / "run"), 0), "head/kernel")
  assert len(rows) % 64 == 0 and 3 <= len(rows) - len(values) < 67
  mean = values.astype(np.float64).mean(axis=0).astype("f4")
  assert (rows[len(values) :] == mean).all()
  export = str(tmp_path / "out")
  checkpoint.main(["export", str(tmp_path / "run"), export, "--format=hf"])
  same = tokenizers.get(export).fingerprint()
  assert same == tokenizers.get(str(out)).fingerprint()


@pytest.mark.slow
def test_a_larger_vocabulary_adds_rows(models, tmp_path):
  folder = models["tied"]
  values = old_arrays(folder)["token_embedding"]
  size = len(values) + 5
  config = config_of(folder, None, new_rows=dict(init="normal"))
  config["model"]["vocab_size"] = size
  main.train({**config, "stop_at_steps": 1}, str(tmp_path / "run"))
  rows = params_of(str(tmp_path / "run"), 0)["token_embedding"]
  np.testing.assert_array_equal(rows[:-5], values)
  assert rows.shape[0] == size
  spread = np.abs(rows[-5:] - values.mean(axis=0)) / values.std(axis=0)
  assert 0 < spread.min() and spread.max() < 6
  # A run that starts from this one adds to its rows.
  config = config_of(folder, None)
  config |= dict(model_init=str(tmp_path / "run"))
  config["model"]["vocab_size"] = size + 1
  main.train({**config, "stop_at_steps": 1}, str(tmp_path / "next"))
  again = params_of(str(tmp_path / "next"), 0)["token_embedding"]
  last = params_of(str(tmp_path / "run"))["token_embedding"]
  np.testing.assert_array_equal(again[:-1], last)
  assert len(again) == size + 1


@pytest.mark.slow
def test_rows_of_pieces(models, tmp_path):
  folder = models["untied"]
  params = first_params(folder, tmp_path / "run", new_rows=dict(init="pieces"))
  tokenizer = tokenizers.get(folder)
  for array, values in old_arrays(folder).items():
    for i, text in enumerate([" quux", "<call>", "</call>"]):
      ids = tokenizer.encode(text)
      assert len(ids) > 1
      np.testing.assert_allclose(
        rows_of(params, array)[len(values) + i],
        values[ids].mean(axis=0),
        rtol=1e-5,
        atol=1e-8,
      )


# The known collapse: a model whose file says that head and embedding are one,
# and whose head has been trained alone. Libraries then load the embedding.


def test_a_tied_flag_is_refused_where_the_head_has_parted(models, tmp_path):
  folder = write_model(tmp_path / "parted", tied_head=False)
  values = json.loads((tmp_path / "parted" / "config.json").read_text())
  values["tie_word_embeddings"] = True
  (tmp_path / "parted" / "config.json").write_text(json.dumps(values))
  with pytest.raises(ConfigError, match="does not fit the model") as error:
    train(folder, tmp_path / "run")
  assert "config.model.tied_head=False loads it" in str(error.value)
  config = config_of(folder)
  config["model"]["tied_head"] = False
  main.train(config, str(tmp_path / "run"))
  out = str(tmp_path / "out")
  checkpoint.main(["export", str(tmp_path / "run"), out, "--format=hf"])
  exported = json.loads((tmp_path / "out" / "config.json").read_text())
  assert exported["tie_word_embeddings"] is False
  assert "lm_head.weight" in safetensors_files.read(out)


def refused(match, config, tmp_path):
  with pytest.raises(ConfigError, match=match):
    main.train(config, str(tmp_path / "run"))


def test_mistakes_are_told_in_a_line(models, tmp_path):
  folder = models["tied"]
  for new, match in (
    (dict(new_tokens=[" six"]), "' six' is no new token: it has the id"),
    (dict(new_tokens=["<a>", "<a>"]), "'<a>' is there twice"),
    (dict(new_tokens="<a>"), "new_tokens: expected a list of texts"),
    (dict(tokens=["<a>"]), "tokenizer.tokens: unknown key"),
  ):
    refused(match, config_of(folder, new), tmp_path)
  for options, match in (
    (dict(init="median"), "config.new_rows.init: unknown 'median'"),
    (dict(multiple_of=0), "config.new_rows.multiple_of: expected"),
    (dict(train="all"), "config.new_rows.train: unknown 'all'"),
    (dict(trian="rows"), "config.new_rows.trian: unknown key"),
  ):
    refused(match, config_of(folder, new_rows=options), tmp_path)
  config = config_of(folder, None, new_rows={})
  refused("config.new_rows: no row is new", config, tmp_path)
  config = config_of(folder, new_rows={})
  del config["model_init"]
  refused("config.new_rows: expected config.model_init", config, tmp_path)
  val = dict(type="perplexity", pred="perplexity", log_steps=2)
  data = config_of(folder, None)["input"]["data"]
  config = config_of(folder, evals=dict(val=val | dict(data=data)))
  match = "config.evals.val.data.tokenizer='.*': expected that of the training"
  refused(match, config, tmp_path)
  teacher = dict(model_name="decoder", model=dict(published=folder))
  config = config_of(folder, teacher=teacher | dict(model_init=folder))
  refused("config.teacher: its vocabulary has 300", config, tmp_path)
  config = config_of(folder)
  config["input"]["data"]["allow_special"] = False
  with pytest.raises(ConfigError, match="rows.jsonl, line 2: .*'<call>'"):
    main.train(config, str(tmp_path / "run"))


@pytest.fixture(scope="module")
def opened(models, whole, tmp_path_factory):
  """{case: (workdir, folder)}: exports that transformers has opened."""
  folder = tmp_path_factory.mktemp("exports")
  workdirs = dict(whole)
  adapters = dict(targets=".*(query|up)/kernel", rank=2)
  for name in whole:
    options: dict = dict(adapters=adapters)
    for case in ("adapters", "rows", "adapters, full"):
      if case == "rows":
        options = dict(new_rows=dict(train="rows"))
      elif case == "adapters, full":
        options = dict(adapters=adapters, new_rows=dict(train="full"))
      key = f"{name}, {case}"
      workdirs[key] = train(models[name], folder / key, **options)
  result = {}
  for i, (case, workdir) in enumerate(workdirs.items()):
    out = str(folder / f"out{i}")
    checkpoint.main(["export", workdir, out, "--format=hf"])
    result[case] = workdir, out
  test_transformers.run(
    "open_tokens.py", TEXT, *[out for _, out in result.values()]
  )
  return result


TEXT = "one quux six<call>seven</call> left"


@pytest.mark.published
@pytest.mark.parametrize("case", ["", "adapters", "rows", "adapters, full"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_transformers_computes_the_same(name, case, models, opened):
  workdir, out = opened[f"{name}, {case}" if case else name]
  theirs = np.load(f"{out}/opened.npz")
  ours = bigtrain.load(workdir)
  ids = ours.tokenizer.encode(TEXT, special=True).tolist()
  size = len(old_arrays(models[name])["token_embedding"])
  assert set(range(size, size + 3)) < set(ids)
  assert theirs["ids"].tolist() == ids
  assert theirs["size"] == size + 3
  assert str(theirs["text"]) == ours.tokenizer.decode(ids)
  assert theirs["tied"] == (name == "tied")
  np.testing.assert_allclose(theirs["logits"], logits_of(ours, ids), atol=1e-5)
