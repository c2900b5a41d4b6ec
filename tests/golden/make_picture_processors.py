"""Makes picture_processors/: small processors, and what they make of pictures.

Each function of MAKERS makes a processor of transformers and the config.json of
its model. `write` gives each a folder with the files of the processor, this
config.json, and reference.npz: pictures, and the ids and pixels of a text with
these pictures. requirements.txt has the library's version.

Image processors are those of Pillow, or of torch where there is no other. Some
processors cannot be called as a whole, because they need a processor of videos,
which needs torchvision (`without_videos`). Their ids and pixels are computed
from their parts.

  python tests/golden/make_picture_processors.py [NAME ...]  # All by default.
"""

import functools
import json
import pathlib
import shutil
import sys

import numpy as np
import PIL.Image
import tokenizers
import torch
import torchvision_by_torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

SIDE = 16
TEXTS = ["what is left of the three", "how many sevens are there"]
TEMPLATE = """\
{%- for message in messages -%}
<turn>{{ message["role"] }}
{% if message["content"] is string %}{{ message["content"] }}{% else -%}
{%- for part in message["content"] -%}
{%- if part["type"] == "image" -%}PLACEHOLDER
{%- else -%}{{ part["text"] }}{%- endif -%}
{%- endfor -%}{%- endif -%}<end>
{% endfor -%}
{%- if add_generation_prompt %}<turn>assistant
{% endif -%}
"""
SPECIAL = ["<pad>", "<eos>", "<bos>", "<turn>", "<end>"]
SIZE = {"height": SIDE, "width": SIDE}
VISION = dict(image_size=SIDE, patch_size=4)
CLIP_VISION = dict(model_type="clip_vision_model", **VISION)


def tokenizer(special):
  made = tokenizers.Tokenizer(models.BPE())
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=[*SPECIAL, *special],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator([*TEXTS, "\n\n\n"], trainer)
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=made,
    bos_token="<bos>",
    eos_token="<eos>",
    pad_token="<pad>",
  )


def template(placeholder):
  """A chat template that writes `placeholder` for each picture."""
  return TEMPLATE.replace("PLACEHOLDER", placeholder)


def without_videos(cls, image_processor, codec, placeholder, **attributes):
  """A processor without its processor of videos, which needs torchvision."""
  processor = object.__new__(cls)
  processor.image_processor, processor.tokenizer = image_processor, codec
  processor.chat_template = template(placeholder)
  for name, value in attributes.items():
    setattr(processor, name, value)
  return processor


def pil(module, name, **options):
  """An image processor of a module of transformers.models."""
  modules = getattr(transformers.models, module)
  cls = getattr(getattr(modules, f"image_processing_pil_{module}"), name)
  return cls(**options)


def paligemma():
  codec = tokenizer(["<image>"])
  processor = transformers.PaliGemmaProcessor(
    transformers.SiglipImageProcessorPil(size=SIZE, image_seq_length=16), codec
  )
  config = dict(
    model_type="paligemma",
    image_token_index=codec.convert_tokens_to_ids("<image>"),
    vision_config=VISION,
  )
  return processor, config


def gemma3():
  names = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
  codec = tokenizer(names)
  ids = codec.convert_tokens_to_ids(names)
  for name, text, number in zip(("boi", "eoi", "image"), names, ids):
    setattr(codec, f"{name}_token", text)
    setattr(codec, f"{name}_token_id", number)
  processor = transformers.Gemma3Processor(
    transformers.Gemma3ImageProcessorPil(size=SIZE),
    codec,
    chat_template=template(names[0]),
    image_seq_length=4,
  )
  config = dict(
    model_type="gemma3",
    boi_token_index=ids[0],
    eoi_token_index=ids[1],
    image_token_index=ids[2],
    mm_tokens_per_image=4,
    vision_config=VISION,
  )
  return processor, config


def of_clip_tower(cls, image_processor, codec):
  """A processor for CLIP's tower, whose class token is left out."""
  return cls(
    image_processor,
    codec,
    patch_size=4,
    vision_feature_select_strategy="default",
    num_additional_image_tokens=1,
    chat_template=template("<image>"),
  )


def llava():
  codec = tokenizer(["<image>"])
  processor = of_clip_tower(
    transformers.LlavaProcessor,
    transformers.LlavaImageProcessorPil(
      size={"shortest_edge": SIDE}, crop_size=SIZE
    ),
    codec,
  )
  config = dict(
    model_type="llava",
    image_token_index=codec.convert_tokens_to_ids("<image>"),
    vision_config=CLIP_VISION,
  )
  return processor, config


def qwen3_vl():
  """Patches in about the picture's size, 4 x 4 pixels and 2 x 2 for a token."""
  names = [
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
  ]
  codec = tokenizer(names)
  ids = codec.convert_tokens_to_ids(names)
  processor = without_videos(
    transformers.Qwen3VLProcessor,
    transformers.Qwen2VLImageProcessorPil(
      patch_size=4,
      merge_size=2,
      size={"shortest_edge": 256, "longest_edge": 512},
      image_mean=[0.5, 0.4, 0.3],
      image_std=[0.5, 0.6, 0.7],
    ),
    codec,
    "<|vision_start|><|image_pad|><|vision_end|>",
    image_token=names[2],
  )
  config = dict(
    model_type="qwen3_vl",
    vision_start_token_id=ids[0],
    vision_end_token_id=ids[1],
    image_token_id=ids[2],
    video_token_id=ids[3],
    vision_config=dict(patch_size=4),
  )
  return processor, config


def smolvlm():
  """Tiles of 16 x 16 pixels, and the whole picture."""
  tiles = [f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)]
  names = ["<image>", "<fake_token_around_image>", "<global-img>", *tiles]
  codec = tokenizer([*names, "<end_of_utterance>"])
  processor = transformers.Idefics3Processor(
    transformers.SmolVLMImageProcessorPil(
      size={"longest_edge": 40}, max_image_size={"longest_edge": SIDE}
    ),
    codec,
    image_seq_len=1,
    chat_template=template("<image>"),
  )
  config = dict(
    model_type="smolvlm",
    image_token_id=codec.convert_tokens_to_ids("<image>"),
    scale_factor=4,
    vision_config=VISION,
  )
  return processor, config


def gemma4():
  """As many tokens as fit into 70, of 2 x 2 patches of 4 x 4 pixels each."""
  names = ["<|image>", "<image|>", "<|image|>"]
  codec = tokenizer(names)
  ids = codec.convert_tokens_to_ids(names)
  processor = without_videos(
    transformers.Gemma4Processor,
    pil(
      "gemma4",
      "Gemma4ImageProcessorPil",
      patch_size=4,
      pooling_kernel_size=2,
      max_soft_tokens=70,
    ),
    codec,
    names[2],
    boi_token=names[0],
    eoi_token=names[1],
    image_token=names[2],
  )
  config = dict(
    model_type="gemma4",
    boi_token_id=ids[0],
    eoi_token_id=ids[1],
    image_token_id=ids[2],
    vision_config=dict(patch_size=4, pooling_kernel_size=2),
  )
  return processor, config


def llava_onevision():
  """Several pictures of a row, which have no tiles."""
  codec = tokenizer(["<image>"])
  pinpoints = [[16, 32], [32, 16], [32, 32], [16, 48]]
  processor = without_videos(
    transformers.LlavaOnevisionProcessor,
    pil(
      "llava_onevision",
      "LlavaOnevisionImageProcessorPil",
      size=SIZE,
      image_grid_pinpoints=pinpoints,
    ),
    codec,
    "<image>",
    image_token="<image>",
    num_image_tokens=16,
    vision_feature_select_strategy="full",
    vision_aspect_ratio="anyres_max_2",
  )
  config = dict(
    model_type="llava_onevision",
    image_token_index=codec.convert_tokens_to_ids("<image>"),
    image_grid_pinpoints=pinpoints,
    vision_aspect_ratio="anyres_max_2",
    vision_config=VISION,
  )
  return processor, config


def llava_next():
  codec = tokenizer(["<image>"])
  pinpoints = [[16, 32], [32, 16], [32, 32]]
  processor = of_clip_tower(
    transformers.LlavaNextProcessor,
    pil(
      "llava_next",
      "LlavaNextImageProcessorPil",
      size={"shortest_edge": SIDE},
      crop_size=SIZE,
      image_grid_pinpoints=pinpoints,
    ),
    codec,
  )
  config = dict(
    model_type="llava_next",
    image_token_index=codec.convert_tokens_to_ids("<image>"),
    image_grid_pinpoints=pinpoints,
    vision_config=CLIP_VISION,
  )
  return processor, config


def vipllava():
  codec = tokenizer(["<image>"])
  processor = of_clip_tower(
    transformers.LlavaProcessor,
    transformers.CLIPImageProcessorPil(
      size={"shortest_edge": SIDE}, crop_size=SIZE
    ),
    codec,
  )
  config = dict(
    model_type="vipllava",
    image_token_index=codec.convert_tokens_to_ids("<image>"),
    vision_config=CLIP_VISION,
  )
  return processor, config


def deepseek_vl():
  """Squares, in which the shorter side has at least five pixels."""
  name = "<image_placeholder>"
  codec = tokenizer([name])
  processor = without_videos(
    transformers.DeepseekVLProcessor,
    pil("deepseek_vl", "DeepseekVLImageProcessorPil", size=SIZE, min_size=5),
    codec,
    name,
    image_token=name,
    num_image_tokens=16,
  )
  config = dict(
    model_type="deepseek_vl",
    image_token_id=codec.convert_tokens_to_ids(name),
    vision_config=VISION,
  )
  return processor, config


def exaone4_5():
  names = ["<vision>", "</vision>", "<|image_pad|>", "<|video_pad|>"]
  codec = tokenizer(names)
  ids = codec.convert_tokens_to_ids(names)
  processor = without_videos(
    transformers.Exaone4_5_Processor,
    transformers.Qwen2VLImageProcessorPil(
      patch_size=4, size={"shortest_edge": 256, "longest_edge": 512}
    ),
    codec,
    "<vision><|image_pad|></vision>",
    image_token=names[2],
  )
  config = dict(
    model_type="exaone4_5",
    vision_start_token_id=ids[0],
    vision_end_token_id=ids[1],
    image_token_id=ids[2],
    video_token_id=ids[3],
    vision_config=dict(patch_size=4),
  )
  return processor, config


def pixtral_processor(codec, edge, patch_size, **attributes):
  of_texts = torchvision_by_torch.imported("pixtral", "processing_pixtral")
  return without_videos(
    of_texts.PixtralProcessor,
    pil(
      "pixtral",
      "PixtralImageProcessorPil",
      size={"longest_edge": edge},
      patch_size={"height": patch_size, "width": patch_size},
    ),
    codec,
    "[IMG]",
    patch_size=patch_size,
    image_token="[IMG]",
    image_break_token="[IMG_BREAK]",
    image_end_token="[IMG_END]",
    **attributes,
  )


PIXTRAL_TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]


def mistral3():
  """Squares of 2 x 2 patches; one file for both processors."""
  codec = tokenizer(PIXTRAL_TOKENS)
  processor = pixtral_processor(codec, 40, 4, spatial_merge_size=2)
  config = dict(
    model_type="mistral3",
    image_token_index=codec.convert_tokens_to_ids("[IMG]"),
    spatial_merge_size=2,
    vision_config=dict(model_type="pixtral", patch_size=4),
  )
  return processor, config


def llava_pixtral():
  """Each patch is a token."""
  codec = tokenizer(PIXTRAL_TOKENS)
  processor = pixtral_processor(codec, 24, 4, spatial_merge_size=1)
  config = dict(
    model_type="llava",
    image_token_index=codec.convert_tokens_to_ids("[IMG]"),
    vision_config=dict(model_type="pixtral", patch_size=4),
  )
  return processor, config


def lighton_ocr():
  """Squares of 4 x 4 patches, which rows and columns of patches do not fill."""
  codec = tokenizer(["<|image_pad|>"])
  processor = without_videos(
    transformers.LightOnOcrProcessor,
    pil(
      "pixtral",
      "PixtralImageProcessorPil",
      size={"longest_edge": 64},
      patch_size={"height": 4, "width": 4},
    ),
    codec,
    "<|image_pad|>",
    image_token="<|image_pad|>",
    effective_patch_size=16,
  )
  config = dict(
    model_type="lighton_ocr",
    image_token_id=codec.convert_tokens_to_ids("<|image_pad|>"),
    spatial_merge_size=4,
    vision_config=dict(model_type="pixtral", patch_size=4),
  )
  return processor, config


def internvl():
  names = ["<img>", "</img>", "<IMG_CONTEXT>"]
  codec = tokenizer(names)
  processor = without_videos(
    transformers.InternVLProcessor,
    pil("got_ocr2", "GotOcr2ImageProcessorPil", size=SIZE, max_patches=6),
    codec,
    names[2],
    image_seq_length=4,
    start_image_token=names[0],
    end_image_token=names[1],
    image_token=names[2],
  )
  config = dict(
    model_type="internvl",
    image_token_id=codec.convert_tokens_to_ids(names[2]),
    vision_config=dict(image_size=[SIDE, SIDE], patch_size=[4, 4]),
  )
  return processor, config


def aya_vision():
  names = ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>"]
  codec = tokenizer(
    [*names, "<image>", "TILE_GLOBAL", *[f"TILE_{i}" for i in range(1, 7)]]
  )
  processor = without_videos(
    transformers.AyaVisionProcessor,
    pil("got_ocr2", "GotOcr2ImageProcessorPil", size=SIZE, max_patches=6),
    codec,
    "<image>",
    image_token="<image>",
    patch_size=8,
    img_size=SIDE,
    start_of_img_token=names[0],
    end_of_img_token=names[1],
    img_patch_token=names[2],
    tile_token="TILE",
    tile_global_token="TILE_GLOBAL",
  )
  config = dict(
    model_type="aya_vision",
    image_token_index=codec.convert_tokens_to_ids(names[2]),
    downsample_factor=2,
    vision_config=VISION,
  )
  return processor, config


def cohere2_vision():
  names = [
    "<|START_OF_IMG|>",
    "<|END_OF_IMG|>",
    "<|IMG_LINE_BREAK|>",
    "<|IMG_PATCH|>",
  ]
  codec = tokenizer(names)
  of_images = torchvision_by_torch.imported(
    "cohere2_vision", "image_processing_cohere2_vision"
  )
  processor = without_videos(
    transformers.Cohere2VisionProcessor,
    of_images.Cohere2VisionImageProcessor(
      size=SIZE, max_patches=6, patch_size=1
    ),
    codec,
    names[3],
    patch_size=1,
    boi_token=names[0],
    eoi_token=names[1],
    img_line_break_token=names[2],
    image_token=names[3],
  )
  config = dict(
    model_type="cohere2_vision",
    image_token_id=codec.convert_tokens_to_ids(names[3]),
    downsample_factor=4,
    vision_config=VISION,
  )
  return processor, config


def grids_of(of_images, options):
  """Random sizes, and the rows and columns of tiles of such pictures."""
  rng = np.random.default_rng(1)
  sizes = rng.integers(1, 200, (300, 2))
  sizes[::3, 1] = np.maximum(sizes[::3, 0] // rng.integers(1, 4, 100), 1)
  grids = [
    of_images.get_optimal_tiled_canvas(tuple(size), (SIDE, SIDE), *options)
    for size in sizes.tolist()
  ]
  return dict(sizes=sizes, tiles=np.asarray(grids)[:, ::-1])


# What a processor makes of a text with pictures: functions of (processor,
# folder, pictures), which also write the processor's files into the folder.

MESSAGES = [
  {
    "role": "user",
    "content": [
      {"type": "image"},
      {"type": "image"},
      {"type": "text", "text": TEXTS[0]},
    ],
  },
  {"role": "assistant", "content": "a seven"},
]


def of_whole(processor, out, pictures):
  processor.save_pretrained(out)
  text = processor.apply_chat_template(MESSAGES, tokenize=False)
  return ids_and_pixels(
    processor(images=[pictures], text=text, add_special_tokens=False)
  )


def of_vipllava(processor, out, pictures):
  result = of_whole(processor, out, pictures)
  sparse(out / "processor_config.json", processor.image_processor)
  return result


def of_paligemma(processor, out, pictures):
  """Without a chat template: pictures, a prompt, and an answer."""
  processor.save_pretrained(out)
  text = "<image><image>" + TEXTS[0]
  return ids_and_pixels(
    processor(images=[pictures], text=text, suffix="a seven")
  )


def ids_and_pixels(result):
  pixels = np.asarray(result["pixel_values"])
  return dict(
    ids=np.asarray(result["input_ids"]).reshape(-1),
    pixels=views(pixels.reshape(1, -1, 3, SIDE, SIDE)),
  )


def text_of(codec, chat_template):
  codec.chat_template = chat_template
  return codec.apply_chat_template(MESSAGES, tokenize=False)


def ids_of(codec, text):
  return np.asarray(codec(text, add_special_tokens=False)["input_ids"])


def of_parts(processor, out, pictures):
  """Of a processor `without_videos`, by its `replace_image_token`."""
  text = text_of(processor.tokenizer, processor.chat_template)
  processor.image_processor.save_pretrained(out)
  processor.tokenizer.save_pretrained(out)
  result = processor.image_processor(images=[pictures])
  for i in range(len(pictures)):
    whole = processor.replace_image_token(result, i)
    whole = whole.replace(processor.image_token, "\0")
    text = text.replace(processor.image_token, whole, 1)
  text = text.replace("\0", processor.image_token)
  ids = ids_of(processor.tokenizer, text)
  if "image_grid_thw" in result:
    patches, grids = result["pixel_values"], result["image_grid_thw"]
    return dict(ids=ids, patches=patches, grids=grids)
  if "image_position_ids" in result:  # With padding, and (column, row).
    places = np.asarray(result["image_position_ids"])
    grids = places.max(axis=1)[:, ::-1] + 1
    grids = np.pad(grids, ((0, 0), (1, 0)), constant_values=1)
    pixels = np.asarray(result["pixel_values"])
    return dict(ids=ids, patches=pixels[places[..., 0] >= 0], grids=grids)
  return dict(ids=ids, pixels=views(result["pixel_values"]))


def of_onevision(processor, out, pictures):
  """Also what it makes of the first picture alone."""
  values = of_parts(processor, out, pictures)
  result = processor.image_processor(images=[pictures[:1]])
  whole = processor.replace_image_token(result, 0)
  values["tokens alone"] = whole.count(processor.image_token)
  values["pixels alone"] = views(result["pixel_values"])
  return values


def of_sparse_parts(processor, out, pictures):
  """Of a processor `without_videos`, by its `_process_images`.

  The file of the image processor names only what is not a default, as the files
  that publishers write by hand. Some publishers have one file for both.
  """
  processor.image_processor.save_pretrained(out)
  path = out / "preprocessor_config.json"
  sparse(path, processor.image_processor)
  if isinstance(getattr(processor, "spatial_merge_size", None), int):
    whole = dict(
      image_processor=json.loads(path.read_text()),
      patch_size=processor.patch_size,
      spatial_merge_size=processor.spatial_merge_size,
    )
    path.unlink()
    (out / "processor_config.json").write_text(json.dumps(whole, indent=2))
  text = text_of(processor.tokenizer, processor.chat_template)
  processor.tokenizer.save_pretrained(out)
  options = {
    key: value
    for key, value in getattr(processor, "images_kwargs", {}).items()
    if key != "return_tensors"
  }
  result, texts = processor._process_images(pictures, **options)
  first, *others = text.split(processor.image_token)
  text = first + "".join(map("".join, zip(texts, others, strict=True)))
  ids = ids_of(processor.tokenizer, text)
  pixels = result["pixel_values"]
  if "image_grid_thw" in result:
    grids = np.asarray(result["image_grid_thw"])
    return dict(ids=ids, patches=np.asarray(pixels), grids=grids)
  if "image_sizes" in result:
    return dict(ids=ids, **pixtral_patches(processor, pixels, result))
  pixels = np.stack([np.asarray(x) for x in pixels])
  return dict(ids=ids, pixels=pixels.transpose(0, 2, 3, 1))


def of_internvl(processor, out, pictures):
  """Also the grids of tiles of many sizes."""
  values = of_sparse_parts(processor, out, pictures)
  module = sys.modules[type(processor.image_processor).__module__]
  return values | grids_of(module, (1, 6))


def of_cohere2_vision(processor, out, pictures):
  """Also the grids of many sizes, and pictures that torch has resized."""
  return of_internvl(processor, out, pictures) | resized_by_torch()


def sparse(path, image_processor):
  """Leaves out of its file what an image processor has by default."""
  content = json.loads(path.read_text())
  values = content.get("image_processor", content)
  cls = type(image_processor)
  for name, value in [*values.items()]:
    is_default = value is None or value == getattr(cls, name, None)
    if is_default and name != "image_processor_type":
      del values[name]
  path.write_text(json.dumps(content, indent=2))


def resized_by_torch():
  """Pictures of several sizes, resized by torch as torchvision does."""
  rng = np.random.default_rng(2)
  results = {}
  for i, (old, new) in enumerate(RESIZED):
    picture = rng.integers(0, 256, (*old, 3), dtype=np.uint8)
    results[f"before {i}"] = picture
    for method in ("bilinear", "bicubic"):
      after = torchvision_by_torch.resize(
        torch.from_numpy(picture).permute(2, 0, 1),
        new,
        torchvision_by_torch.InterpolationMode(method),
        antialias=True,
      )
      results[f"{method} {i}"] = after.permute(1, 2, 0).numpy()
  return results


# Sizes before and after: larger, smaller, both, and one side alone.
RESIZED = (
  ((7, 5), (31, 23)),
  ((61, 47), (9, 16)),
  ((13, 50), (33, 8)),
  ((90, 3), (2, 3)),
  ((6, 41), (6, 5)),
  ((1, 1), (4, 3)),
)


def in_squares(m, rows, columns, place):
  """Sorts places of patches: by squares, then what is left on the right."""
  row, column = place
  if column >= columns // m * m:
    return (1, row, column)
  if row >= rows // m * m:
    return (2, row, column)
  return (0, row // m, column // m, row % m, column % m)


def pixtral_patches(processor, pixels, result):
  """Patches of 4 x 4 pixels: those of squares, and what is left of them."""
  side = getattr(processor, "effective_patch_size", None)
  m = side // 4 if side else processor.spatial_merge_size
  patches, grids = [], []
  for image, (height, width) in zip(pixels, result["image_sizes"]):
    rows, columns = height // 4, width // 4
    grids.append((1, rows, columns))
    places = np.stack(np.indices((rows, columns)), axis=-1).reshape(-1, 2)
    order = functools.partial(in_squares, m, rows, columns)
    for row, column in sorted(places.tolist(), key=order):
      patch = image[:, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4]
      patches.append(np.asarray(patch).reshape(-1))
  return dict(patches=np.stack(patches), grids=np.asarray(grids))


def views(pixel_values):
  """All views of all pictures; padding is all zeros."""
  pixels = np.concatenate([np.asarray(x) for x in pixel_values])
  pixels = pixels[np.any(pixels != 0, axis=(1, 2, 3))]
  return pixels.transpose(0, 2, 3, 1)


SMALL = ((23, 31), (18, 12))
# Tiles: 3 x 3, 1 x 2 rows and columns after resizing, and one alone.
SIZES = {
  "qwen3_vl": ((23, 31), (50, 12)),
  "smolvlm": ((41, 30), (9, 60)),
  "gemma4": ((23, 31), (90, 4)),
  "llava_next": ((41, 30), (9, 60)),
  "llava_onevision": ((41, 30), (9, 60)),
  # 2 x 1 tiles and 1 x 6.
  "internvl": ((41, 21), (9, 60)),
  "aya_vision": ((41, 21), (9, 60)),
  # 3 x 2 tiles, and one.
  "cohere2_vision": ((41, 21), (9, 14)),
  # One within the bounds, and one that is shrunk.
  "mistral3": ((23, 31), (90, 20)),
  "llava_pixtral": ((13, 17), (10, 60)),
  # 5 x 7 patches, and 16 x 6.
  "lighton_ocr": ((18, 25), (90, 30)),
  "exaone4_5": ((23, 31), (50, 12)),
  "deepseek_vl": ((23, 31), (6, 60)),
}
# {what makes a processor: what makes its reference}.
MAKERS = {
  paligemma: of_paligemma,
  gemma3: of_whole,
  gemma4: of_parts,
  llava: of_whole,
  llava_next: of_whole,
  llava_onevision: of_onevision,
  qwen3_vl: of_parts,
  smolvlm: of_whole,
  vipllava: of_vipllava,
  deepseek_vl: of_sparse_parts,
  exaone4_5: of_sparse_parts,
  mistral3: of_sparse_parts,
  llava_pixtral: of_sparse_parts,
  lighton_ocr: of_sparse_parts,
  internvl: of_internvl,
  aya_vision: of_sparse_parts,
  cohere2_vision: of_cohere2_vision,
}


def write(golden, names=()):
  """Writes folders below `golden`."""
  for make, results_of in MAKERS.items():
    name = make.__name__
    if names and name not in names:
      continue
    out = golden / "picture_processors" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    processor, config = make()
    rng = np.random.default_rng(0)
    pictures = [
      rng.integers(0, 256, (*size, 3), dtype=np.uint8)
      for size in SIZES.get(name, SMALL)
    ]
    opened = [PIL.Image.fromarray(picture) for picture in pictures]
    values = results_of(processor, out, opened)
    values |= {f"picture {i}": x for i, x in enumerate(pictures)}
    (out / "config.json").write_text(json.dumps(config))
    np.savez_compressed(out / "reference.npz", **values)
    print(out, {key: np.shape(x) for key, x in values.items()})


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent, sys.argv[1:])
