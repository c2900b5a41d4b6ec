"""What may change between two starts; test_changes.py trains whole runs."""

import logging

import pytest

from bigtrain.checkpoints import changes
from bigtrain.config.errors import ConfigError


def test_differences_compare_leaves_as_json():
  old = {"a": 1, "b": {"c": [1, 2], "gone": 0}, "same": 0.1, "e": {}}
  new = {"a": 2, "b": {"c": (1, 2), "came": None}, "same": 0.1, "e": {"f": 1}}
  changed = changes.differences(old, new)
  assert set(changed) == {"a", "b.gone", "b.came", "e", "e.f"}
  assert changed["a"] == ("1", "2")
  assert changed["b.gone"] == ("0", None)
  assert changed["b.came"] == (None, "null")
  assert changes.differences(new, new) == {}


def test_lists_are_compared_as_a_whole():
  old = {"schedule": [["a", {"x": 1}], [".*", None]]}
  new = {"schedule": [("a", {"x": 1}), (".*", None)]}
  assert changes.differences(old, new) == {}
  new["schedule"][0][1]["x"] = 2
  assert set(changes.differences(old, new)) == {"schedule"}


@pytest.mark.parametrize(
  ("key", "harmless"),
  [
    ("log_steps", True),
    ("log_epochs", True),
    ("ckpt_steps", True),
    ("keep_ckpts", True),
    ("evals.val.log_steps", True),
    ("hooks.early.patience", True),
    ("mesh.fsdp", True),
    ("nonfinite", True),
    ("stop_at_steps", True),
    ("stop_at_percent", True),
    ("input.prefetch", True),
    ("weight_stats", True),
    ("mlflow.experiment", True),
    ("trackio", True),
    ("seed", False),
    ("input.batch_size", False),
    ("input.pp", False),
    ("input.prefetched", False),
    ("meshes", False),
    ("total_steps", False),
    ("model.width", False),
    ("lr", False),
    ("schedule.decay_type", False),
    ("ema_decay", False),
  ],
)
def test_harmless_keys(key, harmless):
  assert changes.is_harmless(key) == harmless


def check(old, new, allowed=()):
  changes.check_config(old, new, allowed)


def test_all_refused_keys_are_named_in_one_line(caplog):
  old = {"lr": 0.1, "model": {"width": 8, "depth": 1}, "log_steps": 1}
  new = {"lr": 0.2, "model": {"width": 9, "depth": 1}, "log_steps": 2}
  with caplog.at_level(logging.INFO, logger="absl"):
    with pytest.raises(ConfigError) as refused:
      check(old, new)
  message = str(refused.value)
  assert "config.lr: 0.1 -> 0.2; config.model.width: 8 -> 9." in message
  assert "log_steps" not in message and "\n" not in message
  assert "config.log_steps: 1 -> 2 (harmless)" in caplog.text
  assert "config.lr: 0.1 -> 0.2 (changes the trajectory)" in caplog.text


def test_files_with_changed_content_are_refused(caplog):
  old = {"c4.model": "abc", "gone.txt": "1", "bytes": "x"}
  changes.check_files(old, {"c4.model": "abc", "bytes": "x", "new": "2"}, ())
  # Old checkpoints have no fingerprints.
  changes.check_files({}, {"c4.model": "def"}, ())
  new = {"c4.model": "def", "bytes": "x"}
  for allowed in ((), None, ["c4"], "lr"):
    with pytest.raises(ConfigError, match=r"c4.model: .*abc.*def"):
      changes.check_files(old, new, allowed)
  caplog.clear()
  with caplog.at_level(logging.INFO, logger="absl"):
    for allowed in (True, "c4.model", ["lr", "c4.model"]):
      changes.check_files(old, new, allowed)
  assert caplog.text.count("c4.model: abc -> def") == 3


def test_allow_changes():
  old, new = {"a": {"b": 1, "c": 1}, "ab": 1}, {"a": {"b": 2, "c": 2}, "ab": 1}
  check(old, new, True)
  check(old, new, ["a"])
  check(old, new, "a")  # As from the command line.
  check(old, new, ["a.b", "a.c"])
  check(old, old)
  for allowed in ([], None, False, ["a.b"], ["a.b.c", "a.c"], ["ab"]):
    with pytest.raises(ConfigError, match=r"config\.a\.[bc]"):
      check(old, new, allowed)
