"""Runs the program with a fault that can only be injected from inside.

python -m faults.run_with_fault FAULT [ARGUMENT ...] -- --config=... ...

kill POINT N     SIGKILL when a save reaches POINT (see checkpointer._point)
                 for the N-th time
chunk N          the kernel ends the process in the middle of a file of the
                 N-th save, by SIGXFSZ
removal N        SIGKILL in the middle of the N-th removal of a directory
hold POINT N FLAG   the N-th time, creates FLAG and waits for FLAG.go
slow POINT SECS FLAG   sleeps there every time, and adds a line to FLAG
hang PHASE       never returns from making the data ("start") or compiling
limit N [BYTES]  limits the size of files from the N-th save on: a full disk
reads FILE       adds the bytes of arrays that are read from a workdir to FILE
logger PROBLEM   W&B is installed, but its first call "fails" or "hangs"
unprivileged     as a user without root's rights
"""

from bigtrain.cluster import process

if __name__ == "__main__":
  process.catch_signals()  # Like the program itself.

import ctypes
import os
import resource
import shutil
import signal
import sys
import time
import types

import jax

from bigtrain import command, main
from bigtrain.checkpoints import checkpointer, folders, integrity
from bigtrain.inputs import sources
from bigtrain.reports import writers
from faults import waiting

_CAPABILITY_VERSION_3 = 0x20080522
_IGNORE_PERMISSIONS = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, _READ_SEARCH
_CUT_AT_BYTES = 100_000


def _die():
  os.kill(os.getpid(), signal.SIGKILL)
  time.sleep(60)


def _sleep_forever():
  while True:
    time.sleep(1)


def _at(point, number, action):
  """Calls `action` when saves reach a point for the `number`-th time."""
  count = 0

  def on_point(name):
    nonlocal count
    count += name == point
    if name == point and count == int(number):
      action()

  checkpointer._point = on_point


def _limit_files(num_bytes):
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def kill(point, number):
  _at(point, number, _die)


def chunk(number):
  signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it.
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  _at("metadata written", number, lambda: _limit_files(_CUT_AT_BYTES))


def removal(number):
  rmtree, count = shutil.rmtree, 0

  def remove(path):
    nonlocal count
    # A killed run may also have left an attempt, which has perhaps no arrays.
    count += ".del-" in path
    if ".del-" in path and count == int(number):
      rmtree(os.path.join(path, "params"))
      _die()
    rmtree(path)

  folders.shutil.rmtree = remove


def hold(point, number, flag):
  _at(point, number, lambda: waiting.wait_here(flag))


def slow(point, secs, flag):
  def on_point(name):
    with open(flag, "a") as file:
      file.write(f"{name}\n")
    if name == point:
      time.sleep(float(secs))

  checkpointer._point = on_point


def hang(phase):
  if phase == "start":
    sources.make_source = lambda *args: _sleep_forever()
  else:
    jax.stages.Lowered.compile = lambda *args: _sleep_forever()


def limit(number, num_bytes=_CUT_AT_BYTES):
  _at("begin", number, lambda: _limit_files(int(num_bytes)))


def reads(path, workdir):
  read_each = integrity.read_each

  def counted(directory, *args):
    for part, value in read_each(directory, *args):
      if directory.startswith(workdir):
        with open(path, "a") as file:
          file.write(f"{value.nbytes}\n")
      yield part, value

  integrity.read_each = counted


def logger(problem):
  def init(**options):
    if problem == "hangs":
      _sleep_forever()
    raise OSError("no route to host")

  fake = types.ModuleType("wandb")
  fake.init, fake.api = init, types.SimpleNamespace(api_key="key")
  sys.modules["wandb"] = fake
  writers._MAX_CALL_SECS = 1.0  # In place of two minutes.


def unprivileged():
  # Another user might not be able to read the Python installation.
  libc = ctypes.CDLL(None, use_errno=True)
  header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
  sets = (ctypes.c_uint32 * 6)()
  if libc.capget(header, sets):
    raise OSError(ctypes.get_errno(), "capget")
  for i in range(3):  # Effective, permitted, inheritable.
    sets[i] &= ~_IGNORE_PERMISSIONS
  if libc.capset(header, sets):
    raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
  end = sys.argv.index("--")
  fault, *arguments = sys.argv[1:end]
  globals()[fault](*arguments)
  del sys.argv[1 : end + 1]
  command.run(main.train)
