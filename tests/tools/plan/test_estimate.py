"""Estimates of time and traffic, from facts about a made-up program."""

import pytest

from bigtrain.tools.plan import collectives, estimate, hardware


def facts(devices, fsdp, **changes):
  """Facts of a made-up program: a gather, a scatter and a sum over replicas."""
  made = lambda kind, group, stride, nbytes: collectives.Collective(
    kind, group, stride, runs=2, nbytes=nbytes
  )
  replica = devices // fsdp
  return (
    dict(
      devices=devices,
      replica=replica,
      pipeline=1,
      fsdp=fsdp,
      sequence=1,
      tensor=1,
      batch_size=2 * devices,
      microbatches=2,
      parameters=1000,
      sharded_parameters=1000,
      state_bytes={"params": 4000 / fsdp, "opt": 8000 / fsdp},
      host_state_bytes=16000 / fsdp,
      batch_bytes=64,
      memory=dict(
        argument_bytes=12_064 / fsdp,
        output_bytes=12_000 / fsdp,
        alias_bytes=12_000 / fsdp,
        temporary_bytes=500,
        peak_bytes=12_064 / fsdp + 300,
      ),
      collectives=[
        made("all-gather", fsdp, 1, 8000)._asdict(),
        made("reduce-scatter", fsdp, 1, 4000)._asdict(),
        made("all-reduce", replica, fsdp, 4000 // fsdp)._asdict(),
      ],
      unknown_loops=0,
      tokens_per_example=None,
      model_flops=6e9 * devices,
      executed_flops=8e9 * devices,
      figures="compiled",
      compiler="cpu",
      cycles=None,
      products=None,
    )
    | changes
  )


H100 = hardware.find("h100")


def test_seconds_of_a_step_match_a_calculation_by_hand():
  row = estimate.from_facts(
    facts(32, 16), {"model": {"dtype": "bfloat16"}}, H100, 0.5
  )
  gather, scatter, over = 8000 * 15 / 16, 4000 * 15 / 16, 2 * 250 * 1 / 2
  assert row["sent_bytes"]["all-gather"] == gather
  assert row["sent_bytes"]["reduce-scatter"] == scatter
  assert row["sent_bytes"]["all-reduce"] == over
  assert row["formula"]["all-gather"] == gather  # 2 * 2 * 2 * 1000 bytes.
  # 16 devices are two servers of 8; the other replica is on other servers.
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
def test_extrapolation_matches_a_compiled_program(fsdp):
  small, large = facts(16, 8), facts(64, fsdp, microbatches=4, batch_size=256)
  assert estimate.basis([small], large) is small
  guess = estimate.extrapolate(small, large)
  assert guess["figures"] == "from 16"
  scaled = guess["collectives"]
  assert [(c["group_size"], c["stride"]) for c in scaled] == [
    (fsdp, 1),
    (fsdp, 1),
    (64 // fsdp, fsdp),
  ]
  assert [c["nbytes"] for c in scaled] == [16_000, 8000, 8000 / fsdp]
  assert guess["state_bytes"] == large["state_bytes"]
  assert guess["host_state_bytes"] == large["host_state_bytes"]
  assert guess["memory"]["output_bytes"] == large["memory"]["output_bytes"]
  assert guess["executed_flops"] == 8e9 * 128


def test_extrapolation_needs_the_same_axes_and_examples_per_device():
  assert not estimate.basis([facts(8, 8)], facts(64, 8))  # No replicas.
  more = facts(64, 8, batch_size=256)
  assert not estimate.basis([facts(16, 8)], more)


def test_seconds_and_memory_of_the_compiler():
  row = estimate.from_facts(facts(32, 16), {}, H100)
  assert row["compiler_secs"] is row["compiler_mfu"] is None
  cycles = dict(compute_secs=0.3, exposed_secs=0.1, kernels={})
  row = estimate.from_facts(
    facts(32, 16, cycles=cycles, compiler="tpu"), {}, H100
  )
  assert row["compiler_secs"] == pytest.approx(0.4)
  assert row["compiler_mfu"] == pytest.approx(6e9 / (0.4 * 989.4e12))
  # Not all temporary arrays are alive at the same time.
  assert row["peak_bytes"] == 12_064 / 16 + 300
  # The cycles of a program are those of its own mesh.
  assert estimate.extrapolate(row, facts(64, 16))["cycles"] is None


def test_products_that_became_dense_take_longer():
  config = {"model": {"dtype": "bfloat16"}}
  products = dict(flops=8e12, kernels={}, unknown_loops=0)
  row = estimate.from_facts(
    facts(32, 16, products=products, compiler="gpu"), config, H100, 0.5
  )
  assert row["product_flops"] == 32 * 8e12
  assert row["secs"]["compute"] == pytest.approx(8e12 / (989.4e12 * 0.5))
  # Attention kernels are not in the products, so they may also be fewer.
  products["flops"] = 6e9
  row = estimate.from_facts(
    facts(32, 16, products=products, compiler="gpu"), config, H100, 0.5
  )
  assert row["secs"]["compute"] == pytest.approx(8e9 / (989.4e12 * 0.5))
  # Temporary memory is allocated at once, whatever the peak.
  assert row["peak_bytes"] == 12_064 / 16 + 500
