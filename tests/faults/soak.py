"""Kills a tiny run at random times, and compares its end with a quiet one.

  make soak ARGS="--kills=100 --seed=0 --model=vit"

Ends with code 0 if the run that was killed has, in its last checkpoint and in
its rows, the same bits as one that nobody disturbed. What each kill met is
printed; the folder stays if they differ.
"""

import argparse
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time

from bigtrain.checkpoints import checkpointer, folders
from bigtrain.reports import rows as rows_lib
from faults import program as program_lib

# Between two kills, on average. A save is due every other step, so that many
# of the kills meet one.
_STEPS_A_KILL = 12
# That no kill comes too late: how many steps follow, and how long each takes.
_MORE_STEPS = 100
_STEP_SECS = 0.01
# So long after what was waited for, at most.
_MOST_SECS = 0.3
# One in so many kills comes before the first step.
_EARLY = 4


def _newest_row(workdir):
  found = rows_lib.read_rows(str(workdir))
  return found[-1]["step"] if found else 0


def _wait(process, workdir, last, rng):
  """Waits until a random moment; returns words about it."""
  if not rng.randrange(_EARLY):
    words = rng.choice(["process(es)", "starting", "of this", "compiling"])
    come = lambda: words in process.text()
    what = f"after it said {words!r}"
  else:
    # No further than `last`, or the run would end before its last kill.
    step = _newest_row(workdir) + rng.randint(1, 2 * _STEPS_A_KILL)
    step = min(step, last)
    come = lambda: _newest_row(workdir) >= step
    what = f"after the row of step {step}"
  process.until(lambda: come() or process.ended(), what)
  secs = rng.uniform(0, _MOST_SECS)
  process.linger(secs)
  return f"{secs:.3f} s {what}"


def soak(program, folder, *, kills, seed, model="net", say=print):
  """Raises AssertionError if the kills left a trace.

  Args:
    program: program.Program.
    folder: for the two runs, "quiet" and "killed".
    kills: how many.
    seed: of their moments; how far the process has come then is up to the
      machine.
    model: the config's.
    say: is told of each kill.
  """
  rng = random.Random(seed)
  total = _STEPS_A_KILL * kills + _MORE_STEPS
  quiet, killed = folder / "quiet", folder / "killed"
  length = f"total_steps={total}"
  pace = dict(pace=dict(type="faults.waiting.Pace", secs=_STEP_SECS))
  program.run(quiet, length, f"ckpt_steps={total}", model=model)
  for number in range(1, kills + 1):
    process = program.start(killed, length, f"hooks={pace}", model=model)
    what = _wait(process, killed, _STEPS_A_KILL * number, rng)
    assert not process.ended(), f"it ended by itself:\n{process.text()}"
    process.kill()
    there = folders.listing(str(killed))
    for directory in there.checkpoints.values():
      problems = checkpointer.verify(directory)
      assert not problems, problems
    say(
      f"kill {number} of {kills}: {what}; checkpoints {[*there.checkpoints]}, "
      f"remains {[os.path.basename(path) for path in there.leftovers]}",
      flush=True,
    )
  program.run(killed, length, model=model)
  program_lib.assert_same_run(killed, quiet, total)


def _main():
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--kills", type=int, default=100)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--model", default="net", choices=("net", "vit"))
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
  print(f"{options.kills} kills, {secs:.0f} s, and not a bit differs.")


if __name__ == "__main__":
  _main()
