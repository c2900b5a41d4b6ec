"""Makes chat_masks/: what TRL trains on, by its own training templates.

There is a file of each template: its text, some conversations, and for each of
them the ids and the mask of transformers' apply_chat_template, for which the
template marks the answers by {% generation %}. tokenizer.json is a small one
with the special tokens of all templates. The templates are TRL's, under its
license, Apache 2.0. requirements.txt has the versions.

  python tests/golden/make_chat_masks.py   # writes the files anew
"""

import functools
import json
import pathlib

import tokenizers
import transformers
import trl
from tokenizers import decoders, models, pre_tokenizers, trainers

TEMPLATES = pathlib.Path(trl.__file__).parent / "chat_templates"
NAMES = """
cohere gemma gemma3 lfm2 llama3 phi3 qwen3 qwen3_instruct_2507 smolvlm
""".split()
SPECIAL = """
<s> </s> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|>
<|eot_id|> <start_of_turn> <end_of_turn> <|end|> <|user|> <|assistant|>
<|system|> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|>
<|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <end_of_utterance>
""".split()

# Where texts are split, as in Llama 3: blank lines are no part of words.
SPLIT = (
  r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
  r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOOLS = [
  {
    "type": "function",
    "function": {
      "name": "multiply",
      "description": "Multiplies two numbers.",
      "parameters": {
        "type": "object",
        "properties": {
          "a": {"type": "number", "description": "First factor."},
          "b": {"type": "number", "description": "Second factor."},
        },
        "required": ["a", "b"],
      },
    },
  }
]


def message(role, content, **more):
  return {"role": role, "content": content, **more}


def conversations():
  question = [message("user", " What is 2 * 3?"), message("assistant", "6")]
  more = [message("user", "And 日本?"), message("assistant", "Japan.\n\nYes. ")]
  system = [message("system", "Be brief.")]
  call = {"name": "multiply", "arguments": {"a": 2, "b": 3}}
  call = {"type": "function", "function": call}
  use = [
    question[0],
    message("assistant", "", tool_calls=[call]),
    message("tool", "6", name="multiply"),
    question[1],
  ]
  thought = [message("assistant", "4", reasoning_content="2 + 2\n= 4")]
  for messages, tools in (
    (question, None),
    (question + more, None),
    (question + more + question, None),
    (system + question + more, None),
    (question + [message("user", "2 + 2?")] + thought, None),
    (use, TOOLS),
    (system + use + more, TOOLS),
  ):
    yield {"messages": messages, "tools": tools}


def tokenizer():
  made = tokenizers.Tokenizer(models.BPE())
  made.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  made.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=420,
    special_tokens=SPECIAL,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  texts = [json.dumps(TOOLS), "What is the answer of the assistant?\n\n"]
  made.train_from_iterator(texts * 3, trainer)
  return made


def masks(name, coder):
  template = (TEMPLATES / f"{name}_training.jinja").read_text()
  cases = []
  for case in conversations():
    encode = functools.partial(
      coder.apply_chat_template,
      case["messages"],
      chat_template=template,
      return_dict=True,
      return_assistant_tokens_mask=True,
    )
    try:
      result = encode(tools=case["tools"])
      if case["tools"] and result == encode():
        continue  # A template without tools.
    except Exception:  # A template without tools, or without the role system.
      continue
    case |= {"ids": result["input_ids"], "mask": result["assistant_masks"]}
    cases.append(case)
  return {"template": template, "cases": cases}


def write(golden):
  made = tokenizer()
  coder = transformers.PreTrainedTokenizerFast(
    tokenizer_object=made, bos_token="<s>", eos_token="</s>"
  )
  result = {name: masks(name, coder) for name in NAMES}
  folder = golden / "chat_masks"
  folder.mkdir(exist_ok=True)
  made.save(str(folder / "tokenizer.json"), pretty=False)
  config = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
  (folder / "tokenizer_config.json").write_text(config + "\n")
  for name, of_template in result.items():
    text = json.dumps(of_template, ensure_ascii=False, separators=(",", ":"))
    (folder / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
  write(pathlib.Path(__file__).parent)
