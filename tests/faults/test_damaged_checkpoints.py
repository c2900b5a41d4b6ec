"""Faults 13 to 17 and 19 to 21: refuses checkpoints that it cannot trust."""

import os
import pathlib
import shutil

import pytest

from faults.program import assert_same_run, path_of, steps

LARGE = "params/first/kernel"


@pytest.fixture
def trained(workdir, undisturbed):
  """A workdir as of step 6, with the checkpoints of steps 4 and 6."""
  workdir.mkdir()
  shutil.copy(undisturbed / "metrics.jsonl", workdir)
  for step in (4, 6):
    shutil.copytree(path_of(undisturbed, step), path_of(workdir, step))
  return workdir


def chunk_of(workdir, name):
  """The only file with values of an array."""
  folder = path_of(workdir, 6, name)
  (chunk,) = (p for p in folder.rglob("c*") if p.is_file())
  return chunk


def content(workdir):
  """{file: bytes} of all checkpoints, and the rows."""
  files = [*(workdir / "checkpoints").rglob("*"), workdir / "metrics.jsonl"]
  return {path: path.read_bytes() for path in files if path.is_file()}


def check_refused(program, workdir, *words, code=1, changes=()):
  """The run ends at its start with a reason, and changes nothing."""
  before = content(workdir)
  process = program.run(workdir, *changes, code=code)
  for word in words:
    assert str(word) in process.text(), f"{word}:\n{process.text()}"
  assert "error: " in process.text()
  assert "resumed from" not in process.text()
  assert content(workdir) == before
  return process


def flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 3] ^= 16
  path.write_bytes(content)


@pytest.mark.slow
def test_a_flipped_bit_is_refused_or_falls_back(program, trained, undisturbed):
  chunk = chunk_of(trained, LARGE)
  flip(chunk)
  folder = trained / "checkpoints"
  (folder / "00000099").mkdir()
  (folder / "my notes").mkdir()
  (folder / "my notes" / "today.txt").write_text("good")
  process = check_refused(program, trained)
  last = process.last_line()
  assert f"array '{LARGE}'" in last and str(chunk) in last
  assert "config.ckpt_fallback=True resumes" in last
  # Falls back to the newest intact one; leaves other files alone (fault 19).
  process = program.run(trained, "ckpt_fallback=True")
  assert str(chunk) in process.text()
  assert "resumed from step 4 of this workdir" in process.text()
  for name in ("00000099", "my notes"):
    assert f"{folder / name}: ignored, not a checkpoint" in process.text()
  assert (folder / "my notes" / "today.txt").read_text() == "good"
  assert (folder / "00000099").is_dir()
  assert_same_run(trained, undisturbed, 24)


def deleted(path):
  path.unlink()


def cut(path):
  os.truncate(path, path.stat().st_size // 2)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("damage", "name", "what"),
  [
    (deleted, LARGE, "missing"),
    (cut, LARGE, "has 65538 bytes, expected 131076"),
    (flip, "step", "step"),
    (deleted, "opt/0/nu/head/bias", "missing"),
  ],
)
def test_a_damaged_file_is_named(program, trained, damage, name, what):
  chunk = chunk_of(trained, name)
  damage(chunk)
  last = check_refused(program, trained).last_line()
  assert f"array '{name}'" in last and str(chunk) in last and what in last


@pytest.mark.slow
def test_a_missing_array_and_a_missing_manifest_are_named(program, trained):
  folder = path_of(trained, 6, "ema/head")
  shutil.rmtree(folder)
  last = check_refused(program, trained).last_line()
  assert "array 'ema/head/" in last and str(folder) in last
  path_of(trained, 6, "manifest.json").unlink()
  last = check_refused(program, trained).last_line()
  assert f"{path_of(trained, 6)}: not a checkpoint" in last
  # If none is intact, the fallback does not start from scratch either.
  flip(path_of(trained, 4, "manifest.json"))
  check_refused(program, trained, changes=["ckpt_fallback=True"])
  assert steps(trained) == [4, 6]


def test_a_changed_config_is_refused_and_printed(program, trained, tmp_path):
  other = tmp_path / "other"
  shutil.copytree(pathlib.Path(program.data), other)
  changes = (
    "seed=1",
    "input.batch_size=16",
    "lr=0.5",
    "schedule.warmup_steps=4",
    f"input.data.path={other}/train.npz",
    "log_steps=6",
  )
  process = check_refused(program, trained, code=2, changes=changes)
  last = process.last_line()
  for words in (
    "config.seed: 0 -> 1",
    "config.input.batch_size: 8 -> 16",
    "config.lr: 0.001 -> 0.5",
    "config.schedule.warmup_steps: 2 -> 4",
    "config.input.data.path: ",
    "config.allow_changes",
  ):
    assert words in last, last
  assert "log_steps" not in last
  assert "config.log_steps: 3 -> 6 (harmless)" in process.text()


@pytest.mark.slow
def test_a_changed_config_is_resumed_if_allowed(program, trained):
  changes = ["lr=0.5", "seed=1", "allow_changes=['lr']"]
  last = check_refused(program, trained, code=2, changes=changes).last_line()
  assert "config.seed: 0 -> 1" in last and "config.lr" not in last
  changes = ["lr=0.5", "allow_changes=['lr']"]
  process = program.run(trained, *changes, "stop_at_steps=8")
  assert "config.lr: 0.001 -> 0.5 (changes the trajectory)" in process.text()
  assert "resumed from step 6" in process.text()
  assert steps(trained) == [6, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("change", "words"),
  [
    (
      "model.width=256",
      [
        "shape: params/first/kernel: expected float32[64,256], found "
        "float32[64,512]",
        "13 shape (listed above)",
      ],
    ),
    (
      "optimizer.name=lion",
      [
        "extra: opt/0/nu/first/kernel: expected nothing, found float32[64,512]",
      ],
    ),
    (
      "optimizer.mu_dtype=bfloat16",
      [
        "dtype: opt/0/mu/first/kernel: expected bfloat16[64,512], found "
        "float32[64,512]",
        "4 dtype (listed above)",
      ],
    ),
  ],
)
def test_another_model_or_optimizer_is_refused(program, trained, change, words):
  changes = [change, "allow_changes=True"]
  process = check_refused(program, trained, *words, code=2, changes=changes)
  assert "config.model_init" in process.last_line()
