"""Opens pages in headless Chromium."""

import html
import os
import pathlib
import re
import shutil
import subprocess

import pytest

# Runs after the page's own script; what it prints is the result.
_TRIAL = r"""
<pre id="result"></pre><script>
const lines = [];
const say = (...words) => lines.push(words.join(" "));
const all = (query) => [...document.querySelectorAll(query)];
const curves = (i) => all(`#chart-${i} path.curve`).length;
function move(i, share, type = "pointermove") {
  const svg = document.getElementById(`chart-${i}`);
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent(type, {
    clientX: box.left + share * box.width, clientY: box.top + 100,
  }));
}
window.addEventListener("load", () => {
%s
const result = document.getElementById("result");
result.textContent = ["RESULT", ...lines, "END"].join("\n");
});
</script>
"""


def chromium(page, *flags):
  """Opens a page; returns (standard output, messages of its console)."""
  if not shutil.which("chromium"):
    pytest.skip("Chromium is not installed")
  done = subprocess.run(
    [
      "chromium",
      "--headless",
      "--no-sandbox",  # Tests may run as root.
      "--disable-gpu",
      "--enable-logging=stderr",
      *flags,
      f"file://{os.path.abspath(page)}",
    ],
    check=True,
    capture_output=True,
    text=True,
    timeout=300,
  )
  console = [x for x in done.stderr.splitlines() if "CONSOLE" in x]
  return done.stdout, console


def screenshot(page, picture, height=2600):
  """Takes a picture of a page; returns the messages of its console."""
  flags = f"--window-size=1280,{height}", f"--screenshot={picture}"
  return chromium(page, *flags)[1]


def play(page, script):
  """Runs a script in a page; returns what it `say`s, line by line.

  Args:
    page: path of the page.
    script: JavaScript, which may use `say`, `all`, `curves(chart)` and
      `move(chart, share of its width, type)`.
  """
  path = pathlib.Path(page)
  copy = path.with_name(f"trial-{path.name}")
  copy.write_text(path.read_text().replace("</body>", _TRIAL % script))
  text, console = chromium(copy, "--dump-dom", "--window-size=1280,2000")
  copy.unlink()
  assert not console, console
  found = re.search(r"RESULT\n(.*)\nEND", text, re.DOTALL)
  assert found, text[-2000:]
  return html.unescape(found[1]).splitlines()
