"""What one GPU does: correct, fast against torch, and true to what is planned.

  make gpu-wheels     packages that a machine without network may lack
  make gpu            everything, in eight minutes on an H100 or H200
  benchmarks/gpu.sh   the same where nothing is installed but jax and torch
  benchmarks/gpu.sh --quick    tiny sizes, on a CPU too

The peers compile side by side at the start, in processes of their own, while
the GPU's results are compared with the CPU's. Nothing is measured before all
have compiled. Our programs compile one by one, each before its measurement,
since XLA times kernels when it compiles. Each part has a time limit, and a
part that fails or is late leaves the others alone; if a peer does, ours is
measured alone. Each figure is printed as a line of JSON when it is known, and a
table at the end, also after Ctrl-C.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks import adapter_step, measure, peer_process, run, step_rate

# Seconds after which peers that have not compiled are given up.
_START_LIMIT_SECS = 170
# Seconds to compile ours and to measure a pair.
_PAIR_LIMIT_SECS = 90
# Seconds of steps in a turn, about.
_TURN_SECS = 0.5
# Seconds in all; what does not begin or end before is left out by name.
_TOTAL_LIMIT_SECS = 475
# Seconds that a pair and a script need at least.
_LEAST_SECS = 15

# Names of pairs, in the order of measurement. The first one needs most memory:
# its sides do not take turns, and it leaves its memory to the others.
_PAIRS = ("llama", "vit", "decoder", "lora", "decode", "convnext")
# torch's Llama needs some 70 GB with four texts, while the other peers wait in
# the same memory. A device with less than this has two texts.
_FOUR_TEXTS_BYTES = 110e9
# Models of which half of the peak is expected.
_MFU_GOALS = ("Llama", "ViT-B/16")
# What a side's `run` raises if its process has failed, or was ended.
_FAILURES = (RuntimeError, BrokenPipeError, ValueError)
# Number of the comparison with the CPU, which has goals with tiny sizes too.
_CORRECT = 32
_LORA_BATCH = dict(batch_size=2, length=2048)
_DECODE = dict(batch_size=8, length=128, max_new=256)
_DECODE_QUICK = dict(batch_size=2, length=8, max_new=8)
_QUICK_CASES: dict[str, dict[str, Any]] = dict(
  convnext=dict(
    variant="tiny",
    depths=[1, 1, 1, 1],
    widths=[8, 16, 32, 64],
    size=32,
    batch_size=2,
  ),
  llama=dict(
    vocab_size=64,
    width=128,
    depth=1,
    num_kv_heads=1,
    mlp_dim=64,
    tied_head=True,
    length=8,
    batch_size=2,
  ),
)
_LLAMA_1B = dict(
  width=2048,
  depth=16,
  num_heads=32,
  num_kv_heads=8,
  mlp_dim=8192,
  vocab_size=128_256,
)

# Comparisons with the CPU, in processes side by side: most of their time is
# that of compilers.
_COMPARISONS = [
  (script, [f"--part={i}/3"])
  for script in ("gpu_correct", "gpu_losses")
  for i in (1, 2, 3)
]
# Seconds for each script that needs no peer, and its flags; in order of worth,
# as the last ones are left out if there is no time left.
_SCRIPTS: dict[str, tuple[float, list[str]]] = {
  "limits": (20, []),
  "gpu_run": (80, []),
  "checkpoint_stall": (60, ["--devices=1"]),
  "guard_cost": (60, []),
  "loop_overhead": (60, []),
}


class Side(NamedTuple):
  """A peer's process: its script, and options for it."""

  script: str
  options: dict[str, Any]
  python: str = sys.executable


class Pair(NamedTuple):
  """Ours and a peer's, which do the same work."""

  number: int  # Of the benchmark.
  name: str
  peer_name: str
  ours: Side
  peer: Side
  steps: int | None = None  # In a turn; None for about _TURN_SECS.
  has_mfu: bool = False
  # Whether the sides take turns. If not, ours leaves its memory to the peer.
  in_turns: bool = True
  needs_peer: bool = False  # Whether ours loads what the peer writes.


class Results:
  """All figures, printed as they come.

  Args:
    patience: factor of all time limits.
    quick: whether sizes are tiny, so that times have no goals.
  """

  def __init__(self, patience: float, quick: bool) -> None:
    self.patience, self.quick = patience, quick
    self.start_secs = time.monotonic()
    self.figures: list[dict[str, Any]] = []
    self.scripts: set[subprocess.Popen[str]] = set()  # That run now.
    self.interrupted = False

  def report(self, *args: Any, **kwargs: Any) -> None:
    """As measure.report."""
    goal = {"target": None} if self.quick else {}
    self.figures.append(measure.report(*args, **kwargs | goal))

  def add(self, figure: dict[str, Any]) -> None:
    """Prints a figure that a script has reported."""
    if self.quick and figure["benchmark"] != _CORRECT:
      figure["target"] = None
    print(json.dumps(figure), flush=True)
    self.figures.append(figure)

  def skip(self, *args: Any) -> None:
    """As measure.skip."""
    self.figures.append(measure.skip(*args))

  def begin(self, what: str) -> None:
    """Prints what begins now, and when."""
    secs = time.monotonic() - self.start_secs
    print(f"[{secs // 60:.0f}:{secs % 60:02.0f}] {what}", flush=True)

  def interrupt(self) -> None:
    """Ends the scripts that run now."""
    self.interrupted = True
    for process in [*self.scripts]:
      _kill(process)

  def left_secs(self) -> float:
    """Seconds until the time is up."""
    limit_secs = _TOTAL_LIMIT_SECS * self.patience
    return limit_secs - (time.monotonic() - self.start_secs)


def main() -> None:
  """Runs all parts, and prints a table."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--only", help="names of parts, separated by commas")
  parser.add_argument(
    "--patience", type=float, default=1.0, help="factor of all time limits"
  )
  args = parser.parse_args()
  parts = ["correct", "fast", *_SCRIPTS]
  only = args.only.split(",") if args.only else parts
  unknown = {*only} - {*parts, *_PAIRS}
  if unknown:
    expected = ", ".join([*parts, *_PAIRS])
    parser.error(
      f"unknown parts {sorted(unknown)}; expected some of {expected}"
    )
  # Leaves memory for the others.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
  device_bytes = 0 if args.quick else _check_device()
  results = Results(args.patience, args.quick)
  try:
    _run(args.quick, only, device_bytes, results)
  except KeyboardInterrupt:
    results.interrupt()
    print("\nInterrupted. These are the figures so far.")
  print(f"\n{time.strftime('%Y-%m-%d')}, `python -m benchmarks.gpu`", end=", ")
  print(f"{(time.monotonic() - results.start_secs) / 60:.1f} minutes\n")
  if args.quick:
    print("The sizes are tiny: times and rates say nothing of the program.\n")
  print("\n".join(run.table(results.figures)))
  if results.interrupted:
    sys.exit(128 + signal.SIGINT)


def _check_device() -> int:
  """Returns the bytes of the device; ends the program if it is not a GPU.

  On a CPU everything would be late.
  """
  code = (
    "import jax; x = jax.devices()[0]; print(x.platform, x.device_kind); "
    "print((x.memory_stats() or {}).get('bytes_limit', 0))"
  )
  found = subprocess.run(
    [sys.executable, "-c", code],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  ).stdout.strip()
  *_, device, memory = ["", "", *found.splitlines()]
  if not device.startswith(("gpu ", "cuda ", "rocm ")):
    print(device or memory)  # Another device, or an error.
    sys.exit("jax finds no GPU. To see that all runs on a CPU, add --quick.")
  print(f"{device}, {int(memory) / 1e9:.0f} GB", flush=True)
  return int(memory)


def _run(
  quick: bool, only: Sequence[str], device_bytes: int, results: Results
) -> None:
  with tempfile.TemporaryDirectory() as folder:
    pairs = [
      pair
      for name, pair in _pairs(quick, folder, device_bytes).items()
      if "fast" in only or name in only
    ]
    if pairs:
      results.begin(f"{len(pairs)} peers compile")
    with _started(pairs) as started:
      if "correct" in only:
        results.begin("results of the GPU and of the CPU")
        _correct(quick, results)
      for pair, ours, peer in started(results):
        results.begin(pair.name)
        _measure(pair, ours, peer, results, quick)
  for script, (limit_secs, flags) in _SCRIPTS.items():
    if script in only:
      results.begin(f"benchmarks.{script}")
      _script(script, flags, limit_secs, quick, results)


def _correct(quick: bool, results: Results) -> None:
  """Compares the GPU with the CPU; nothing is timed."""
  with concurrent.futures.ThreadPoolExecutor(len(_COMPARISONS)) as pool:
    limit_secs = _START_LIMIT_SECS
    waits = [
      pool.submit(_script, script, flags, limit_secs, quick, results)
      for script, flags in _COMPARISONS
    ]
    try:
      for wait in waits:
        wait.result()
    except KeyboardInterrupt:
      results.interrupt()
      raise


def _pairs(quick: bool, folder: str, device_bytes: int) -> dict[str, Pair]:
  """The pairs by name; `folder` is for a model that both sides load."""
  sizes = step_rate.GPU
  if device_bytes < _FOUR_TEXTS_BYTES:
    llama = sizes.cases["llama"] | dict(batch_size=2)
    sizes = sizes._replace(cases=sizes.cases | dict(llama=llama))
  if quick:
    sizes = step_rate.QUICK._replace(cases=step_rate.QUICK.cases | _QUICK_CASES)
  torch_python = os.environ.get("TORCH_PYTHON", sys.executable)
  pairs = {}
  for name in _PAIRS:
    if name in sizes.cases:
      case = step_rate.case_of(name, sizes)
      pairs[name] = Pair(
        23,
        case.name,
        "torch",
        Side("our_step", {"config": case.config.to_dict()}),
        Side("peer_torch_step", case.torch or {}, torch_python),
        has_mfu=True,
        in_turns=name != "llama",
      )
  model = adapter_step.QUICK if quick else adapter_step.GPU
  batch = dict(batch_size=2, length=8) if quick else _LORA_BATCH
  dtype = "float32" if quick else "bfloat16"
  lora = adapter_step.config_of(model, **batch, dtype=dtype)
  options = dict(model=model, rank=adapter_step.RANK, dtype=dtype, **batch)
  pairs["lora"] = Pair(
    28,
    f"LoRA of {model['depth']} layers of width {model['width']}, "
    f"{batch['batch_size']} x {batch['length']} tokens, {dtype}",
    "PEFT eager" if quick else "PEFT compiled",
    Side("our_step", {"config": lora.to_dict()}),
    Side("peer_peft_step", options | dict(compiled=not quick), torch_python),
  )
  model = adapter_step.QUICK if quick else _LLAMA_1B
  decode = _DECODE_QUICK if quick else _DECODE
  options = dict(model=model, folder=os.path.join(folder, "llama"), **decode)
  pairs["decode"] = Pair(
    33,
    f"decoding {decode['batch_size']} x {decode['max_new']} tokens after "
    f"{decode['length']}, Llama of width {model['width']}, bfloat16",
    "transformers",
    Side("our_decode", options),
    Side("peer_decode", options, torch_python),
    steps=decode["max_new"],
    needs_peer=True,
  )
  return {name: pairs[name] for name in _PAIRS if name in pairs}


@contextlib.contextmanager
def _started(
  pairs: Sequence[Pair],
) -> Iterator[Callable[[Results], Iterator[tuple[Pair, Any, Any]]]]:
  """Starts the processes of all pairs; they end with the context.

  Yields:
    A function that waits for all, reports those that failed, and yields the
    others as (pair, ours, peer or None).
  """
  peers: list[tuple[peer_process.Peer, peer_process.Peer]] = []
  with concurrent.futures.ThreadPoolExecutor(2 * len(pairs) or 1) as pool:
    start_secs = time.monotonic()
    waits = []

    def ready(results: Results) -> Iterator[tuple[Pair, Any, Any]]:
      limit_secs = _START_LIMIT_SECS * results.patience
      left_secs = start_secs + limit_secs - time.monotonic()
      everything = [wait for both in waits for wait in both]
      concurrent.futures.wait(everything, timeout=max(0, left_secs))
      pending = {wait for wait in everything if not wait.done()}
      for both, waited in zip(peers, waits):
        for peer, wait in zip(both, waited):
          if wait in pending:
            peer.close()
      for pair, (ours, peer), waited in zip(pairs, peers, waits):
        reasons = [
          f"not ready after {limit_secs:.0f} s" if x in pending else _failure(x)
          for x in waited
        ]
        reasons[1] = reasons[1] or _difference(ours, peer)
        if reasons[1] and pair.needs_peer:
          reasons[0] = "it loads what the peer writes"
        name = _ratio_name(pair)
        for side, reason in zip((pair.peer, pair.ours), reversed(reasons)):
          if reason:
            why = f"{side.script}: {reason}"
            results.skip(pair.number, name, why)
            name = f"step, ours: {pair.name}"
        if reasons[1]:
          peer.close()
        if not reasons[0]:
          yield pair, ours, None if reasons[1] else peer
        for side in (ours, peer):
          side.close()

    try:
      for pair in pairs:
        ours, peer = (
          peer_process.Peer(
            x.script, x.options, _environment(x), x.python, False
          )
          for x in (pair.ours, pair.peer)
        )
        peers.append((ours, peer))
        waits.append([pool.submit(side.wait) for side in (ours, peer)])
        if pair.needs_peer:
          waits[-1][1].add_done_callback(functools.partial(_follow, ours))
      yield ready
    finally:
      for both in peers:
        for peer in both:
          peer.close()


def _environment(side: Side) -> dict[str, str]:
  env = step_rate.torch_environment() | {
    "HF_HUB_OFFLINE": "1",
    # All compile at the same time.
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
  }
  if side.python != sys.executable:  # Our packages may not fit another Python.
    own = os.environ.get("PYTHONPATH", "")
    env["PYTHONPATH"] = env["PYTHONPATH"].removesuffix(own).rstrip(os.pathsep)
  return env


def _follow(ours: peer_process.Peer, wait: Any) -> None:
  """Ends ours, which would wait for ever, if its peer has failed."""
  if wait.exception():
    ours.close()


def _failure(wait: Any) -> str:
  """Why a process has failed, or ""."""
  error = wait.exception()
  return (_last_line(error) or "ended without a message") if error else ""


def _difference(ours: peer_process.Peer, peer: peer_process.Peer) -> str:
  """Why two sides that are ready do not do the same work, or ""."""
  sides = [getattr(side, "ready", None) for side in (ours, peer)]
  if None not in sides:
    for what in ("platform", "parameters"):
      own, theirs = (side.get(what) for side in sides)
      if own != theirs:
        return f"its {what} is {theirs}, ours is {own}"
  return ""


def _ratio_name(pair: Pair, how: str = "") -> str:
  how = f" {how}" if how else ""
  return f"rate, ours / {pair.peer_name}{how}: {pair.name}"


def _measure(
  pair: Pair,
  ours: peer_process.Peer,
  peer: peer_process.Peer | None,
  results: Results,
  quick: bool,
) -> None:
  """Measures ours and, if there is one, the peer."""
  limit_secs = min(_PAIR_LIMIT_SECS * results.patience, results.left_secs())
  if limit_secs < _LEAST_SECS:
    why = "no time left; --only=fast runs the pairs alone"
    results.skip(pair.number, _ratio_name(pair), why)
    return
  sides = {"ours": ours} | ({"peer": peer} if peer else {})
  timer = threading.Timer(
    limit_secs, lambda: [side.close() for side in sides.values()]
  )
  start_secs = time.monotonic()
  timer.start()
  turns: dict[str, list[Any]] = {}
  steps = pair.steps or 2
  try:
    ours.run(steps)  # Compiles.
    if pair.in_turns:
      steps = pair.steps or _steps(*sides.values())
      turns = _turns(sides, steps, quick)
    else:
      steps = pair.steps or _steps(ours)
      turns = _turns({"ours": ours}, steps, quick)
      ours.close()
      if peer:
        turns |= _turns({"peer": peer}, steps, quick)
  except _FAILURES as e:
    late = time.monotonic() - start_secs >= limit_secs
    why = f"stopped after {limit_secs:.0f} s" if late else _last_line(e)
    results.skip(
      pair.number, _ratio_name(pair), why or "ended without a message"
    )
    if peer and not turns and not late:  # It may be the one that failed.
      peer.close()
      with contextlib.suppress(*_FAILURES):
        steps = pair.steps or _steps(ours)
        turns = _turns({"ours": ours}, steps, quick)
  finally:
    timer.cancel()
    # They leave their memory to the next pair.
    for side in sides.values():
      side.close()
  secs = {name: [_secs(x) / steps for x in xs] for name, xs in turns.items()}
  if peer and "peer" in secs:
    _report_ratio(pair, peer.ready, secs, results)
  for side, values in secs.items():
    label = f"step, {'ours' if side == 'ours' else pair.peer_name}"
    results.report(pair.number, f"{label}: {pair.name}", values, unit="s")
  if turns:
    _report_facts(pair, ours.ready, turns["ours"], secs["ours"], results)


def _turns(
  sides: dict[str, peer_process.Peer], steps: int, quick: bool
) -> dict[str, list[Any]]:
  calls = {
    name: functools.partial(side.run, steps) for name, side in sides.items()
  }
  return measure.interleave(calls, 1 if quick else measure.REPEATS)


def _report_ratio(
  pair: Pair,
  ready: dict[str, Any],
  secs: dict[str, list[float]],
  results: Results,
) -> None:
  """Reports the ratio, which has a goal if the peer was compiled."""
  how = ready.get("how", "")
  name = _ratio_name(pair, how)
  ratios = measure.ratios(secs["peer"], secs["ours"])
  if how == "eager":
    results.report(pair.number, name, ratios)
    results.skip(pair.number, _ratio_name(pair, "compiled"), ready["why"])
  else:
    results.report(pair.number, name, ratios, target=">= 1.0")


def _report_facts(
  pair: Pair,
  ready: dict[str, Any],
  turns: Sequence[dict[str, Any]],
  secs: Sequence[float],
  results: Results,
) -> None:
  """Reports MFU, memory and the time to compile."""
  peak_flops = ready.get("peak_flops")
  if pair.has_mfu and not peak_flops:
    results.skip(2, f"MFU: {pair.name}", "this device's peak is unknown")
  elif pair.has_mfu:
    flops = ready["model_flops"]
    mfu = [flops / (x * peak_flops) for x in secs]
    target = ">= 0.5" if pair.name.startswith(_MFU_GOALS) else None
    results.report(2, f"MFU: {pair.name}", mfu, target=target)
  last = turns[-1]
  if "compile_secs" in last:
    value = [last["compile_secs"]]
    results.report(5, f"compile time: {pair.name}", value, unit="s")
  if last.get("planned_bytes") and last.get("peak_bytes"):
    planned = last["planned_bytes"]
    value = [last["peak_bytes"] / planned]
    results.report(34, f"peak memory / planned: {pair.name}", value)
    value = [planned / 1e9]
    results.report(34, f"planned memory: {pair.name}", value, unit="GB")
  elif "planned_bytes" in last:
    name = f"peak memory / planned: {pair.name}"
    results.skip(34, name, "this device does not count its memory")


def _steps(*sides: peer_process.Peer) -> int:
  """Number of steps of a turn; also warms the sides up."""
  slowest = 0.0
  for side in sides:
    side.run(2)
    slowest = max(slowest, _secs(side.run(2)) / 2)
  return max(2, min(50, round(_TURN_SECS / slowest)))


def _secs(turn: Any) -> float:
  return float(turn["secs"] if isinstance(turn, dict) else turn[0])


def _script(
  name: str,
  flags: Sequence[str],
  limit_secs: float,
  quick: bool,
  results: Results,
) -> None:
  """Runs a benchmark that needs no peer, for a limited time."""
  limit_secs = min(limit_secs * results.patience, results.left_secs())
  label = " ".join([f"benchmarks.{name}", *flags])
  if limit_secs < _LEAST_SECS:
    results.skip(0, label, f"no time left; --only={name} runs it alone")
    return
  process = subprocess.Popen(
    [
      *(sys.executable, "-m", f"benchmarks.{name}"),
      *flags,
      *(["--quick"] if quick else []),
    ],
    env=measure.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )
  results.scripts.add(process)
  if results.interrupted:  # Meanwhile, in the main thread.
    _kill(process)
  timer = threading.Timer(limit_secs, lambda: _kill(process))
  timer.start()
  last_lines: collections.deque[str] = collections.deque(maxlen=3)
  try:
    for line in process.stdout or ():
      if line.startswith('{"benchmark"'):
        results.add(json.loads(line))
      elif line.strip():
        last_lines.append(line.strip())
    code = process.wait()
  finally:  # After Ctrl-C too.
    timer.cancel()
    _kill(process)
    results.scripts.discard(process)
  if code:
    why = " / ".join(last_lines)[-400:]
    if code == -signal.SIGKILL:
      why = f"stopped after {limit_secs:.0f} s, before its other figures"
    if results.interrupted:
      why = "interrupted"
    results.skip(0, label, why)


def _kill(process: subprocess.Popen[str]) -> None:
  """Ends a process that still runs, with all that it has started."""
  if process.poll() is None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)


def _last_line(error: BaseException) -> str:
  lines = str(error).strip().splitlines()
  return lines[-1][:300] if lines else ""


if __name__ == "__main__":
  main()
