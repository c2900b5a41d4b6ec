"""Plans: what is compiled for devices that are not there, and estimates."""

import json

import jax
import pytest

from bigtrain import main, settings, sharding
from bigtrain.checkpoints import start
from bigtrain.inputs import pipeline
from bigtrain.settings import ConfigError
from bigtrain.tools.plan import collectives, estimate, hardware, plan, stand_ins

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


class Enough(Exception):
  """Ends a run of which no more is wanted."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  path = tmp_path_factory.mktemp("plan") / "config.py"
  path.write_text(CONFIG)
  return str(path)


@pytest.fixture(scope="module")
def rows(config):
  return plan.plan(config, [8], ["model.remat_policy=nothing_saveable"])


def test_it_needs_no_data_and_tells_the_mesh(rows):
  (row,) = rows
  assert (row["devices"], row["replica"], row["fsdp"]) == (8, 2, 4)
  assert row["figures"] == "compiled"
  assert row["tokens_per_example"] == 32
  assert row["executed_flops"] > row["model_flops"] > 0


def test_bytes_are_those_of_a_real_state(rows, config, tmp_path, monkeypatch):
  (row,) = rows
  states = []
  begin = start.start

  def kept(*args, **more):
    found = begin(*args, **more)
    states.append(found.state)
    raise Enough

  monkeypatch.setattr(start, "begin", kept)
  plain = settings.load(config)
  plain["model"]["remat_policy"] = "nothing_saveable"
  plain |= {"evals": {}, "hooks": {}, "eager": True, "compile_cache": False}
  plain["input"]["data"] = dict(
    type="synthetic",
    features={"tokens": "int32[32] < 256", "targets": "int32[32] < 256"},
  )
  with pytest.raises(Enough):
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


def test_what_is_sent_is_near_the_formula(rows):
  (row,) = rows
  # Norms and embeddings are what the formula leaves out.
  formula, sent = row["formula"], row["sent_bytes"]
  assert sent["all-gather"] == pytest.approx(formula["all-gather"], rel=0.3)
  assert sent["reduce-scatter"] <= formula["reduce-scatter"]
  assert sent["reduce-scatter"] > 0.5 * formula["reduce-scatter"]
  kinds = {
    (c.kind, c.group_size, c.stride)
    for c in collectives.from_json(row["collectives"])
  }
  # Within fsdp, then from replica to replica.
  assert {("reduce-scatter", 4, 1), ("all-reduce", 2, 4)} <= kinds


def test_the_table_and_json(rows, capsys, monkeypatch):
  monkeypatch.setattr(plan, "plan", lambda *args, **kwargs: rows)
  argv = ["--config=x.py", "--devices=8", "--hardware=tpu_v5e"]
  assert plan.main([*argv, "--json"]) == 0
  assert json.loads(capsys.readouterr().out) == rows
  assert plan.main(argv) == 0
  lines = capsys.readouterr().out.splitlines()
  table = {line[:36].strip(): line[36:].strip() for line in lines}
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
    (["--devices=eight"], "argument --devices: invalid"),
    (["--devices=8,0"], "argument --devices: invalid"),
    (["--hardware=tpu_v5"], "--hardware=tpu_v5: unknown. Did you mean"),
    (["--devices=6"], "--devices=6: replica=1 x fsdp=4 are not 6; set --fsdp"),
    pytest.param(
      ["--config.lrr=1", "--devices=4"],
      "config.lrr: unknown key. Did you mean 'lr'",
      marks=pytest.mark.slow,
    ),
    (["--features=image"], "argument --features: invalid"),
    (["--compiler=tpu"], "--hardware=h100 is no TPU"),
    (["--devices=8", "--compile_up_to=4"], "cannot be extrapolated from 4"),
  ],
)
def test_mistakes_are_told_in_a_line(config, argv, message, capsys):
  assert plan.main([f"--config={config}", *argv]) == 2
  err = capsys.readouterr().err.strip()
  assert err.startswith("error: ") and "\n" not in err
  assert message in err


def facts(devices, fsdp, **changes):
  """Of a made-up program: one gather, one scatter, one sum over replicas."""
  made = lambda kind, group, stride, nbytes: collectives.Collective(
    kind, group, stride, runs=2, nbytes=nbytes
  )
  replica = devices // fsdp
  return (
    dict(
      devices=devices,
      replica=replica,
      fsdp=fsdp,
      batch_size=2 * devices,
      microbatches=2,
      parameters=1000,
      sharded_parameters=1000,
      state_bytes={"params": 4000 / fsdp, "opt": 8000 / fsdp},
      batch_bytes=64,
      memory=dict(
        argument_bytes=12_064 / fsdp,
        output_bytes=12_000 / fsdp,
        alias_bytes=12_000 / fsdp,
        temporary_bytes=500,
      ),
      collectives=collectives.to_json(
        [
          made("all-gather", fsdp, 1, 8000),
          made("reduce-scatter", fsdp, 1, 4000),
          made("all-reduce", replica, fsdp, 4000 // fsdp),
        ]
      ),
      unknown_loops=0,
      tokens_per_example=None,
      model_flops=6e9 * devices,
      executed_flops=8e9 * devices,
      figures="compiled",
      compiler="cpu",
    )
    | changes
  )


H100 = hardware.find("h100")


def test_seconds_of_a_step_by_hand():
  row = estimate.row(facts(32, 16), {"model": {"dtype": "bfloat16"}}, H100, 0.5)
  gather, scatter, over = 8000 * 15 / 16, 4000 * 15 / 16, 2 * 250 * 1 / 2
  assert row["sent_bytes"]["all-gather"] == gather
  assert row["sent_bytes"]["reduce-scatter"] == scatter
  assert row["sent_bytes"]["all-reduce"] == over
  assert row["formula"]["all-gather"] == gather  # 2 * 2 * 2 * 1000 bytes.
  # 16 devices are two servers of 8; a replica's peer is in another one.
  link = (gather + scatter) / 450e9
  network = (gather + scatter) / (8 * 50e9) + over / 50e9
  compute = 8e9 / (989.4e12 * 0.5)
  secs = row["secs"]
  assert secs["compute"] == pytest.approx(compute)
  assert secs["link"] == pytest.approx(link)
  assert secs["network"] == pytest.approx(network)
  assert secs["in_turn"] == pytest.approx(compute + network)
  assert secs["overlapped"] == pytest.approx(max(compute, network))
  assert row["mfu"] == pytest.approx(6e9 / 989.4e12 / secs["overlapped"])
  assert row["examples_per_sec"] == pytest.approx(64 / secs["overlapped"])
  assert row["peak_bytes"] == 12_064 / 16 + 500 and row["fits"]


@pytest.mark.parametrize("fsdp", [8, 16])
def test_extrapolated_is_what_would_be_compiled(fsdp):
  small, large = facts(16, 8), facts(64, fsdp, microbatches=4, batch_size=256)
  assert estimate.alike([small], large) is small
  guess = estimate.extrapolate(small, large)
  assert guess["figures"] == "from 16"
  found = collectives.from_json(guess["collectives"])
  assert [(c.group_size, c.stride) for c in found] == [
    (fsdp, 1),
    (fsdp, 1),
    (64 // fsdp, fsdp),
  ]
  assert [c.nbytes for c in found] == [16_000, 8000, 8000 / fsdp]
  assert guess["state_bytes"] == large["state_bytes"]
  assert guess["memory"]["output_bytes"] == large["memory"]["output_bytes"]
  assert guess["executed_flops"] == 8e9 * 128


def test_only_like_is_extrapolated_from_like():
  assert not estimate.alike([facts(8, 8)], facts(64, 8))  # Has no replicas.
  more = facts(64, 8, batch_size=256)
  assert not estimate.alike([facts(16, 8)], more)


@pytest.mark.parametrize(
  "devices, microbatch, batch, microbatches",
  [
    (8, None, 512, 1),
    (8, 1, 512, 64),
    (8, 24, 512, 4),  # 16 is the most that divides 64.
    (512, 8, 512, 1),
    (1024, 8, 1024, 1),
    (96, 1, 480, 5),
  ],
)
def test_batches_that_divide(devices, microbatch, batch, microbatches):
  config = {"input": {"batch_size": 512}}
  assert plan._batch(config, devices, microbatch) == {
    "batch_size": batch,
    "microbatches": microbatches,
  }


def test_slices_of_tpus():
  assert hardware.topology("tpu_v5p", 8) == "v5p:2x2x2"
  assert hardware.topology("tpu_v5p", 256) == "v5p:4x8x8"
  assert hardware.topology("tpu_v6e", 128) == "v6e:8x16"
  for number in (512, 12):
    with pytest.raises(ConfigError, match="power of two up to 256"):
      hardware.topology("tpu_v6e", number)


def test_hardware_has_peaks():
  for name, one in hardware.TABLE.items():
    assert one.peak_flops > 1e14, name


@pytest.mark.slow
@pytest.mark.parametrize(
  "path, shapes",
  [
    ("vit_i1k.py:S/16", {"image": (224, 224, 3), "labels": ()}),
    ("cappa.py", {"image": (224, 224, 3), "labels": (64,)}),
    ("t5_small.py", {"inputs": (512,), "targets": (114,)}),
  ],
)
def test_batches_of_real_configs_are_known_without_their_data(path, shapes):
  loaded = settings.load(f"configs/{path}")
  for change in stand_ins.stand_ins(loaded, None, 1000):
    settings.override(loaded, change)
  loaded["input"]["batch_size"] = 8
  found = pipeline.make_train(
    settings.Config(loaded).input, seed=0, mesh=sharding.make_mesh()
  )
  got = {name: x.shape[1:] for name, x in found.spec.items()}
  assert got.items() >= shapes.items()
