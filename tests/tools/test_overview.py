"""`python -m bigtrain`, and --help of every tool."""

import importlib
import sys

import pytest
from support import processes

import bigtrain
from bigtrain.tools import overview, reference

TOOLS = overview.programs()


def run(capsys, *words):
  code = overview.main(words)
  output = capsys.readouterr()
  return code, output.out, output.err


def test_help_lists_every_tool(capsys):
  code, out, _ = run(capsys, "--help")
  words = " ".join(out.split())
  assert code == 0 and run(capsys)[1] == out
  assert {"predict", "report", "plan", "runs"} <= TOOLS.keys()
  assert not {"overview", "reference", "arguments", "exits"} & TOOLS.keys()
  for name, line in TOOLS.items():
    assert f"{name} {line}" in words and line.endswith(".")
  assert all(len(line) <= 80 for line in out.splitlines())


def test_the_version(capsys):
  assert run(capsys, "--version")[1] == f"bigtrain {bigtrain.__version__}\n"


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_has_help(name, capsys):
  module = importlib.import_module(f"bigtrain.tools.{name}")
  if hasattr(module, "__path__"):
    module = importlib.import_module(f"bigtrain.tools.{name}.{name}")
  with pytest.raises(SystemExit) as e:
    module.main(["--help"])
  assert not e.value.code
  assert f"python -m bigtrain.tools.{name}" in capsys.readouterr().out


def test_tools_that_only_read_files_start_without_jax():
  # Importing jax takes three times as long as all else.
  tools = "checkpoint gguf merge_tokens replay rows runs supervise tokenize"
  modules = [f"bigtrain.tools.{name}" for name in tools.split()]
  code = (
    f"import sys, {', '.join(modules)}, bigtrain.tools.sweep.sweep as sweep\n"
    "for tool in sweep, bigtrain.tools.gguf, bigtrain.tools.replay:\n"
    "  try: tool.main(['--help'])\n"
    "  except SystemExit: assert 'jax' not in sys.modules, tool\n"
  )
  run = processes.run([sys.executable, "-c", code])
  assert run.returncode == 0, run.stderr


def test_the_kinds_are_those_of_the_lists():
  assert sorted(overview.KINDS) == sorted(reference.KINDS)


@pytest.mark.parametrize(
  "words, message",
  [
    (["lst", "tasks"], "expected list KIND"),
    (["list"], "kinds: tasks"),
    (["list", "task"], "mean 'tasks'"),
    (["list", "ops", "rezise"], "mean 'resize'"),
  ],
)
def test_mistakes_give_a_one_line_error(capsys, words, message):
  code, _, error = run(capsys, *words)
  assert code == 2 and message in error and error.count("\n") == 1
