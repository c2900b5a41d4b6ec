"""Tool calls in answers, and the ids that bring a model their results."""

import json
import pathlib

import numpy as np
import pytest

from bigtrain.config.errors import ConfigError
from bigtrain.text import chat, tokenizers, tool_calls
from bigtrain.text.tool_calls import Call

GOLDEN = pathlib.Path(__file__).parents[1] / "golden/chat_masks"


@pytest.mark.parametrize(
  ("parser", "text", "expected"),
  [
    ("hermes", "It is 6.", []),
    (
      "hermes",
      'First.\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n'
      "</tool_call>"
      '<tool_call>{"name": "now"}</tool_call>',
      [Call("add", {"x": 1}), Call("now", {})],
    ),
    (
      "hermes",
      '<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>',
      [Call("add", {"x": 1})],
    ),
    ("llama3", "It is 6.", []),
    (
      "llama3",
      '<|python_tag|>{"name": "add", "parameters": {"x": 1}}; '
      '{"name": "add", "parameters": {"x": 2}}',
      [Call("add", {"x": 1}), Call("add", {"x": 2})],
    ),
    ("mistral", "It is 6.", []),
    (
      "mistral",
      'Hm.[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}}]',
      [Call("add", {"x": 1})],
    ),
  ],
)
def test_calls_are_found(parser, text, expected):
  assert tool_calls.PARSERS[parser](text) == expected


@pytest.mark.parametrize(
  ("parser", "text", "error"),
  [
    ("hermes", '<tool_call>{"name": "a"}', "has no </tool_call>"),
    ("hermes", "<tool_call>{name: a}</tool_call>", "is not valid JSON"),
    ("hermes", "<tool_call>[1]</tool_call>", "has no name"),
    (
      "hermes",
      '<tool_call>{"name": "a", "arguments": 3}</tool_call>',
      "no JSO",
    ),
    ("llama3", '{"name": "a"', "is not valid JSON"),
    ("mistral", "[TOOL_CALLS] nothing", "are not valid JSON"),
  ],
)
def test_what_is_no_call_is_an_error_for_the_model(parser, text, error):
  (call,) = tool_calls.PARSERS[parser](text)
  assert error in call.error


def template_of(name):
  golden = json.loads((GOLDEN / f"{name}.json").read_text())
  tokens = {"bos_token": "<s>", "eos_token": "</s>"}
  return chat.Template(name, {"default": golden["template"]}, tokens)


CODER = tokenizers.get(str(GOLDEN))
IM_END = CODER.spellings["<|im_end|>"]


def test_ids_are_those_of_the_whole_conversation():
  """Qwen 3's template joins the results of several calls in one turn."""
  template = template_of("qwen3")
  calls = [Call("add", {"x": 1}), Call("add", {"x": 2})]
  results = ["first 6", "then 7"]
  schemas = [{"type": "function", "function": {"name": "add"}}]
  told = [
    {
      "type": "function",
      "function": {"name": call.name, "arguments": call.arguments},
    }
    for call in calls
  ]
  conversation = [
    {"role": "user", "content": "What is 2 * 3?"},
    {"role": "assistant", "content": "", "tool_calls": told},
    *({"role": "tool", "content": result} for result in results),
  ]
  ids_of = lambda messages, **options: CODER.encode(
    template.render(messages, schemas, **options), special=True
  )
  answered = ids_of(conversation[:2])
  end = int(np.flatnonzero(answered == IM_END)[-1]) + 1
  whole = ids_of(conversation, add_generation_prompt=True)
  np.testing.assert_array_equal(whole[:end], answered[:end])
  continuation = tool_calls.Continuation(template, CODER, [IM_END])
  ids = continuation(calls, results, schemas)
  np.testing.assert_array_equal(ids, whole[end:])
  assert CODER.spell(ids) == (
    "\n<|im_start|>user\n<tool_response>\nfirst 6\n</tool_response>\n"
    "<tool_response>\nthen 7\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
  )


def test_templates_that_want_calls_before_results_get_them():
  text = (
    "{% set ns = namespace(calls=0) %}{% for m in messages %}"
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('result without a call') }}{% endif %}"
    "<|im_start|>{{ m.role }} {{ m.tool_call_id or '' }}"
    "{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
  )
  template = chat.Template("strict", {"default": text}, {})
  continuation = tool_calls.Continuation(template, CODER, [IM_END])
  ids = continuation([Call("add", {})], ["6"])
  expected = "<|im_start|>tool call000006<|im_end|><|im_start|>"
  assert CODER.spell(ids) == expected


def test_templates_without_results_are_refused():
  text = (
    "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}"
  )
  template = chat.Template("plain", {"default": text}, {})
  with pytest.raises(ConfigError, match="plain does not write the role 'tool'"):
    tool_calls.Continuation(template, CODER, [IM_END])
  end = CODER.spellings["<end_of_turn>"]
  with pytest.raises(ConfigError, match="tools: chat template gemma"):
    tool_calls.Continuation(template_of("gemma"), CODER, [end])
