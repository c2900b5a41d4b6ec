"""Answers of several turns, with a function that answers tool calls."""

import json
import sys

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from support import policy_runs
from support.policy_runs import (
  chat_config,
  kill_after,
  metrics_of,
  rows_of,
  start,
)

from bigtrain import main
from bigtrain.config import settings
from bigtrain.config.errors import ConfigError, DataError
from bigtrain.objective import rollouts, turns
from bigtrain.text import tokenizers

NAMES = (*policy_runs.NAMES, "turns", "tool_calls")


def train(config, workdir):
  return main.train(settings.plain(config), str(workdir))


@pytest.fixture
def recorded(monkeypatch):
  """Batches of the steps of a run, and the messages of their answers."""
  batches, messages = [], []
  write, take_turns = rollouts.Rollout._write, turns.Turns.__call__

  def record(*args):
    batches.append(write(*args))
    return batches[-1]

  def record_turns(*args):
    made, own = take_turns(*args)
    messages.append(own)
    return made, own

  monkeypatch.setattr(rollouts.Rollout, "_write", record)
  monkeypatch.setattr(turns.Turns, "__call__", record_turns)
  return batches, messages


def expected_text(coder, prompt, messages, is_truncated):
  """(ids, whether each was drawn) of an answer by its messages."""
  ids, drawn = prompt.tolist(), [0] * len(prompt)
  for i, message in enumerate(messages):
    is_last = i + 1 == len(messages)
    if message["role"] == "assistant":
      if ids[-1] != coder.spellings["<|assistant|>"]:
        ids, drawn = [*ids, coder.spellings["<|assistant|>"]], [*drawn, 0]
      own = coder.encode(message["content"], special=True).tolist()
      if not (is_last and is_truncated):
        own.append(coder.eos_id)
    else:
      text = f"<|tool|>{message['content']}<|end|>"
      own = coder.encode(text, special=True).tolist()
    ids += own
    drawn += [int(message["role"] == "assistant")] * len(own)
  return ids, drawn


def test_masks_and_texts_are_those_of_the_messages(tmp_path, recorded):
  config = chat_config(tmp_path, total_steps=2)
  train(config, tmp_path / "run")
  folder = config["input"]["data"]["tokenizer"]
  coder = tokenizers.get(folder)
  all_turns, failures = [], 0
  for batch, messages in zip(*map(jax.device_get, recorded)):
    text = np.concatenate([batch["tokens"][..., :1], batch["targets"]], -1)
    for b, g in np.ndindex(*text.shape[:2]):
      first = int(batch["loss_mask"][b, g].argmax()) + 1
      own = messages[b][g]
      truncated = bool(batch["truncated"][b, g])
      has_end = text[b, g][batch["loss_mask"][b, g].nonzero()[0][-1] + 1] == 1
      ids, drawn = expected_text(coder, text[b, g, :first], own, not has_end)
      assert text[b, g, : len(ids)].tolist() == ids
      assert not text[b, g, len(ids) :].any()
      assert len(ids) - first <= 96
      mask = np.zeros(text.shape[-1])
      mask[: len(drawn)] = drawn
      assert (batch["loss_mask"][b, g] == mask[1:]).all()
      assert not batch["log_probs"][b, g][mask[1:] == 0].any()
      assert has_end or truncated
      roles = [message["role"] for message in own]
      results = [m["content"] for m in own if m["role"] == "tool"]
      number = roles.count("assistant")
      assert batch["turns"][b, g] == number <= 3
      assert batch["reward"][b, g] == len(results)
      # Calls in the last turn are not answered, and each other one is.
      called = [
        policy_runs.calls_of(m["content"])
        for m, after in zip(own, roles[1:])
        if (m["role"], after) == ("assistant", "tool")
      ]
      assert len(results) == sum(map(len, called))
      row = coder.decode(text[b, g, :first])[:-1]
      for result in results:
        assert result in (f"{row}+5", "error: ValueError: seven")
        failures += result.startswith("error")
      all_turns.append(number)
  assert set(all_turns) == {1, 2, 3} and failures
  rows = rows_of(tmp_path / "run")
  # The sampler's log-probabilities are those of whole texts.
  assert all(0 < row["log_prob_difference"] < 1e-5 for row in rows)
  mean = np.mean([row["turns"] for row in rows])
  np.testing.assert_allclose(mean, np.mean(all_turns), rtol=1e-6)
  assert sum(row["failed_tools"] for row in rows) == failures


def test_an_error_of_a_tool_can_end_the_run(tmp_path):
  config = chat_config(tmp_path)
  config["input"]["data"]["failed_tool"] = "stop"
  with pytest.raises(DataError, match="row.*tools .*: add: ValueError: seven"):
    train(config, tmp_path / "run")


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(tools="support.policy_runs.tol"), "tools: .*has no 'tol'"),
    (dict(tool_calls="hermse"), "tool_calls='hermse'.*Did you mean 'hermes'"),
    (dict(max_turns=0), "max_turns"),
    (dict(tools=None), "tool_calls=.* has no effect without `tools`"),
    (dict(failed_tool="ignore"), "failed_tool"),
  ],
)
def test_mistakes_are_told_before_the_run(options, message, tmp_path):
  config = chat_config(tmp_path)
  config["input"]["data"] |= options
  with pytest.raises(ConfigError, match=message):
    train(config, tmp_path / "run")


def test_a_prompt_without_messages_is_told(tmp_path):
  config = chat_config(tmp_path)
  path = tmp_path / "chats.jsonl"
  path.write_text(json.dumps({"prompt": "1?", "number": 1}) + "\n")
  with pytest.raises(DataError, match="with tools, expected a list of mess"):
    train(config, tmp_path / "run")


@pytest.mark.slow
def test_a_run_killed_within_a_set_takes_the_same_turns(tmp_path):
  sets = dict(minibatches=2, iterations=2)
  config = chat_config(tmp_path, total_steps=8, rollouts=sets)
  assert start(config, tmp_path, "whole").wait() == 0
  kill_after(start(config, tmp_path, "killed"), tmp_path / "killed", 2)
  assert start(config, tmp_path, "killed").wait() == 0
  whole, killed = (metrics_of(tmp_path / n, NAMES) for n in ("whole", "killed"))
  assert whole == killed and len(whole) == 8
  params = policy_runs.params_of(tmp_path / "killed")
  for name, value in policy_runs.params_of(tmp_path / "whole").items():
    np.testing.assert_array_equal(value, params[name])


@pytest.mark.slow
def test_eight_devices_take_the_turns_of_one(tmp_path):
  config = chat_config(tmp_path)
  for name, devices in (("one", 1), ("eight", 8)):
    assert start(config, tmp_path, name, devices).wait() == 0
  one, eight = (metrics_of(tmp_path / n, NAMES) for n in ("one", "eight"))
  np.testing.assert_allclose(eight, one, rtol=1e-4, atol=1e-6)


JUDGE = """\
import json, os, sys
requests = [json.loads(line) for line in sys.stdin]
with open(sys.argv[1], "a") as notes:
  notes.write(json.dumps([r["row"]["number"] for r in requests]) + "\\n")
for request in requests:
  print(sum(m["role"] == "tool" for m in request["messages"]))
"""


def train_together(folder, **mesh):
  """A part of a job of support/two_processes.py; also run by one process."""
  if jax.process_index() == 0:
    (folder / "judge.py").write_text(JUDGE)
    chat_config(folder)
  multihost_utils.sync_global_devices("chats")
  config = chat_config(folder, total_steps=2, compile_cache=False, mesh=mesh)
  config["model"]["num_heads"] = 4
  config["loss"]["max_new"] = 40
  words = [sys.executable, str(folder / "judge.py"), str(folder / "notes")]
  judge = dict(command=words, time_limit=300)
  config["input"]["data"]["rewards"] = judge
  train(config, folder / "run")


def train_split(folder):
  """The same with examples that are split over all devices."""
  train_together(folder, fsdp=1, tensor=4)


def calls(path):
  lines = (path / "notes").read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_two_processes_call_for_their_own_answers(tmp_path, two_processes):
  train_together(tmp_path)
  together, split = (
    two_processes(f"objective.test_turns.{name}").folder
    for name in ("train_together", "train_split")
  )
  one = metrics_of(tmp_path / "run", NAMES)
  for path in (together, split):
    two = metrics_of(path / "run", NAMES)
    np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)
  # Each process calls once in each of two steps, with half of the answers; if
  # both have all examples, one calls for both.
  assert [len(call) for call in calls(tmp_path)] == [32, 32]
  assert [len(call) for call in calls(together)] == [16, 16, 16, 16]
  assert calls(split) == calls(tmp_path)
  first, second = (
    sorted(number for call in calls(path) for number in call)
    for path in (tmp_path, together)
  )
  assert first == second
