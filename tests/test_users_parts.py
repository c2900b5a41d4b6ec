"""Parts that a user provides: modules by dotted path, arrays in memory."""

import numpy as np
import pytest
import tiny
from tiny import mine

from bigtrain import main
from bigtrain.config.errors import ConfigError


def test_every_part_can_come_from_a_users_module(tiny_config, tmp_path):
  mine.Hook.calls.clear()
  path = "tiny.mine"
  config = tiny_config(
    {
      "task": path,
      "loss": dict(scale=0.5),
      "model_name": path,
      "model": {},
      "input.data": dict(type=path, length=64),
      "input.pp": "my_double",
      "input.shuffle": False,
      "pp_modules": (path,),
      "evals": {
        "own": dict(
          type=path,
          pred="shifted",
          pred_kw=dict(by=100.0),
          at=0.0,
          log_steps=2,
        )
      },
      "hooks": {"own": dict(type=f"{path}.Hook", tag="t")},
    }
  )
  results = main.train(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  assert list(rows) == [1, 2, 4]
  # Examples 32 to 63 are in the third and fourth batch; the op doubles them.
  assert rows[4]["seen"] == 2 * np.arange(32, 64).mean()
  bias = tiny.arrays(tmp_path)["params/only/bias"][0]
  assert rows[4]["own/out"] == pytest.approx(100 + bias)
  assert results["step"] == 4
  # The row of step 1 follows step 2, because the loop stays a step ahead. The
  # rows of steps 2 and 4 are flushed before an evaluation.
  assert mine.Hook.calls == [
    ("before_train", 0, "t"),
    ("before_step", 1),
    ("after_step", 1),
    ("before_step", 2),
    ("after_step", 2),
    ("after_row", 1, True),
    ("after_row", 2, True),
    ("after_row", 2, False),
    ("before_step", 3),
    ("after_step", 3),
    ("before_step", 4),
    ("after_step", 4),
    ("after_row", 4, True),
    ("after_train", 4, "stopped"),
  ]
  assert sorted(tiny.checkpoint_steps(tmp_path)) == [3, 4]


def test_arrays_in_memory_can_be_trained_on_and_resumed(tiny_config, tmp_path):
  with np.load(tiny_config()["input"]["data"]["path"]) as file:
    data = dict(type="arrays", arrays=dict(file))
  whole, resumed = tmp_path / "whole", tmp_path / "resumed"
  main.train(tiny_config(), str(whole))
  config = tiny_config({"input.data": data})
  main.train(config | {"stop_at_steps": 3}, str(resumed))
  main.train(config, str(resumed))
  tiny.assert_same(tiny.arrays(whole), tiny.arrays(resumed))
  other = {**data["arrays"], "image": np.zeros((80, 8, 8, 1), np.float32)}
  config["input"]["data"] = dict(type="arrays", arrays=other)
  with pytest.raises(ConfigError, match=r"input.data.arrays.image:"):
    main.train(config, str(resumed))
