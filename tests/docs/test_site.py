"""The site that `make docs` builds: links and anchors lead somewhere, and no page is wider than a phone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.process
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

#: Opens page after page in a frame as wide as a phone, and writes down how wide each has become.
PHONE = """<iframe id="frame" style="width:390px; height:844px"></iframe><pre id="widths"></pre><script>
const pages = %s, frame = document.getElementById("frame"), widths = document.getElementById("widths");
let n = 0;
frame.onload = () => {
  const page = frame.contentDocument.documentElement;
  widths.textContent += `${pages[n]} ${page.scrollWidth} of ${page.clientWidth}\\n`;
  if (++n < pages.length) frame.src = pages[n];
};
frame.src = pages[0];
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("docs") / "site"
    words = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", "docs", str(directory)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory


def test_it_has_signatures_and_the_picture(site: Path) -> None:
    api = (site / "reference.html").read_text()
    # Signatures and docstrings, not names alone.
    assert 'id="megaresume.attach"' in api and "has a section for each trainer" in api
    assert (site / "_images/killed-three-times.svg").is_file()
    assert "first-page.css" in (site / "index.html").read_text()


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_no_page_is_wider_than_a_phone(site: Path) -> None:
    assert BROWSER is not None
    pages = sorted(path.name for path in site.glob("*.html"))
    (site / "phone.html").write_text(PHONE % json.dumps(pages))
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    words += ["--allow-file-access-from-files", "--virtual-time-budget=600000", "--dump-dom"]
    done = subprocess.run([*words, (site / "phone.html").as_uri()], capture_output=True, text=True, timeout=600)
    widths = re.findall(r"(\S+\.html) (\d+) of (\d+)$", done.stdout.replace('<pre id="widths">', "\n"), re.MULTILINE)
    assert [name for name, *_ in widths] == pages
    assert [name for name, width, room in widths if int(width) > int(room)] == []
