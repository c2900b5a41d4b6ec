"""Processes on loopback are one job: same losses, one set of files."""

import pytest
from support import processes

from bigtrain import main
from bigtrain.checkpoints import folders
from bigtrain.reports import writers
from configs import digits, llama_8b, pydoc_lm


def train_digits(folder):
  """A part of a job of support/two_processes.py; also run by one process."""
  config = digits.get_config("runlocal")
  config.model.depth = 1
  config.compile_cache = False
  main.train(config, str(folder / "run"))


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path, two_processes):
  train_digits(tmp_path)
  workdir = str(two_processes("test_two_processes.train_digits").folder / "run")
  two, one = map(writers.read_rows, (workdir, str(tmp_path / "run")))
  assert [row["step"] for row in two] == [row["step"] for row in one]
  for a, b in zip(two, one):
    for name in ("loss", "grad_norm", "param_norm", "val/loss", "val/acc"):
      if name in b:
        assert a[name] == pytest.approx(b[name], rel=1e-4), name
  assert folders.steps(workdir) == [2, 4]


def train_split_examples(folder, sequence=8):
  """The same for examples whose tokens are on devices of both processes."""
  config = pydoc_lm.get_config("runlocal")
  config.mesh = dict(replica=1, fsdp=-1, sequence=sequence)
  config.compile_cache = False
  config.model.attention = "ring" if sequence > 1 else "auto"
  main.train(config, str(folder / "run"))


@pytest.mark.slow
def test_two_processes_share_examples(tmp_path, two_processes):
  train_split_examples(tmp_path, sequence=1)
  job = two_processes("test_two_processes.train_split_examples")
  two = writers.read_rows(str(job.folder / "run"))
  one = writers.read_rows(str(tmp_path / "run"))
  assert [row["step"] for row in two] == [row["step"] for row in one]
  for a, b in zip(two, one):
    for name in ("loss", "grad_norm", "param_norm", "tokens_seen", "val/loss"):
      if name in b:
        assert a[name] == pytest.approx(b[name], rel=1e-5), name


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
  """Rows of a run in which no device shares its examples."""
  workdir = tmp_path_factory.mktemp("one")
  config = llama_8b.get_config("runlocal")
  config.mesh = dict(replica=1, fsdp=8)
  config.model.dtype = "float32"
  config.compile_cache = False
  config.evals = {}
  main.train(config, str(workdir))
  return writers.read_rows(str(workdir))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 4), (4, 2)])
def test_processes_split_examples_and_layers(
  tmp_path, one_process, count, devices
):
  mesh = dict(replica=1, fsdp=2, sequence=2, tensor=2)
  command = processes.main_command(
    processes.ROOT / "configs/llama_8b.py:runlocal",
    tmp_path / "run",
    f"--config.mesh={mesh}",
    "--config.model.dtype=float32",
    "--config.compile_cache=False",
    "--config.evals={}",
  )
  processes.run_job(command, tmp_path, count, devices=devices)
  rows = writers.read_rows(str(tmp_path / "run"))
  assert [row["step"] for row in rows] == [row["step"] for row in one_process]
  for row, want in zip(rows, one_process):
    for name in ("loss", "grad_norm", "param_norm", "tokens_seen"):
      assert row[name] == pytest.approx(want[name], rel=1e-5), name
