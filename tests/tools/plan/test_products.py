# ruff: noqa: E501 (lines of the compiler)
"""Products of a program for GPUs, in text as the compiler writes it."""

from bigtrain.tools.plan import hlo, products

TEXT = """HloModule jit_update, num_partitions=8

%gemm_fusion (p0: bf16[100,512], p1: bf16[512,64]) -> bf16[100,64] {
  %p0 = bf16[100,512]{1,0} parameter(0)
  %p1 = bf16[512,64]{1,0} parameter(1)
  ROOT %dot.5 = bf16[100,64]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (t: (s32[], bf16[100,512], bf16[512,64])) -> (s32[], bf16[100,512], bf16[512,64]) {
  %t = (s32[], bf16[100,512]{1,0}, bf16[512,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %a = bf16[100,512]{1,0} get-tuple-element(%t), index=1
  %b = bf16[512,64]{1,0} get-tuple-element(%t), index=2
  %gemm = bf16[100,64]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm_fusion, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %fmha = (bf16[100,64]{1,0}, u8[16]{0}) custom-call(%gemm), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %out = (s32[], bf16[100,512]{1,0}, bf16[512,64]{1,0}) tuple(%i, %a, %b)
}

%condition (t: (s32[], bf16[100,512], bf16[512,64])) -> pred[] {
  %t.1 = (s32[], bf16[100,512]{1,0}, bf16[512,64]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %limit = s32[] constant(12)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x: (s32[], bf16[100,512], bf16[512,64]), y: bf16[4,32,16], z: f32[2,8,8,3], f: f32[4,4,3,6], g: f32[2,2,2,6]) -> f32[] {
  %x = (s32[], bf16[100,512]{1,0}, bf16[512,64]{1,0}) parameter(0)
  %y = bf16[4,32,16]{2,1,0} parameter(1)
  %z = f32[2,8,8,3]{3,2,1,0} parameter(2)
  %f = f32[4,4,3,6]{3,2,1,0} parameter(3)
  %g = f32[2,2,2,6]{3,2,1,0} parameter(4)
  %loop = (s32[], bf16[100,512]{1,0}, bf16[512,64]{1,0}) while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %cublas = (bf16[4,16,16]{2,1,0}, s8[4096]{0}) custom-call(%y, %y), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},"alpha_imag":0}}
  %conv = (f32[2,2,2,6]{3,2,1,0}, u8[0]{0}) custom-call(%z, %f), window={size=4x4 stride=4x4}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"
  %grad = (f32[4,4,3,6]{3,2,1,0}, u8[0]{0}) custom-call(%z, %g), window={size=4x4 stride=4x4}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardFilter"
  ROOT %sum = f32[] constant(0)
}
"""


def test_products_of_loops_libraries_and_convolutions():
  found = products.products(hlo.Module(TEXT))
  loop = 12 * 2 * 100 * 512 * 64
  library = 2 * 4 * 16 * 16 * 32
  convolution = 2 * (2 * 2 * 2 * 6) * (4 * 4 * 3)
  assert found.flops == loop + library + 2 * convolution
  assert found.kernels == {"__cudnn$fmhaSoftmax": 12}
  assert found.unknown_loops == 0
  # The condition has the number of rounds too, beside other constants.
  text = TEXT.replace("known_trip_count", "x")
  text = text.replace(
    "  %limit =", "  %rows = s32[2]{0} constant({...})\n  %limit ="
  )
  assert products.products(hlo.Module(text)) == found
  # A loop without a trip count counts once, and says so.
  text = TEXT.replace("known_trip_count", "x").replace("=LT", "=NE")
  once = products.products(hlo.Module(text))
  assert once.flops == found.flops - loop * 11 // 12
  assert once.unknown_loops == 1


TRANSFERS = """HloModule jit_update, num_partitions=8

%scatter (p: f32[64,16]) -> f32[8,16] {
  %p = f32[64,16]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = f32[8,16]{1,0} reduce-scatter(%p), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

%body (t: (s32[], bf16[8,64], bf16[64,64])) -> (s32[], bf16[8,64], bf16[64,64]) {
  %t = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %part = bf16[8,64]{1,0} get-tuple-element(%t), index=1
  %whole = bf16[64,64]{1,0} get-tuple-element(%t), index=2
  %gather = (bf16[8,64]{1,0}, bf16[64,64]{1,0}) all-gather-start(%part), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  %product = (bf16[64,64]{1,0}, s8[4096]{0}) custom-call(%whole, %whole), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"alpha_imag":0}}
  %gathered = bf16[64,64]{1,0} all-gather-done(%gather)
  ROOT %out = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}) tuple(%i, %part, %gathered)
}

%condition (t: (s32[], bf16[8,64], bf16[64,64])) -> pred[] {
  %t.1 = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x: (s32[], bf16[8,64], bf16[64,64]), y: f32[64,16], z: f32[8]) -> f32[8] {
  %x = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}) parameter(0)
  %y = f32[64,16]{1,0} parameter(1)
  %z = f32[8]{0} parameter(2)
  %scatter-start = ((f32[64,16]{1,0}), f32[8,16]{1,0}) async-start(%y), calls=%scatter
  %twice = f32[8]{0} add(%z, %z)
  %scattered = f32[8,16]{1,0} async-done(%scatter-start)
  %loop = (s32[], bf16[8,64]{1,0}, bf16[64,64]{1,0}) while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %sum = f32[8]{0} all-reduce(%z), channel_id=2, replica_groups=[1,8]<=[8], to_apply=%add
}
"""


def test_bytes_that_travel_while_products_run():
  gather = 5 * 64 * 64 * 2 * 7 / 8
  scatter = 64 * 16 * 4 * 7 / 8
  reduce = 2 * 8 * 4 * 7 / 8
  found = products.products(hlo.Module(TRANSFERS))
  assert found.sent_bytes == gather + scatter + reduce
  assert found.hidden_bytes == gather
  # A loop with products hides it as well.
  loop = next(line for line in TRANSFERS.splitlines() if "%loop" in line)
  done = next(line for line in TRANSFERS.splitlines() if "async-done" in line)
  text = TRANSFERS.replace(loop + "\n", "").replace(done, f"{loop}\n{done}")
  assert products.products(hlo.Module(text)).hidden_bytes == gather + scatter
  # The compiler may decide to wait at the start.
  text = TRANSFERS.replace(
    "dimensions={0}\n", 'dimensions={0}, x={"is_sync":true}\n'
  )
  assert products.products(hlo.Module(text)).hidden_bytes == 0
