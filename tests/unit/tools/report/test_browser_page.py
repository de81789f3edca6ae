"""The report's pages in a headless Chromium: no errors, no network, nothing cut off at 360 and 1200 px, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.tools.report.browser import HOW_TO_GET_ONE, Page, browser, find_chromium
from tests.unit.tools.report.test_report import FIGURES, write_bench, write_run

from shardwright.tools.report.verb import run_report

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=HOW_TO_GET_ONE)

VISIBLE = """[...document.querySelectorAll('figure:not(.absent) .drawing')].filter(one => one.offsetParent)
    .map(one => one.querySelector('svg').getBoundingClientRect()).map(box => [box.width, box.height])"""
OUTSIDE = """[...document.querySelectorAll('.drawing svg')].filter(one => one.parentElement.offsetParent).flatMap(one => {
    const box = one.getBoundingClientRect();
    return [...one.querySelectorAll('text')].filter(label => {
        const own = label.getBoundingClientRect();
        return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1 || own.bottom > box.bottom + 1;
    }).map(label => one.getAttribute('aria-labelledby') + ': ' + label.textContent);
})"""
TOUCHING = """[...document.querySelectorAll('.drawing svg')].filter(one => one.parentElement.offsetParent).flatMap(one => {
    const ticks = [...one.querySelectorAll('text.tick')].map(label => [label.textContent, label.getBoundingClientRect()]);
    return ticks.flatMap(([a, p], i) => ticks.slice(i + 1).filter(([b, q]) =>
        p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 1 && q.top < p.bottom - 1)
        .map(([b]) => one.getAttribute('aria-labelledby') + ': ' + a + ' and ' + b));
})"""
CONTRAST = """(() => {
    const light = colour => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const paper = light(getComputedStyle(document.body).backgroundColor);
    const ratio = colour => { const l = light(colour); return (Math.max(l, paper) + 0.05) / (Math.min(l, paper) + 0.05); };
    const all = query => [...document.querySelectorAll(query)].map(one => getComputedStyle(one));
    const least = (query, key) => Math.min(...all(query).map(style => ratio(style[key])));
    return [least('p, h1, h2, h3, td, th, a', 'color'), least('svg .tick, svg .label, svg .value, svg .name', 'fill'),
            least('svg path.line', 'stroke'), light(getComputedStyle(document.body).backgroundColor)];
})()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of one pipeline run, of two runs with long names, and of a bench."""
    root = tmp_path_factory.mktemp("report")
    one = write_run(root / "a", updates=40, parallelism__pp_size=2)
    other = write_run(root / "a-second-run-whose-name-is-long", updates=30, parallelism__data_parallel="zero3")
    made = {"one": [one], "two": [one, other], "bench": [write_bench(root / "b")]}
    for name, paths in made.items():
        run_report(paths, root / f"{name}.html", None, lambda text: None)
    return {name: root / f"{name}.html" for name in made}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert CHROMIUM is not None
    with browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("name", ["one", "two", "bench"])
def test_a_page_is_whole(
    page: Page, pages: dict[str, Path], tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    page.open(pages[name], width, scheme)
    if name != "bench":
        present = page.value("[...document.querySelectorAll('figure')].map(one => one.id)")
        assert {f"figure-{figure}" for figure in FIGURES} <= set(present)
    assert page.value("document.documentElement.scrollWidth") == width
    boxes = page.value(VISIBLE)
    assert len(boxes) == page.value("document.querySelectorAll('figure:not(.absent) .drawing').length") // 2
    assert all(w > 0.8 * min(width, 824) - 40 and h > 60 for w, h in boxes)
    assert page.value(OUTSIDE) == []
    assert page.value(TOUCHING) == []
    words, labels, strokes, paper = page.value(CONTRAST)
    assert words >= 4.5 and labels >= 4.5  # WCAG 2.2, 1.4.3
    assert strokes is None or strokes >= 3  # 1.4.11
    assert (paper > 0.9) == (scheme == "light")
    page.picture(tmp_path / f"{name}-{width}-{scheme}.png")
    assert (tmp_path / f"{name}-{width}-{scheme}.png").stat().st_size > 10_000
    assert page.heard == []
    assert all(address.startswith(("file:", "data:")) for address in page.requested)


def test_paper_is_light_and_shows_the_numbers(page: Page, pages: dict[str, Path]) -> None:
    page.open(pages["one"], 1200, "dark", media="print")
    *_, paper = page.value(CONTRAST)
    assert paper > 0.9
    page.call("Page.printToPDF", displayHeaderFooter=False)
    assert page.value("[...document.querySelectorAll('details')].every(one => one.open)")
