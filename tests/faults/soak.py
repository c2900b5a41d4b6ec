"""Kills a tiny run at random times and compares it with an undisturbed one.

  make soak ARGS="--kills=100 --seed=0 --model=vit --devices=4 --replica=2"
  make soak ARGS="--kills=50 --processes=4 --replica=2 --local=3"

Steps whose loss is high are skipped as spikes, and hooks compare replicas and
compute steps twice. With --local=N the killed run also saves on its host, every
N steps; after some kills these files are removed or damaged.

With --processes=N the run is a job of N processes, each with --devices devices.
A kill after the first step hits a random one of them, which also loses its
files on the host; the others must end by themselves. A kill before the first
step hits all.

Exits with code 0 if the killed run has the same bits as the undisturbed one in
its last checkpoint and its rows. Prints the moment of each kill; keeps the
folder if the runs differ.
"""

import argparse
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

from support.processes import exit_codes

from bigtrain.checkpoints import folders, integrity
from bigtrain.reports import log_entries
from faults import program as program_lib

# Average number of steps between two kills. Every other step saves, so a
# large part of the kills hits a save.
_STEPS_PER_KILL = 12
# With local checkpoints, those of the workdir are rarer.
_LOCAL_CKPT_STEPS = 20
# More steps at the end, and the duration of a step, so that the run does not
# end before its last kill.
_MORE_STEPS = 100
_STEP_SECS = 0.01
# Upper limit of the random delay after the event that is waited for.
_MAX_DELAY_SECS = 0.3
# One in this number of kills comes before the first step.
_EARLY = 4


def _newest_row(workdir):
  rows = log_entries.read(str(workdir))
  return rows[-1]["step"] if rows else 0


def _wait(process, workdir, last, rng):
  """Waits until a random moment; returns (its description, if it is early)."""
  early = not rng.randrange(_EARLY)
  if early:
    words = rng.choice(["Devices:", "starting", "of this", "compiling"])
    condition = lambda: words in process.text()
    moment = f"after it logged {words!r}"
  else:
    # Not beyond `last`, or the run would end before its last kill.
    step = _newest_row(workdir) + rng.randint(1, 2 * _STEPS_PER_KILL)
    step = min(step, last)
    condition = lambda: _newest_row(workdir) >= step
    moment = f"after the row of step {step}"
  process.until(lambda: condition() or process.ended(), moment)
  secs = rng.uniform(0, _MAX_DELAY_SECS)
  process.linger(secs)
  return f"{secs:.3f} s {moment}", early


def _kill(job, early, rng):
  """Kills all processes, or one; returns the index of the one, or None."""
  if early or len(job) == 1:  # Before they have joined, the others would wait.
    for process in job:
      process.kill()
    return None
  index = rng.randrange(len(job))
  job[index].kill()
  others = [p for p in job if p is not job[index]]
  # Gloo, the transport of CPU devices, may abort a process whose peers are in
  # another operation than it is, before that process hears of the kill.
  codes = set(exit_codes(others))
  assert codes <= {1, -signal.SIGABRT}, (codes, others[0].text())
  return index


def _harm(hosts, lost, rng):
  """Removes or damages the local checkpoints, or not; returns what it did.

  Args:
    hosts: config.local_ckpt_dir.
    lost: index of the process that loses its files; None for a random harm.
    rng: random numbers.
  """
  data = sorted(hosts.glob("*/*/checkpoints/*[0-9]/**/c*"))
  saved = hosts.glob("*/*/checkpoints/*[0-9]/manifest.json")
  steps = sorted({int(path.parent.name) for path in saved})
  if lost is not None:
    for folder in hosts.glob(f"*/{lost}"):
      shutil.rmtree(folder)
    return f"; on the hosts {steps}, those of process {lost} removed"
  what = rng.choice(["kept", "kept", "removed", "damaged"]) if data else "none"
  if what == "removed":
    shutil.rmtree(hosts)
  elif what == "damaged":
    with open(data[-1], "r+b") as file:
      place = rng.randrange(data[-1].stat().st_size)
      file.seek(place)
      byte = file.read(1)[0]
      file.seek(place)
      file.write(bytes([byte ^ 1 << rng.randrange(8)]))
  return f"; on the host {steps}, {what}"


# A low limit, so that some steps are skipped.
_SPIKES = dict(z=1.5, window=10, policy="skip", most=10**6)
_CHECKS = dict(
  replay=dict(type="replay", every_steps=7),
  replicas=dict(type="replicas", every_steps=5),
)


def soak(
  program,
  folder,
  *,
  kills,
  seed,
  model="net",
  devices=1,
  replica=1,
  processes=1,
  local=0,
  report=print,
):
  """Raises AssertionError if the kills changed the result.

  Args:
    program: program.Program.
    folder: folder for the two runs, "quiet" and "killed".
    kills: number of kills.
    seed: seed of their moments; the progress until then depends on the
      machine.
    model: model of the tiny config.
    devices: number of simulated devices of each process.
    replica: number of replicas in the mesh.
    processes: number of processes of the job.
    local: number of steps between local checkpoints; 0 for none.
    report: called with a line about each kill.
  """
  rng = random.Random(seed)
  total = _STEPS_PER_KILL * kills + _MORE_STEPS
  quiet, killed = folder / "quiet", folder / "killed"
  length = f"total_steps={total}"
  pace = dict(pace=dict(type="faults.waiting.Pace", secs=_STEP_SECS))
  hooks = f"hooks={pace | _CHECKS}"
  options = dict(model=model, devices=devices)
  same = (length, f"spikes={_SPIKES}", f"mesh={dict(replica=replica)}")
  hosts = folder / "hosts"
  saves = []
  if local:
    saves = [f"local_ckpt_steps={local}", f"local_ckpt_dir={hosts}"]
    saves.append(f"ckpt_steps={_LOCAL_CKPT_STEPS}")

  def start(workdir, *changes):
    if processes == 1:
      return [program.start(workdir, *same, *changes, **options)]
    each = [{}] * processes
    return program.start_job(workdir, *same, *changes, each=each, **options)

  def run(workdir, *changes):
    job = start(workdir, *changes)
    assert exit_codes(job) == [0] * processes, job[0].text()

  run(quiet, f"ckpt_steps={total}")
  for number in range(1, kills + 1):
    job = start(killed, *saves, hooks)
    moment, early = _wait(job[0], killed, _STEPS_PER_KILL * number, rng)
    assert not job[0].ended(), f"it ended by itself:\n{job[0].text()}"
    lost = _kill(job, early, rng)
    listing = folders.listing(str(killed))
    for directory in listing.checkpoints.values():
      problems = integrity.verify(directory)
      assert not problems, problems
    report(
      f"kill {number} of {kills}: {moment}; checkpoints "
      f"{[*listing.checkpoints]}, leftovers "
      f"{[os.path.basename(path) for path in listing.leftovers]}"
      f"{_harm(hosts, lost, rng) if local else ''}",
      flush=True,
    )
  run(killed, *saves)
  assert not local or not [*hosts.iterdir()]
  program_lib.assert_same_run(killed, quiet, total)
  assert log_entries.read(str(killed))[-1]["spike_steps"] > 0


def _main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--kills", type=int, default=100)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--model", default="net", choices=("net", "vit"))
  parser.add_argument("--devices", type=int, default=1)
  parser.add_argument("--replica", type=int, default=1)
  parser.add_argument("--processes", type=int, default=1)
  parser.add_argument("--local", type=int, default=0)
  options = parser.parse_args()
  folder = pathlib.Path(tempfile.mkdtemp(prefix="soak-"))
  program_lib.write_data(folder / "data")
  program = program_lib.Program(folder)
  began = time.monotonic()
  try:
    soak(program, folder, **vars(options))
  except AssertionError:
    print(f"the two runs are in {folder}", file=sys.stderr)
    raise
  finally:
    program.close()
  shutil.rmtree(folder)
  secs = time.monotonic() - began
  print(f"{options.kills} kills in {secs:.0f} s; the runs are bit-equal.")


if __name__ == "__main__":
  _main()
