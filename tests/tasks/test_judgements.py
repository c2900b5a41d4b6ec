"""KTO on judgements of single answers, from the rows to the gradients."""

import functools
import json
import logging
import pathlib

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec
from support import any_mesh, pages

from bigtrain import main, metrics, sharding
from bigtrain.arrays import trees
from bigtrain.checkpoints import warm_start
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import supervised
from bigtrain.models import decoder
from bigtrain.tasks import preference

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
# Of make_trl_kto.py.
SCALE = 0.7
OPTIONS = dict(kind="kto", beta=0.3, desirable=0.8, undesirable=1.7)
LENGTH = 10
OPTIONS_OF_MODEL = dict(
  variant="llama",
  vocab_size=61,
  width=24,
  depth=2,
  num_heads=6,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=40,
  max_len=64,
  rope_scaling=dict(
    type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_len=32,
  ),
)
MODEL = decoder.Model(**OPTIONS_OF_MODEL)
_PAIR = ("chosen", "rejected")
SMALL = dict(
  variant="llama", vocab_size=61, width=8, depth=1, num_heads=2, mlp_dim=8
)


@functools.cache
def golden():
  return dict(np.load(GOLDEN / "trl_kto.npz"))


def batch_of(ids, mask, label):
  """A batch of one answer to each prompt, from TRL's padded ids."""
  pad = ((0, 0), (0, LENGTH + 1 - ids.shape[1]))
  ids, mask = np.pad(ids, pad).astype(np.int32), np.pad(mask, pad)
  return {
    "tokens": ids[:, None, :-1],
    "targets": ids[:, None, 1:],
    "loss_mask": mask[:, None, 1:].astype(np.float32),
    "label": label.astype(np.int32),
  }


def given():
  names = ("input_ids", "completion_mask", "label")
  return batch_of(*(golden()[name] for name in names))


def params_of(folder):
  tokens = np.zeros((1, 4), np.int32)
  like = jax.eval_shape(MODEL.init, jax.random.key(0), tokens)["params"]
  params, _ = warm_start.load_params(
    str(folder), like, convert=decoder.from_published
  )
  return jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), params)


def run(params, reference, batch, model=MODEL, **options):
  variables = {"params": params, "teacher": {"params": reference}}
  return preference.loss_fn(
    variables,
    batch,
    None,
    model=model,
    teacher=model,
    train=True,
    **{**OPTIONS, **options},
  )[0]


@pytest.fixture
def exact():
  """A model that computes in float64, its losses included."""
  with any_mesh.precision({"model": {"dtype": "float64"}}):
    yield lambda options: decoder.Model(**options, dtype="float64")


@pytest.mark.golden
def test_loss_and_gradients_are_those_of_trls_trainer(exact):
  model = exact(OPTIONS_OF_MODEL)
  reference = params_of(GOLDEN / "hf_llama")
  params = jax.tree.map(lambda x: x * SCALE if x.ndim > 1 else x, reference)

  @jax.jit
  def mean(params):
    result = run(params, reference, given(), model)
    total, number = result["loss"]
    return total / number, result

  (loss, result), grad = jax.value_and_grad(mean, has_aux=True)(params)
  # Their rotary tables are float32.
  close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
  close(loss, golden()["loss"])
  close(result["kl"][0] / result["kl"][1], golden()["kl"])
  assert golden()["kl"] > 1  # Above the bound of 0.
  theirs = {
    name.removeprefix("grad/"): value
    for name, value in golden().items()
    if name.startswith("grad/")
  }
  like = dict(trees.flatten_with_names(grad))
  expected = decoder.from_published(theirs, like)
  assert expected.keys() == like.keys()
  for name, value in expected.items():
    close(like[name], value, err_msg=name)


@pytest.mark.golden
def test_mismatched_answers_are_those_of_trl():
  label = golden()["label"]
  ids, mask = golden()["KL_input_ids"], golden()["KL_completion_mask"]
  expected = batch_of(ids, mask, label)
  other = preference._mismatched(given())
  for name in ("tokens", "targets", "loss_mask"):
    np.testing.assert_array_equal(other[name], expected[name], err_msg=name)


@pytest.fixture
def source(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

  def make(contents, **options):
    path = tmp_path / "judged.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in contents))
    options = {"preferences": True} | options
    return supervised.Source("bytes", 12, str(path), **options)

  return make


def rows_of(labels):
  return [
    {"prompt": f"{i}+1=", "completion": str(i), "label": label}
    for i, label in enumerate(labels)
  ]


def test_rows_become_one_answer_with_a_label(source):
  judged = source(rows_of([True, False, True]))
  assert judged.spec["tokens"][1] == (1, 12) and judged.spec["label"][1] == ()
  batch = judged.read(np.array([2, 1]))
  assert batch["label"].tolist() == [1, 0]
  coder = judged._coder
  for row, tokens, targets, mask in zip(
    (2, 1), batch["tokens"], batch["targets"], batch["loss_mask"]
  ):
    assert coder.spell(tokens[0, :5]) == f"{row}+1={row}"
    assert coder.spell(targets[0, mask[0] == 1]) == f"{row}<eos>"
  # The name of the shape says the same as `preferences`.
  named = source(
    rows_of([True, False, True]), rows="unpaired", preferences=False
  )
  np.testing.assert_array_equal(named.read(np.array([2, 1]))["label"], [1, 0])
  short = source(rows_of([0, 1, 1, 0]), slice="[1:]")
  assert short.read(np.arange(3))["label"].tolist() == [1, 1, 0]


@pytest.mark.parametrize(
  "labels, message",
  [
    ([True] * 3, "all 3 answers are wanted"),
    ([0, 0], "all 2 answers are unwanted"),
    (
      [1, 1, 1, 1, 0],
      "give config.loss.undesirable from 3 to 4, or desirable ",
    ),
    ([1, 0], None),
  ],
)
def test_classes_that_need_weights_are_said(source, caplog, labels, message):
  with caplog.at_level(logging.WARNING):
    source(rows_of(labels))
  assert (message or "KTO") in caplog.text or message is None
  assert bool(caplog.records) == (message is not None)


def test_pairs_and_judgements_do_not_mix(source):
  pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
  with pytest.raises(DataError, match="line 2: some rows are judgements"):
    source([pair, *rows_of([1])])


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(kind="sigmoid"), "kind='sigmoid' compares two answers.*kind='kto'"),
    (dict(kind="reward", model=None), "kind='reward' compares two answers"),
  ],
)
def test_other_losses_are_refused(changes, message):
  options = dict(kind=changes["kind"])
  with pytest.raises(ConfigError, match=message):
    preference.loss_fn(
      {"params": {}}, given(), None, model=MODEL, train=True, **options
    )


def small_models(**options):
  """(model, its parameters, other parameters)."""
  model = decoder.Model(**SMALL, **options)
  tokens = np.zeros((1, 4), np.int32)
  params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
  return model, params, jax.tree.map(lambda x: x * 1.5, params)


def test_one_example_has_no_other_prompt():
  alone = {name: x[:1] for name, x in given().items()}
  _, params, _ = small_models()
  with pytest.raises(ConfigError, match="two examples in a microbatch"):
    run(params, params, alone)


def test_padding_weights_and_labels_of_metrics():
  model, params, other = small_models()
  batch = given()
  measure = jax.jit(functools.partial(run, model=model))
  whole = measure(other, params, batch)
  chosen, rejected = (whole[f"reward/{n}"].metric for n in _PAIR)
  assert chosen[1] == 4 and rejected[1] == 2
  assert whole["loss"][1] == whole["accuracy"][1] == 6
  padded = {n: np.concatenate([x, x[:2]]) for n, x in batch.items()}
  padded |= {"_mask": np.array([1] * 6 + [0] * 2)}
  # Example 0 follows padding, so its mismatched answer does not count.
  result = measure(other, params, padded)
  assert result["loss"][1] == 6
  for name in ("reward/chosen", "log_prob/rejected"):
    pairs = (found[name].metric for found in (result, whole))
    np.testing.assert_allclose(*pairs, rtol=1e-5)
  weighted = batch | {"loss_mask": batch["loss_mask"] * 3}
  tripled = measure(other, params, weighted)
  np.testing.assert_allclose(
    tripled["loss"], 3 * np.array(whole["loss"]), rtol=1e-5
  )


@pytest.mark.slow
def test_the_config_of_the_page_trains(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.chdir(tmp_path)
  page = "docs/finetuning.md"
  (rows,) = [b.text for b in pages.blocks(page, "text") if '"label"' in b.text]
  (tmp_path / "judged.jsonl").write_text(rows * 4)
  (code,) = [b.text for b in pages.blocks(page, "python") if '"kto"' in b.text]
  config = ml_collections.ConfigDict(
    dict(
      total_steps=2,
      log_steps=1,
      input=dict(batch_size=16),
      model_name="decoder",
      model=dict(
        variant="llama",
        vocab_size=400,
        width=16,
        depth=1,
        num_heads=2,
        mlp_dim=24,
      ),
      optimizer=dict(name="adam"),
      schedule=dict(decay_type="constant"),
      microbatches=2,
      tensorboard=False,
    )
  )
  exec(code, {"config": config, "folder": str(GOLDEN / "chat_masks")})
  config.input.data.length = 32
  val = dict(type="mean", pred="preference", data=config.input.data.to_dict())
  config.evals = dict(val=val | dict(batch_size=16, log_steps=2))
  config.lr = 0.01
  main.train(config.to_dict(), "run")
  first, second = tiny.rows(tmp_path / "run").values()
  assert first["loss"] == 0.5 and first["kl"] == 0  # Of equal models.
  assert second["reward/chosen"] != 0 and second["reward/rejected"] != 0
  assert 0 <= second["accuracy"] <= 1
  assert second["val/loss"] < 0.5


@pytest.mark.usefixtures("exact")
def test_eight_devices_compare_the_same_answers():
  model, params, other = small_models(dtype="float64")
  batch = {n: np.concatenate([x, x[:2]]) for n, x in given().items()}

  @jax.jit
  def measure(batch):
    return run(other, params, batch, model)

  mesh = sharding.make_mesh()
  place = NamedSharding(mesh, PartitionSpec(sharding.batch_axes(mesh)))
  with jax.set_mesh(mesh):
    split = metrics.host_values([measure(jax.device_put(batch, place))])
  whole = metrics.host_values([measure(batch)])
  assert {"loss", "kl", "reward/rejected"} <= whole.keys()
  for name, value in whole.items():
    np.testing.assert_allclose(split[name], value, rtol=1e-9, err_msg=name)


def test_answers_of_one_kind_have_no_metrics_of_the_other():
  model, params, other = small_models()
  batch = given() | {"label": np.ones(6, np.int32)}
  measure = jax.jit(functools.partial(run, model=model))
  values = metrics.host_values([measure(other, params, batch)])
  assert "reward/chosen" in values and "log_prob/chosen" in values
  assert not {"reward/rejected", "log_prob/rejected"} & values.keys()
  assert np.isfinite(list(values.values())).all()
