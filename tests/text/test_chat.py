"""Chat templates: where they come from, what they may do, what they write.

And which tokens of a conversation a model learns: the same as in TRL, by the
files of golden/make_chat_masks.py.
"""

import datetime
import json
import pathlib

import hypothesis
import numpy as np
import pytest
import tokenizers as hugging_face
from hypothesis import strategies as st

from bigtrain.config.errors import ConfigError, DataError
from bigtrain.text import chat, tokenizers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "chat_masks"
TRL = {path.stem: path for path in GOLDEN.glob("*.json")}
del TRL["tokenizer"], TRL["tokenizer_config"]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHAT = [
  {"role": "user", "content": "Hello"},
  {"role": "assistant", "content": "Hi."},
]


def template(text, **tokens):
  return chat.Template("test", {"default": text}, tokens)


def folder(path, **config):
  (path / "tokenizer_config.json").write_text(json.dumps(config))
  return str(path)


def test_the_folder_has_the_template_and_its_tokens(tmp_path):
  place = folder(
    tmp_path,
    chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    bos_token="<s>",
    eos_token={"content": "</s>"},
    pad_token=None,
  )
  assert chat.Template.of_folder(place).render(CHAT) == "<s>Hello</s>"
  # A file of its own comes first, as in transformers.
  (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
  assert chat.get(None, place).render(CHAT) == "<s>file"
  assert chat.get(None, f"{place}/tokenizer.json").render(CHAT) == "<s>file"


def test_one_of_several_templates_is_for_tools(tmp_path):
  place = folder(
    tmp_path,
    chat_template=[
      {"name": "tool_use", "template": "{{ tools[0].name }}"},
      {"name": "default", "template": "no tools"},
    ],
  )
  found = chat.get(None, place)
  assert found.render(CHAT) == found.render(CHAT, []) == "no tools"
  assert found.render(CHAT, [{"name": "add"}]) == "add"


def test_a_missing_template_names_what_there_is(tmp_path):
  with pytest.raises(ConfigError, match="no chat template.*chatml"):
    chat.get(None, folder(tmp_path, bos_token="<s>"))
  with pytest.raises(ConfigError, match="'bytes' has no chat template.*chatml"):
    chat.get(None, "bytes")
  with pytest.raises(ConfigError, match="Did you mean 'chatml'"):
    chat.get("chatlm", str(tmp_path))


def test_templates_find_the_functions_that_transformers_has():
  text = (
    "{{ messages[0] | tojson }}{{ {'b': 1, 'a': 'é<'} | tojson(indent=1) }}"
  )
  assert template(text).render([{"x": "ü<>"}]) == (
    '{"x": "ü<>"}{\n "b": 1,\n "a": "é<"\n}'
  )
  blocks = "  {% if true %}\nx\n  {% endif %}\n{% for i in [1, 2] %}{% break %}"
  assert template(blocks + "{% endfor %}y").render(CHAT) == "x\ny"
  marked = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}"
  assert template(marked + "{% endgeneration %}{{ a }}").render(CHAT) == "21"
  with pytest.raises(ConfigError, match="test: roles must alternate"):
    template("{{ raise_exception('roles must alternate') }}").render(CHAT)
  with pytest.raises(ConfigError, match="line 2: .*endfor"):
    template("a\n{% endfor %}").render(CHAT)


def test_the_date_is_an_argument():
  text = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'none' }}"
  then = datetime.datetime(2024, 7, 26)
  assert template(text).render(CHAT, now=lambda: then) == "26 Jul 2024"
  assert template(text).render(CHAT, now=None) == "none"


@pytest.mark.parametrize(
  "text",
  [
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{% for i in range(10000000) %}{% endfor %}",
  ],
)
def test_templates_run_in_a_sandbox(text):
  with pytest.raises(ConfigError, match="chat template test: "):
    assert not template(text).render(list(CHAT))


def test_named_templates_write_the_published_formats(tmp_path):
  place = folder(tmp_path, bos_token="<s>", eos_token="</s>")
  system = [{"role": "system", "content": "Be brief."}]
  thoughts = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
  expected = {
    "chatml": "<|im_start|>user\nHello<|im_end|>\n"
    "<|im_start|>assistant\nHi.<|im_end|>\n",
    "qwen3": "<|im_start|>user\nHello<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\nHi.<|im_end|>\n",
    "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHi.<|eot_id|>",
    "gemma": "<s><start_of_turn>user\nHello<end_of_turn>\n"
    "<start_of_turn>model\nHi.<end_of_turn>\n",
    "mistral": "<s>[INST] Hello[/INST] Hi.</s>",
    "phi3": "<|user|>\nHello<|end|>\n<|assistant|>\nHi.<|end|>\n",
  }
  assert {*expected} == {*chat.NAMES}
  for name, text in expected.items():
    named = chat.get(name, place)
    assert named.render(CHAT) == text
    # What a model is asked is the beginning of what it was trained on.
    prompt = named.render(CHAT[:1], add_generation_prompt=True)
    assert text.startswith(prompt) and "Hi." not in prompt
    assert text.startswith(named.render(CHAT[:1]))
    with pytest.raises(ConfigError, match="no tools"):
      named.render(CHAT, tools=[{"name": "add"}])
  assert "user\nBe brief.\n\nHello<" in chat.get("gemma", place).render(
    system + CHAT
  )
  assert "<think>\n2+2\n</think>\n\n4<" in chat.get("qwen3", place).render(
    [*CHAT[:1], thoughts]
  )


@pytest.fixture(scope="module")
def coder():
  return tokenizers.get(str(GOLDEN))


@pytest.mark.parametrize("name", TRL)
def test_answers_are_those_of_trl(name, coder):
  golden = json.loads(TRL[name].read_text())
  made = chat.Template(name, {"default": golden["template"]}, TOKENS)
  assert len(golden["cases"]) >= 4
  for case in golden["cases"]:
    messages, tools = case["messages"], case["tools"]
    ids, trained = chat.supervised(made, coder, messages, tools)
    assert ids.tolist() == case["ids"]
    assert trained.tolist() == [bool(x) for x in case["mask"]]
    assert trained.any()
    # Only the last answer is the same without the others.
    ids, last = chat.supervised(made, coder, messages, tools, loss="last")
    begin = int(last.argmax())
    assert last[begin:].tolist() == trained[begin:].tolist()
    assert not trained[begin - 1] and last.sum() <= trained.sum()
    turns = sum(message["role"] == "assistant" for message in messages)
    assert (last.sum() < trained.sum()) == (turns > 1)


def test_several_of_trls_templates_have_tools():
  files = [json.loads(path.read_text()) for path in TRL.values()]
  assert len(files) >= 8
  assert sum(any(c["tools"] for c in f["cases"]) for f in files) >= 3


# Published formats, written in Python: what comes before an answer, the answer,
# and what comes after it.
FORMATS = {
  "chatml": lambda m: (f"<|im_start|>{m['role']}\n", m["content"], "\n"),
  "phi3": lambda m: (f"<|{m['role']}|>\n", m["content"], "\n"),
  "llama3": lambda m: (
    f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n",
    m["content"].strip(),
    "",
  ),
  "gemma": lambda m: (
    f"<start_of_turn>{m['role'].replace('assistant', 'model')}\n",
    m["content"].strip(),
    "\n",
  ),
}
ENDS = {
  "chatml": "<|im_end|>",
  "phi3": "<|end|>",
  "llama3": "<|eot_id|>",
  "gemma": "<end_of_turn>",
}
LETTERS = st.text(st.sampled_from("ab 1\n.é日<|>"), max_size=8)
TURNS = st.lists(st.tuples(LETTERS, LETTERS), min_size=1, max_size=4)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.sampled_from(sorted(FORMATS)), TURNS, st.booleans())
def test_random_conversations_by_definition(name, turns, system):
  """A token has a loss if its characters are in an answer or its end."""
  messages = [{"role": "system", "content": "S"}] * (system and name != "gemma")
  for question, answer in turns:
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": answer})
  text, spans = "<s>" if name in ("llama3", "gemma") else "", []
  prompts = []
  for message in messages:
    head, content, tail = FORMATS[name](message)
    text += head
    prompts.append(text)
    start = len(text)
    text += content + ENDS[name] + tail
    if message["role"] == "assistant":
      spans.append((start, len(text)))
  library = hugging_face.Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
  encode = lambda text: library.encode(text, add_special_tokens=False)
  expected = encode(text)
  made = chat.get(name, str(GOLDEN))
  coder = tokenizers.get(str(GOLDEN))
  # A token may contain the end of a prompt and the begin of its answer; then
  # no prompt of such a model has that token.
  asked = [
    encode(prompt).ids
    for prompt, message in zip(prompts, messages)
    if message["role"] == "assistant"
  ]
  if any(expected.ids[: len(ids)] != ids for ids in asked):
    with pytest.raises(DataError, match="but .* in the prompt for this"):
      chat.supervised(made, coder, messages)
    return
  ids, trained = chat.supervised(made, coder, messages)
  assert ids.tolist() == expected.ids
  assert trained.tolist() == [
    any(start <= a and b <= stop for start, stop in spans)
    for a, b in expected.offsets
  ]


def check_refused(text, coder, message, messages=CHAT * 2, **options):
  with pytest.raises(DataError, match=message):
    chat.supervised(template(text, **TOKENS), coder, messages, **options)


def test_a_template_that_drops_earlier_thoughts_is_refused(coder):
  text = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>1+1</think>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
  )
  check_refused(
    text,
    coder,
    "message 1: .*whole conv.*, but .*<think>1.*one up to .*loss='last'",
  )
  ids, trained = chat.supervised(template(text), coder, CHAT * 2, loss="last")
  assert coder.spell(ids[trained]) == "<think>1+1</think>Hi.<|im_end|>"
  # One answer has nothing that goes on.
  assert chat.supervised(template(text), coder, CHAT)[1].any()


def test_an_end_that_is_never_trained_is_refused(coder):
  rows = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
  prompt = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
  message = "message 1: the end of the answer has no loss"
  # The next turn ends this one.
  check_refused(rows + "{% endfor %}" + prompt, coder, message)
  # Only the last turn has an end.
  last = "{% endfor %}{% if not add_generation_prompt %}</s>{% endif %}"
  check_refused(rows + last + prompt, coder, message)
  # The end is no token of this tokenizer.
  check_refused(rows + "<|fin|>{% endfor %}" + prompt, coder, message)
  ids, trained = chat.supervised(
    template(rows + "</s>\n{% endfor %}" + prompt), coder, CHAT
  )
  assert coder.spell(ids[trained]) == "Hi.</s>\n"


def test_a_prompt_that_is_no_beginning_is_refused(coder):
  text = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
  )
  text += "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
  check_refused(text, coder, "message 1: .*Hi.*, but .*<think>' in the prompt")


def test_tools_that_a_template_leaves_out_are_refused(coder):
  text = "{{ messages[0].content }}"
  check_refused(text, coder, "tools: .*does not write them", tools=[{"a": 1}])


def test_messages_of_weight_zero_have_no_loss(coder):
  messages = [*CHAT, CHAT[0], {**CHAT[1], "content": "No.", "weight": 0}]
  made = chat.get("chatml", str(GOLDEN))
  ids, trained = chat.supervised(made, coder, messages)
  assert coder.spell(ids[trained]) == "Hi.<|im_end|>\n"
  ids, trained = chat.supervised(made, coder, messages, loss="all")
  assert coder.spell(ids[~trained]) == "No.<|im_end|>\n"
  messages[1] = {**messages[1], "weight": None}  # As parquet files have it.
  ids, trained = chat.supervised(made, coder, messages)
  assert coder.spell(ids[trained]) == "Hi.<|im_end|>\n"
  messages[1] = {**messages[1], "weight": 0.5}
  with pytest.raises(DataError, match="message 1: weight: expected 0"):
    chat.supervised(made, coder, messages)
  ids, trained = chat.supervised(made, coder, CHAT * 2, first=2)
  assert np.flatnonzero(trained)[0] > len(ids) // 2
