import json

from bigtrain.checkpoints.manifest import HostState

FULL = HostState(
  config={"lr": 0.1},
  tally={"loss": [1.0, 2.0]},
  clock={"wall_secs": 3.0},
  hooks={"hooks": {}},
  batches_ahead=2,
  fingerprints={"c4.model": "abc"},
  data={"class_names": {"labels": ["cat", "dog"]}},
  base={"digest": "0f"},
)


def test_the_record_survives_json():
  assert HostState.from_json(json.loads(json.dumps(FULL.to_json()))) == FULL
  # Names and order as in checkpoints of earlier versions.
  assert list(FULL.to_json()) == [
    "config",
    "tally",
    "clock",
    "hooks",
    "batches_ahead",
    "fingerprints",
    "data",
    "base",
  ]


def test_a_record_without_values_restores_as_a_new_run():
  assert HostState.from_json({}) == HostState()
  assert HostState.from_json(HostState().to_json()) == HostState()
  assert HostState().config is None and HostState().clock is None
  assert HostState().batches_ahead == 0


def test_records_of_other_versions_are_read():
  # Older: without the keys that came later. Newer: with another key.
  content = {"tally": {"loss": [1.0, 2.0]}, "added_later": 1}
  assert HostState.from_json(content) == HostState(tally={"loss": [1.0, 2.0]})


def test_defaults_are_not_shared():
  HostState().hooks["best"] = 1
  assert HostState().hooks == {}
