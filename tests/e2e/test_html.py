"""`tpu-compile inspect --html`: one page, opened in Chromium; and the treemaps on it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from tpu_compile.cli import main
from tpu_compile.targets.treemap import treemap

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(128, 256, dtype=torch.bfloat16)
        self.down = nn.Linear(256, 128, dtype=torch.bfloat16)

    def forward(self, x):
        h = torch.relu(self.up(x)) if x.shape[0] < 1000 and "<b>" else x
        return self.down(h)

def net():
    return Net(), (torch.randn(64, 128, dtype=torch.bfloat16),)
"""
LINE = 1 + next(i for i, words in enumerate(MODELS.splitlines()) if "torch.relu" in words)
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")

POINT = """
<script>
"use strict";
const line = [...document.querySelectorAll(".source .row")].find(e => e.textContent.includes("torch.relu"));
line.dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
const panes = ["fx", "stablehlo", "fusions"];
const marked = name => panes.map(p => document.querySelectorAll("." + p + " ." + name).length).join(" ");
document.body.dataset.hovered = marked("on");
document.querySelector(".time .box[data-k]").dispatchEvent(new MouseEvent("click", {bubbles: true}));
document.body.dataset.pinned = marked("pinned");
document.body.dataset.source = document.querySelectorAll(".source .pinned").length;
document.querySelector(".time .box[data-k]").dispatchEvent(new MouseEvent("click", {bubbles: true}));
document.body.dataset.released = document.querySelectorAll(".pinned").length;
</script></body>
"""


class Page(HTMLParser):
    """What a page refers to, and the attributes of its body."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.body: dict[str, str | None] = {}
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag == "body":
            self.body = dict(attrs)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install tpu-compile[tpu]")
    folder = tmp_path_factory.mktemp("page")
    (folder / "models.py").write_text(MODELS)
    path = list(sys.path)
    done = CliRunner().invoke(
        main,
        ["inspect", f"{folder / 'models.py'}:net", "--grad", "--target", "v5e", "--html", str(folder / "page.html")],
    )
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    yield folder / "page.html"
    sys.modules.pop("models", None)
    sys.path[:] = path


def opened(page: Path, *arguments: str) -> tuple[str, str]:
    """(the document after its scripts ran, what the browser's console said)."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    assert browser, f"no Chromium by any name of {', '.join(BROWSERS)}: apt-get install chromium-headless-shell"
    options = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom".split()
    command = [browser, *options, f"--user-data-dir={page.parent / 'profile'}", *arguments, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_the_page_stands_alone(page: Path) -> None:
    text = page.read_text()
    found = Page(text)
    assert found.links == [] and "link" not in found.tags and found.tags.count("script") == 1
    assert not re.search(r"https?:|@import|url\(", text)
    assert "&lt;b&gt;" in text and '"<b>"' not in text, "source is text, not markup"
    for words in (
        "Net_inference",
        "Net_forward",
        "Net_backward",
        "stablehlo.dot_general",
        "aten.",
        f"models.py:{LINE}",
    ):
        assert words in text


@pytest.mark.full  # needs a Chromium, which no package of ours brings
def test_chromium_opens_it_without_a_word_on_the_console(page: Path) -> None:
    document, console = opened(page)
    assert console == "" and 'class="map time"' in document


@pytest.mark.full
def test_pointing_at_a_line_marks_what_it_became(page: Path) -> None:
    driven = page.with_name("driven.html")
    driven.write_text(page.read_text().replace("</body>", POINT))
    document, console = opened(driven)
    assert console == ""
    body = Page(document).body
    hovered = [int(count) for count in (body["data-hovered"] or "").split()]
    assert len(hovered) == 3 and all(count > 0 for count in hovered), "FX, StableHLO and fusions of the line"
    assert all(int(count) > 0 for count in (body["data-pinned"] or "").split())
    assert int(body["data-source"] or 0) > 0 and body["data-released"] == "0"


def test_a_page_needs_a_chip(page: Path) -> None:
    done = CliRunner().invoke(main, ["inspect", f"{page.parent / 'models.py'}:net", "--html", "x.html"])
    assert done.exit_code == 2 and "--target" in done.stderr


# ---- treemaps


@pytest.mark.parametrize("sizes", [[1.0], [6.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.0], [1e6, 1.0], [0.0, 5.0], [0.1] * 37])
def test_tiles_have_the_areas_of_the_sizes_and_fill_the_whole(sizes: list[float]) -> None:
    tiles = treemap(sizes, 100, 60)
    assert sorted(tile.index for tile in tiles) == [i for i, size in enumerate(sizes) if size]
    scale = 100 * 60 / sum(sizes)
    for tile in tiles:
        assert tile.width * tile.height == pytest.approx(sizes[tile.index] * scale)
        assert tile.x >= -1e-6 and tile.x + tile.width <= 100 + 1e-6
        assert tile.y >= -1e-6 and tile.y + tile.height <= 60 + 1e-6
    for i, a in enumerate(tiles):
        for b in tiles[i + 1 :]:
            across = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            down = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert across <= 1e-6 or down <= 1e-6, "tiles do not overlap"


def test_tiles_are_not_much_longer_than_wide() -> None:
    worst = max(max(t.width / t.height, t.height / t.width) for t in treemap([6, 6, 4, 3, 2, 2, 1], 60, 40))
    assert worst < 3


def test_nothing_is_drawn_of_nothing() -> None:
    assert treemap([]) == treemap([0.0]) == []
