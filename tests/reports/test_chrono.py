"""Time accounts and rates, with a clock that tests control."""

import json
import threading

import hypothesis
import pytest
from hypothesis import strategies as st

from bigtrain.reports import chrono


class Clock:
  """A clock that advances only when a test calls `sleep`."""

  def __init__(self, now=0.0):
    self.now = now

  def __call__(self):
    return self.now

  def sleep(self, secs):
    self.now += secs


def make(clock=None, wall=None, **kwargs):
  clock = clock or Clock()
  kwargs = (
    dict(batch_size=32, total_steps=100, clock=clock, memory=dict) | kwargs
  )
  return clock, chrono.Chrono(wall=wall or clock, **kwargs)


def test_throughput_excludes_warm_up_and_pauses():
  clock, c = make(
    examples_per_epoch=64,
    tokens_per_example=10,
    flops_per_step=6e12,
    peak_flops_per_device=1e12,
    num_devices=4,
  )
  clock.sleep(3)
  with c.account("compile"):
    clock.sleep(20)
  c.start(0)
  clock.sleep(5)  # The first step.
  c.warm(1)
  for _ in range(4):
    with c.account("data_wait"):
      clock.sleep(0.5)
    clock.sleep(1.5)
  assert c.figures(5) == pytest.approx(
    {
      "examples_seen": 160,
      "tokens_seen": 1600,
      "epoch": 2.5,
      "progress": 0.05,
      "step_secs": 2.0,
      "examples_per_sec": 16.0,
      "tokens_per_sec": 160.0,
      "examples_per_sec_per_device": 4.0,
      "tokens_per_sec_per_device": 40.0,
      "data_wait_fraction": 0.25,
      "mfu": 6e12 / (2.0 * 4 * 1e12),
      "eta_secs": 190.0,
      "compile_secs": 25.0,
      "device_hours": 36 * 4 / 3600,
      "account/start_secs": 3.0,
      "account/compile_secs": 25.0,
      "account/step_secs": 6.0,
      "account/data_wait_secs": 2.0,
    }
  )
  with c.account("save"):
    clock.sleep(1)
  with c.account("eval"):
    clock.sleep(7)
  for _ in range(5):
    clock.sleep(2)
  c.ckpt_written(4.5)
  row = c.figures(10)
  assert row["step_secs"] == 2.0
  assert row["data_wait_fraction"] == 0.0
  assert row["ckpt_stall_secs"] == 1.0
  assert row["ckpt_write_secs"] == 4.5
  # 18 s of steps came with 8 s of pauses; the rest is predicted alike.
  assert row["eta_secs"] == pytest.approx(90 * 2 * (1 + 8 / 18))
  assert row["account/eval_secs"] == 7.0
  assert "compile_secs" not in row
  clock.sleep(2)
  row = c.figures(11)
  assert "ckpt_stall_secs" not in row and "ckpt_write_secs" not in row


def test_rows_have_no_unknown_figures():
  clock, c = make(total_steps=10, last_step=6)
  c.start(0)
  clock.sleep(1)
  c.warm(1)
  clock.sleep(1)
  row = c.figures(2)
  assert row["progress"] == 0.2
  assert row["eta_secs"] == 4.0  # To last_step, not to total_steps.
  for name in row:
    assert not name.startswith(("mfu", "tokens", "epoch"))
    assert "per_device" not in name


def test_without_warm_the_first_row_ends_the_warm_up():
  clock, c = make()
  c.start(0)
  clock.sleep(30)
  row = c.figures(1)
  assert "step_secs" not in row and "eta_secs" not in row
  assert row["compile_secs"] == 30.0
  clock.sleep(4)
  assert c.figures(3)["step_secs"] == 2.0


def test_time_after_an_earlier_row_counts_for_the_next_row():
  clock, c = make()
  c.start(0)
  c.warm(0)
  clock.sleep(10)
  with c.account("eval"):
    clock.sleep(6)
  clock.sleep(1)
  row = c.figures(5, now=8.0)  # The step completed before the evaluation.
  assert row["step_secs"] == 8 / 5
  assert "account/eval_secs" not in row
  clock.sleep(1)
  row = c.figures(7)
  assert row["step_secs"] == 2.0  # 2 s before, 2 s after the evaluation.
  assert row["account/eval_secs"] == 6.0


def test_a_row_ends_when_the_device_completes_the_step():
  clock, c = make()
  c.start(0)
  c.warm(0)
  done = threading.Event()
  c.completes(4, done.wait)
  clock.sleep(8)
  done.set()
  (noting,) = [t for t in threading.enumerate() if "step 4" in t.name]
  noting.join()
  clock.sleep(3)  # The loop fetches the metrics late.
  assert c.figures(4)["step_secs"] == 2.0
  clock.sleep(1)
  assert c.figures(6)["step_secs"] == 2.0  # 3 s before the row, 1 s after it.

  def fails():
    raise RuntimeError("the device is gone")

  c.completes(7, fails)
  with pytest.raises(RuntimeError, match="gone"):
    c.figures(7)


def test_of_nested_accounts_the_inner_one_counts():
  clock, c = make()
  c.start(0)
  c.warm(0)
  with c.account("eval"):
    clock.sleep(1)
    with c.account("compile"):
      clock.sleep(10)
    clock.sleep(2)
    assert c.accounts()["eval"] == 3.0
  accounts = c.accounts()
  assert (accounts["eval"], accounts["compile"]) == (3.0, 10.0)


def test_an_exception_ends_an_account():
  clock, c = make()
  with pytest.raises(RuntimeError):
    with c.account("save"):
      clock.sleep(2)
      raise RuntimeError
  clock.sleep(1)
  assert c.accounts()["save"] == 2.0
  assert c.accounts()["start"] == 1.0


def test_a_restart_continues_the_accounts_and_counts_lost_time():
  wall = Clock(1000.0)
  clock, first = make(wall=wall, num_devices=2)

  def sleep(secs):
    clock.sleep(secs)
    wall.sleep(secs)

  sleep(4)
  first.start(0)
  sleep(6)
  first.warm(1)
  sleep(20)
  first.figures(11)
  state = json.loads(json.dumps(first.state()))
  sleep(15)  # Killed here, at 1045, and started again at 1100.
  wall.now = 1100.0
  clock, second = make(clock=Clock(7.0), wall=wall, num_devices=8)
  second.restore(state, last_alive=1045.0)
  second.start(11)
  sleep(5)
  second.warm(12)
  sleep(2)
  row = second.figures(13)
  assert row["compile_secs"] == 5.0  # Of this process only.
  assert row["restarts"] == 1
  accounts = second.accounts()
  assert accounts == {
    "start": 4.0,
    "compile": 11.0,
    "step": 22.0,
    "data_wait": 0.0,
    "eval": 0.0,
    "save": 0.0,
    "lost": 15.0,
    "down": 55.0,
  }
  assert sum(accounts.values()) == wall.now - 1000.0
  # 45 s on two devices, 7 s on eight; none while it was down.
  assert row["device_hours"] == pytest.approx((45 * 2 + 7 * 8) / 3600)


@pytest.mark.parametrize("last_alive", [None, 900.0, 99999.0])
def test_a_restart_with_clocks_that_disagree(last_alive):
  wall = Clock(1000.0)
  state = make(wall=wall)[1].state()
  wall.sleep(50)
  c = make(wall=wall)[1]
  c.restore(state, last_alive=last_alive)
  accounts = c.accounts()
  lost = 50.0 if last_alive == 99999.0 else 0.0
  assert (accounts["lost"], accounts["down"]) == (lost, 50.0 - lost)


def test_the_summary_includes_time_after_the_last_row():
  clock, c = make()
  c.start(0)
  c.warm(0)
  clock.sleep(1)
  c.figures(1)
  with c.account("save"):
    clock.sleep(2)
  with c.account("eval"):
    clock.sleep(3)
  assert c.summary() == {
    "device_hours": 6 / 3600,
    "ckpt_stall_secs": 2.0,
    "account/step_secs": 1.0,
    "account/save_secs": 2.0,
    "account/eval_secs": 3.0,
  }


EVENTS = st.lists(
  st.tuples(
    st.sampled_from(["step", "eval", "save", "data_wait", "row", "state"]),
    st.integers(0, 5),
  ),
  max_size=30,
)


@hypothesis.given(EVENTS)
def test_every_second_is_in_one_account(events):
  clock, c = make()
  c.start(0)
  c.warm(0)
  expected = dict.fromkeys(chrono.ACCOUNTS, 0.0)
  step, productive, rows = 0, 0.0, []
  for name, secs in events:
    if name in ("eval", "save", "data_wait"):
      with c.account(name):
        clock.sleep(secs)
    elif name == "row":
      rows.append((c.figures(step), step, productive))
    elif name == "state":
      c.state()
    else:
      clock.sleep(secs)
      step += 1
    if name in expected:
      expected[name] += secs
    if name in ("step", "data_wait"):
      productive += secs
  assert c.accounts() == expected
  last_step, last_secs = 0, 0.0
  for row, step, secs in rows:
    if step > last_step and secs > last_secs:
      assert row["step_secs"] == (secs - last_secs) / (step - last_step)
    else:
      assert "step_secs" not in row
    last_step, last_secs = step, secs


def test_memory_of_this_process():
  memory = chrono.memory_bytes()
  assert 2**24 < memory["host_rss_bytes"] < 2**36
  assert "device_peak_bytes" not in memory  # Unknown on CPU.


def test_device_memory_is_the_largest_peak(monkeypatch):
  import jax

  class Device:
    def __init__(self, peak):
      self.peak = peak

    def memory_stats(self):
      return self.peak and {"peak_bytes_in_use": self.peak}

  devices = [Device(3), Device(7), Device(None)]
  monkeypatch.setattr(jax, "local_devices", lambda: devices)
  assert chrono.memory_bytes()["device_peak_bytes"] == 7
