"""Benchmark 12: the updates of published configs, judged by the TPU's compiler.

libtpu compiles the update as main builds it for chips that are absent, and
tools.plan reads the program. A step takes the cycles that the compiler
estimates, plus the time in which it waits for transfers at the published
bandwidth. The figures leave out the time of kernels (Pallas), which the
compiler does not know, norms of steps with a row, and the host. The same
program has the same cycles in each compilation, so one is enough.

Sharded updates are compared with unsharded updates of the same batch.

  python -m benchmarks.compilers --only=siglip,llama_1b
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import measure

_NUMBER = 12


class Case(NamedTuple):
  """An update to compile.

  Attributes:
    config: config file, with arguments.
    hardware: entry of bigtrain/tools/plan/hardware.py.
    devices: number of chips.
    batch_size: examples per step.
    changes: changes of the config, such as "model.scan=True".
    fsdp: number of chips that share a state; None for the config's.
    replica_too: whether to compare it with an unsharded state.
  """

  config: str
  hardware: str
  devices: int
  batch_size: int
  changes: tuple[str, ...] = ()
  fsdp: int | None = None
  replica_too: bool = False


# Layers are under scan, so the time to compile does not depend on their number.
_SCAN = "model.scan=True"
_DOTS = "model.remat_policy=dots_with_no_batch_dims_saveable"
_V5E = ("tpu_v5e", 16)
CASES = {
  "siglip": Case("siglip.py", *_V5E, 1024, replica_too=True),
  "t5_1_1_base": Case("t5_1_1_base.py", *_V5E, 256, replica_too=True),
  "cappa": Case("cappa.py", *_V5E, 512, replica_too=True),
  "vit_b16": Case(
    "vit_i1k.py:B/16,reg=0.0", *_V5E, 1024, (_SCAN, _DOTS), fsdp=1
  ),
  "gpt2_124m": Case("gpt2_124m.py", *_V5E, 128, (_SCAN,)),
  "llama_1b": Case("llama_1b.py", *_V5E, 16),
  "llama_8b": Case("llama_8b.py", "tpu_v5p", 64, 64),
}


def main() -> None:
  """Prints the figures of each case."""
  args = measure.arguments(__doc__, only="names of cases, separated by commas")
  names = args.only.split(",") if args.only else [*CASES]
  unknown = [name for name in names if name not in CASES]
  if unknown:
    sys.exit(f"--only={args.only}: expected some of {', '.join(CASES)}.")
  missing = measure.missing("libtpu")
  if missing:
    missing += " (make install EXTRAS=tpu)"
  if args.quick:
    names = names[:1]
  for name in names:
    case = CASES[name]
    title = f"{name}, {case.batch_size} on {case.devices} {case.hardware}"
    if missing:
      measure.skip(_NUMBER, title, missing)
      continue
    row = _row(case, args.quick)
    secs = _report(title, row)
    if case.replica_too and not args.quick:
      alone = _row(case._replace(fsdp=1))
      of_alone = _report(f"{title}, unsharded", alone)
      if secs and of_alone:
        measure.report(
          _NUMBER,
          f"step, sharded / unsharded: {title}",
          [secs / of_alone],
          target="<= 1.1",
        )


def _row(case: Case, quick: bool = False) -> dict[str, Any]:
  """Compiles a case; returns the row of tools.plan."""
  from bigtrain.tools.plan import plan

  config = _runlocal(case.config) if quick else case.config
  (row,) = plan.plan(
    f"{measure.ROOT}/configs/{config}",
    [case.devices],
    [f"input.batch_size={case.batch_size}", *case.changes],
    fsdp=[case.fsdp],
    hardware_name=case.hardware,
    compiler="tpu",
  )
  return row


def _runlocal(config: str) -> str:
  return f"{config}{',' if ':' in config else ':'}runlocal"


def _report(title: str, row: dict[str, Any]) -> float | None:
  """Prints the figures of a row; returns the seconds of a step, if known."""
  for name, unit, value in _figures(row):
    measure.report(_NUMBER, f"{name}: {title}", [value], unit=unit)
  if not row["fits"]:
    limit = row["peak_bytes"] / row["memory_fraction"] / 1e9
    measure.skip(
      _NUMBER,
      f"memory: {title}",
      f"{row['peak_bytes'] / 1e9:.1f} GB do not fit in {limit:.1f}",
    )
  return row["compiler_secs"]


def _figures(row: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
  """Yields (name, unit, value)."""
  gigabyte = 1e9
  if row["cycles"]:
    runs = sum(row["cycles"]["kernels"].values())
    without = f", without {runs} runs of kernels" if runs else ""
    yield f"step{without}", "s", row["compiler_secs"]
    yield "waiting for transfers", "s", row["cycles"]["exposed_secs"]
    yield "norms in a step with a row", "s", row["cycles"]["row_secs"]
    yield f"MFU{without}", "ratio", row["compiler_mfu"]
  yield "temporary memory", "GB", row["memory"]["temporary_bytes"] / gigabyte
  yield "peak memory", "GB", row["peak_bytes"] / gigabyte
  yield "sent", "GB", sum(row["sent_bytes"].values()) / gigabyte


if __name__ == "__main__":
  main()
