"""Steps that are not finite, in whole runs: reported, skipped, rolled back.

test_tally.py tests the judgement of single steps.
"""

import contextlib
import math

import numpy as np
import pytest
import tiny

from bigtrain import main
from bigtrain.step import guard, spikes


@pytest.fixture
def spoilt_config(tiny_config, tmp_path):
  """A config whose fourth batch (examples 48 to 63) has a NaN."""
  with np.load(tiny_config()["input"]["data"]["path"]) as file:
    data = dict(file)
  data["image"][55, 3, 3] = np.nan
  np.savez(tmp_path / "spoilt.npz", **data)
  return tiny_config(
    {
      "input.data.path": str(tmp_path / "spoilt.npz"),
      "input.shuffle": False,
      "log_steps": 3,
      "evals.val.log_steps": 1,
    }
  )


def test_a_bad_step_is_never_saved(spoilt_config, tmp_path):
  # Step 5 would save, and step 4 evaluates.
  config = spoilt_config | {"ckpt_steps": 5}
  with pytest.raises(guard.NotFinite) as error:
    main.train(config, str(tmp_path / "run"))
  message = str(error.value)
  for part in ("step 4", "loss nan", "first/kernel", "48, 49", "spoilt.npz"):
    assert part in message
  assert tiny.checkpoint_steps(tmp_path / "run") == []
  assert list(tiny.rows(tmp_path / "run")) == [1, 2, 3]
  assert message.endswith("finite: nonfinite='skip' would skip such steps.")


def test_skipping_is_not_recommended_if_the_next_step_is_bad_too(
  spoilt_config, tmp_path
):
  with np.load(spoilt_config["input"]["data"]["path"]) as file:
    data = dict(file)
  data["image"][48:, 3, 3] = np.nan
  np.savez(tmp_path / "spoilt.npz", **data)
  with pytest.raises(guard.NotFinite, match="step 4 is not") as error:
    main.train(spoilt_config, str(tmp_path / "run"))
  assert "so skipping would not help" in str(error.value)
  assert "'skip'" not in str(error.value)


def test_the_checkpoint_before_a_bad_step_stays(
  spoilt_config, tiny_config, tmp_path
):
  with pytest.raises(guard.NotFinite, match="step 4 is not finite"):
    main.train(spoilt_config, str(tmp_path / "run"))
  assert tiny.checkpoint_steps(tmp_path / "run") == [3]
  main.train(
    tiny_config({"input.shuffle": False, "stop_at_steps": 3}),
    str(tmp_path / "good"),
  )
  tiny.assert_same(
    tiny.arrays(tmp_path / "run"), tiny.arrays(tmp_path / "good")
  )


def test_skipped_steps_count_and_change_nothing(spoilt_config, tmp_path):
  config = spoilt_config | {"nonfinite": "skip", "ckpt_steps": 1}
  config["keep_ckpts"] = 10
  main.train(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  assert "skipped_steps" not in rows[3]
  assert rows[6]["skipped_steps"] == 1
  assert math.isfinite(rows[6]["loss"])
  before, after = tiny.arrays(tmp_path, 3), tiny.arrays(tmp_path, 4)
  assert before.pop("step") == 3 and after.pop("step") == 4
  tiny.assert_same(before, after)
  assert (
    tiny.arrays(tmp_path, 5)["params/head/bias"] != after["params/head/bias"]
  ).any()
  # The saved state is good, so the policy may change.
  longer = config | {"stop_at_steps": None, "nonfinite": "stop"}
  (tmp_path / "checkpoints" / "00000006").rename(tmp_path / "away")
  main.train(longer, str(tmp_path))
  assert rows == tiny.rows(tmp_path)


def test_too_many_skipped_steps_end_the_run(spoilt_config, tmp_path):
  config = spoilt_config | {"nonfinite": "skip", "max_nonfinite": 0}
  with pytest.raises(guard.NotFinite, match="step 4"):
    main.train(config, str(tmp_path / "run"))
  assert tiny.checkpoint_steps(tmp_path / "run") == [3]


def test_a_rollback_skips_the_batches(spoilt_config, tmp_path):
  config = spoilt_config | {"nonfinite": "rollback", "ckpt_steps": 2}
  main.train(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  assert list(rows) == [1, 2, 3, 4, 5, 6]
  assert all(math.isfinite(row.get("loss", 0)) for row in rows.values())
  assert tiny.checkpoint_steps(tmp_path) == [4, 6]


def test_each_kind_of_rollback_has_its_own_limit():
  by_spikes = spikes.Spikes(6, 200, "rollback", 10)
  judge = guard.Guard("rollback", 3, None, True, by_spikes)
  bad = guard.NotFinite("x")
  assert isinstance(judge.failure(bad, 50, 40, 2), guard.Rollback)
  assert judge.failure(bad, 50, 40, 3) is bad


def test_rollbacks_of_another_kind_do_not_count(spoilt_config, tmp_path):
  """`main` passes the number of those like the error."""
  earlier = guard.Rollback(guard.Spike("y"), 1, 0)
  config = spoilt_config | {"nonfinite": "rollback", "ckpt_steps": 2}
  config["max_nonfinite"] = 1
  with contextlib.ExitStack() as at_end:
    with pytest.raises(guard.Rollback):
      main._train(config, str(tmp_path), at_end, [earlier], None)
