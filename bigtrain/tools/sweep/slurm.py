"""Submits the variants of a sweep as Slurm jobs, by launch/slurm.sbatch."""

import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

from bigtrain.config.errors import ConfigError
from bigtrain.tools.sweep import local, results

_SCRIPT = pathlib.Path(__file__).parents[3] / "launch" / "slurm.sbatch"
# Slurm's states of jobs that do not run yet. All others that squeue lists do.
_QUEUED = {"PENDING": results.QUEUED, "CONFIGURING": results.QUEUED}


def update(table: results.Results, logs: str) -> None:
  """Updates the states of entries with a job, from squeue and their logs."""
  listed = _run(["squeue", "--noheader", "--me", "--format=%i %T"])
  states = dict(line.split() for line in listed.splitlines())
  for entry in table.entries:
    if entry.state == results.FINISHED or not entry.job:
      continue
    entry.reason = ""
    if state := states.get(entry.job):
      entry.state = _QUEUED.get(state, results.RUNNING)
      continue
    # The job has ended. Process 0 of its newest start wrote the last lines.
    stem = glob.escape(os.path.join(logs, entry.variant.name))
    paths = glob.glob(f"{stem}-{entry.job}-0.log")
    text = pathlib.Path(paths[0]).read_text(errors="replace") if paths else ""
    line = local.last_line(paths[0]) if paths else ""
    if line.startswith("preempted: "):
      entry.state = results.INTERRUPTED
    elif re.search(r"^(Finished at step|error: )", text, re.M) is None:
      entry.state = results.FAILED
      entry.reason = line or f"job {entry.job} has ended; see {logs}"
    elif text.rfind("\nFinished at step") > text.rfind("\nerror: "):
      entry.state = results.FINISHED
    else:
      entry.state, entry.reason = results.FAILED, line


def submit(
  table: results.Results,
  command: Callable[[results.Entry], list[str]],
  jobs: int | None,
  options: Sequence[str],
  logs: str,
) -> None:
  """Submits the variants that are neither finished, queued nor running.

  At most `jobs` run at a time, if given. `options` go to sbatch.
  """
  if not _SCRIPT.is_file():
    raise ConfigError(
      f"--launcher=slurm: no file {_SCRIPT}; install bigtrain from a checkout."
    )
  os.makedirs(logs, exist_ok=True)
  leave_alone = (results.FINISHED, results.QUEUED, results.RUNNING)
  sweep = os.path.basename(os.path.dirname(table.entries[0].workdir))
  for i, entry in enumerate(table.entries):
    if entry.state in leave_alone:
      continue
    name = entry.variant.name
    dependency = []
    if jobs:
      # Slurm runs one "singleton" of a name at a time, so `jobs` names.
      name = f"{sweep}-{i % jobs}"
      dependency = ["--dependency=singleton"]
    log_stem = os.path.join(logs, entry.variant.name)
    # After the interpreter and "-m bigtrain.main" come the program's flags.
    flags = command(entry)[3:]
    output = _run(
      [
        "sbatch",
        "--parsable",
        "--nodes=1",
        f"--job-name={name}",
        f"--output={log_stem}-%j.log",
        *dependency,
        *options,  # Last, because sbatch uses the second of two equal options.
        str(_SCRIPT),
        *flags,
      ],
      {**os.environ, "PYTHON": sys.executable, "LOG": log_stem},
    )
    entry.job = output.strip().partition(";")[0]
    entry.state = results.QUEUED
    entry.reason = ""
    entry.secs = None
    print(f"{entry.variant.name}: job {entry.job}", flush=True)
    table.write()


def _run(command: Sequence[str], env: dict[str, str] | None = None) -> str:
  if not shutil.which(command[0]):
    raise ConfigError(f"--launcher=slurm: {command[0]} is not installed.")
  ended = subprocess.run(
    command, env=env, capture_output=True, text=True, check=False
  )
  if ended.returncode:
    message = " ".join(ended.stderr.split())
    raise ConfigError(f"--launcher=slurm: {command[0]}: {message}")
  return ended.stdout
