"""The note of a finished run, and what makes it invalid."""

import json

from bigtrain import main
from bigtrain.checkpoints import finished
from bigtrain.config import settings


def test_any_change_or_damage_makes_the_note_invalid(tiny_config, tmp_path):
  workdir = str(tmp_path)
  config = tiny_config()
  main.train(config, workdir)
  plain = settings.Config(config).to_dict()
  results = finished.read(workdir, plain, {})
  assert results["step"] == 6 and results["val/loss"] > 0
  for change in ({"lr": 1.0}, {"total_steps": 8}, {"evals": {}}):
    assert finished.read(workdir, {**plain, **change}, {}) is None
  assert finished.read(workdir, plain, {"tokenizer": "1f"}) is None
  note = tmp_path / "finished.json"
  content = note.read_text()
  for damaged in ("", "[]", "{}", content[:-9]):
    note.write_text(damaged)
    assert finished.read(workdir, plain, {}) is None
  note.write_text(content)
  chunk = next(tmp_path.glob("checkpoints/*6/params/**/c.*"))
  intact = chunk.read_bytes()
  chunk.write_bytes(bytes([intact[0] ^ 1]) + intact[1:])
  assert finished.read(workdir, plain, {}) is None
  chunk.write_bytes(intact)
  assert finished.read(workdir, plain, {}) == results

  # A longer run replaces the note when it ends.
  longer = tiny_config({"total_steps": 8, "allow_changes": True})
  assert main.train(longer, workdir)["step"] == 8
  assert json.loads(note.read_text())["results"]["step"] == 8
  assert finished.read(workdir, plain, {}) is None
