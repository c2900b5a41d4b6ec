"""Figure 24: the start, input, speed and save of a run by the command line.

GPT-2 124M on tokens of noise, twice: with an empty compile cache, then with the
one that the first run has filled. Its layers are under scan, as those of a run
that wants to start soon. The other figures are the second run's own, from its
log.
"""

import json
import os
import tempfile
import time

from benchmarks import measure

_STEPS = 60
_LOG_STEPS = 20
_SIZES = (
  "kind=decoder,length=1024,batch_size=32,dtype=bfloat16,vocab_size=50304,scan"
)
_QUICK_SIZES = (
  "kind=decoder,variant=gpt2_mu,length=16,batch_size=4,vocab_size=64"
)


def main() -> None:
  """Prints figures of both runs."""
  args = measure.arguments(__doc__)
  sizes = _QUICK_SIZES if args.quick else _SIZES
  steps, log_steps = (6, 2) if args.quick else (_STEPS, _LOG_STEPS)
  name = "a run of GPT-2" + (
    "" if args.quick else " 124M, scan, 32 x 1,024 tokens"
  )
  with tempfile.TemporaryDirectory() as folder:
    cache = os.path.join(folder, "cache")
    for start in ("cold", "warm"):
      workdir = os.path.join(folder, start)
      first_secs, log = _run(sizes, steps, log_steps, workdir, cache)
      measure.report(
        24, f"command to first step, {start}: {name}", [first_secs], unit="s"
      )
    for key in ("data_wait_fraction", "mfu", "step_secs", "tokens_per_sec"):
      if key in log:
        measure.report(24, f"{key}: {name}", [log[key]], unit="as logged")
      else:
        measure.skip(24, f"{key}: {name}", "not logged for this device")
    for key, value in log.items():
      if key.startswith("account/") and value:
        measure.report(24, f"{key}: {name}", [value], unit="s")


def _run(
  sizes: str, steps: int, log_steps: int, workdir: str, cache: str
) -> tuple[float, dict[str, float]]:
  """Returns (seconds from the command to the first step, last log entry)."""
  command = [
    "-m",
    "bigtrain.main",
    f"--config=benchmarks/synthetic_text.py:{sizes}",
    f"--workdir={workdir}",
    f"--config.compile_cache={cache}",
    f"--config.total_steps={steps}",
    f"--config.log_steps={log_steps}",
    f"--config.ckpt_steps={steps // 2}",
    "--config.schedule.warmup_steps=1",
    "--config.hooks={'first': {'type': 'benchmarks.gpu_run.FirstStep'}}",
  ]
  start_secs = time.time()
  first_secs = float("nan")
  for line in measure.lines(*command):
    if line.startswith("first step at "):
      first_secs = float(line.split()[-1]) - start_secs
  entries = []
  with open(os.path.join(workdir, "metrics.jsonl")) as file:
    entries = [json.loads(line) for line in file]
  merged: dict[str, float] = {}
  for entry in entries:
    merged |= entry
  return first_secs, merged


class FirstStep:
  """A hook that prints when the first step has been computed."""

  def __init__(self, context):
    self._context = context
    self._printed = False

  def after_step(self, step: int) -> None:
    """Waits for the first step alone."""
    if not self._printed:
      import jax

      jax.block_until_ready(self._context.state)
      print(f"first step at {time.time()}", flush=True)
      self._printed = True


if __name__ == "__main__":
  main()
