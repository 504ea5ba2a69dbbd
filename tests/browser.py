"""Opens a page in a real browser and tells what it shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Run in the page itself when everything in it has been loaded.
_LOOK = """
const box = each => each.getBoundingClientRect();
const found = {
  title: document.title,
  width: document.documentElement.clientWidth,
  scrolls: document.documentElement.scrollWidth,
  headings: [...document.querySelectorAll("h1, h2")].filter(h => box(h).height > 0).map(h => h.innerText),
  pictures: [...document.images].map(i => ({
    alt: i.alt, loaded: i.complete && i.naturalWidth > 0, wide: box(i).width, high: box(i).height,
  })),
  tables: [...document.querySelectorAll("table")].map(t => ({rows: t.rows.length, high: box(t).height})),
  asked: performance.getEntriesByType("resource").map(r => r.name).filter(name => !name.startsWith("data:")),
};
const out = document.createElement("pre");
out.id = "found";
out.textContent = JSON.stringify(found);
document.body.append(out);
"""


def look(page: str, folder: Path, width: int) -> dict[str, Any]:
    """What ``page`` shows in a window so many pixels wide; fails if the browser complains about anything in it."""
    assert BROWSER is not None
    file = folder / f"looked-at-{width}.html"
    file.write_text(page.replace("</body>", f"<script>addEventListener('load', () => {{{_LOOK}}});</script></body>"))
    # fmt: off
    flags = (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--virtual-time-budget=5000",
        "--enable-logging=stderr", "--log-level=0",
    )
    # fmt: on
    ran = subprocess.run([BROWSER, *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120)
    said = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    written = re.search(r'<pre id="found">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert written is not None, ran.stderr[-2000:]
    return dict(json.loads(unescape(written[1])))
