"""Makes published_vision/timm_*: a small random model of each kind by timm.

As make_published_vision.py does by transformers. The layout is that of
timm.models.save_for_hf. The pooled features, or the logits, are
"pooler_output" in reference.npz.

  python tests/golden/make_timm.py   # The folders.
  python tests/golden/make_timm.py architectures ../../bigtrain/models/published
"""

import json
import pathlib
import shutil
import sys
import unittest.mock

import make_published
import no_torchvision  # noqa: F401, Before timm.
import numpy as np
import PIL.Image
import safetensors.torch
import timm
import torch
from make_image_processors import image
from timm.layers import Mlp, SwiGLUPacked
from timm.models import deit, vision_transformer

TINY = dict(embed_dim=16, depth=2, num_heads=2, patch_size=4, img_size=16)
FAMILIES = {
  "timm_augreg": ("vit_tiny_patch16_384", dict(num_classes=3)),
  "timm_deit3": (
    "deit3_small_patch16_224",
    dict(init_values=0.5, num_classes=4),
  ),
  "timm_registers": (
    "vit_small_patch14_reg4_dinov2",
    dict(init_values=0.5, reg_tokens=3, num_classes=0, mlp_ratio=1.5),
  ),
  "timm_gap": (
    "vit_medium_patch16_reg4_gap_256",
    dict(init_values=0.5, num_classes=3, qkv_bias=False),
  ),
  "timm_siglip": (
    "vit_so400m_patch16_siglip_256",
    dict(num_classes=0, mlp_ratio=2.5),
  ),
  "timm_clip": ("vit_base_patch32_clip_quickgelu_224", dict(num_classes=5)),
  "timm_swiglu": (
    "vit_giant_patch14_dinov2",
    dict(num_classes=0, init_values=0.5, mlp_ratio=3),
  ),
}


def architectures():
  """{name: arguments of each ViT, without those of "", the defaults}."""
  sites = dict.fromkeys(
    "qk_norm scale_attn_norm scale_mlp_norm pool_include_prefix".split(), False
  )
  fixed = sites | dict(final_norm=True, embed_norm_layer=None)
  defaults = dict(
    **dict(patch_size=16, embed_dim=768, depth=12, num_heads=12, mlp_ratio=4),
    **dict(qkv_bias=True, proj_bias=True, init_values=None, class_token=True),
    **dict(pos_embed="learn", no_embed_class=False, reg_tokens=0),
    **dict(pre_norm=False, fc_norm=None, global_pool="token"),
    **dict(act_layer="gelu", swiglu=False, norm_eps=1e-6),
  )
  result = {"": defaults}

  def note(cls, name, pretrained, **given):
    del pretrained
    norm = given.pop("norm_layer", torch.nn.LayerNorm)
    args = {key: x for key, x in given.items() if key in defaults | fixed}
    if args.get("act_layer") is torch.nn.SiLU:  # Of the gated MLP.
      del args["act_layer"]
    mlp = given.get("mlp_layer", Mlp)
    args["swiglu"] = mlp is SwiGLUPacked
    args["norm_eps"] = getattr(norm, "keywords", {}).get("eps", 1e-6)
    known = cls is vision_transformer.VisionTransformer
    known = known and mlp in (Mlp, SwiGLUPacked)
    known = known and "LayerNorm" in str(getattr(norm, "func", norm))
    known = known and not {"block_fn", "embed_layer", "attn_layer"} & {*given}
    args = {key: x for key, x in args.items() if x != (defaults | fixed)[key]}
    learned = args.get("reg_tokens", 0) and not args.get("no_embed_class")
    if known and not learned and not {*fixed} & {*args}:
      result[name] = args
    raise InterruptedError

  for module in (vision_transformer, deit):
    names = timm.list_models(module=module.__name__.rpartition(".")[2])
    with unittest.mock.patch.object(module, "build_model_with_cfg", note):
      for name in names:
        try:
          timm.create_model(name)
        except InterruptedError:
          pass
  rows = [f"{json.dumps(k)}: {json.dumps(x)}" for k, x in result.items()]
  return "{\n" + ",\n".join(rows) + "\n}\n"


def outputs_of(model, pixels):
  features = model.forward_features(pixels)
  return {
    "last_hidden_state": features,
    "pooler_output": model.forward_head(features),
  }


def write_family(name, options, out):
  torch.manual_seed(0)
  rng = np.random.default_rng(0)
  model = timm.create_model(name, **TINY | options).eval()
  make_published.with_noise(model, rng)
  timm.models.save_for_hf(model, out, safe_serialization=True)
  pixels = rng.normal(size=(2, 3, 16, 16)).astype(np.float32)
  outputs = outputs_of(model, torch.from_numpy(pixels))
  weights = {
    f"weight of {key}": rng.normal(size=value.shape).astype(np.float32)
    for key, value in outputs.items()
  }
  weights["weight of last_hidden_state"][:, :-16] = 0
  sum(
    (value * torch.from_numpy(weights[f"weight of {key}"])).sum()
    for key, value in outputs.items()
  ).backward()
  values = {key: value.detach().numpy() for key, value in outputs.items()}
  np.savez_compressed(
    out / "reference.npz", pixel_values=pixels, **values, **weights
  )
  zeros = torch.zeros_like
  gradients = {
    name: zeros(x) if x.grad is None else x.grad
    for name, x in model.named_parameters()
  }
  safetensors.torch.save_file(gradients, out / "gradients.safetensors")


def processed(crop_pct, crop_mode, side=16):
  """Pixels of timm's transforms for evaluation: Pillow's, and a crop."""
  picture, whole = PIL.Image.fromarray(image()), int(side / crop_pct)
  width, height = picture.size
  shorter = min(width, height)
  size = (width * whole // shorter, height * whole // shorter)
  size = size if crop_mode == "center" else (whole, whole)
  pixels = np.asarray(picture.resize(size, PIL.Image.Resampling.BICUBIC))
  top, left = (round((n - side) / 2) for n in pixels.shape[:2])
  return pixels[top : top + side, left : left + side]


def write(golden):
  """Writes folders below `golden`."""
  for name, (architecture, options) in FAMILIES.items():
    out = golden / "published_vision" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_family(architecture, options, out)
  pixels = {mode: processed(0.9, mode) for mode in ("center", "squash")}
  np.savez_compressed(golden / "timm_pixels.npz", image=image(), **pixels)


if __name__ == "__main__":
  if sys.argv[1:2] == ["architectures"]:
    file = pathlib.Path(sys.argv[2]) / "timm.json"
    file.write_text(architectures())
  else:
    write(pathlib.Path(__file__).parent)
