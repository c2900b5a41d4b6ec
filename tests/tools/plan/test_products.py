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
  # A loop without a trip count counts once, and says so.
  text = TEXT.replace("known_trip_count", "x").replace("=LT", "=NE")
  once = products.products(hlo.Module(text))
  assert once.flops == found.flops - loop * 11 // 12
  assert once.unknown_loops == 1
