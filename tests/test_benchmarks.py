"""Every benchmark runs and prints valid figures. No time is asserted."""

import io
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from benchmarks import headers, measure, peer_process, run

ROOT = pathlib.Path(__file__).parent.parent
# Fast compilation: the speed of the programs does not matter here.
_XLA_FLAGS = (
  "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
  " --xla_force_host_platform_device_count=2"
)
_KEYS = "benchmark name value unit spread repeats target machine".split()

# {scripts that share a process: numbers of their benchmarks}.
_GROUPS = {
  "limits loop_overhead compile_time input_rate tar_shards state_bytes "
  "compilers": {0, 3, 5, 8, 10, 12, 21},
  "weight_stats checkpoint_stall guard_cost step_rate step_floor loss_memory "
  "headers": {1, 3, 6, 9, 11, 13},
  "startup restart recovery sweep check_cost adapter_step": {1, 4, 7, 16, 17},
}

# The imports take longer than some of the benchmarks.
_RUN = """
import runpy, sys
_, names = sys.argv
sys.argv[1:] = ["--quick"]
for name in names.split():
  runpy.run_module(f"benchmarks.{name}", run_name="__main__")
"""


def _lines(names, cache):
  finished = subprocess.run(
    [sys.executable, "-c", _RUN, names],
    cwd=ROOT,
    env={
      **measure.environment(),
      "XLA_FLAGS": _XLA_FLAGS,
      # The scripts share most programs.
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    },
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert finished.returncode == 0, finished.stderr
  return [json.loads(line) for line in finished.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("names, numbers", list(_GROUPS.items()))
def test_each_script_prints_figures(names, numbers, tmp_path):
  figures = _lines(names, tmp_path)
  assert {figure["benchmark"] for figure in figures} == numbers
  measured = [f for f in figures if "skipped" not in f]
  assert measured
  for figure in measured:
    assert list(figure) == _KEYS
    least, largest = figure["spread"]
    assert 0 < least <= figure["value"] <= largest
    assert figure["machine"]["cores"] >= 1
  # The table has a line for every figure.
  assert len(run.table(figures)) == 2 + len(figures)


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_on_a_cpu(tmp_path):
  """`benchmarks/gpu.sh --quick` runs the other parts, which take long."""
  figures_file = tmp_path / "figures.txt"
  env = {
    **measure.environment(),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": _XLA_FLAGS.rpartition(" ")[0],
    "PYTHON": sys.executable,
    "WHEELS": str(tmp_path),
    "FIGURES": str(figures_file),
  }
  finished = subprocess.run(
    ["benchmarks/gpu.sh", "--quick", "--patience=20", "--only=fast,limits"],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert finished.returncode == 0, finished.stderr
  lines = figures_file.read_text().splitlines()
  figures = [json.loads(x) for x in lines if x.startswith('{"benchmark"')]
  skipped = [figure for figure in figures if "skipped" in figure]
  ratios = [f for f in skipped if f["name"].startswith("rate, ours / ")]
  assert [f["benchmark"] for f in ratios] == [23, 23, 23, 28, 33, 23]
  for figure in ratios:
    assert "No module named" in figure["skipped"]
    assert f"| {figure['name']} |" in finished.stdout
  # Ours is measured without its peer, except where it loads the peer's model.
  steps = [f for f in figures if f["name"].startswith("step, ours")]
  assert [f["skipped"] for f in steps if "skipped" in f] == [
    "our_decode: it loads what the peer writes"
  ]
  assert [f["value"] > 0 for f in steps if "value" in f] == [True] * 5
  # A CPU has neither a known peak nor counted memory.
  others = [f["benchmark"] for f in skipped if f not in ratios + steps]
  assert sorted(others) == [2] * 4 + [34] * 5
  assert {0, 5} <= {figure["benchmark"] for figure in figures}


@pytest.mark.slow
def test_ctrl_c_ends_the_script_for_a_gpu_with_a_table(tmp_path):
  figures_file = tmp_path / "figures.txt"
  process = subprocess.Popen(
    ["benchmarks/gpu.sh", "--quick", "--patience=20", "--only=correct"],
    cwd=ROOT,
    env={
      **measure.environment(),
      "JAX_PLATFORMS": "cpu",
      "PYTHON": sys.executable,
      "WHEELS": str(tmp_path),
      "FIGURES": str(figures_file),
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
    # A shell's background jobs ignore it.
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
  )
  names = []
  lines = []
  for line in process.stdout:
    lines.append(line)
    if line.startswith('{"benchmark"'):
      names.append(json.loads(line)["name"])
      break
  os.killpg(process.pid, signal.SIGINT)  # As a terminal does.
  lines += process.stdout
  assert process.wait(timeout=60) == 128 + signal.SIGINT
  written = figures_file.read_text()
  assert written and "".join(lines).endswith(written)
  assert "Interrupted. These are the figures so far." in written
  assert f"| 32 | {names[0]} |" in written


@pytest.mark.slow
def test_parts_of_models_are_compared_with_the_cpu():
  """No choice of experts depends on rounding, on any processor."""
  parts = "attention, causal;linear cross-entropy;NF4 kernel;"
  parts += "gated DeltaNet;latent attention;experts, capacity"
  found = []
  for line in measure.lines(
    *("-m", "benchmarks.gpu_correct", f"--only={parts}"),
    env=measure.environment() | {"JAX_PLATFORMS": "cpu"},
  ):
    if line.startswith('{"benchmark"'):
      found.append(json.loads(line))
  values = {figure["name"]: figure.get("value") for figure in found}
  assert len(values) == 16 and len(found) == 16
  for name, value in values.items():
    if "cudnn" in name or "tokamax" in name:
      assert value is None  # They need a GPU.
    else:
      limit = 6e-2 if "DeltaNet" in name else 3e-2
      assert value < (1e-4 if "float32" in name else limit), name


def test_every_script_is_listed_and_tested():
  assert set(run.SCRIPTS) == {
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if "Benchmark " in path.read_text()[:20] or path.stem == "limits"
  }
  assert sorted(run.SCRIPTS) == sorted(" ".join(_GROUPS).split())


def test_interleaved_calls_take_turns():
  calls = []

  def call(name, values):
    values = iter(values)
    return lambda: calls.append(name) or next(values)

  results = measure.interleave(
    {"a": call("a", [9.0, 2.0, 4.0]), "b": call("b", [9.0, 1.0, 8.0])},
    repeats=2,
  )
  assert "".join(calls) == "ababab"
  assert results == {"a": [2.0, 4.0], "b": [1.0, 8.0]}  # No warm-up.
  assert measure.ratios(results["a"], results["b"]) == [2.0, 0.5]


def test_a_figure_is_the_median_with_its_spread(capsys):
  measure.report(3, "x", [3.0, 1.0, 1.25], target="<= 1.02")
  figure = json.loads(capsys.readouterr().out)
  assert (figure["value"], figure["spread"]) == (1.25, [1.0, 3.0])
  assert (
    run.table([figure])[-1] == "| 3 | x | 1.25 | 1 to 3 | <= 1.02 | missed |"
  )


def test_a_failed_process_is_an_error():
  lines = measure.lines("-c", "print('a'); raise SystemExit('why it failed')")
  assert next(lines) == "a"
  with pytest.raises(RuntimeError, match="why it failed"):
    list(lines)


def test_a_peer_does_the_requested_steps(monkeypatch, capsys):
  monkeypatch.setattr("sys.stdin", io.StringIO("3\n5\n"))
  peer_process.serve({"parameters": 7}, lambda steps: steps / 2)
  assert capsys.readouterr().out.splitlines() == [
    'peer: {"parameters": 7}',
    "peer: 1.5",
    "peer: 2.5",
  ]


def test_a_failed_peer_is_an_error_with_its_output():
  env = peer_process.environment()
  with pytest.raises(RuntimeError, match="No module named benchmarks.absent"):
    peer_process.Peer("absent", {}, env)


def test_every_header_names_hardware_that_can_be_checked():
  found = {p.stem: headers.read(p) for p in (ROOT / "configs").glob("*.py")}
  assert found["llama_8b"] == headers.Header(
    "llama_8b.py", 64, "h100", ("mesh.fsdp=-1", "microbatches=8")
  )
  assert found["vit_i1k"].config == "vit_i1k.py:B/16"
  assert found["deepseek_v3"].devices == 2048
  for name, header in found.items():
    text = (ROOT / "configs" / f"{name}.py").read_text()
    says = text.partition("\nHardware: ")[2]
    needs = says and not says.startswith(("any", "not known"))
    assert bool(header) == bool(needs), name
