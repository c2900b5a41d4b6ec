"""The commands of docs/rewards.md, with a smaller model and shorter runs."""

import json

import pytest
from support import pages
from support.policy_runs import rows_of
from test_day import block, write_published

pytestmark = pytest.mark.slow

PAGE = "docs/rewards.md"
SMALL = (
  "--config.total_steps=4 --config.log_steps=1 --config.input.batch_size=8 "
  "--config.loss.samples=2 --config.loss.max_new=8 --config.ckpt_steps=4"
)


def test_the_commands_of_the_page(tmp_path):
  write_published(tmp_path)
  line = block(PAGE, "text", "12 * 31")
  (tmp_path / "questions.jsonl").write_text(line * 120)
  for name, words in (
    ("my_rewards.py", "def exact"),
    ("rl.py", "kind="),
    ("judge.py", "json.loads"),
    ("judged.py", "import rl"),
    ("my_tools.py", "def calculator"),
  ):
    (tmp_path / name).write_text(block(PAGE, "python", words))
  for run in ("runs/rl", "runs/judged", "runs/tools"):
    command = block(PAGE, "", f"--workdir={run}")
    pages.ran(pages.type_shell(command, tmp_path, SMALL))
    rows = [row for row in rows_of(tmp_path / run) if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert "clipped_low" in rows[3]  # Four updates of one set.
    assert ("turns" in rows[0]) == (run == "runs/tools")
    answers = (tmp_path / run / rows[-1]["answers"]).read_text()
    (prompt,) = {json.loads(line)["prompt"] for line in answers.splitlines()}
    assert "What is 12 * 31?" in prompt
  pages.ran(pages.type_shell(block(PAGE, "", "tools.report"), tmp_path))
  (page,) = (tmp_path / "runs/rl/report").glob("*.html")
  assert "What is 12 * 31?" in page.read_text()
