"""Runs of the task policy_gradient with a tiny model, also as processes."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from support import compile_cache

MODEL = dict(
  variant="llama", vocab_size=31, width=16, mlp_dim=24, num_heads=2, depth=2
)
# Metrics that are equal in runs that learn the same.
NAMES = ("loss", "reward", "reward_std", "length", "truncated", "grad_norm")


def num_digits(texts, row):
  """A reward function. Processes of rewards import it from here."""
  return [sum(c.isdigit() for c in text) for text in texts]


def config_of(**changes):
  config = dict(
    seed=3,
    total_steps=4,
    log_steps=1,
    ckpt_steps=2,
    task="policy_gradient",
    loss=dict(kind="grpo", samples=4, max_new=4),
    input=dict(
      data=dict(
        type="prompts",
        tokenizer="bytes",
        length=8,
        name="arithmetic",
        rewards=f"{__name__}.num_digits",
      ),
      batch_size=8,
    ),
    model_name="decoder",
    model=MODEL | dict(vocab_size=259, init_std=0.3),
    optimizer=dict(name="adam"),
    lr=1e-3,
    schedule=dict(decay_type="constant"),
    tensorboard=False,
  )
  return config | changes


def start(config, tmp_path, name, devices=1):
  """Starts a run in tmp_path / name; returns its process."""
  path = tmp_path / f"{name}.py"
  path.write_text(f"def get_config():\n  return {config!r}\n")
  root = pathlib.Path(__file__).parents[2]
  paths = [str(root), str(root / "tests" / "tasks"), str(root / "tests")]
  env = os.environ | {
    "PYTHONPATH": os.pathsep.join(paths),
    "XLA_FLAGS": compile_cache.flags(devices),
  }
  command = [sys.executable, "-m", "bigtrain.main", f"--config={path}"]
  command += [f"--workdir={tmp_path / name}"]
  return subprocess.Popen(command, env=env, cwd=root)


def kill_after(process, workdir, step):
  """Kills a run once it has saved a step."""
  file = workdir / "checkpoints" / f"{step:08d}" / "manifest.json"
  while not file.exists() and process.poll() is None:
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  process.wait()


def rows_of(workdir):
  lines = (pathlib.Path(workdir) / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def metrics_of(workdir, names=NAMES):
  rows = [row for row in rows_of(workdir) if "loss" in row]
  assert all(row.get("log_prob_difference", 0) < 1e-5 for row in rows)
  return [[row[name] for name in names] for row in rows]


def params_of(workdir):
  from bigtrain.checkpoints.foreign import parameter_files

  arrays = parameter_files.open_file(
    str(workdir), step=None, prefix="params", key="workdir"
  )
  return arrays.read([*arrays.specs])


# Conversations with tools: a tokenizer of single characters, whose model often
# ends a turn by chance, and a template with a token for each role.

ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
END = "<|end|>"
_TEMPLATE = (
  "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
  "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_LETTERS = "abcdefghijklmnopqrstuvwxyzVE0123456789 :+?!"


def chat_folder(folder):
  """Writes a folder with the tokenizer and its template; returns its path."""
  import tokenizers
  from tokenizers import decoders, models

  folder.mkdir(exist_ok=True)
  special = ["<unk>", END, *ROLES]
  vocab = {token: i for i, token in enumerate([*special, *_LETTERS])}
  made = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
  made.add_special_tokens(special)
  made.decoder = decoders.Fuse()
  made.save(str(folder / "tokenizer.json"))
  config = {"eos_token": END, "chat_template": _TEMPLATE}
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return str(folder)


def calls_of(text):
  """The first two of the digits 5 and 7 are calls of a tool."""
  digits = [int(c) for c in text if c in "57"][:2]
  return [dict(name="add", arguments=dict(x=digit)) for digit in digits]


def tool(call, row):
  if call["arguments"]["x"] == 7:
    raise ValueError("seven")
  return f"{row['number']}+{call['arguments']['x']}"


def num_results(texts, row, messages):
  """A reward for results of tools, and one for the letters of the last turn."""
  assert [each[-1]["content"] == text for each, text in zip(messages, texts)]
  return [sum(m["role"] == "tool" for m in each) for each in messages]


def chat_config(folder, **changes):
  """A config whose model calls tools."""
  rows = [
    {"prompt": [{"role": "user", "content": f"{i}?"}], "number": i}
    for i in range(16)
  ]
  path = folder / "chats.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = config_of(loss=dict(kind="grpo", samples=4, max_new=96))
  config["input"]["data"] = dict(
    type="prompts",
    path=str(path),
    tokenizer=chat_folder(folder / "tokenizer"),
    length=6,
    rewards=f"{__name__}.num_results",
    tools=f"{__name__}.tool",
    tool_calls=f"{__name__}.calls_of",
    max_turns=3,
    workers=2,
  )
  config["model"] |= dict(vocab_size=len(_LETTERS) + 5, init_std=0.1)
  return config | changes
