"""Chat templates: where they come from, what they may do, what they write."""

import datetime
import json

import pytest

from bigtrain import chat
from bigtrain.settings import ConfigError

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
