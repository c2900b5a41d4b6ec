"""Faults 43 to 45 and 47 to 49: mistakes end the run early, in one line."""

import os
import pathlib
import pickle
import re

import numpy as np
import pytest

from faults import program as program_lib
from faults.program import path_of

CASES = {
  # Fault 43: the message has the numbers.
  "batch_size": (
    "input.batch_size=6",
    r"config\.input\.batch_size=6 does not divide among 4 devices .* 4 and 8\.",
  ),
  # Fault 44: a misspelled key at any depth.
  "key": (
    "total_stepz=3",
    r"config\.total_stepz: unknown key\..*total_steps.*",
  ),
  "input_key": (
    "input.batchsize=3",
    r"config\.input\.batchsize: unknown key\..*'\w+'\?.*",
  ),
  "model_key": ("model.widht=3", r"config\.model\.widht: .*'width'\?.*"),
  "source_key": (
    "input.data.pth=x",
    r"config\.input\.data\.pth: unknown key\. Did you mean 'path'\?.*",
  ),
  "evaluator_key": (
    "evals.val.cahce=True",
    r"config\.evals\.val\.cahce: unknown key\. Did you mean 'cache'\?.*",
  ),
  "schedule_key": (
    "schedule.warmup_stepz=1",
    r"config\.schedule\.warmup_stepz: .*'warmup_steps'\?.*",
  ),
  "optimizer_key": ("optimizer.b_1=0.5", r"config\.optimizer\.b_1: .*'b1'\?.*"),
  # Fault 45: an unknown name; the message has a similar one.
  "task": ("task=clasification", r"config\.task: .*'classification'\?"),
  "model": ("model_name=vitt", r"config\.model_name: .*'vit'\?"),
  "source": (
    "input.data.type=array",
    r"config\.input\.data\.type: .*'arrays'\?",
  ),
  "evaluator": (
    "evals.val.type=meen",
    r"config\.evals\.val\.type: .*'mean'\?",
  ),
  "predict_function": (
    "evals.val.pred=logit",
    r"config\.evals\.val\.pred: .*'logits'\?",
  ),
  "op": (
    "input.pp=valu_range(-1,1)",
    r"config\.input\.pp: .*'value_range'\?.*",
  ),
  "evaluators_op": (
    "evals.val.pp=valu_range(-1,1)",
    r"config\.evals\.val\.pp: .*'value_range'\?.*",
  ),
}
# Each case takes a second or two; these run in `make test`.
QUICK = ("batch_size", "evaluator_key", "op")


def check(process, workdir, expected):
  assert re.fullmatch("error: " + expected, process.last_line()), process.text()
  assert "Traceback" not in process.text()
  assert "compiling" not in process.text()
  assert not workdir.exists()


@pytest.mark.parametrize(
  "name",
  [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in CASES
  ],
)
def test_a_mistake_is_reported_in_one_line(program, workdir, name):
  change, expected = CASES[name]
  process = program.run(workdir, change, devices=4, code=2)
  check(process, workdir, expected)


@pytest.mark.slow
def test_a_broken_import_is_reported_unchanged(program, workdir):
  process = program.run(workdir, "task=faults.broken_task", code=1)
  assert process.last_line() == (
    "error: ModuleNotFoundError: No module named 'a_missing_package'"
  )
  assert "broken_task.py" in process.text()
  assert not workdir.exists()


def test_preprocessing_is_not_evaluated(program, workdir, tmp_path):
  """Fault 49."""
  proof = tmp_path / "proof"
  code = f"input.pp=__import__('os').system('touch {proof}')"
  process = program.run(workdir, code, code=2)
  check(process, workdir, r"config\.input\.pp: .*")
  assert not proof.exists()


class _Payload:
  """Creates a file when it is unpickled."""

  def __init__(self, path):
    self._path = path

  def __reduce__(self):
    return (pathlib.Path.touch, (self._path,))


def test_pickles_are_not_loaded(program, workdir, tmp_path):
  """Fault 47."""
  proof = tmp_path / "proof"
  payload = np.empty(program_lib.NUM_TRAIN, object)
  payload[0] = _Payload(proof)
  train = {**program_lib.digits()["train"], "label": payload}
  program_lib.write_data(tmp_path / "data", train=train)
  process = program.run(workdir, data=tmp_path / "data", code=2)
  path = re.escape(f"{tmp_path}/data/train.npz")
  check(
    process,
    workdir,
    rf"config\.input\.data: {path}: array 'label' holds Python objects, .*",
  )
  assert not proof.exists()
  pickle.loads(pickle.dumps(_Payload(proof)))
  assert proof.exists(), "the payload has no effect"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["00000003.tmp-ab12-0", "00000099"])
def test_links_out_of_the_workdir_are_not_followed(
  program, workdir, tmp_path, name
):
  """Fault 48; for array names see checkpoints/test_checkpointer.py."""
  outside = tmp_path / "outside"
  (outside / "params").mkdir(parents=True)
  (outside / "params" / "zarr.json").write_text("{}")
  program.run(workdir, "stop_at_steps=2")
  link = path_of(workdir, 2).with_name(name)
  link.symlink_to(outside)
  process = program.run(workdir, code=1)
  assert (
    f"{link}: is a symbolic link; it is not followed." in process.last_line()
  )
  assert os.listdir(outside / "params") == ["zarr.json"]
  assert link.is_symlink()
