"""Shared jobs of two processes, for all tests that look at their results.

Starting two processes takes longer than most tests that need them. So one job
runs several parts, one after the other. A part is a function of a folder that
both processes call; its module stands beside the test. The part may return
JSON. The fixture `two_processes` of conftest.py runs the job, if no other test
has needed it before.

  python -m support.two_processes FOLDER PART [PART ...]
"""

import fcntl
import importlib
import json
import os
import pathlib
import sys
from typing import Any, NamedTuple

from support import processes

# Each job: simulated devices of each process, and parts.
JOBS = (
  # Quick tests share this one; the others are for slow tests.
  (
    4,
    (
      "inputs.global_batches.make",
      "checkpoints.local_together.run",
      "checkpoints.save_together.run",
    ),
  ),
  (4, ("test_two_processes.train_split_examples",)),
  (
    2,
    (
      "test_two_processes.train_digits",
      "runtime.test_hooks_of_two_processes.train_until_stopped",
      "runtime.test_hooks_of_two_processes.train_until_nan",
      "runtime.test_hooks_of_two_processes.train_acting",
      "hooks.test_replicas.train_with_a_flip",
      "tasks.test_policy_gradient.train_with_notes",
      "objective.test_turns.train_together",
      "objective.test_turns.train_split",
      "evaluators.test_evaluators_of_two_processes.evaluate",
    ),
  ),
)
_LIMIT_SECS = 1800.0


class Part(NamedTuple):
  """Results of a part.

  Attributes:
    folder: the folder that the part was called with.
    results: return value of the function on each process.
    texts: output and log of each process during the part.
  """

  folder: pathlib.Path
  results: list[Any]
  texts: list[str]


def part(shared: pathlib.Path, name: str) -> Part:
  """Returns the results of a part; runs its job if necessary.

  Args:
    shared: folder shared by all workers of a test session.
    name: dotted name of the function.

  Raises:
    AssertionError: a process failed before the part was finished.
  """
  number = next(i for i, (_, parts) in enumerate(JOBS) if name in parts)
  folder = shared / f"job-{number}"
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / "lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not (folder / "ended").exists():
      try:
        _run(folder, *JOBS[number])
      finally:
        (folder / "ended").touch()  # Another run would fail in the same way.
  texts = [log.read_text() for log in sorted(folder.glob("*.log"))]
  done = all(_end(name) in text for text in texts)
  assert done and len(texts) == 2, "\n".join(t[-3000:] for t in texts)
  results = [
    json.loads((folder / name / f"result-{i}.json").read_text())
    for i in range(2)
  ]
  texts = [
    text.partition(_begin(name))[2].partition(_end(name))[0] for text in texts
  ]
  return Part(folder / name, results, texts)


def _run(folder, devices, parts):
  with processes.Processes(folder) as started:
    command = [
      sys.executable,
      "-m",
      "support.two_processes",
      str(folder),
      *parts,
    ]
    job = started.start_job(command, devices=devices)
    processes.exit_codes(job, _LIMIT_SECS)


def _begin(name):
  return f"begin {name}\n"


def _end(name):
  return f"end {name}\n"


def _main():
  from absl import logging

  from bigtrain.cluster import process
  from bigtrain.config import settings
  from support import compile_cache

  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO)
  process.join_job(settings.Config({}))
  compile_cache.enable()
  folder = pathlib.Path(sys.argv[1])
  for name in sys.argv[2:]:
    print(_begin(name), end="", flush=True)
    module, _, function = name.rpartition(".")
    (folder / name).mkdir(exist_ok=True)
    result = getattr(importlib.import_module(module), function)(folder / name)
    file = folder / name / f"result-{os.environ['JAX_PROCESS_ID']}.json"
    file.write_text(json.dumps(result))
    print(_end(name), end="", flush=True)
  process.exit_now(process.EXIT_OK)


if __name__ == "__main__":
  _main()
