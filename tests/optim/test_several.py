"""Several optimizers, each of its own parameters: config.optimizers."""

import numpy as np
import pytest
import tiny

from bigtrain import main
from bigtrain.config.errors import ConfigError

FIRST = dict(params="first/.*", optimizer=dict(name="adam"), lr=0.01)
HEAD = dict(
  params="head/.*",
  optimizer=dict(name="sgd", momentum=0.9),
  lr=0.1,
  wd=0.01,
  schedule=dict(decay_type="linear", warmup_steps=2),
  grad_clip_norm=0.5,
)


def config(tiny_config, **optimizers):
  changes = {"log_steps": 1, "ckpt_steps": 1, "keep_ckpts": 9, "evals": {}}
  for key in ("optimizer", "lr", "schedule"):
    changes[key] = None
  return tiny_config(changes | {"optimizers": optimizers})


def train(config, folder):
  main.train(config, str(folder))
  return [tiny.arrays(folder, step) for step in range(1, 7)]


def changed(states, part):
  """Steps after the first that changed any array with `part` in its name."""
  return [
    step
    for step in range(2, 7)
    if any(
      not np.array_equal(x, states[step - 2][name])
      for name, x in states[step - 1].items()
      if part in name
    )
  ]


def test_each_trains_its_parameters_as_it_would_alone(tiny_config, tmp_path):
  states = train(config(tiny_config, a=FIRST, b=HEAD), tmp_path / "both")
  # The other one frozen, the first step is the same.
  for name, entry, other in (("a", FIRST, "head"), ("b", HEAD, "first")):
    options = {k: x for k, x in entry.items() if k != "params"}
    schedule = options.pop("schedule", dict(decay_type="constant"))
    changes = dict(
      **options,
      schedule=[(f"{other}/.*", None), (".*", schedule)],
      log_steps=1,
      ckpt_steps=1,
      keep_ckpts=9,
      evals={},
    )
    alone = train(tiny_config(changes), tmp_path / name)[0]
    part = entry["params"].removesuffix(".*")
    for key, x in alone.items():
      if key.startswith(f"params/{part}"):
        np.testing.assert_array_equal(states[0][key], x, err_msg=key)
  rows = tiny.rows(tmp_path / "both")
  assert rows[2]["lr/a"] == pytest.approx(0.01)
  assert rows[2]["lr/b"] == pytest.approx(0.05)
  names = [name for name in states[0] if name.startswith("opt/")]
  assert {name.split("/")[1] for name in names} == {"a", "b"}


def test_they_may_take_turns_and_continue_bit_for_bit(tiny_config, tmp_path):
  one = config(tiny_config, a=FIRST | {"steps": 2}, b=HEAD | {"steps": 1})
  states = train(one, tmp_path / "whole")
  assert changed(states, "params/first") == [2, 4, 5]
  assert changed(states, "opt/a") == [2, 4, 5]
  assert changed(states, "params/head") == [3, 6]
  assert changed(states, "opt/b") == [3, 6]
  for stop in (2, 3, None):
    main.train(one | {"stop_at_steps": stop}, str(tmp_path / "cut"))
  tiny.assert_same(tiny.arrays(tmp_path / "cut"), states[-1])


def test_a_task_may_train_the_parameters_of_one_optimizer(
  tiny_config, tmp_path
):
  one = config(tiny_config, a=FIRST | {"steps": 1}, b=HEAD | {"steps": 1})
  one["task"] = {
    "one": dict(type="classification", weight=1.0, optimizer="a"),
    "two": dict(type="classification", weight=1.0, optimizer="b"),
  }
  states = train(one, tmp_path)
  assert changed(states, "params/first") == [3, 5]
  assert changed(states, "params/head") == [2, 4, 6]
  rows = tiny.rows(tmp_path)
  for step in range(1, 7):
    names = {name for name in rows[step] if name.endswith("/loss")}
    assert names == ({"one/loss"} if step % 2 else {"two/loss"})


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"b": None}, "no optimizer has head/bias, head/kernel; a schedule"),
    ({"b.params": ".*"}, "first/bias belongs to a and b"),
    ({"b.params": "tail/.*"}, "optimizers.b.params='tail/.*': matches none"),
    ({"b.params": None}, "optimizers.b.params: missing"),
    ({"b.lr": None}, "optimizers.b.lr: missing"),
    ({"b.steps": 0}, "optimizers.b.steps: expected a whole number at least 1"),
    ({"b.stepz": 1}, "optimizers.b.stepz: unknown key.*'steps'"),
    ({"b.optimizer": dict(name="adm")}, "optimizers.b.optimizer.*'adam'"),
    ({"lr": 0.1}, "config.lr: with config.optimizers, each of them has"),
  ],
)
def test_mistakes_have_their_line(tiny_config, tmp_path, changes, message):
  optimizers = {"a": dict(FIRST), "b": dict(HEAD)}
  one = config(tiny_config, **optimizers)
  for key, value in changes.items():
    name, _, option = key.partition(".")
    if name == "lr":
      one["lr"] = value
    elif not option:
      del one["optimizers"][name]
    elif value is None:
      del one["optimizers"][name][option]
    else:
      one["optimizers"][name][option] = value
  with pytest.raises(ConfigError, match=message):
    main.train(one, str(tmp_path))


def test_a_task_of_an_unknown_optimizer(tiny_config, tmp_path):
  one = config(tiny_config, a=FIRST, b=HEAD)
  task = dict(type="classification", weight=1.0, optimizer="c")
  with pytest.raises(ConfigError, match="task.one.optimizer: unknown 'c'"):
    main.train(one | {"task": {"one": task}}, str(tmp_path))


def test_steps_without_a_task(tiny_config, tmp_path):
  one = config(tiny_config, a=FIRST | {"steps": 1}, b=HEAD | {"steps": 1})
  task = dict(type="classification", weight=1.0, optimizer="a")
  with pytest.raises(ConfigError, match="no task trains the optimizer 'b'"):
    main.train(one | {"task": {"one": task}}, str(tmp_path))
