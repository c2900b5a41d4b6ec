"""Seconds of small programs by their cycles, against sums made by hand."""

import pytest

from bigtrain.tools.plan import collectives, cycles, hardware, hlo

# A loop of 5 rounds whose condition is a fusion, as TPUs write it. In its body
# a gather runs behind a product, a permute is waited for, and a kernel has no
# cycles. Then follow a branch with the norms of a row, another branch, a
# product of unknown cycles, and a sum of all devices.
TPU = """\
HloModule jit_update_fn, is_scheduled=true, num_partitions=4

%less (n: s32[]) -> pred[] {
  %n = s32[]{:T(128)} parameter(0)
  %five = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[]{:T(512)} compare(%n, %five), direction=LT
}

%cond (s: (s32[], bf16[8,128])) -> pred[] {
  %s = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  ROOT %go = pred[]{:T(512)} fusion(%i), kind=kLoop, calls=%less
}

%product (a: bf16[128,128], b: bf16[128,128]) -> bf16[128,128] {
  %a = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %conv = bf16[128,128]{1,0:T(8,128)(2,1)} convolution(%a, %b), \
dim_labels=bf_io->bf
}

%body (s.1: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %s.1 = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%s.1), index=0
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%s.1), index=1
  %ag = (bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[32,128]{1,0:T(8,128)(2,1)}) \
all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}
  %f.1 = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%x), kind=kOutput, \
calls=%product, backend_config={"window_config":{"cost":"1"},\
"estimated_cycles":"6000"}
  %w = bf16[32,128]{1,0:T(8,128)(2,1)} all-gather-done(%ag)
  %cp = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, u32[], u32[]) \
collective-permute-start(%f.1), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %f.2 = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%w), kind=kLoop, \
calls=%product, backend_config={"estimated_cycles":"500"}
  %y = bf16[8,128]{1,0:T(8,128)(2,1)} collective-permute-done(%cp)
  %k = bf16[8,128]{1,0:T(8,128)(2,1)} custom-call(%y), \
custom_call_target="tpu_custom_call", \
metadata={op_name="jit(update_fn)/while/body/flash"}
  ROOT %out = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) tuple(%i.1, %k)
}

%norms (p: f32[256]) -> f32[] {
  %p = f32[256]{0:T(256)} parameter(0)
  ROOT %n.1 = f32[]{:T(128)} fusion(%p), kind=kLoop, calls=%less, \
backend_config={"estimated_cycles":"70000"}
}

%nothing (p.1: f32[256]) -> f32[] {
  %p.1 = f32[256]{0:T(256)} parameter(0)
  ROOT %n.2 = f32[]{:T(128)} constant(0)
}

%advance (p.2: f32[256]) -> f32[] {
  %p.2 = f32[256]{0:T(256)} parameter(0)
  ROOT %n.3 = f32[]{:T(128)} fusion(%p.2), kind=kLoop, calls=%less, \
backend_config={"estimated_cycles":"900"}
}

ENTRY %main (q: f32[256], t: (s32[], bf16[8,128]), m: bf16[128,128]) -> f32[] {
  %q = f32[256]{0:T(256)} parameter(0)
  %t = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(1)
  %m = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(2)
  %loop = (s32[]{:T(128)}, /*index=1*/bf16[8,128]{1,0:T(8,128)(2,1)}) \
while(%t), condition=%cond, body=%body
  %flag = pred[]{:T(512)} constant(true)
  %row = f32[]{:T(128)} conditional(%flag, %q, %q), \
true_computation=%norms, false_computation=%nothing, \
metadata={op_name="jit(update_fn)/row_norms/cond"}
  %new = f32[]{:T(128)} conditional(%flag, %q, %q), \
branch_computations={%nothing, %advance}, \
metadata={op_name="jit(update_fn)/cond"}
  %big = bf16[128,128]{1,0:T(8,128)(2,1)} fusion(%m, %m), kind=kOutput, \
calls=%product, backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %sum = f32[]{:T(128)} all-reduce(%new), replica_groups=[1,4]<=[4], \
to_apply=%less
}
"""
NANOSECOND = 1e-9


def read(text, clock=1e9, flops_per_cycle=128, secs_per_byte=NANOSECOND):
  return cycles.cycles(
    hlo.Module(text),
    clock,
    flops_per_cycle,
    lambda c: c.sent_bytes * secs_per_byte,
  )


def test_loops_branches_kernels_and_products():
  cost = read(TPU, secs_per_byte=0.0)
  product = 2 * 128**3 / (128 * 0.88)
  assert cost.compute_secs == pytest.approx(
    (5 * (6000 + 500) + 70_000 + 900 + product) * NANOSECOND
  )
  assert cost.kernels == {"flash": 5}
  assert cost.exposed_secs == cost.transfer_secs == 0.0
  assert cost.unknown_loops == 0
  faster = read(TPU, clock=2e9, secs_per_byte=0.0)
  assert faster.compute_secs == cost.compute_secs / 2


def test_transfers_hide_behind_what_runs_meanwhile():
  # Bytes that a device sends: 3/4 of the gathered 32 x 128 bfloat16, all 8 x
  # 128 of the permute, and twice 3/4 of 4 bytes of the sum.
  gather, permute, total = 0.75 * 32 * 128 * 2, 8 * 128 * 2, 2 * 0.75 * 4
  cost = read(TPU)
  assert cost.transfer_secs == pytest.approx(
    (5 * (gather + permute) + total) * NANOSECOND
  )
  assert cost.sent_bytes == 5 * (gather + permute) + total
  # The gather of 6,144 ns behind 6,000, the permute of 2,048 ns behind 500.
  waits = 5 * (gather - 6000 + permute - 500) + total
  assert cost.exposed_secs == pytest.approx(waits * NANOSECOND)


def test_the_links_take_one_transfer_after_the_other():
  # Both are on the way at the same time, so the permute waits for the gather.
  moved = TPU.replace("  %w = ", "  %done = ").replace(
    "  %y = bf16", "  %w = bf16[32,128]{1,0} all-gather-done(%ag)\n  %y = bf16"
  )
  moved = moved.replace(
    "  %done = bf16[32,128]{1,0:T(8,128)(2,1)} all-", "  # "
  )
  cost = read(moved)
  gather, permute = 0.75 * 32 * 128 * 2, 8 * 128 * 2
  waits = 5 * (gather + permute - 6500) + 2 * 0.75 * 4
  assert cost.exposed_secs == pytest.approx(waits * NANOSECOND)


def test_an_unknown_trip_count_counts_once():
  cost = read(TPU.replace("direction=LT", "direction=NE"), secs_per_byte=0.0)
  assert cost.unknown_loops == 1 and cost.kernels == {"flash": 1}


def test_rare_rounds_of_experts_do_not_count():
  mark = 'body=%body, metadata={op_name="jit(f)/model_flops_rare/while"}'
  cost = read(TPU.replace("body=%body", mark), secs_per_byte=0.0)
  assert cost.unknown_loops == 0 and not cost.kernels


def test_programs_of_other_compilers_have_no_cycles():
  assert read("HloModule m\n\nENTRY %main () -> f32[] {\n}\n") is None


def test_clocks_follow_from_peaks_and_matrix_units():
  clocks = {"tpu_v4": 1.05, "tpu_v5e": 1.5, "tpu_v5p": 1.75, "tpu_v6e": 1.75}
  for name, gigahertz in clocks.items():
    clock = hardware.find(name).clock_hertz
    assert clock == pytest.approx(gigahertz * 1e9, rel=0.01), name


def test_a_collective_of_a_wrapped_computation():
  text = TPU.replace(
    "ENTRY %main",
    "%wrapped (g: f32[64]) -> f32[16] {\n  %g = f32[64]{0} parameter(0)\n"
    "  ROOT %rs = f32[16]{0} reduce-scatter(%g), replica_groups=[1,4]<=[4], "
    "dimensions={0}, to_apply=%less\n}\n\nENTRY %main",
  ).replace(
    "  %flag = ",
    "  %rs.1 = ((f32[64]{0}), f32[16]{0}) async-start(%q), calls=%wrapped\n"
    "  %rs.2 = f32[16]{0} async-done(%rs.1)\n  %flag = ",
  )
  more = read(text).transfer_secs - read(TPU).transfer_secs
  one = collectives.Collective("reduce-scatter", 4, 1, 1, 64 * 4)
  assert more == pytest.approx(one.sent_bytes * NANOSECOND)


def test_a_collective_in_parts_runs_behind_the_fusions_with_its_channel():
  # As libtpu writes it: a fusion starts the gather, a product continues it, and
  # a third fusion ends it. Each has the gather in it.
  part = """\
%part (g: bf16[8,128]) -> bf16[32,128] {
  %g = bf16[8,128]{1,0} parameter(0)
  %ag.9 = bf16[32,128]{1,0} all-gather(%g), channel_id=7, \
replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %c = bf16[32,128]{1,0} custom-call(%ag.9), custom_call_target="Part"
}

ENTRY %main"""
  parts = """\
  %a.1 = bf16[32,128]{1,0} fusion(%x), kind=kCustom, calls=%part
  %a.2 = bf16[32,128]{1,0} fusion(%a.1), kind=kOutput, calls=%part, \
backend_config={"estimated_cycles":"4000"}
  %a.3 = bf16[32,128]{1,0} fusion(%a.2), kind=kCustom, calls=%part
  %ag = """
  text = TPU.replace("ENTRY %main", part).replace("  %ag = ", parts)
  cost, before = read(text), read(TPU)
  gather = 0.75 * 32 * 128 * 2
  assert cost.transfer_secs - before.transfer_secs == pytest.approx(
    5 * gather * NANOSECOND
  )
  assert cost.exposed_secs - before.exposed_secs == pytest.approx(
    5 * (gather - 4000) * NANOSECOND
  )
