"""Makes picture_processors/: small processors, and what they make of pictures.

By transformers: a folder has what save_pretrained of a processor writes, the
config.json of its model, and reference.npz: pictures, ids and pixels of a text
with pictures. Image processors are those of Pillow. requirements.txt has the
library's version.

  python tests/golden/make_picture_processors.py
"""

import json
import pathlib
import shutil

import numpy as np
import PIL.Image
import tokenizers
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


def paligemma():
  codec = tokenizer(["<image>"])
  processor = transformers.PaliGemmaProcessor(
    transformers.SiglipImageProcessorPil(size=SIZE, image_seq_length=16), codec
  )
  config = dict(
    model_type="paligemma",
    image_token_index=codec.convert_tokens_to_ids("<image>"),
    vision_config=dict(image_size=SIDE, patch_size=4),
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
    chat_template=TEMPLATE.replace("PLACEHOLDER", names[0]),
    image_seq_length=4,
  )
  config = dict(
    model_type="gemma3",
    boi_token_index=ids[0],
    eoi_token_index=ids[1],
    image_token_index=ids[2],
    mm_tokens_per_image=4,
    vision_config=dict(image_size=SIDE, patch_size=4),
  )
  return processor, config


def llava():
  codec = tokenizer(["<image>"])
  processor = transformers.LlavaProcessor(
    transformers.LlavaImageProcessorPil(
      size={"shortest_edge": SIDE}, crop_size=SIZE
    ),
    codec,
    patch_size=4,
    vision_feature_select_strategy="default",
    num_additional_image_tokens=1,
    chat_template=TEMPLATE.replace("PLACEHOLDER", "<image>"),
  )
  config = dict(
    model_type="llava",
    image_token_index=codec.convert_tokens_to_ids("<image>"),
    vision_config=dict(
      model_type="clip_vision_model", image_size=SIDE, patch_size=4
    ),
  )
  return processor, config


def write(golden):
  """Writes folders below `golden`."""
  rng = np.random.default_rng(0)
  for make in (paligemma, gemma3, llava):
    out = golden / "picture_processors" / make.__name__
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    processor, config = make()
    processor.save_pretrained(out)
    (out / "config.json").write_text(json.dumps(config))
    values = {}
    pictures = [
      rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
      for height, width in ((23, 31), (18, 12))
    ]
    opened = [PIL.Image.fromarray(picture) for picture in pictures]
    if make is paligemma:
      result = processor(
        images=[opened], text="<image><image>" + TEXTS[0], suffix="a seven"
      )
    else:
      content = [{"type": "image"}, {"type": "text", "text": TEXTS[0]}]
      messages = [
        {"role": "user", "content": [{"type": "image"}, *content]},
        {"role": "assistant", "content": "a seven"},
      ]
      text = processor.apply_chat_template(messages, tokenize=False)
      result = processor(images=[opened], text=text, add_special_tokens=False)
    for i, picture in enumerate(pictures):
      values[f"picture {i}"] = picture
    values["ids"] = np.asarray(result["input_ids"]).reshape(-1)
    pixels = np.asarray(result["pixel_values"])
    values["pixels"] = pixels.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    np.savez_compressed(out / "reference.npz", **values)
    print(out, values["ids"].shape, values["pixels"].shape)


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
