"""The distribution of rewards and two answers, in log entries and reports."""

import html
import json

import jax
import numpy as np
import pytest
from support import policy_runs
from support.policy_runs import config_of, kill_after, rows_of, start

from bigtrain import main
from bigtrain.config import settings
from bigtrain.objective import rollouts
from bigtrain.tools.report import report

QUANTILES = {
  "reward_min": 0,
  "reward_q10": 10,
  "reward_q50": 50,
  "reward_q90": 90,
  "reward_max": 100,
}


@pytest.fixture
def batches(monkeypatch):
  """The batches of the steps of a run."""
  recorded, write = [], rollouts.Rollout._write

  def record(*args):
    recorded.append(write(*args))
    return recorded[-1]

  monkeypatch.setattr(rollouts.Rollout, "_write", record)
  return recorded


def texts_of(batch, b, g):
  """(prompt, answer) of an answer, for a tokenizer of bytes."""
  mask = batch["loss_mask"][b, g] != 0
  first = int(mask.argmax())
  spell = lambda ids: "".join(
    "</s>" if i == 2 else f"<{i}>" if i < 3 else bytes([i - 3]).decode("latin1")
    for i in ids
  )
  prompt = batch["tokens"][b, g, : first + 1]
  return spell(prompt), spell(batch["targets"][b, g][mask])


@pytest.mark.slow
def test_entries_have_the_distribution_and_two_answers(batches, tmp_path):
  config = config_of(total_steps=4, log_steps=2)
  main.train(settings.plain(config), str(tmp_path / "run"))
  entries = [row for row in rows_of(tmp_path / "run") if "loss" in row]
  assert [entry["step"] for entry in entries] == [1, 2, 4]
  for entry in entries:
    batch = jax.device_get(batches[entry["step"] - 1])
    reward = batch["reward"]
    for name, percent in QUANTILES.items():
      np.testing.assert_allclose(entry[name], np.percentile(reward, percent))
    histogram = json.loads(
      (tmp_path / "run" / entry["reward_histogram"]).read_text()
    )
    counts, edges = np.histogram(reward, 20)
    if reward.min() < reward.max():
      assert histogram["counts"] == counts.tolist()
      np.testing.assert_allclose(histogram["edges"], edges)
    lines = (tmp_path / "run" / entry["answers"]).read_text().splitlines()
    best, worst = map(json.loads, lines)
    assert best["reward"] == reward.max() and worst["reward"] == reward.min()
    b, g = np.argwhere(reward == reward.max())[0]
    prompt, _ = texts_of(batch, b, g)
    assert best["prompt"] == prompt and best["prompt"].endswith("=")
    assert best["answer"]
    np.testing.assert_allclose(best["mean_of_group"], reward[b].mean())
  report.main([str(tmp_path / "run"), f"--out={tmp_path / 'report'}"])
  (path,) = (tmp_path / "report").glob("*.html")
  page = html.unescape(path.read_text())
  for text in ("reward_q50", "reward_histogram", "answers", best["prompt"]):
    assert text in page


@pytest.mark.slow
def test_a_killed_run_reports_the_same(tmp_path):
  config = config_of(
    total_steps=8, log_steps=3, rollouts=dict(minibatches=2, iterations=2)
  )
  assert start(config, tmp_path, "whole").wait() == 0
  kill_after(start(config, tmp_path, "killed"), tmp_path / "killed", 4)
  assert start(config, tmp_path, "killed").wait() == 0

  def read(name):
    rows = [row for row in rows_of(tmp_path / name) if "answers" in row]
    files = [(tmp_path / name / row["answers"]).read_text() for row in rows]
    names = (*QUANTILES, *policy_runs.NAMES)
    return [[row[name] for name in names] for row in rows], files

  assert read("whole") == read("killed")
  assert len(read("whole")[0]) == 4
