"""Runs of `python -m bigtrain.main` that share the time of the imports.

Importing the program takes seconds. A server process imports it once and forks
for each run. No jax backend exists before the fork, so each run has its own
flags and its own number of devices.
"""

import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

# As in support.processes: a busy machine needs minutes for what otherwise takes
# seconds.
LIMIT_SECS = 900


class Finished(NamedTuple):
  """A run that has ended.

  Attributes:
    code: exit code; negative for a signal.
    output: standard output and standard error.
  """

  code: int
  output: str


class Server:
  """The process that runs are forked from.

  Args:
    env: changes to the environment.
  """

  def __init__(self, **env: str):
    self._process = subprocess.Popen(
      [sys.executable, __file__],
      env=dict(os.environ, **env),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def run(
    self,
    arguments: Sequence[str],
    cwd: os.PathLike[str],
    env: dict[str, str] | None = None,
    timeout_secs: int = LIMIT_SECS,
  ) -> Finished:
    """Runs bigtrain.main, and returns when it has ended.

    Args:
      arguments: of the command line, without the program's name.
      cwd: working directory; gets the file main.log.
      env: further changes to the environment.
      timeout_secs: after this time the run ends by SIGALRM.
    """
    job = [list(arguments), str(cwd), env or {}, timeout_secs]
    print(json.dumps(job), file=self._process.stdin, flush=True)
    code = int(self._process.stdout.readline())
    return Finished(code, (pathlib.Path(cwd) / "main.log").read_text())

  def close(self) -> None:
    """Ends the server."""
    self._process.stdin.close()
    self._process.wait(60)


def _serve() -> None:
  import bigtrain.main  # noqa: F401
  from bigtrain.pp import host_tensorflow

  host_tensorflow.load()
  for line in sys.stdin:
    pid = os.fork()
    if not pid:
      _run(*json.loads(line))
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)


def _run(
  arguments: list[str], cwd: str, env: dict[str, str], timeout_secs: int
) -> None:
  """Becomes `python -m bigtrain.main`."""
  signal.alarm(timeout_secs)
  os.environ.update(env)
  os.chdir(cwd)
  log = os.open("main.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  null = os.open(os.devnull, os.O_RDONLY)
  for source, target in ((null, 0), (log, 1), (log, 2)):
    os.dup2(source, target)
  sys.argv = ["bigtrain.main", *arguments]
  try:
    runpy.run_module("bigtrain.main", run_name="__main__", alter_sys=True)
  finally:
    os._exit(99)  # main ends the process itself.


if __name__ == "__main__":
  _serve()
