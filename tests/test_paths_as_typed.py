"""main and every tool take paths as people type them."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from support import cases

from bigtrain import command, main
from bigtrain.checkpoints import checkpointer
from bigtrain.checkpoints.manifest import HostState
from bigtrain.config import loading, settings
from bigtrain.inputs import labels
from bigtrain.models import decoder
from bigtrain.pp import parse, registry
from bigtrain.runtime import jax_flags
from bigtrain.tools import checkpoint, evaluate, generate, tokenize
from bigtrain.tools.plan import plan
from bigtrain.tools.report import report

ROOT = pathlib.Path(__file__).parent.parent

# {what a user types: the same place below tmp_path}.
TYPED = {
  "run": "here/run",
  "./run": "here/run",
  "../here/./run/": "here/run",
  "a//b///run": "here/a/b/run",
  "~/run": "home/run",
  "two words/a run": "here/two words/a run",
  "link/run": "there/deep/run",
  "link/../run": "there/run",
}
each_path = pytest.mark.parametrize("typed", TYPED)
telling_paths = pytest.mark.parametrize(
  "typed", cases.quick(TYPED, "~/run", "two words/a run", "link/../run")
)


@pytest.fixture
def place(tmp_path, monkeypatch):
  """`place(typed)`: the absolute path of `typed`, whose folder exists.

  The working directory has a link to ../there/deep; HOME is ../home.
  """
  for name in ("here", "home", "there/deep"):
    (tmp_path / name).mkdir(parents=True)
  (tmp_path / "here" / "link").symlink_to(tmp_path / "there" / "deep")
  monkeypatch.chdir(tmp_path / "here")
  monkeypatch.setenv("HOME", str(tmp_path / "home"))

  def find(typed):
    path = tmp_path / TYPED[typed]
    path.parent.mkdir(parents=True, exist_ok=True)
    return path

  return find


@pytest.fixture(scope="module")
def trained(tiny_config, tmp_path_factory):
  """A workdir with checkpoints of steps 1 and 2."""
  workdir = tmp_path_factory.mktemp("trained") / "run"
  config = tiny_config({"ckpt_steps": 1, "stop_at_steps": 2, "log_steps": 1})
  main.train(config, workdir)
  assert tiny.checkpoint_steps(workdir) == [1, 2]
  return workdir


@pytest.fixture
def run(trained, place):
  """`run(typed)` makes a copy of `trained` there, and returns its path."""
  return lambda typed: shutil.copytree(trained, place(typed))


# Training.


@telling_paths
def test_main_trains_in_the_workdir_as_typed(place, tiny_config, typed):
  config = tiny_config({"ckpt_steps": 1, "stop_at_steps": 1})
  main.train(config, typed)
  main.train(config | {"stop_at_steps": 2}, pathlib.Path(typed))
  workdir = place(typed)
  assert tiny.checkpoint_steps(workdir) == [1, 2]
  assert list(tiny.rows(workdir)) == [1, 2]
  # And nowhere else: no folder is called "~".
  files = pathlib.Path().resolve().parent.rglob("metrics.jsonl")
  assert list(files) == [workdir / "metrics.jsonl"]


@telling_paths
def test_configs_name_files_as_typed(run, tiny_config, tmp_path, typed):
  workdir = run(typed)
  data = tiny_config()["input"]["data"]["path"]
  shutil.copy(data, workdir / "train.npz")
  config = tiny_config(
    {
      "stop_at_steps": 1,
      "model_init": dict(path=typed, step=1),
      "input.data.path": f"{typed}/train.npz",
      "evals.val.data.path": f"{typed}/train.npz",
    }
  )
  main.train(config, tmp_path / "warm")
  # The first step of the warm-up has a learning rate of 0.
  params = tiny.arrays(tmp_path / "warm")["params/head/bias"]
  np.testing.assert_array_equal(
    params, tiny.arrays(workdir, 1)["params/head/bias"]
  )
  config = tiny_config({"resume": typed, "stop_at_steps": 3})
  main.train(config, tmp_path / "resumed")
  assert tiny.checkpoint_steps(tmp_path / "resumed") == [3]


@each_path
def test_other_files_of_a_config(place, typed, monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 1)
  names = place(typed)
  names.write_text("cat\ndog\n")
  assert labels.read(typed, "config.evals.names") == ["cat", "dog"]
  op = registry.compose(parse.parse(f"lookup({typed!r}, key='name')"))
  assert op.fn({"name": "dog"}, None)["name"] == 1
  assert (
    jax_flags.use_compile_cache(typed) == jax.config.jax_compilation_cache_dir
  )
  assert pathlib.Path(jax.config.jax_compilation_cache_dir).samefile(names)


# The command line.


@each_path
def test_the_command_line_takes_paths_as_typed(place, typed):
  config = place(typed).with_suffix(".py")
  config.write_text("def get_config(arg=''): return {'arg': arg, 'lr': 1.0}")
  typed = typed.rstrip("/")
  for suffix, arg in (("", ""), (":a//b/../c", "a//b/../c")):
    words = [f"--config={typed}.py{suffix}", f"--workdir={typed}"]
    read, workdir, _ = command.parse(["main", *words])
    assert read["arg"] == arg
    assert os.path.isabs(workdir)
    assert f"{workdir}.py" == os.path.normpath(f"{workdir}.py")
    assert config.samefile(f"{workdir}.py")


@pytest.mark.parametrize(
  "typed", ["~/two  words//run", "../here/./link/../run"]
)
def test_commands_in_processes_of_their_own(place, tiny_config, typed):
  del place  # Makes the folders.
  config = tiny_config({"ckpt_steps": 1, "stop_at_steps": 1})
  code = f"def get_config(): return {settings.plain(config)!r}"
  pathlib.Path("config.py").write_text(code)
  env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}

  def call(module, *words):
    return subprocess.run(
      [sys.executable, "-m", f"bigtrain.{module}", *words],
      env=env,
      capture_output=True,
      text=True,
      timeout=300,
    )

  done = call("main", "--config=./config.py", f"--workdir={typed}")
  assert done.returncode == 0, done.stderr
  done = call("tools.checkpoint", "verify", typed)
  assert (done.returncode, done.stdout.count("intact")) == (0, 1), done.stderr


# Tools.


@each_path
def test_checkpoint_shows_verifies_and_exports(run, capsys, typed):
  workdir = run(typed)
  for path in (typed, f"{typed}/checkpoints/00000002"):
    assert checkpoint.main(["show", path, "--step=2"]) == 0
    assert "step 2," in capsys.readouterr().out.splitlines()[0]
  assert checkpoint.main(["verify", f"{typed}/checkpoints/"]) == 0
  assert capsys.readouterr().out.count("intact") == 2
  for kind in ("npz", "safetensors"):
    out = f"{typed}/params.{kind}"
    assert checkpoint.main(["export", typed, out, "--prefix=params"]) == 0
    assert (workdir / f"params.{kind}").is_file()


@each_path
def test_evaluate_finds_the_run(run, capsys, typed):
  workdir = run(typed)
  assert evaluate.main([f"--workdir={typed}", "--step=2"]) == 0
  row = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert row["step"] == 2 and "val/loss" in row
  assert workdir.is_dir()


@each_path
def test_report_reads_and_writes(run, monkeypatch, typed):
  # Drawing takes seconds.
  monkeypatch.setattr(report.curves, "pngs", lambda runs: {"loss": b"a plot"})
  monkeypatch.setattr(
    report.page, "render", lambda runs, *_: str(runs[0].entries[-1])
  )
  workdir = run(typed)
  for out, words in (("report", []), ("page", [f"--out={typed}/page"])):
    assert report.main([typed, *words]) == 0
    assert "'step': 2" in (workdir / out / "report.html").read_text()
    assert (workdir / out / "loss.png").read_bytes() == b"a plot"


@each_path
def test_tokenize_reads_and_writes(place, typed):
  folder = place(typed)
  folder.mkdir()
  (folder / "text.txt").write_text("a text")
  words = [f"{typed}/text.*", "--tokenizer=bytes", "--processes=1"]
  assert tokenize.main([*words, f"--output={typed}/tokens"]) == 0
  assert (folder / "tokens" / "manifest.json").is_file()


MODEL = dict(
  variant="gpt2", vocab_size=259, width=8, depth=1, num_heads=2, max_len=16
)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
  """A workdir of a language model of zeros."""
  workdir = tmp_path_factory.mktemp("language") / "run"
  specs = jax.eval_shape(
    decoder.Model(**MODEL).init, jax.random.key(0), jnp.zeros((1, 2), int)
  )
  params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), specs["params"])
  config = {
    "task": "language_modeling",
    "model_name": "decoder",
    "model": MODEL,
    "input": {"data": {"type": "text", "path": "x.txt", "length": 16}},
  }
  saver = checkpointer.Checkpointer(str(workdir))
  saver.save(1, {"params": params}, HostState(config=config))
  saver.close()
  return workdir


@each_path
def test_generate_finds_the_model(place, language_model, capsys, typed):
  shutil.copytree(language_model, place(typed))
  words = ["--prompt=abc", "--max_new=0"]
  assert generate.main([f"--workdir={typed}", *words]) == 0
  assert capsys.readouterr().out == "abc\n"


@each_path
def test_plan_finds_the_config(place, monkeypatch, capsys, typed):
  place(typed).with_suffix(".py").write_text("def get_config(): return {}")
  # All of the plan that reads the config's file.
  monkeypatch.setattr(plan, "plan", lambda path, *_, **__: loading.load(path))
  monkeypatch.setattr(plan.table, "text", lambda *_: "the plan")
  assert plan.main([f"--config={typed.rstrip('/')}.py"]) == 0
  assert "the plan" in capsys.readouterr().out
