"""The pages in a real browser: nothing wider than the screen, nothing fetched, every section there."""

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fedfm.reports import compare, html
from reports import runs

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=3000",
    "--window-size=1400,1000",
    "--allow-file-access-from-files",
    "--disable-web-security",
    "--dump-dom",
]
# The window of a headless browser has a least width, so each page is measured in frames of the widths that matter.
MEASURE = """<body><script>
const out = [];
for (const width of [1280, 390]) {
  const frame = document.createElement('iframe');
  frame.style.cssText = `border:0;width:${width}px;height:900px`;
  frame.onload = () => {
    const page = frame.contentDocument, root = page.documentElement;
    const wide = [...page.querySelectorAll('body *')].filter(e => !e.closest('.box') && !e.closest('svg')
      && e.getBoundingClientRect().right > width + 0.5).map(e => e.outerHTML.slice(0, 80));
    const fonts = [...page.querySelectorAll('figure svg')].filter(s => s.getBoundingClientRect().width)
      .map(s => s.getBoundingClientRect().width / s.viewBox.baseVal.width);
    page.querySelectorAll('details').forEach(d => d.open = true);
    out.push({width, inner: frame.contentWindow.innerWidth, scroll: root.scrollWidth, wide, scale: Math.min(...fonts),
      sections: [...page.querySelectorAll('section')].map(s => s.id), shown: fonts.length,
      fetched: frame.contentWindow.performance.getEntriesByType('resource').map(r => r.name)});
    const pre = document.createElement('pre');
    pre.id = 'measured';
    pre.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(out))));
    if (out.length == 2) document.body.append(pre);
  };
  frame.src = 'PAGE';
  document.body.append(frame);
}
</script>"""


@pytest.fixture(scope="module", params=["finished", "hostile", "large", "map", "comparison"])
def page(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "finished":
        return html.write(runs.make(folder / "a"), [runs.make(folder / "b", name="b")])
    if request.param == "hostile":
        names = [
            "<script>document.title='x'</script>",
            "W" * 200,
            "北京" * 60,
            "long name " * 30,
            '"><img src="http://x.invalid/">',
        ]
        run = runs.make(folder / "a", names=names, n_rounds=3, finished=None, result=None, name="n" * 150)
        return html.write(run)
    if request.param == "large":
        return html.write(runs.make(folder / "a", n_clients=120, n_rounds=200, n_classes=120, traffic=[]))
    if request.param == "map":
        run = runs.make(folder / "a", names=["W" * 200, "<b>", *(f"c{i}" for i in range(70))], n_rounds=3)
        runs.weights(run, layers=7)
        return html.write(run)
    return compare.write([runs.make(folder / f"r{i}", name="x" * 60 + str(i)) for i in range(10)], folder / "c.html")


@pytest.mark.sample("map")
def test_no_overflow_no_requests_all_sections(page, tmp_path):
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the path: the page is not rendered")
    measure = tmp_path / "measure.html"
    measure.write_text(MEASURE.replace("PAGE", page.as_uri()), encoding="utf-8")
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", measure.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom)
    assert found is not None, dom[-2000:]
    measured = json.loads(base64.b64decode(found[1]))
    assert sorted(m["width"] for m in measured) == [390, 1280]
    for m in measured:
        assert m["inner"] == m["width"]
        assert m["scroll"] <= m["inner"], m["wide"]
        assert m["wide"] == []
        assert m["fetched"] == []
        assert m["scale"] > 0.9  # text in drawings keeps its size
        assert m["shown"] >= 2
        wanted = {"compare", "runs"} if page.name == "c.html" else {"rounds", "clients", "split", "messages", "privacy"}
        assert wanted <= set(m["sections"])
