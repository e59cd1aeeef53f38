"""The page in a real browser: complete in itself, silent, and readable in every width and theme."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from poseidon.report.figures import compute_figures
from poseidon.report.html import make_page
from poseidon.report.record import RunRecord
from poseidon.report.speedup import draw_curves
from support import runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "</script><script>alert(1)</script>&<b>"
SMUGGLED = (
    HOSTILE,
    "</script><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "</title></style><script>alert(1)</script>",
    '<a href="javascript:alert(1)">a</a>',
    "<!--<script>",
    "{{ 7 * 7 }}{% raw %}%{x}",
    "]]>\u2028\x1b[2J",
)
QUIET = ["--disable-component-update", "--disable-features=OptimizationGuideModelExecution,OptimizationHints,Translate"]
"""So that the browser starts no process of its own accord, which would count as left behind by a test."""
Opener = Callable[..., tuple[Any, list[str]]]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look at the page with")


def write_page(folder: Path, **changes: Any) -> Path:
    record = RunRecord.load(runs.write_run(folder / "run", **changes))
    path = folder / "page.html"
    path.write_text(make_page(record, compute_figures(record)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", *QUIET]
        launched = started.chromium.launch(executable_path=CHROMIUM, args=options)
        launched.new_page().close()  # starts the browser's other processes
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("page"))


@pytest.fixture
def open_page(browser: Any) -> Iterator[Opener]:
    """Opens a file; gives the page, and a list of what it should not have done."""
    with ExitStack() as stack:

        def opener(path: Path, width: int = 1280, scheme: str = "light") -> tuple[Any, list[str]]:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            stack.callback(context.close)
            page = context.new_page()
            complaints: list[str] = []
            page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
            page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
            page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
            page.on("request", lambda request: complaints.append(request.url) if request.url != path.as_uri() else None)
            page.goto(path.as_uri())
            page.locator(".plot .main-svg").last.wait_for()
            return page, complaints

        yield opener


def wait_until(page: Any, expression: str) -> Any:
    """What an expression gives once it is true; the page's own rules forbid playwright's waiting for functions."""
    end = time.monotonic() + 10
    while not (value := page.evaluate(expression)) and time.monotonic() < end:
        page.wait_for_timeout(50)
    assert value, expression
    return value


@needs_browser
@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (420, "dark"),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in [(1280, "dark"), (800, "light"), (800, "dark")]),
        pytest.param(420, "light", marks=pytest.mark.thorough),
    ],
)
def test_it_opens_in_silence_and_fits(open_page: Opener, page_file: Path, width: int, scheme: str) -> None:
    page, complaints = open_page(page_file, width, scheme)
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert wait_until(page, "document.querySelectorAll('.plot .plot-container').length") == 4


@needs_browser
def test_what_matters_is_on_the_first_screen(open_page: Opener, page_file: Path) -> None:
    page, _ = open_page(page_file)
    for card, text in (("achieved", "160 samples/s"), ("limits", "Network"), ("prediction", "Yes, within 10 %")):
        place = page.locator(f"#{card}")
        assert text in place.inner_text()
        box = place.bounding_box()
        assert box["y"] + box["height"] < 900


@needs_browser
def test_ink_and_ground_change_with_the_theme_even_while_it_is_open(open_page: Opener, page_file: Path) -> None:
    page, complaints = open_page(page_file)
    ink = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    light = page.evaluate(ink)
    page.emulate_media(color_scheme="dark")
    wait_until(page, f"{ink} !== '{light}'")
    assert brightness(page.evaluate(ink)) > 180 > 100 > brightness(light)
    assert complaints == []


def brightness(color: str) -> float:
    """Of `rgb(1, 2, 3)`, from 0 to 255."""
    return sum(float(part) for part in color[color.index("(") + 1 : -1].split(",")[:3]) / 3


@needs_browser
def test_a_step_can_be_zoomed_into(open_page: Opener, page_file: Path) -> None:
    page, _ = open_page(page_file)
    place = page.locator('[data-plot="step"]')
    place.scroll_into_view_if_needed()
    full = place.evaluate("one => one.layout.xaxis.range[1]")
    box = place.locator(".draglayer .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20, steps=4)
    page.mouse.up()
    wait_until(page, f"document.querySelector('[data-plot=\"step\"]').layout.xaxis.range[1] < {full} * 0.8")


@needs_browser
def test_text_of_a_run_stays_text(open_page: Opener, tmp_path: Path) -> None:
    page, complaints = open_page(write_page(tmp_path, hostile=HOSTILE))
    assert complaints == []
    assert HOSTILE in page.locator("h1").inner_text()


@needs_browser
@pytest.mark.parametrize("text", ["".join(SMUGGLED), *(pytest.param(t, marks=pytest.mark.thorough) for t in SMUGGLED)])
def test_no_text_becomes_a_script_a_picture_or_a_link(open_page: Opener, tmp_path: Path, text: str) -> None:
    """In whatever is named: task, layers, events, hosts' devices and cards, options, the baseline and the plan."""
    facts = runs.make_facts()
    surroundings = {**facts["surroundings"], **dict.fromkeys(("device", "link", "interface", "torch", "python"), text)}
    others = {"options": {"batch_size": text}, "baseline": {**facts["baseline"], "note": text}, "plan": text}
    path = write_page(tmp_path, hostile=text, surroundings=surroundings, poseidon=text, **others)
    page, complaints = open_page(path)
    plot = page.locator('[data-plot="step"]')
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    for share in (0.3, 0.5, 0.8):
        page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] * 0.4)
        page.wait_for_timeout(30)
    assert complaints == []
    assert (
        page.evaluate("document.querySelectorAll('img, a, [onerror], [onload], [onmouseover], script[src]').length")
        == 0
    )
    assert page.evaluate("document.scripts.length") == 2 + page.evaluate("document.querySelectorAll('.plot').length")
    shown = page.evaluate("document.body.textContent")
    assert shown.count(text) >= 8


@needs_browser
def test_a_script_that_got_into_the_page_would_not_run(open_page: Opener, tmp_path: Path) -> None:
    path = write_page(tmp_path)
    page_text = path.read_text(encoding="utf-8")
    path.write_text(page_text.replace("<main>", "<main><script>alert(1)</script><i onclick='alert(1)' id='it'>x</i>"))
    page, complaints = open_page(path)
    page.locator("#it").click()
    assert len(complaints) == 2
    assert all("Content Security Policy" in complaint for complaint in complaints)


@needs_browser
def test_the_picture_of_speed_ups_shows_names_as_text(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "speed-ups.html"
    draw_curves([(text, [1, 2], [1.0, 1.9]) for text in SMUGGLED], path, title="".join(SMUGGLED))
    page = browser.new_page()
    complaints: list[str] = []
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    page.locator(".main-svg").last.wait_for()
    assert complaints == []
    assert page.evaluate("document.querySelectorAll('img, svg[onload], svg a').length") == 0
    page.close()


def test_nothing_is_fetched_and_everything_is_escaped(tmp_path: Path) -> None:
    text = write_page(tmp_path, hostile=HOSTILE).read_text(encoding="utf-8")
    own = text[: text.index("<script>")] + text[text.rindex("<script>") :]
    assert "http://" not in own
    assert "https://" not in own
    assert "default-src 'none'; script-src 'sha256-" in own
    assert "script-src 'unsafe-inline'" not in own
    assert HOSTILE not in text


@pytest.mark.parametrize("missing", ["predicted", "steps", "everything"])
def test_a_page_can_be_made_of_what_is_there(tmp_path: Path, missing: str) -> None:
    folder = runs.write_run(tmp_path / "run", predicted=False, baseline=None, result=None)
    if missing in ("steps", "everything"):
        (folder / "timeline.jsonl").write_text("")
    if missing == "everything":
        for name in ("steps.jsonl", "plan.json", "timeline.jsonl"):
            (folder / name).unlink()
    record = RunRecord.load(folder)
    text = make_page(record, compute_figures(record))
    assert "None was made" in text
    assert ("One step, rank by rank" in text) == (missing == "predicted")
