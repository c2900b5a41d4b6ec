"""Plans of whole configs, compiled for simulated devices."""

import json

import jax
import pytest

from bigtrain import main
from bigtrain.checkpoints import start
from bigtrain.config import loading
from bigtrain.tools.plan import meshes, plan

CONFIG = """
def get_config():
  return dict(
    seed=0,
    total_steps=3,
    mesh=dict(replica=-1, fsdp=4),
    task="language_modeling",
    model_name="decoder",
    model=dict(variant="llama_mu", vocab_size=256, scan=True),
    optimizer=dict(name="adam"),
    lr=1e-3,
    input=dict(
      data=dict(type="tokens", path="nowhere/train", length=32),
      batch_size=16,
    ),
    evals=dict(
      val=dict(
        type="perplexity",
        pred="perplexity",
        data=dict(type="tokens", path="nowhere/val", length=32),
        log_steps=1,
      )
    ),
    hooks=dict(nan=dict(type="stop_on_nan")),
  )
"""


class EndRun(Exception):
  """Ends a run early."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  path = tmp_path_factory.mktemp("plan") / "config.py"
  path.write_text(CONFIG)
  return str(path)


@pytest.fixture(scope="module")
def rows(config):
  return plan.plan(config, [8], ["model.remat_policy=nothing_saveable"])


def test_a_row_has_the_mesh_and_needs_no_data(rows):
  (row,) = rows
  assert (row["devices"], row["replica"], row["fsdp"]) == (8, 2, 4)
  assert row["figures"] == "compiled"
  assert row["tokens_per_example"] == 32
  assert row["executed_flops"] > row["model_flops"] > 0


@pytest.mark.slow
def test_bytes_match_a_real_state(rows, config, tmp_path, monkeypatch):
  (row,) = rows
  states = []
  start_run = start.start

  def record_state(*args, **kwargs):
    states.append(start_run(*args, **kwargs).state)
    raise EndRun

  monkeypatch.setattr(start, "start", record_state)
  plain = loading.load(config)
  plain["model"]["remat_policy"] = "nothing_saveable"
  plain |= {"evals": {}, "hooks": {}, "eager": True, "compile_cache": False}
  plain["input"]["data"] = dict(
    type="synthetic",
    features={"tokens": "int32[32] < 256", "targets": "int32[32] < 256"},
  )
  with pytest.raises(EndRun):
    main.train(plain, str(tmp_path))
  (state,) = states
  device = jax.devices()[3]
  for name, part in state.items():
    held = sum(
      shard.data.nbytes
      for leaf in jax.tree.leaves(part)
      for shard in leaf.addressable_shards
      if shard.device == device
    )
    assert row["state_bytes"][name] == held > 0, name
  sizes = [leaf.size for leaf in jax.tree.leaves(state["params"])]
  assert row["parameters"] == sum(sizes)


def test_traffic_is_close_to_the_formula(rows):
  (row,) = rows
  for kind in ("all-gather", "reduce-scatter", "all-to-all"):
    of_kind = row["sent_bytes"][kind]
    assert of_kind == pytest.approx(row["formula"][kind], rel=0.05), kind
  kinds = {
    (c["kind"], c["group_size"], c["stride"]) for c in row["collectives"]
  }
  # Within fsdp, then across replicas.
  assert {("reduce-scatter", 4, 1), ("all-reduce", 2, 4)} <= kinds


def test_the_table_and_json(rows, capsys, monkeypatch):
  monkeypatch.setattr(plan, "plan", lambda *args, **kwargs: rows)
  argv = ["--config=x.py", "--devices=8", "--hardware=tpu_v5e"]
  assert plan.main([*argv, "--json"]) == 0
  assert json.loads(capsys.readouterr().out) == rows
  assert plan.main(argv) == 0
  lines = capsys.readouterr().out.splitlines()
  cells = [line.strip().rsplit("  ", 1) for line in lines if "  " in line]
  table = {name.strip(): value.strip() for name, value in cells}
  assert table["mesh, replica x fsdp"] == "2 x 4"
  assert float(table["params"]) == pytest.approx(
    rows[0]["state_bytes"]["params"] / 1e9, rel=0.01
  )
  assert "Google Cloud" in lines[-2]


@pytest.mark.parametrize(
  "argv, message",
  [
    (
      ["--device=8"],
      "'--device=8': unknown argument. Did you mean '--devices'?",
    ),
    (["--devices=eight"], "argument --devices: 'eight': expected a positive"),
    (["--devices=8,0"], "argument --devices: '0': expected a positive"),
    (["--hardware=tpu_v5"], "--hardware: unknown 'tpu_v5'. Did you mean"),
    (["--devices=6"], "--devices=6: replica=1 x fsdp=4 is not 6; set --fsdp"),
    pytest.param(
      ["--config.lrr=1", "--devices=4"],
      "config.lrr: unknown key. Did you mean 'lr'",
      marks=pytest.mark.slow,
    ),
    (["--features=image"], "argument --features: 'image': expected NAME"),
    (["--compiler=tpu"], "--hardware=h100 is not a TPU"),
    (["--compiler=gpu", "--hardware=tpu_v5e"], "expected one of h100"),
    (["--devices=8", "--compile_up_to=4"], "cannot be extrapolated from 4"),
  ],
)
def test_mistakes_give_a_one_line_error(config, argv, message, capsys):
  assert plan.main([f"--config={config}", *argv]) == 2
  err = capsys.readouterr().err.strip()
  assert err.startswith("error: ") and "\n" not in err
  assert message in err


@pytest.mark.parametrize(
  "devices, microbatch, batch, microbatches",
  [
    (8, None, 512, 1),
    (8, 1, 512, 64),
    (8, 24, 512, 4),  # 16 is the largest divisor of 64 up to 24.
    (512, 8, 512, 1),
    (1024, 8, 1024, 1),
    (96, 1, 480, 5),
  ],
)
def test_batch_and_microbatches_divide_evenly(
  devices, microbatch, batch, microbatches
):
  config = {"input": {"batch_size": 512}}
  mesh = dict(replica=1, pipeline=1, fsdp=devices)
  assert meshes.batch(config, mesh, microbatch) == {
    "batch_size": batch,
    "microbatches": microbatches,
  }


def test_microbatches_may_be_given_in_examples():
  config = {"input": {"batch_size": 512}, "microbatch_examples": 128}
  of = meshes.mesh(config, 8, {})
  of |= meshes.batch(config, of, None)
  assert of["microbatches"] == 4
  changes = meshes.changes(config, of)
  assert {"microbatches=4", "microbatch_examples=None"} <= {*changes}
