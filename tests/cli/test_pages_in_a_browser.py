# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pages written by commands, in headless Chromium: no errors, requests or sideways scrolling."""

import re
import shutil
import subprocess

import pytest

from tests.cli.command import energon_ext
from tests.cli.runs import write_run
from tests.support import write_mix, write_tokens

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]

#: Typical source names of Megatron users, and one whose name is markup.
NAMES = [f"data/CC-MAIN-20{n}-{n + 7}_text_document" for n in range(14, 23)] + ["<b>&x</b>"]

#: Logs the width and the colours of the page to the console.
PROBE = """<script>
const style = getComputedStyle(document.body);
const table = document.querySelector("td");
console.log("MEASURED", document.documentElement.scrollWidth, innerWidth,
            style.color, style.backgroundColor);
</script>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write_run(folder / "run", steps=90, sources=NAMES, resumed_after=[30])
    assert energon_ext("report", folder / "run").exit_code == 0
    for name in ("web_text_document", "code_text_document"):
        write_tokens(folder / name, [[65] * 40] * 60)
    mix = write_mix(folder / "mix.yaml", [("web_text_document", 3), ("code_text_document", 1)])
    forecast = folder / "forecast.html"
    result = energon_ext("plan", mix, "--steps", 40, "--seq-length", 64, "--html", forecast)
    assert result.exit_code == 0
    return {"report": folder / "run" / "report.html", "forecast": forecast}


def open_page(page, folder, *options):
    """Return console lines and requested addresses while Chromium shows a page."""
    probed = folder / "probed.html"
    probed.write_text(page.read_text().replace("</html>", PROBE + "</html>"))
    log = folder / "net.json"
    result = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--enable-logging=stderr", "--v=0", f"--log-net-log={log}",
            f"--user-data-dir={folder / 'profile'}", f"--screenshot={folder / 'shot.png'}",
            *options, probed.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    requests = re.findall(r'"url":"(https?://[^"]+)"', log.read_text())
    # The browser itself checks for updates; no page uses these hosts.
    return console, [url for url in requests if "google" not in url and "gvt1" not in url]


@pytest.mark.parametrize("name", ["report", "forecast"])
@pytest.mark.parametrize(
    ("width", "options"), [(1280, []), (500, []), (500, ["--force-dark-mode"])]
)
def test_a_page_logs_nothing_and_fits_the_window(pages, tmp_path, name, width, options):
    console, requests = open_page(pages[name], tmp_path, f"--window-size={width},900", *options)
    assert requests == []
    assert len(console) == 1, console
    scrolled, inner = map(int, re.search(r"MEASURED (\d+) (\d+)", console[0]).groups())
    assert scrolled <= inner
    assert (tmp_path / "shot.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["report", "forecast"])
def test_a_page_fits_a_phone(pages, tmp_path, name):
    """Use a frame of 390 pixels: a Chromium window is at least 500 wide."""
    page = pages[name].read_text().replace("</html>", PROBE + "</html>")
    (tmp_path / "inner.html").write_text(page)
    frame = tmp_path / "frame.html"
    frame.write_text('<iframe src="inner.html" width="390" height="800"></iframe></html>')
    console, _ = open_page(frame, tmp_path, "--window-size=900,900")
    widths = [
        tuple(map(int, re.search(r"MEASURED (\d+) (\d+)", line).groups())) for line in console
    ]
    assert (390, 390) in widths, widths


@pytest.mark.parametrize(
    ("dark", "is_light"), [([], True), (["--blink-settings=preferredColorScheme=0"], False)]
)
def test_text_contrasts_with_its_background(pages, tmp_path, dark, is_light):
    console, _ = open_page(pages["report"], tmp_path, *dark)
    colors = re.findall(r"rgb\((\d+), (\d+), (\d+)\)", console[0])
    ink, paper = (sum(map(int, color)) / 3 for color in colors)
    assert (paper > ink) == is_light
    assert abs(paper - ink) > 180
