"""Runs the program and starts it again when it is preempted or fails.

  python -m bigtrain.tools.supervise -- \\
      python -m bigtrain.main --config=configs/x.py --workdir=runs/x

The command is started again after code 75 (preempted), code 1 (any failure but
a mistake in the config) and death by a signal, after a wait that doubles with
each failure. Any other code ends the supervisor. So do several starts in a row
without progress; progress is a newer checkpoint or log entry.

SIGTERM, SIGUSR1 and SIGINT are passed on to the command and also end the
supervisor. SIGUSR2 is only passed on. If the supervisor is killed, the kernel
sends SIGTERM to the command, which may be a launch script of several processes.
This needs Linux.
"""

import argparse
import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from bigtrain.checkpoints import folders
from bigtrain.checkpoints.manifest import CheckpointError
from bigtrain.cluster import process
from bigtrain.config.errors import ConfigError, check_number
from bigtrain.files import paths
from bigtrain.reports import log_entries
from bigtrain.tools import arguments, exits

_ENDING = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
_PASSED_ON = {*_ENDING, signal.SIGUSR2}
_AWAITED = {*_PASSED_ON, signal.SIGCHLD}  # SIGCHLD: the command has ended.

_PR_SET_PDEATHSIG = 1  # From linux/prctl.h.
# A shell's exit code of a command that signal n has killed is 128 + n.
_KILLED = 128


def supervise(
  command: Sequence[str], workdir: str, options: argparse.Namespace
) -> int:
  """Runs a command until it has finished, and returns the exit code.

  Call this from a process without other threads: it blocks signals so that it
  can wait for them and for the command at the same time. The options are those
  of the command line.
  """
  unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
  newest = _newest_step(workdir)
  starts = 0
  failures = 0  # Starts in a row without progress.
  while True:
    starts += 1
    began = time.monotonic()
    child = _start(command, unblocked)
    told_to_end = False
    while not _has_ended(child):
      number = signal.sigwaitinfo(_AWAITED).si_signo
      if number in _PASSED_ON:
        child.send_signal(number)
        told_to_end |= number in _ENDING
    code = _reap(child)
    secs = time.monotonic() - began
    if told_to_end or not _may_start_again(code, options):
      return code
    before = newest
    newest = max(before, _newest_step(workdir))
    failures = 0 if newest > before else failures + 1
    ended = f"start {starts} ended with code {code} after {secs:.0f} s"
    if failures >= options.failures:
      _print(
        f"giving up: {failures} start(s) in a row made no progress beyond step "
        f"{newest}; {ended}. Its last lines give the reason."
      )
      return code
    wait_secs = min(
      options.wait_secs * 2 ** max(failures - 1, 0), options.most_wait_secs
    )
    _print(
      f"{ended}, newest step {newest}; starting again in {wait_secs:g} s "
      f"({failures} of {options.failures} starts without progress)."
    )
    if _sleep(wait_secs):
      return code


def _start(
  command: Sequence[str], unblocked: Iterable[int]
) -> "subprocess.Popen[bytes]":
  """Starts the command, which gets SIGTERM if this process dies.

  It has its own process group. In the terminal's group, Ctrl-C would reach it
  twice, and the second signal ends a run without a save.
  """
  libc = ctypes.CDLL(None, use_errno=True)
  own_pid = os.getpid()

  def prepare() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != own_pid:  # The supervisor died before that call.
      os._exit(process.EXIT_ERROR)

  return subprocess.Popen(command, process_group=0, preexec_fn=prepare)


def _has_ended(child: "subprocess.Popen[bytes]") -> bool:
  # WNOWAIT: until it is reaped, nobody else can get the number of its process
  # group, which `_reap` kills.
  how = os.WEXITED | os.WNOHANG | os.WNOWAIT
  return os.waitid(os.P_PID, child.pid, how) is not None


def _reap(child: "subprocess.Popen[bytes]") -> int:
  """Kills what is left of the command's process group; returns its code."""
  with contextlib.suppress(ProcessLookupError):  # The group is empty.
    os.killpg(child.pid, signal.SIGKILL)
  code = child.wait()
  return _KILLED - code if code < 0 else code


def _may_start_again(code: int, options: argparse.Namespace) -> bool:
  if code == process.EXIT_PREEMPTED:
    return bool(options.when_preempted == "restart")
  killed = _KILLED < code <= _KILLED + max(signal.valid_signals())
  return killed or code == process.EXIT_ERROR


def _newest_step(workdir: str) -> int:
  try:
    entries = log_entries.read(workdir)
    saved_step = folders.newest(workdir) or 0
  except (OSError, CheckpointError) as e:
    _print(f"progress is unknown: {e}")
    return 0
  logged_step = entries[-1]["step"] if entries else 0
  return max(saved_step, logged_step)


def _sleep(secs: float) -> bool:
  """Sleeps; returns early, with True, after a signal that ends the run."""
  deadline = time.monotonic() + secs
  while (left := deadline - time.monotonic()) > 0:
    info = signal.sigtimedwait(_AWAITED, left)
    if info is not None and info.si_signo in _ENDING:
      return True
  return False


def _print(line: str) -> None:
  print(f"supervise: {line}", file=sys.stderr, flush=True)


def _workdir_of(command: Sequence[str]) -> str:
  for i, word in enumerate(command):
    if word == "--workdir" and i + 1 < len(command):
      return command[i + 1]
    if word.startswith("--workdir="):
      return word.partition("=")[2]
  raise ConfigError(
    f"{shlex.join(command)}: expected a command with --workdir=DIR, whose "
    "checkpoints and log entries show progress."
  )


def _parser() -> arguments.Parser:
  parser = arguments.Parser(
    "supervise", __doc__, usage="%(prog)s [options] -- COMMAND ..."
  )
  parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
  parser.add_argument(
    "--failures",
    type=int,
    default=5,
    help="give up after this many starts in a row without progress "
    "(default: %(default)s)",
  )
  parser.add_argument(
    "--wait_secs",
    type=float,
    default=1.0,
    help="wait before a new start; it doubles with each start without progress "
    "(default: %(default)s)",
  )
  parser.add_argument(
    "--most_wait_secs",
    type=float,
    default=300.0,
    help="upper limit of the wait (default: %(default)s)",
  )
  parser.add_argument(
    "--when_preempted",
    default="restart",
    choices=["restart", "end"],
    help="after exit code 75, start again, or end so that a scheduler can "
    "requeue the job (default: %(default)s)",
  )
  return parser


@exits.in_one_line()
def main(argv: Sequence[str]) -> int:
  args = _parser().parse_args(argv)
  command = args.command
  if command[:1] == ["--"]:
    command = command[1:]
  if not command:
    raise ConfigError("no command: expected -- python -m bigtrain.main ...")
  if not hasattr(ctypes.CDLL(None), "prctl"):
    raise ConfigError("this tool needs Linux.")
  check_number("--failures", args.failures, least=1, whole=True)
  check_number("--wait_secs", args.wait_secs, least=0)
  check_number("--most_wait_secs", args.most_wait_secs, least=0)
  try:
    return supervise(command, paths.absolute(_workdir_of(command)), args)
  except FileNotFoundError as e:
    raise ConfigError(f"{e.filename}: no such program.") from e


if __name__ == "__main__":
  sys.exit(main())
