"""Makes published_vision/: a small random model of each family of encoders.

By transformers, as make_published.py does for language models. Each folder has
the output of save_pretrained; gradients.safetensors, the gradients of the sum
of all outputs times fixed weights, in the same layout; and reference.npz: the
inputs, the outputs, and their weights ("weight of " + an output's name).

  python tests/golden/make_published_vision.py [NAME ...]   # all by default
"""

import pathlib
import shutil
import sys
import tempfile

import make_published
import numpy as np
import safetensors.torch
import torch
import transformers

BATCH = 2
SIZES = dict(
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=2,
)
IMAGE = dict(image_size=16, patch_size=4)
TEXT = dict(**SIZES, vocab_size=41, max_position_embeddings=6)
CLIP_TEXT = TEXT | dict(bos_token_id=1, eos_token_id=40, pad_token_id=0)

FAMILIES = {
  "vit": dict(**SIZES, **IMAGE),
  "dinov2": dict(**SIZES, **IMAGE, mlp_ratio=2, layerscale_value=0.5),
  "dinov2_swiglu": dict(
    **SIZES, **IMAGE, mlp_ratio=2, layerscale_value=0.5, use_swiglu_ffn=True
  ),
  "dinov2_with_registers": dict(
    **SIZES, **IMAGE, mlp_ratio=2, num_register_tokens=3
  ),
  "dinov3_vit": dict(
    **SIZES, **IMAGE, num_register_tokens=3, layerscale_value=0.5
  ),
  "dinov3_gated": dict(
    **SIZES,
    **IMAGE,
    num_register_tokens=3,
    use_gated_mlp=True,
    hidden_act="silu",
  ),
  "clip": dict(
    vision_config=SIZES | IMAGE, text_config=CLIP_TEXT, projection_dim=12
  ),
  "siglip": dict(vision_config=SIZES | IMAGE, text_config=TEXT),
  "siglip2": dict(
    vision_config=SIZES | dict(patch_size=4, num_patches=16), text_config=TEXT
  ),
  "vit_mae": dict(**SIZES, **IMAGE, mask_ratio=0.0),
  "beit": dict(
    **SIZES,
    **IMAGE,
    use_relative_position_bias=True,
    use_absolute_position_embeddings=False,
    layer_scale_init_value=0.5,
    use_mean_pooling=True,
  ),
  "beit_shared": dict(
    **SIZES,
    **IMAGE,
    use_shared_relative_position_bias=True,
    use_absolute_position_embeddings=True,
    layer_scale_init_value=0.5,
    use_mean_pooling=True,
  ),
}
BERT = dict(**SIZES, vocab_size=41, max_position_embeddings=9)
FAMILIES |= {
  "bert": dict(**BERT, pad_token_id=0),
  "bert_mlm": dict(**BERT, pad_token_id=0),
  "roberta": dict(**BERT, pad_token_id=1),
  "roberta_classes": dict(**BERT, pad_token_id=1, num_labels=3),
}
FAMILIES |= {
  "bit": dict(
    embedding_size=8, hidden_sizes=[32, 64], depths=[1, 2], num_groups=4
  ),
}
STAGES = dict(hidden_sizes=[4, 8, 12, 16], depths=[1, 2, 1, 1])
FAMILIES |= {
  "convnext": dict(**STAGES, layer_scale_init_value=0.5),
  "convnextv2": dict(**STAGES, num_labels=3),
}
# Grids of 10, 5 and 3 rows, that need padding to whole windows.
WINDOWS = dict(
  **dict(image_size=19, patch_size=2, embed_dim=8, window_size=3),
  mlp_ratio=2.0,
  num_heads=[1, 2, 4],
  drop_path_rate=0.0,
)
FAMILIES |= {
  "swin": dict(**WINDOWS, depths=[2, 2, 2]),
  "swin_classes": dict(
    **WINDOWS, depths=[2, 1, 1], num_labels=3, qkv_bias=False
  ),
  "swinv2": dict(
    **WINDOWS, depths=[2, 2, 1], pretrained_window_sizes=[4, 2, 0]
  ),
  "swinv2_classes": dict(
    **WINDOWS | dict(window_size=5),
    depths=[2, 1, 1],
    num_labels=3,
  ),
}
CLASSES_OF_IMAGES = "AutoModelForImageClassification"
# Of the models that end with a small image.
SIDES = {"bit": 64, "convnext": 32, "convnextv2": 32, "swin": 19, "swinv2": 19}
CLASSES = {
  "swin_classes": CLASSES_OF_IMAGES,
  "swinv2_classes": CLASSES_OF_IMAGES,
  "convnextv2": CLASSES_OF_IMAGES,
  "bert_mlm": "AutoModelForMaskedLM",
  "roberta_classes": "AutoModelForSequenceClassification",
}
MODEL_TYPES = {
  "swin_classes": "swin",
  "swinv2_classes": "swinv2",
  "bert_mlm": "bert",
  "roberta_classes": "roberta",
  "dinov2_swiglu": "dinov2",
  "dinov3_gated": "dinov3_vit",
  "beit_shared": "beit",
}


def inputs_of(kind, rng):
  side = SIDES.get(kind, IMAGE["image_size"])
  image = rng.normal(size=(BATCH, 3, side, side)).astype(np.float32)
  text = rng.integers(3, 40, (BATCH, 6))
  text[0, 4:] = 40, 0  # The end of a text, and padding.
  text[1, 5] = 40
  if kind == "siglip2":  # Ready patches, in grids of 3 x 5 and 4 x 3.
    shapes = np.array([[3, 5], [4, 3]])
    mask = np.arange(16) < np.prod(shapes, axis=1)[:, None]
    patches = rng.normal(size=(BATCH, 16, 48)).astype(np.float32)
    return dict(
      pixel_values=patches * mask[..., None],
      pixel_attention_mask=mask.astype(np.int64),
      spatial_shapes=shapes,
      input_ids=text,
    )
  if kind in ("bert", "roberta"):
    text[0, 4:] = kind == "roberta"  # Padding.
    types = np.arange(6) % 2 * np.ones_like(text) * (kind == "bert")
    mask = (text != (kind == "roberta")).astype(np.int64)
    # RoBERTa has one kind of tokens.
    return dict(input_ids=text, token_type_ids=types, attention_mask=mask)
  if kind in ("clip", "siglip"):
    return dict(pixel_values=image, input_ids=text)
  if kind == "vit_mae":  # Without noise the patches would be shuffled.
    noise = np.tile(np.arange(16, dtype=np.float32), (BATCH, 1))
    return dict(pixel_values=image, noise=noise)
  return dict(pixel_values=image)


def outputs_of(model, inputs):
  result = model(**inputs)
  names = (
    *("last_hidden_state", "pooler_output", "image_embeds", "text_embeds"),
    *("logits_per_text", "logits"),
  )
  return {name: result[name] for name in names if result.get(name) is not None}


def write_family(name, options, out):
  torch.manual_seed(0)
  rng = np.random.default_rng(0)
  kind = MODEL_TYPES.get(name, name)
  config = transformers.AutoConfig.for_model(kind, **options)
  auto = getattr(transformers, CLASSES.get(name, "AutoModel"))
  model = auto.from_config(
    config, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  make_published.with_noise(model, rng)
  for key, value in model.named_parameters():
    if key.endswith("layers.0.blocks.0.attention.self.logit_scale"):
      value.data += 3  # Beyond the largest.
  model.save_pretrained(out)
  given = inputs_of(kind, rng)
  tensors = {key: torch.from_numpy(value) for key, value in given.items()}
  outputs = outputs_of(model, tensors)
  weights = {
    f"weight of {key}": rng.normal(size=value.shape).astype(np.float32)
    for key, value in outputs.items()
  }
  if kind in SIDES:
    pass
  elif "attention_mask" in given:
    real = given["attention_mask"][..., None]
    for key, value in weights.items():
      weights[key] = value * real if value.ndim == 3 else value
  elif "last_hidden_state" in outputs:  # Patches, without tokens before.
    weights["weight of last_hidden_state"][:, :-16] = 0
  loss = sum(
    (value * torch.from_numpy(weights[f"weight of {key}"])).sum()
    for key, value in outputs.items()
  )
  loss.backward()
  values = {key: value.detach().numpy() for key, value in outputs.items()}
  np.savez_compressed(out / "reference.npz", **given, **values, **weights)
  with torch.no_grad():
    for parameter in model.parameters():
      grad = parameter.grad
      parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
  with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    arrays = safetensors.torch.load_file(f"{folder}/model.safetensors")
  safetensors.torch.save_file(arrays, out / "gradients.safetensors")


def write(golden, names=tuple(FAMILIES)):
  """Writes folders below `golden`."""
  for name in names:
    options = FAMILIES[name]
    shutil.rmtree(golden / "published_vision" / name, ignore_errors=True)
    out = golden / "published_vision" / name
    out.mkdir(parents=True)
    write_family(name, options, out)


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent, sys.argv[1:] or tuple(FAMILIES))
