"""Each benchmark runs, and what it prints can be read. No time is asserted."""

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks import measure, run

ROOT = pathlib.Path(__file__).parent.parent
# Code that is compiled in a hurry: how fast it runs does not matter here.
_XLA_FLAGS = (
  "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
_KEYS = "benchmark name value unit spread repeats target machine".split()


def _lines(name):
  done = subprocess.run(
    [sys.executable, "-m", f"benchmarks.{name}", "--quick"],
    cwd=ROOT,
    env=measure.environment() | {"XLA_FLAGS": _XLA_FLAGS},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
  "name, numbers",
  [
    ("limits", {0}),
    ("loop_overhead", {3}),
    ("startup", {4}),
    ("compile_time", {5}),
    ("input_rate", {8}),
    ("state_bytes", {10}),
  ],
)
def test_each_script_prints_figures(name, numbers):
  figures = _lines(name)
  assert {figure["benchmark"] for figure in figures} == numbers
  measured = [f for f in figures if "skipped" not in f]
  assert measured
  for figure in measured:
    assert list(figure) == _KEYS
    least, largest = figure["spread"]
    assert 0 < least <= figure["value"] <= largest
    assert figure["machine"]["cores"] >= 1
  # Everything that is printed fits into the table.
  assert len(run.table(figures)) == 2 + len(figures)


def test_every_script_is_run():
  assert set(run.SCRIPTS) <= {
    path.stem for path in (ROOT / "benchmarks").glob("*.py")
  }


def test_turns_are_taken_and_paired():
  calls = []

  def call(name, values):
    values = iter(values)
    return lambda: calls.append(name) or next(values)

  found = measure.interleave(
    {"a": call("a", [9.0, 2.0, 4.0]), "b": call("b", [9.0, 1.0, 8.0])},
    repeats=2,
  )
  assert "".join(calls) == "ababab"
  assert found == {"a": [2.0, 4.0], "b": [1.0, 8.0]}  # Without the warm-up.
  assert measure.ratios(found["a"], found["b"]) == [2.0, 0.5]


def test_a_figure_is_the_median_with_its_spread(capsys):
  measure.report(3, "x", [3.0, 1.0, 1.25], target="<= 1.02")
  figure = json.loads(capsys.readouterr().out)
  assert (figure["value"], figure["spread"]) == (1.25, [1.0, 3.0])
  assert (
    run.table([figure])[-1] == "| 3 | x | 1.25 | 1 to 3 | <= 1.02 | missed |"
  )


def test_a_process_that_fails_is_told():
  lines = measure.lines("-c", "print('a'); raise SystemExit('why it failed')")
  assert next(lines) == "a"
  with pytest.raises(RuntimeError, match="why it failed"):
    list(lines)
