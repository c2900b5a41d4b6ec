"""Makes vision_language/: a small random model of each family with pictures.

By transformers, as make_published.py does for language models. Each folder has
the output of save_pretrained; gradients.safetensors, the gradients of the loss
in the same layout; and reference.npz: pictures, of any
shape with the shapes of their grids, tokens, labels, which tokens
are a prefix, logits, the loss, and the tokens that greedy generation adds.

  python tests/golden/make_vision_language.py [NAME ...]   # all by default
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
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_onevision import modeling_llava_onevision

BATCH, LENGTH, PROMPT, NEW = 2, 32, 24, 8
IMAGE_TOKEN = 60
VISION = dict(
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=2,
  image_size=16,
  patch_size=4,
)
TEXT = dict(
  vocab_size=67,
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=64,
  head_dim=8,
)
QWEN_TEXT = {n: x for n, x in TEXT.items() if n != "head_dim"}
SIGLIP = VISION | dict(model_type="siglip_vision_model")
CLIP = VISION | dict(model_type="clip_vision_model", num_hidden_layers=3)


def layer_types(period, depth=3):
  """A period ends in full attention."""
  sliding, full = "sliding_attention", "full_attention"
  return [sliding if (i + 1) % period else full for i in range(depth)]


# {folder: (model_type, options of its config, tokens of a picture, pictures)}.
FAMILIES = {
  "paligemma": (
    "paligemma",
    dict(
      text_config=TEXT | dict(model_type="gemma"),
      vision_config=SIGLIP | dict(vision_use_head=False),
      projection_dim=16,
      image_token_index=IMAGE_TOKEN,
    ),
    16,
    1,
  ),
  # A window that is shorter than the prefix, and an image token that is no
  # token of the decoder.
  "paligemma2": (
    "paligemma",
    dict(
      text_config=TEXT
      | dict(
        model_type="gemma2",
        sliding_window=5,
        layer_types=layer_types(2),
        query_pre_attn_scalar=8,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0,
      ),
      vision_config=SIGLIP | dict(vision_use_head=False),
      projection_dim=16,
      image_token_index=70,
    ),
    16,
    1,
  ),
  # The window is shorter than a picture. The softcap applies to texts alone.
  "gemma3": (
    "gemma3",
    dict(
      text_config=TEXT
      | dict(
        model_type="gemma3_text",
        sliding_window=3,
        layer_types=layer_types(3),
        query_pre_attn_scalar=8,
        final_logit_softcapping=2.0,
      ),
      vision_config=SIGLIP | dict(vision_use_head=False),
      mm_tokens_per_image=4,
      image_token_index=IMAGE_TOKEN,
      boi_token_index=61,
      eoi_token_index=62,
    ),
    4,
    3,
  ),
  "llava": (
    "llava",
    dict(
      text_config=TEXT | dict(model_type="llama"),
      vision_config=CLIP,
      image_token_index=IMAGE_TOKEN,
      image_seq_length=16,
    ),
    16,
    1,
  ),
  # Another tower and decoder; the last features; no biases. Patches leave
  # a row and a column of pixels over.
  "llava_siglip": (
    "llava",
    dict(
      text_config=TEXT | dict(model_type="qwen3", tie_word_embeddings=True),
      vision_config=SIGLIP | dict(image_size=17),
      image_token_index=IMAGE_TOKEN,
      image_seq_length=16,
      vision_feature_layer=-1,
      vision_feature_select_strategy="full",
      projector_hidden_act="silu",
      multimodal_projector_bias=False,
      tie_word_embeddings=True,
    ),
    16,
    1,
  ),
  # The class token of CLIP is a token of the picture too. Features of several
  # layers, of which the first is the embedding.
  "llava_class": (
    "llava",
    dict(
      text_config=TEXT | dict(model_type="mistral", sliding_window=9),
      vision_config=CLIP,
      image_token_index=IMAGE_TOKEN,
      image_seq_length=17,
      vision_feature_layer=[1, 0, -1],
      vision_feature_select_strategy="full",
    ),
    17,
    1,
  ),
  "idefics3": (
    "idefics3",
    dict(
      text_config=TEXT | dict(model_type="llama"),
      vision_config=VISION,
      image_token_id=IMAGE_TOKEN,
      scale_factor=2,
    ),
    4,
    3,
  ),
  "smolvlm": (
    "smolvlm",
    dict(
      text_config=TEXT | dict(model_type="llama"),
      vision_config=VISION,
      image_token_id=IMAGE_TOKEN,
      scale_factor=4,
      tie_word_embeddings=True,
    ),
    1,
    4,
  ),
  "vipllava": (
    "vipllava",
    dict(
      text_config=TEXT | dict(model_type="llama"),
      vision_config=CLIP,
      image_token_index=IMAGE_TOKEN,
      image_seq_length=16,
      vision_feature_layer=[-2, 1],
      projector_layernorm_eps=1e-3,
    ),
    16,
    1,
  ),
  "aya_vision": (
    "aya_vision",
    dict(
      text_config=QWEN_TEXT | dict(model_type="cohere2", sliding_window=9),
      vision_config=SIGLIP,
      image_token_index=IMAGE_TOKEN,
      alignment_intermediate_size=22,
      vision_feature_layer=-2,
    ),
    4,
    3,
  ),
  "cohere2_vision": (
    "cohere2_vision",
    dict(
      text_config=QWEN_TEXT | dict(model_type="cohere2", sliding_window=9),
      vision_config=SIGLIP,
      image_token_id=IMAGE_TOKEN,
      alignment_intermediate_size=22,
      downsample_factor=4,
    ),
    1,
    3,
  ),
  "internvl": (
    "internvl",
    dict(
      text_config=QWEN_TEXT | dict(model_type="qwen2"),
      vision_config=VISION | dict(use_mean_pooling=False),
      image_token_id=IMAGE_TOKEN,
    ),
    4,
    3,
  ),
  "deepseek_vl": (
    "deepseek_vl",
    dict(
      text_config=TEXT | dict(model_type="llama"),
      vision_config=SIGLIP,
      image_token_id=IMAGE_TOKEN,
    ),
    16,
    1,
  ),
  "mistral3": (
    "mistral3",
    dict(
      text_config=TEXT | dict(model_type="mistral", sliding_window=9),
      vision_config=VISION | dict(model_type="pixtral"),
      image_token_index=IMAGE_TOKEN,
    ),
    4,
    3,
  ),
  "lighton_ocr": (
    "lighton_ocr",
    dict(
      text_config=TEXT | dict(model_type="qwen3"),
      vision_config=VISION | dict(model_type="pixtral", hidden_act="silu"),
      image_token_id=IMAGE_TOKEN,
      spatial_merge_size=4,
    ),
    1,
    3,
  ),
}
# Towers whose pictures have any shape: patches of 2 frames x 4 x 4 pixels, of
# which 2 x 2 become a token.
QWEN_VISION = dict(
  depth=4,
  num_heads=2,
  in_channels=3,
  patch_size=4,
  spatial_merge_size=2,
  temporal_patch_size=2,
)
QWEN3_VISION = QWEN_VISION | dict(
  hidden_size=16,
  intermediate_size=24,
  out_hidden_size=16,
  num_position_embeddings=9,
  deepstack_visual_indexes=[0, 2],
)


def rope(sections, **others):
  """Rotary positions in three axes."""
  return dict(
    rope_parameters=dict(
      rope_type="default", mrope_section=sections, rope_theta=1e4, **others
    )
  )


# {folder: (model_type, options of its config)}.
NATIVE = {
  "qwen3_vl": (
    "qwen3_vl",
    dict(
      text_config=TEXT
      | dict(head_dim=16, tie_word_embeddings=True)
      # More frequencies than a head has.
      | rope([24, 20, 20], mrope_interleaved=True),
      vision_config=QWEN3_VISION,
      tie_word_embeddings=True,
    ),
  ),
  # Experts, and no features of inner layers; the head is not the embedding.
  "qwen3_vl_moe": (
    "qwen3_vl_moe",
    dict(
      text_config=TEXT
      | dict(
        head_dim=16,
        intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        tie_word_embeddings=False,
      )
      | rope([2, 3, 3], mrope_interleaved=True),
      vision_config=QWEN3_VISION | dict(deepstack_visual_indexes=[1]),
      tie_word_embeddings=False,
    ),
  ),
  # Windows of 2 x 2 tokens in all layers but one.
  "qwen2_5_vl": (
    "qwen2_5_vl",
    dict(
      text_config=QWEN_TEXT | dict(hidden_size=32) | rope([1, 1, 2]),
      vision_config=QWEN_VISION
      | dict(
        hidden_size=16,
        intermediate_size=24,
        out_hidden_size=32,
        window_size=16,
        fullatt_block_indexes=[2],
      ),
    ),
  ),
  "qwen2_vl": (
    "qwen2_vl",
    dict(
      text_config=QWEN_TEXT
      | dict(hidden_size=32, tie_word_embeddings=True)
      | rope([1, 2, 1]),
      vision_config=QWEN_VISION
      | dict(embed_dim=16, mlp_ratio=2, hidden_size=32),
      tie_word_embeddings=True,
    ),
  ),
}
QWEN3_5_VISION = {
  n: x for n, x in QWEN3_VISION.items() if n != "deepstack_visual_indexes"
}
# Every second layer is Gated DeltaNet; a quarter of a head rotates.
QWEN3_5_TEXT = TEXT | dict(
  head_dim=32,
  full_attention_interval=2,
  linear_num_key_heads=1,
  linear_num_value_heads=2,
  linear_key_head_dim=8,
  linear_value_head_dim=6,
)
NATIVE |= {
  "qwen3_5": (
    "qwen3_5",
    dict(
      text_config=QWEN3_5_TEXT
      | rope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25),
      vision_config=QWEN3_5_VISION,
    ),
  ),
  "qwen3_5_moe": (
    "qwen3_5_moe",
    dict(
      text_config=QWEN3_5_TEXT
      | dict(
        intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=8,
      )
      | rope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25),
      vision_config=QWEN3_5_VISION,
    ),
  ),
  # The tower's heads share keys; positions of the decoder have one axis.
  "exaone4_5": (
    "exaone4_5",
    dict(
      text_config=QWEN_TEXT
      | dict(model_type="exaone4", hidden_size=32, sliding_window=9),
      vision_config=NATIVE["qwen2_5_vl"][1]["vision_config"]
      | dict(num_key_value_heads=1),
    ),
  ),
}
# Patches of 4 x 4 pixels, of which 2 x 2 become a token.
GEMMA4_VISION = dict(
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=12,
  patch_size=4,
  pooling_kernel_size=2,
  position_embedding_size=9,
)
GEMMA4_TEXT = TEXT | dict(
  global_head_dim=12,
  sliding_window=3,
  layer_types=layer_types(3),
  hidden_size_per_layer_input=0,
  use_bidirectional_attention="vision",
)
# {folder: options of its config}.
GEMMA4 = {
  # A picture's tokens see each other in layers with a window alone.
  "gemma4": dict(
    text_config=GEMMA4_TEXT
    | dict(attention_k_eq_v=True, num_global_key_value_heads=1),
    vision_config=GEMMA4_VISION | dict(standardize=True),
  ),
  # Experts; an image token that is no token of the decoder.
  "gemma4_moe": dict(
    text_config=GEMMA4_TEXT
    | dict(
      enable_moe_block=True,
      num_experts=4,
      top_k_experts=2,
      moe_intermediate_size=8,
      final_logit_softcapping=3.0,
    ),
    vision_config=GEMMA4_VISION | dict(num_key_value_heads=2),
    image_token_id=70,
  ),
  # Inputs of each layer, for which another token stands in place of image
  # tokens; linear layers with bounds.
  "gemma4_devices": dict(
    text_config=GEMMA4_TEXT
    | dict(
      num_hidden_layers=4,
      layer_types=layer_types(2, 4),
      num_kv_shared_layers=2,
      hidden_size_per_layer_input=5,
      vocab_size_per_layer_input=67,
      pad_token_id=7,
      use_bidirectional_attention=None,
    ),
    vision_config=GEMMA4_VISION | dict(use_clipped_linears=True),
  ),
}
# Tiles of 12 x 12 pixels, which are 3 x 3 patches.
TILED_VISION = VISION | dict(image_size=12)
SIZES = [[12, 24], [24, 12], [24, 24], [36, 12]]
# {folder: (model_type, options of its config, sizes of an example's pictures in
# pixels)}. Several pictures of LLaVA-OneVision have no tiles.
TILED = {
  # The features of the tiles of the second example are interpolated.
  "llava_onevision": (
    "llava_onevision",
    dict(
      text_config=QWEN_TEXT
      | dict(model_type="qwen2", tie_word_embeddings=False),
      vision_config=TILED_VISION | dict(model_type="siglip_vision_model"),
      image_token_index=IMAGE_TOKEN,
      image_grid_pinpoints=SIZES,
      vision_aspect_ratio="anyres_max_2",
    ),
    (((20, 9),), ((21, 24),)),
  ),
  # Pictures without tiles; a head that is the embedding.
  "llava_onevision_pictures": (
    "llava_onevision",
    dict(
      text_config=QWEN_TEXT
      | dict(model_type="qwen2", tie_word_embeddings=True),
      vision_config=TILED_VISION
      | dict(model_type="siglip_vision_model", image_size=8),
      image_token_index=IMAGE_TOKEN,
      image_grid_pinpoints=[[8, 8]],
      tie_word_embeddings=True,
    ),
    (((8, 8), (10, 7), (4, 8)), ((5, 5), (9, 9))),
  ),
  # A decoder that scales all its inputs, and logits that it would scale.
  "llava_next": (
    "llava_next",
    dict(
      text_config=QWEN_TEXT
      | dict(
        model_type="granite",
        embedding_multiplier=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.4,
        logits_scaling=3.0,
      ),
      vision_config=TILED_VISION
      | dict(model_type="clip_vision_model", num_hidden_layers=3),
      image_token_index=IMAGE_TOKEN,
      image_grid_pinpoints=SIZES[:2],
      image_seq_length=9,
    ),
    (((14, 20),), ((10, 7),)),
  ),
}
# Pictures of several shapes, of which transformers pads the pixels. {folder:
# (model_type, options of its config, rows and columns of the patches of each
# example's pictures)}.
PADDED = {
  # Each patch is a token.
  "llava_pixtral": (
    "llava",
    dict(
      text_config=TEXT | dict(model_type="mistral", sliding_window=9),
      vision_config=VISION | dict(model_type="pixtral"),
      image_token_index=IMAGE_TOKEN,
      image_seq_length=1,
      vision_feature_layer=-1,
      vision_feature_select_strategy="full",
    ),
    (((2, 3), (1, 4)), ((3, 2), (2, 2))),
  ),
  # Squares of 2 x 2 patches, which rows and columns of patches do not fill.
  "lighton_ocr_partial": (
    "lighton_ocr",
    dict(
      text_config=TEXT | dict(model_type="qwen3"),
      vision_config=VISION | dict(model_type="pixtral"),
      image_token_id=IMAGE_TOKEN,
      spatial_merge_size=2,
    ),
    (((5, 4), (3, 7)), ((4, 6), (2, 3))),
  ),
}
# Rows and columns of the patches of each example's pictures.
GRIDS = (((4, 6), (2, 4)), ((2, 2), (6, 4), (4, 2)))
# Families in which pictures keep their examples: [B, N, 3, H, W].
BY_EXAMPLE = ("idefics3", "smolvlm")
# Families whose processors pad pictures: sizes in pixels.
OF_ANY_SIZE = ("mistral3", "lighton_ocr")


def texts_of(kind, image_token, size, pictures, rng):
  """Tokens, and which of them are a prefix or a picture (token_type_ids)."""
  ids = rng.integers(3, 59, (BATCH, LENGTH))
  types = np.zeros((BATCH, LENGTH), np.int64)
  for b in range(BATCH):
    at = 1 if kind == "paligemma" else 2 + b
    for _ in range(pictures):
      ids[b, at : at + size] = image_token
      types[b, at : at + size] = 1
      at += size + 1 + b % 2
    assert at < PROMPT, (kind, at)
  if kind == "paligemma":  # Prefixes of two lengths: 0 is one.
    prefix = np.asarray([PROMPT, PROMPT - 2])[:, None]
    types = (np.arange(LENGTH) >= prefix).astype(np.int64)
  return ids, types


def model_of(config, rng):
  """A random model, all of whose parameters matter."""
  model = transformers.AutoModelForImageTextToText.from_config(
    config, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  make_published.with_noise(model, rng)
  model.generation_config = transformers.GenerationConfig(
    eos_token_id=None, bos_token_id=None, pad_token_id=0
  )
  return model


def labels_of(ids):
  labels = np.where(np.arange(LENGTH) >= PROMPT, ids, -100)
  labels[0, PROMPT + 3] = -100
  return labels


def write_family(name, out):
  kind, options, size, pictures = FAMILIES[name]
  torch.manual_seed(0)
  rng = np.random.default_rng(0)
  config = transformers.AutoConfig.for_model(kind, **options)
  model = model_of(config, rng)
  model.save_pretrained(out)
  image_token = options.get("image_token_index", options.get("image_token_id"))
  ids, types = texts_of(kind, image_token, size, pictures, rng)
  side = options["vision_config"]["image_size"]
  image = rng.normal(size=(BATCH, pictures, 3, side, side)).astype(np.float32)
  pixels = image if kind in BY_EXAMPLE else image.reshape(-1, *image.shape[2:])
  given = dict(input_ids=ids, pixel_values=pixels, labels=labels_of(ids))
  if kind in ("paligemma", "gemma3"):
    given["token_type_ids"] = types
  if kind in OF_ANY_SIZE:
    given["image_sizes"] = np.asarray([(side, side)] * len(pixels))
  prefix = (types == 0).sum(1) if kind == "paligemma" else np.zeros(0)
  write_results(
    model, given, out, image=image.transpose(0, 1, 3, 4, 2), prefix=prefix
  )


def set_constants(model, rng):
  """Random values for what is not trained."""
  for name, x in model.named_buffers():
    noise = torch.from_numpy(rng.normal(size=x.shape).astype(np.float32))
    if name.endswith("put_min"):
      x.copy_(-0.5 - 0.3 * noise.abs())
    elif name.endswith("put_max"):
      x.copy_(0.5 + 0.3 * noise.abs())
    elif name.endswith(("std_bias", "std_scale")):
      x.copy_(0.5 + 0.3 * noise)


def write_results(model, given, out, prefix=np.zeros(0), **features):
  """Writes what the model makes of its arguments, and the gradients."""
  kind = model.config.model_type
  tensors = {key: torch.from_numpy(value) for key, value in given.items()}
  result = model(**tensors)
  result.loss.backward()
  prompt = {k: x for k, x in tensors.items() if k != "labels"}
  for key in ("input_ids", "token_type_ids", "mm_token_type_ids"):
    if key in prompt:
      prompt[key] = prompt[key][:, :-NEW]
  if kind == "paligemma":  # A prompt is all prefix.
    prompt["token_type_ids"] = torch.zeros_like(prompt["token_type_ids"])
  tokens = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)
  np.savez_compressed(
    out / "reference.npz",
    **features,
    input_ids=given["input_ids"],
    labels=given["labels"],
    prefix=prefix,
    logits=result.logits.detach().numpy(),
    loss=result.loss.detach().numpy(),
    generated=tokens[:, -NEW:].numpy(),
  )
  with torch.no_grad():
    for buffer in model.buffers():  # These are not trained.
      buffer.zero_()
    for parameter in model.parameters():
      grad = parameter.grad
      parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
  with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    arrays = safetensors.torch.load_file(f"{folder}/model.safetensors")
  safetensors.torch.save_file(arrays, out / "gradients.safetensors")


def write_native(name, out):
  """A model whose pictures have any shape: patches, and a grid for each."""
  is_gemma4 = name in GEMMA4
  kind, options = ("gemma4", GEMMA4[name]) if is_gemma4 else NATIVE[name]
  torch.manual_seed(0)
  rng = np.random.default_rng(0)
  tokens = dict(
    image_token_id=IMAGE_TOKEN,
    video_token_id=63,
    vision_start_token_id=61,
    vision_end_token_id=62,
  )
  if is_gemma4:
    tokens = dict(image_token_id=IMAGE_TOKEN, boi_token_id=61, eoi_token_id=62)
  config = transformers.AutoConfig.for_model(kind, **{**tokens, **options})
  model = model_of(config, rng)
  set_constants(model, rng)
  model.save_pretrained(out)
  V = 48 if is_gemma4 else 96
  ids = rng.integers(3, 59, (BATCH, LENGTH))
  shapes = np.zeros((BATCH, max(map(len, GRIDS)), 2), np.int32)
  patches = [rng.normal(size=(h * w, V)) for row in GRIDS for h, w in row]
  pixels = np.concatenate(patches).astype(np.float32)
  image = np.zeros((*shapes.shape[:2], max(map(len, patches)), V), np.float32)
  for b, grids in enumerate(GRIDS):
    at = 1 + b
    for n, (rows, columns) in enumerate(grids):
      size = rows * columns // 4
      ids[b, at : at + size + 2] = [61, *[config.image_token_id] * size, 62]
      at += size + 3
      shapes[b, n] = rows, columns
      image[b, n, : rows * columns] = patches.pop(0)
    assert at < PROMPT, at
  grids = [(1, *grid) for row in GRIDS for grid in row]
  given = dict(
    input_ids=ids,
    pixel_values=pixels,
    image_grid_thw=np.asarray(grids),
    mm_token_type_ids=(ids == config.image_token_id).astype(np.int64),
    labels=labels_of(ids),
  )
  if name == "exaone4_5":  # Which has no positions by row and column.
    del given["mm_token_type_ids"]
  if is_gemma4:
    del given["image_grid_thw"]
    given |= gemma4_pictures(image, shapes)
  write_results(model, given, out, image=image, shapes=shapes)


def in_squares(image, rows, columns, m):
  """Patches of pixels [3, H, W], square by square; what is left comes last."""
  x = image.reshape(3, rows, 4, columns, 4).transpose(1, 3, 0, 2, 4)
  x = x.reshape(rows, columns, -1)
  R, K = rows // m, columns // m
  squares = x[: R * m, : K * m].reshape(R, m, K, m, -1).swapaxes(1, 2)
  parts = squares, x[:, K * m :], x[R * m :, : K * m]
  return np.concatenate([part.reshape(-1, x.shape[-1]) for part in parts])


def write_padded(name, out):
  """A model whose pictures have any shape: pixels with padding."""
  kind, options, all_grids = PADDED[name]
  torch.manual_seed(0)
  rng = np.random.default_rng(0)
  config = transformers.AutoConfig.for_model(kind, **options)
  model = model_of(config, rng)
  model.save_pretrained(out)
  m = options.get("spatial_merge_size", 1)
  most = max(h * w for grids in all_grids for h, w in grids)
  most += -most % m**2
  ids = rng.integers(3, 59, (BATCH, LENGTH))
  shapes = np.zeros((BATCH, max(map(len, all_grids)), 2), np.int32)
  image = np.zeros((*shapes.shape[:2], most, 48), np.float32)
  sides = 4 * np.max([grid for grids in all_grids for grid in grids], axis=0)
  padded, sizes = [], []
  for b, grids in enumerate(all_grids):
    at = 1 + b
    for n, (rows, columns) in enumerate(grids):
      length = (rows // m) * (columns // m)
      ids[b, at : at + length] = IMAGE_TOKEN
      at += length + 1
      pixels = rng.normal(size=(3, 4 * rows, 4 * columns)).astype(np.float32)
      shapes[b, n] = rows, columns
      image[b, n, : rows * columns] = in_squares(pixels, rows, columns, m)
      free = sides - pixels.shape[1:]
      padded.append(np.pad(pixels, ((0, 0), (0, free[0]), (0, free[1]))))
      sizes.append(pixels.shape[1:])
    assert at < PROMPT, at
  given = dict(
    input_ids=ids,
    pixel_values=np.stack(padded),
    image_sizes=np.asarray(sizes),
    labels=labels_of(ids),
  )
  write_results(model, given, out, image=image, shapes=shapes)


def gemma4_pictures(image, shapes):
  """Arguments of Gemma 4: all patches with padding, and their places."""
  is_real = shapes[..., 0] > 0
  places = np.full((*image.shape[:3], 2), -1)
  for index in np.argwhere(is_real):
    rows, columns = shapes[tuple(index)]
    row, column = np.divmod(np.arange(rows * columns), columns)
    places[(*index, slice(rows * columns))] = np.stack([column, row], axis=-1)
  return dict(pixel_values=image[is_real], image_position_ids=places[is_real])


def write_tiled(name, out):
  """A model whose pictures are cut into tiles."""
  kind, options, sizes = TILED[name]
  torch.manual_seed(0)
  rng = np.random.default_rng(0)
  config = transformers.AutoConfig.for_model(kind, **options)
  model = model_of(config, rng)
  model.save_pretrained(out)
  side, patch = config.vision_config.image_size, VISION["patch_size"]
  h = side // patch
  rows, layouts = [], []
  for pictures in sizes:
    views, layout = [], []
    for size in pictures:
      tiles, kept = (0, 0), (h, h)
      if len(pictures) == 1:
        best = select_best_resolution(size, config.image_grid_pinpoints)
        tiles = best[0] // side, best[1] // side
        grid = torch.zeros(1, tiles[0] * h, tiles[1] * h)
        kept = modeling_llava_onevision.unpad_image(grid, size).shape[1:]
      number = 1 + tiles[0] * tiles[1]
      views.append(rng.normal(size=(number, 3, side, side)).astype(np.float32))
      layout += [(*tiles, *kept), *[(0, 0, 0, 0)] * (number - 1)]
    rows.append(views)
    layouts.append(layout)
  most = max(map(len, layouts))
  image = np.zeros((BATCH, most, side, side, 3), np.float32)
  shapes = np.zeros((BATCH, most, 4), np.int32)
  for b, views in enumerate(rows):
    views = np.concatenate(views)
    image[b, : len(views)] = views.transpose(0, 2, 3, 1)
    shapes[b, : len(views)] = layouts[b]
  given = tiled_pictures(image, shapes, sizes)
  features = model.model.get_image_features(
    **{name: torch.from_numpy(x) for name, x in given.items()}
  ).pooler_output
  lengths = iter([len(x) for x in features])
  lengths = [[next(lengths) for _ in pictures] for pictures in sizes]
  number = max(sum(row) + len(row) for row in lengths) + 2 + NEW
  ids = rng.integers(3, 59, (BATCH, number))
  for b, row in enumerate(lengths):
    at = 1 + b
    for length in row:
      ids[b, at : at + length] = IMAGE_TOKEN
      at += length + 1
  given |= dict(input_ids=ids, labels=np.where(ids == IMAGE_TOKEN, -100, ids))
  sizes = given["image_sizes"]
  write_results(
    model, given, out, image=image, shapes=shapes, image_sizes=sizes
  )


def tiled_pictures(image, shapes, sizes):
  """Arguments of LLaVA-NeXT and OneVision."""
  views = image.transpose(0, 1, 4, 2, 3)
  pictures = []
  for b, layout in enumerate(shapes):
    for n in np.flatnonzero(layout[:, 2]):
      pictures.append(views[b, n : n + 1 + layout[n, 0] * layout[n, 1]])
  most = max(map(len, pictures))
  pixels = [np.pad(x, ((0, most - len(x)), *[(0, 0)] * 3)) for x in pictures]
  result = dict(
    pixel_values=np.stack(pixels),
    image_sizes=np.asarray([size for row in sizes for size in row]),
  )
  if any(len(row) > 1 for row in sizes):
    result["batch_num_images"] = np.asarray([len(row) for row in sizes])
  return result


ALL = (*FAMILIES, *NATIVE, *GEMMA4, *TILED, *PADDED)


def write(golden, names=ALL):
  """Writes folders below `golden`."""
  for name in names:
    out = golden / "vision_language" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if name in TILED:
      write_tiled(name, out)
    elif name in PADDED:
      write_padded(name, out)
    else:
      (write_family if name in FAMILIES else write_native)(name, out)


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent, sys.argv[1:] or ALL)
