"""Programs that do not fit, and programs of one device."""

import pytest
import tiny
from support import processes

from bigtrain.tools.plan import estimate, hardware, program, table

# What libtpu wrote about gpt2_124m on 16 v5e, shortened.
TOO_LARGE = """
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error.
Ran out of memory in memory space hbm. Used 22.40G of 15.75G hbm. Exceeded hbm
capacity by 6.65G.
error: exit
"""


def test_a_program_that_does_not_fit_is_a_row_with_its_size():
  needed = program._needed_bytes(TOO_LARGE)
  assert needed == pytest.approx(22.4 * 2**30)
  assert program._needed_bytes("RESOURCE_EXHAUSTED: Used too much") is None
  footprint = dict(
    state_bytes={"params": 4e9, "opt": 8e9},
    host_state_bytes=0,
    batch_bytes=1e6,
    parameters=1e9,
    parameter_bytes=4e9,
    sharded_parameters=0,
    executed_flops=1e12,
    tokens_per_example=8,
  )
  facts = dict(
    footprint,
    memory=program._memory_of_too_large(footprint, needed),
    model_flops=1e12,
    collectives=[],
    unknown_loops=0,
    cycles=None,
    products=None,
    figures="too large",
    compiler="tpu",
    devices=16,
    replica=16,
    pipeline=1,
    fsdp=1,
    sequence=1,
    tensor=1,
    batch_size=16,
    microbatches=1,
  )
  row = estimate.from_facts(facts, {}, hardware.find("tpu_v5e"))
  assert row["peak_bytes"] == needed and not row["fits"]
  text = table.text("x.py", "tpu_v5e", [row], 0.6)
  assert "too large" in text and "150%: too large" in text and "24.1" in text


@pytest.mark.slow
def test_one_device_sends_nothing(tmp_path, monkeypatch):
  # The program runs in a process of its own, which imports tests/tiny.
  monkeypatch.setenv("PYTHONPATH", processes.environment()["PYTHONPATH"])
  path = tmp_path / "config.py"
  tiny.write_data(tmp_path)
  config = tiny.config(tmp_path, {"mesh": {"replica": 1, "fsdp": 1}})
  path.write_text(f"def get_config():\n  return {config!r}\n")
  facts = program.compile_update(str(path), 1, ["hooks={}"], "h100", "cpu")
  assert facts["collectives"] == [] and facts["memory"]["temporary_bytes"] > 0
