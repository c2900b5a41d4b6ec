"""Learning from rewards: the loss, rollouts, and whole runs with them."""

import functools
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from support import any_mesh, cases, policy_runs, rounding
from support.policy_runs import (
  NAMES,
  config_of,
  kill_after,
  metrics_of,
  num_digits,
  rows_of,
  start,
)
from support.policy_runs import params_of as weights_of

from bigtrain import main
from bigtrain.config import loading, settings
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.data import prompts
from bigtrain.data.formats import judges
from bigtrain.data.formats.reward_worker import Workers
from bigtrain.losses import rewards
from bigtrain.models import decoder
from bigtrain.tasks import policy_gradient

B, G, P, NEW, V = 3, 4, 6, 5, 31
EOS = (2, 3)
DIGITS = "support.policy_runs.num_digits"
MODEL = decoder.Model(**policy_runs.MODEL, init_std=0.3)


@functools.cache
def params_of(seed):
  tokens = np.zeros((1, 4), np.int32)
  return MODEL.init(jax.random.key(seed), tokens)["params"]


@functools.cache
def rolled(temperature=1.0, seed=0):
  """(prompts, the rollout of params 0 with random rewards)."""
  rng = np.random.default_rng(0)
  length = np.asarray([2, 6, 4], np.int32)
  prompt = rng.integers(1, V, (B, P)) * (np.arange(P) < length[:, None])
  batch = {"prompt": prompt.astype(np.int32), "prompt_length": length}
  run = functools.partial(
    policy_gradient.rollout,
    model=MODEL,
    eos_ids=EOS,
    samples=G,
    max_new=NEW,
    temperature=temperature,
  )
  made = jax.jit(run)({"params": params_of(0)}, batch, jax.random.key(seed))
  made["reward"] = rng.normal(size=(B, G)).astype(np.float32)
  made["failed_rewards"] = np.zeros((B, G), np.float32)
  return batch, jax.device_get(made)


def plain_log_probs(params, batch, temperature=1.0):
  flat = lambda x: x.reshape(-1, x.shape[-1])
  logits = MODEL.apply({"params": params}, flat(batch["tokens"]))[0]
  by_class = jax.nn.log_softmax(logits / temperature)
  targets = flat(batch["targets"])[..., None]
  result = jnp.take_along_axis(by_class, targets, axis=-1)[..., 0]
  return result.reshape(batch["targets"].shape) * batch["loss_mask"]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_answers_follow_prompts_with_the_probabilities_they_have(temperature):
  batch, made = rolled(temperature)
  text = np.concatenate([made["tokens"][..., :1], made["targets"]], axis=-1)
  for b, length in enumerate(batch["prompt_length"]):
    for g in range(G):
      assert (text[b, g, :length] == batch["prompt"][b, :length]).all()
      answer = text[b, g, length:][:NEW]
      ends = np.flatnonzero(np.isin(answer, EOS))
      number = ends[0] + 1 if len(ends) else NEW
      assert made["truncated"][b, g] == (len(ends) == 0)
      mask = np.zeros(P + NEW - 1)
      mask[length - 1 : length - 1 + number] = 1
      assert (made["loss_mask"][b, g] == mask).all()
      assert (text[b, g, length + number :] == 0).all()
  # Samples of a prompt differ.
  assert len({row.tobytes() for row in text[1]}) == G
  expected = plain_log_probs(params_of(0), made, temperature)
  np.testing.assert_allclose(made["log_probs"], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 7])
def test_thousands_of_tokens_have_the_losses_log_probs(chunk):
  """Sums of the cache and of whole texts differ in their order alone."""
  rng = np.random.default_rng(0)
  length = rng.integers(1, 25, 16).astype(np.int32)
  prompt = rng.integers(3, V, (16, 24)) * (np.arange(24) < length[:, None])
  options = dict(model=MODEL, samples=16, max_new=64, temperature=0.7)
  run = functools.partial(policy_gradient.rollout, eos_ids=(2,), **options)
  batch = dict(prompt=prompt.astype(np.int32), prompt_length=length)
  variables = {"params": params_of(0)}
  made = jax.jit(run)(variables, batch, jax.random.key(1))
  assert made["loss_mask"].sum() > 5000
  made |= dict.fromkeys(("reward", "failed_rewards"), np.zeros((16, 16)))
  loss = functools.partial(
    policy_gradient.loss_fn, rng=None, train=True, chunk=chunk, **options
  )
  metrics, _ = jax.jit(loss)(variables, made)
  assert 0 < metrics["log_prob_difference"].largest < 1e-5


@pytest.mark.slow
def test_the_configs_own_run_draws_with_the_losses_log_probs(tmp_path):
  config = loading.load(f"{any_mesh.CONFIGS}/grpo.py:runlocal")
  main.train(config | dict(log_steps=1, tensorboard=False), str(tmp_path / "x"))
  assert len(metrics_of(tmp_path / "x")) == 4


@pytest.mark.parametrize("kind", cases.quick(rewards.KINDS, "dr_grpo"))
def test_gradients_are_those_of_all_logits(kind):
  _, batch = rolled(0.6)
  options = dict(kind=kind, max_new=NEW, temperature=0.6, beta=0.3)
  reference = params_of(1)

  def ours(params):
    metrics, _ = policy_gradient.loss_fn(
      {"params": params, "teacher": {"params": reference}},
      batch,
      None,
      model=MODEL,
      teacher=MODEL,
      train=True,
      chunk=3,
      **options,
    )
    return metrics["loss"][0] / metrics["loss"][1], metrics

  @jax.jit
  def run(params):
    (value, _), grads = jax.value_and_grad(ours, has_aux=True)(params)
    return value, grads

  def plain(params):
    total, number = rewards.loss(
      kind,
      plain_log_probs(params, batch, 0.6),
      batch["loss_mask"] != 0,
      batch["reward"],
      np.ones(B),
      max_new=NEW,
      reference_BGL=plain_log_probs(reference, batch, 0.6),
      beta=0.3,
    )
    return total / number

  params = params_of(0)
  rounding.assert_close(run, params, jax.jit(jax.value_and_grad(plain))(params))
  metrics = jax.jit(ours)(params)[1]
  assert metrics["log_prob_difference"].largest < 1e-5
  total, number = metrics["reward"]
  np.testing.assert_allclose(total / number, batch["reward"].mean(), rtol=1e-5)
  total, number = metrics["length"]
  assert total / number == batch["loss_mask"].sum(-1).mean()


def test_options_are_checked_before_anything_compiles():
  batch, _ = rolled()
  run = functools.partial(
    policy_gradient.rollout, {}, batch, None, model=MODEL, eos_ids=EOS
  )
  with pytest.raises(ConfigError, match="config.loss.samples"):
    run(samples=1)
  with pytest.raises(ConfigError, match="config.loss.temperature"):
    run(temperature=0.0)
  short = decoder.Model(**policy_runs.MODEL, max_len=10)
  with pytest.raises(ConfigError, match="max_new=5: expected at most 4"):
    run(model=short, max_new=5)


# Rewards: functions of this module are called in other processes.


def fails_sometimes(texts, row):
  if row["number"] == 1:
    print("this is not a reward")
    raise ValueError("no such answer")
  if row["number"] == 2:
    time.sleep(60)
  if row["number"] == 3:
    os._exit(7)
  if row["number"] == 4:
    return [1.0]
  return [float(row["number"])] * len(texts)


@pytest.mark.slow
def test_rewards_that_fail_or_take_too_long_are_told_apart():
  judge = judges.get(f"{__name__}.fails_sometimes", 1.0, Workers(1))
  answers = [judges.Answers({"number": i}, ["a", "b"], None) for i in range(6)]
  got = list(judge(answers))
  assert got[0] == [0.0, 0.0] and got[5] == [5.0, 5.0]
  assert got[1] == "ValueError: no such answer"
  assert got[2] == "it took more than 1 s"
  assert got[3] == "it ended its process with exit code 7"
  assert got[4] == "expected 2 finite numbers, got [1.0]"


def write_rows(path, number):
  rows = [{"prompt": f"{i}+1=", "number": i} for i in range(number)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_failed_reward_names_its_row_or_counts(tmp_path):
  path = write_rows(tmp_path / "rows.jsonl", 6)
  function = f"{__name__}.fails_sometimes"
  options = dict(path=path, time_limit=1.0)
  rest = dict(rewards=[(function, 2.0), (DIGITS, 1.0)])
  ids = np.full((3, 2, 4), ord("7") + 3)
  ids[:, 0, 2] = 2  # An end, and a token without a loss.
  batch = {"targets": ids, "loss_mask": np.ones((3, 2, 4)) * [1, 1, 1, 0]}
  source = prompts.Source("bytes", 8, **rest, **options)
  with pytest.raises(DataError, match="row 1 .*ValueError: no such answer"):
    source.judge(np.asarray([0, 1, 5]), batch)
  source = prompts.Source("bytes", 8, **rest, **options, failed_reward=-1.0)
  got = source.judge(np.asarray([0, 1, 5]), batch)
  assert got["reward"].tolist() == [[2, 3], [0, 1], [12, 13]]
  assert got["failed_rewards"].tolist() == [[0, 0], [1, 1], [0, 0]]


def test_prompts_are_tokenized_as_supervised_rows_are(tmp_path):
  path = write_rows(tmp_path / "rows.jsonl", 12)
  source = prompts.Source("bytes", 6, DIGITS, path=path)
  batch = source.read(np.asarray([3, 11]))
  texts = [bytes((row[:n] - 3).tolist()) for row, n in zip(*batch.values())]
  assert texts == [b"3+1=", b"11+1="] and batch["prompt"].shape == (2, 6)
  assert source.end_ids == [2]
  with pytest.raises(DataError, match="5 tokens do not fit into length=.4."):
    prompts.Source("bytes", 4, DIGITS, path=path)


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(rewards="no_such.module"), "rewards: cannot import"),
    (dict(rewards=["json.loads"]), "expected .function, weight."),
    (dict(rewards="json.loads", lenght=3), "prompts.lenght: unknown key"),
    (dict(rewards="json.loads", pack=True), "prompts.pack: unknown key"),
    (dict(rewards="json.loads", time_limit=0), "time_limit"),
  ],
)
def test_wrong_options_of_prompts_are_named(options, message):
  with pytest.raises(ConfigError, match=message):
    prompts.Source("bytes", 4, path="rows.jsonl", **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "dapo", "rloo"])
def test_devices_and_microbatches_change_nothing(kind, tmp_path):
  loss = dict(kind=kind, samples=4, max_new=4)
  for name, devices, microbatches in (("one", 1, 1), ("four", 4, 2)):
    config = config_of(loss=loss, microbatches=microbatches)
    assert start(config, tmp_path, name, devices).wait() == 0
  one, four = (metrics_of(tmp_path / name) for name in ("one", "four"))
  assert len(one) == 4
  np.testing.assert_allclose(four, one, rtol=1e-4, atol=1e-6)


def noted_digits(texts, row):
  with open(row["notes"], "a") as notes:
    notes.write(json.dumps([row["number"], texts]) + "\n")
  return num_digits(texts, row)


def train_with_notes(folder):
  """A part of a job of support/two_processes.py; also run by one process."""
  path = folder / "rows.jsonl"
  if jax.process_index() == 0:
    notes = str(folder / "notes.jsonl")
    rows = [dict(prompt=f"{i}+1=", number=i, notes=notes) for i in range(32)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  multihost_utils.sync_global_devices("rows")
  config = config_of(compile_cache=False)
  config["input"]["data"] = dict(
    type="prompts",
    tokenizer="bytes",
    length=8,
    path=str(path),
    rewards=f"{__name__}.noted_digits",
  )
  main.train(settings.plain(config), str(folder / "run"))


@pytest.mark.slow
def test_two_processes_write_and_learn_what_one_does(tmp_path, two_processes):
  train_with_notes(tmp_path)
  name = "tasks.test_policy_gradient.train_with_notes"
  folder = two_processes(name).folder
  np.testing.assert_allclose(
    metrics_of(folder / "run"), metrics_of(tmp_path / "run"), 1e-4, 1e-6
  )
  one, two = (
    sorted((path / "notes.jsonl").read_text().splitlines())
    for path in (tmp_path, folder)
  )
  assert one == two and len(one) == 32


@pytest.mark.slow
def test_a_killed_run_writes_the_same_texts_and_ends_bit_equal(tmp_path):
  config = config_of(total_steps=8)
  assert start(config, tmp_path, "whole").wait() == 0
  killed = start(config, tmp_path, "killed")
  kill_after(killed, tmp_path / "killed", 4)
  assert start(config, tmp_path, "killed").wait() == 0
  rows, rows_again = (metrics_of(tmp_path / n) for n in ("whole", "killed"))
  assert rows == rows_again and len(rows) == 8
  again = weights_of(tmp_path / "killed")
  for name, value in weights_of(tmp_path / "whole").items():
    np.testing.assert_array_equal(value, again[name])


@pytest.mark.slow
def test_a_run_learns_what_is_rewarded(tmp_path):
  """Digits are 10 of 259 bytes, and each is worth 1."""
  config = config_of(total_steps=30, log_steps=10, ckpt_steps=30, lr=1e-2)
  config["loss"]["temperature"] = 0.9
  main.train(settings.plain(config), str(tmp_path / "run"))
  rows = [row for row in rows_of(tmp_path / "run") if "loss" in row]
  assert rows[-1]["reward"] > 2 * rows[0]["reward"] > 0
  assert all(row["log_prob_difference"] < 1e-5 for row in rows)
  assert set(rows[-1]) >= {"zero_advantage", *NAMES} - {"failed_rewards"}


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(rewards=[5]), "rewards: expected .function, weight., got 5"),
    (dict(rewards=[]), "rewards: expected at least one function"),
    (dict(rewards=[("math.sqrt", "x")]), "weight of math.sqrt: expected a num"),
    (dict(failed_reward=float("nan")), "failed_reward: expected a finite num"),
  ],
)
def test_mistakes_in_rewards_are_told(options, message):
  source = dict(name="arithmetic", split="train", tokenizer="bytes", length=8)
  with pytest.raises(ConfigError, match=message):
    prompts.Source(**source | dict(rewards="math.sqrt") | options)
