"""The chooser, on made-up programs."""

import time

import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.config.loading import load
from bigtrain.tools.plan import (
  collectives,
  hardware,
  plan,
  program,
  search,
  table,
)

FILE = """
def get_config():
  return dict(
    total_steps=3,
    task="language_modeling",
    model_name="decoder",
    model=dict(variant="llama_mu", vocab_size=256, scan=True),
    optimizer=dict(name="adam"),
    lr=1e-3,
    input=dict(
      data=dict(type="tokens", path="nowhere", length=32), batch_size=16
    ),
  )
"""

SIZES = program.Sizes(
  parameters=8 * 10**9,
  opt_bytes=64 * 10**9,
  model_flops=2 * 10**17,
  batch_bytes=10**6,
  tokens_per_example=8192,
  tensor_sizes=(1, 2, 4, 8),
  has_remat_policy=True,
)
CONFIG = {
  "model_name": "decoder",
  "model": dict(variant="llama_8b", dtype="bfloat16", scan=True),
  "input": dict(batch_size=512),
}
H100 = hardware.find("h100")


def choose(compile_one, ways, sizes=SIZES, seconds=60):
  end = time.monotonic() + seconds
  # A part of the meshes, with all numbers of microbatches.
  few = [
    one
    for one in ways
    if one.sizes["replica"] in (1, 2, 8) and one.sizes["pipeline"] in (1, 4)
  ]
  return search.choose(CONFIG, few, sizes, H100, compile_one, end)


@pytest.fixture(scope="module")
def ways():
  return search.candidates(CONFIG, 64, SIZES, H100)


def test_candidates_divide_devices_batch_and_model(ways):
  for one in ways:
    of = one.sizes
    parts = of["replica"] * of["pipeline"] * of["fsdp"]
    assert parts * of["sequence"] * of["tensor"] == 64
    assert 512 % (parts * of["microbatches"]) == 0
    # Within a server, and at least 1,024 tokens on a device.
    assert of["tensor"] in (1, 2, 4, 8) and of["sequence"] in (1, 2, 4, 8)
  assert len({one.axes for one in ways}) > 40
  with pytest.raises(
    ConfigError, match="512 divides among .* no mesh.*the batch: 64 and 128"
  ):
    search.candidates(CONFIG, 7 * 11, SIZES._replace(tensor_sizes=(1,)), H100)


@pytest.mark.slow
def test_the_best_are_compiled_and_correct_the_others(ways):
  """A compiler that needs twice the memory of the formula."""
  calls = []

  def compile_one(candidate, left):
    assert 0 < left <= 60
    calls.append(candidate)
    facts = search.by_formula(
      candidate, CONFIG, SIZES, correction=search.Correction(2.0)
    )
    return facts | {"figures": "compiled"}

  result = choose(compile_one, ways)
  assert len(result.best) == search.BEST and not result.out_of_time
  assert all(r["figures"] == "compiled" and r["fits"] for r in result.best)
  assert len(calls) == len(set(calls)) == search.BEST + len(result.too_large)
  # After the first, the others are estimated with twice the memory as well.
  assert len(result.too_large) <= 1
  times = [search.score(r) for r in result.best]
  assert times == sorted(times)


def test_rounds_of_a_pipeline_are_searched(ways):
  """More rounds idle less and send more, so both ends have candidates."""
  of_mesh = {}
  for one in ways:
    if one.remat_policy == "none" and one.sizes["pipeline"] > 1:
      of_mesh.setdefault(one.mesh, {})[one.pipeline_rounds] = one
  rounds = next(r for m, r in of_mesh.items() if dict(m)["pipeline"] == 4)
  assert sorted(rounds) == [1, 2, 4]  # 32 layers: up to 8 parts a stage.
  rows = {n: search.by_formula(one, CONFIG, SIZES) for n, one in rounds.items()}
  flops = [rows[n]["executed_flops"] for n in (1, 2, 4)]
  assert flops[0] > flops[1] > flops[2]
  few, many = (
    sum(collectives.Collective(**c).sent_bytes for c in rows[n]["collectives"])
    for n in (1, 4)
  )
  assert few < many
  assert "mesh.pipeline_rounds=4" in rounds[4].changes(CONFIG)
  (row,) = search.choose(CONFIG, [rounds[4]], SIZES, H100, None, 0).best
  assert table.config_lines(row)[0].endswith(", pipeline_rounds=4)")


def test_a_program_corrects_those_that_split_their_layers_alike(ways):
  def one(replica, fsdp, tensor, microbatches, policy="none"):
    sizes = dict(
      replica=replica, pipeline=1, fsdp=fsdp, sequence=1, tensor=tensor
    )
    sizes |= dict(devices=64, batch_size=512, microbatches=microbatches)
    (found,) = [
      c for c in ways if c.sizes == sizes and c.remat_policy == policy
    ]
    return found

  factors = {
    one(1, 64, 1, 1): search.Correction(3.0),
    one(1, 64, 1, 8): search.Correction(2.0),
    one(1, 32, 2, 1): search.Correction(0.3),
    one(2, 32, 1, 1, "nothing_saveable"): search.Correction(0.5, 0.9),
  }

  def nearest(*args):
    return search._nearest(factors, one(*args))

  assert nearest(2, 32, 1, 1).temporary == 3.0
  assert nearest(2, 32, 1, 8).temporary == 2.0
  assert nearest(2, 8, 4, 8).temporary == 0.3
  # Recomputation depends on the policy, and memory as well.
  assert nearest(2, 8, 4, 8, "nothing_saveable") == (0.5, 0.9)
  dots = "dots_with_no_batch_dims_saveable"
  del factors[one(1, 64, 1, 1)], factors[one(1, 64, 1, 8)]
  assert nearest(2, 32, 1, 1, dots) == (0.5, 1.0)


def test_what_is_not_compiled_in_time_is_by_formula(ways):
  answers = [None]

  def compile_one(candidate, left):
    return answers.pop()  # The time is up during the first.

  result = choose(compile_one, ways)
  assert result.out_of_time
  assert {r["figures"] for r in result.best} == {"formula"}
  text = table.choice_text(result, 3)
  assert "because the 3 minutes were up: 1, 2, 3, 4, 5." in text
  assert choose(compile_one, ways, seconds=0).out_of_time  # Compiles nothing.


def test_what_does_not_fit_is_a_row_with_its_size(ways):
  huge = SIZES._replace(parameters=10**13, opt_bytes=8 * 10**13)
  result = choose(None, ways, huge)
  assert len(result.best) == search.BEST
  assert not any(r["fits"] for r in result.best)
  assert "Nothing fits; this needs" in table.choice_text(result, 1)


def test_the_command_prints_lines_to_paste(tmp_path, capsys):
  path = tmp_path / "config.py"
  path.write_text(FILE)
  argv = [f"--config={path}", "--devices=8", "--choose", "--minutes=0"]
  assert plan.main(argv) == 0
  out = capsys.readouterr().out
  lines = [s.strip() for s in out.splitlines() if s.startswith("     config.")]
  assert len(lines) == 3 * search.BEST
  # The lines are changes that a config accepts.
  scope = load(str(path))
  key, value = lines[2].removeprefix("config.").split(" = ")
  changed = load(str(path), [f"{key}={value}"])
  assert changed["model"]["remat_policy"] in search.POLICIES
  assert changed["model"].keys() - scope["model"].keys() == {"remat_policy"}
  assert lines[0].startswith("config.mesh = dict(replica=")
  assert plan.main([*argv, "--fsdp=8"]) == 2
  assert "--choose: expected one number" in capsys.readouterr().err


@pytest.mark.slow
def test_the_best_are_compiled_and_their_lines_give_the_same_program(tmp_path):
  path = tmp_path / "config.py"
  path.write_text(FILE.replace("batch_size=16", "batch_size=2"))
  choice = plan.choose(str(path), 2)
  assert not choice.out_of_time and not choice.too_large
  meshes = [(r["fsdp"], r["sequence"], r["tensor"]) for r in choice.best]
  assert sorted(meshes) == [(1, 1, 1), (1, 1, 2), (2, 1, 1)]
  for row in choice.best:
    assert row["figures"] == "compiled" and row["fits"] and row["reasons"]
  best = choice.best[0]
  changes = [line.removeprefix("config.") for line in table.config_lines(best)]
  changes = [change.replace(" = ", "=") for change in changes]
  sizes = changes.pop(0).removeprefix("mesh=dict(").removesuffix(")")
  changes += [f"mesh.{size}" for size in sizes.split(", ")]
  (row,) = plan.plan(str(path), [2], changes)
  for key in ("collectives", "executed_flops", "state_bytes"):
    assert row[key] == best[key], key
  # The CPU's compiler does not place temporaries twice alike.
  assert row["peak_bytes"] == pytest.approx(best["peak_bytes"], rel=0.01)


def test_stages_divide_the_pipeline_microbatches_of_the_config():
  config = {**CONFIG, "mesh": dict(pipeline_microbatches=4)}
  ways = search.candidates(config, 64, SIZES, H100)
  assert {one.sizes["pipeline"] for one in ways} == {1, 2, 4}
  for one in ways[:: len(ways) // 50]:
    search.by_formula(one, config, SIZES)
