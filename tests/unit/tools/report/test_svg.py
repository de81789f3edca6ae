"""The geometry of the report's figures: scales, marks, bins, stacks and paths, and where the marks of each figure stand."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.layout.pipeline_schedules import Action
from shardwright.planner.pipeline_simulator import Span
from shardwright.tools.report.charts import (
    Bar,
    Series,
    bars,
    gantt,
    histogram,
    idle_seconds,
    lines,
    ratios,
    stacked,
)
from shardwright.tools.report.svg import (
    Frame,
    Named,
    Scale,
    bins,
    element,
    marks,
    polyline,
    stack,
    steps,
    text,
    thin,
    ticks,
)

NAMED = Named("one", "A title", "What <can> be seen & read")
finite = st.floats(-1e12, 1e12, allow_nan=False)


def drawn(markup: str) -> ElementTree.Element:
    return ElementTree.fromstring(markup)


def of_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [one for one in root.iter() if name in one.get("class", "").split()]


def at(one: ElementTree.Element, key: str) -> float:
    return float(one.attrib[key])


def plain(value: float) -> str:
    return f"{value:g}"


def test_a_scale_is_linear_and_a_point_range_is_in_the_middle() -> None:
    scale = Scale(10, 20, 100, 300)
    assert [scale(value) for value in (10, 12.5, 20, 25)] == [100, 150, 300, 400]
    assert Scale(3, 3, 0, 50)(3) == 25
    assert Frame(400, 200, left=40, right=10, top=20, bottom=30).y(0, 1)(0) == 170


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0, 10, 5, [0, 5, 10]),
        (3.7, 5.6, 5, [4, 4.5, 5, 5.5]),
        (0, 0.004, 5, [0, 0.001, 0.002, 0.003, 0.004]),
        (-3, 3, 3, [-2, 0, 2]),
        (7, 7, 5, [7]),
    ],
)
def test_ticks_by_hand(low: float, high: float, most: int, expected: list[float]) -> None:
    assert ticks(low, high, most) == list(expected)


def test_marks_by_hand() -> None:
    assert marks(3.7, 5.6) == [3.5, 4, 4.5, 5, 5.5, 6]
    assert marks(0, 4.75) == [0, 1, 2, 3, 4, 5]
    assert marks(2, 2)[0] < 2 < marks(2, 2)[-1]


@given(finite, finite, st.integers(2, 12))
def test_marks_cover_and_are_evenly_1_2_or_5_apart(one: float, other: float, most: int) -> None:
    low, high = min(one, other), max(one, other)
    # tolerance: a span that is nothing beside its values
    if high - low < 1e-6 * max(abs(low), abs(high), 1e-6):
        return
    found = marks(low, high, most)
    step = found[1] - found[0]
    # tolerance: a millionth of a step is less than a pixel
    assert found[0] <= low + step * 1e-6 and found[-1] >= high - step * 1e-6
    assert found[0] > low - 1.001 * step and found[-1] < high + 1.001 * step
    assert len(found) <= most + 3
    assert f"{step:.5e}"[0] in "125" and float(f"{step:.5e}"[:7]) in (1, 2, 5)


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=60))
def test_every_value_is_in_one_bin(values: list[float]) -> None:
    found = bins(values)
    assert sum(count for *_, count in found) == len(values)
    for index, (low, high, count) in enumerate(found):
        last = index == len(found) - 1
        inside = sum(low <= value < high or (last and value == high) or low == high for value in values)
        assert count == inside
    assert all(first[1] == second[0] for first, second in itertools.pairwise(found))


def test_stack_piles_up() -> None:
    assert stack([[1, 2], [10, 20], [0, 5]]) == [[(0, 1), (0, 2)], [(1, 11), (2, 22)], [(11, 11), (22, 27)]]


def test_thinning_keeps_the_largest() -> None:
    totals = [float(i % 97) for i in range(1000)]
    totals[613] = 5000.0
    kept = thin(totals, 50)
    assert len(kept) == 50 and 613 in kept and kept == sorted(kept)
    assert all(totals[i] == max(totals[20 * n : 20 * n + 20]) for n, i in enumerate(kept))
    assert thin(totals[:7], 50) == [0, 1, 2, 3, 4, 5, 6]


def test_a_missing_value_is_a_gap() -> None:
    assert polyline([(0, 1), (1, 2), (2, None), (3, 4)]) == "M0 1h0L1 2M3 4h0"


def test_a_band_of_steps_has_the_area_under_it() -> None:
    edges, heights = [0.0, 2, 5, 6], [(10.0, 7.0), (10.0, 4.0), (9.0, 9.0)]
    points, x, y = [], 0.0, 0.0
    for letter, numbers in re.findall(r"([MLH])([-\d. ]+)", steps(edges, heights)):
        values = [float(value) for value in numbers.split()]
        x, y = (values[0], y) if letter == "H" else (values[0], values[1])
        points.append((x, y))
    area = sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(points, [*points[1:], points[0]])) / 2
    assert abs(area) == pytest.approx(2 * 3 + 3 * 6 + 1 * 0)


def test_what_people_write_is_escaped() -> None:
    assert element("g", text(1, 2, "<b> & c"), class_='a"b') == (
        '<g class="a&quot;b"><text x="1" y="2" class="tick">&lt;b&gt; &amp; c</text></g>'
    )


@pytest.mark.parametrize("width", [760.0, 320.0])
def test_lines_stand_where_their_values_are(width: float) -> None:
    root = drawn(lines(NAMED, width, [[1, 2, 3]], [Series("run", "c0 d0", [2.0, None, 4.0])], plain, "update"))
    assert root.get("aria-labelledby") == "one-title one-desc" and root.get("role") == "img"
    assert [root[0].text, root[1].text] == ["A title", "What <can> be seen & read"]
    (path,) = of_class(root, "line")
    (x0, y0), (x2, y2) = [tuple(map(float, pair)) for pair in re.findall(r"M([\d.]+) ([\d.]+)", path.attrib["d"])]
    labels = {one.text: at(one, "y") - 4 for one in of_class(root, "tick") if one.get("text-anchor") == "end"}
    # tolerance: a chart is drawn in tenths of a pixel
    assert (y0, y2) == pytest.approx((labels["2"], labels["4"]), abs=0.1) and y0 > y2
    assert x0 < x2 == width - 12


def test_the_bars_of_a_histogram_are_as_high_as_their_counts() -> None:
    values = [1.0, 1.1, 1.1, 1.9, 3.05]
    root = drawn(histogram(NAMED, 760, values, [("p50 1.1", 1.1), ("max 3.05", 3.05)], plain, "s"))
    rects = of_class(root, "bar")
    tallest = max(at(rect, "height") for rect in rects)
    counts = [round(2 * at(rect, "height") / tallest) for rect in rects]
    assert Counter(counts) == Counter(count for *_, count in bins(values)) and sum(counts) == len(values)
    first, last = of_class(root, "mark")
    low, high = at(rects[0], "x"), at(rects[-1], "x") + at(rects[-1], "width")
    assert low <= at(first, "x1") < at(last, "x1") <= high + 1


def test_the_peak_is_marked_at_the_fullest_moment() -> None:
    series = [
        Series("a", "parameters", [4.0, 4.0, 4.0, 4.0]),
        Series("b", "activations", [1.0, 9.0, 3.0, 0.0]),
    ]
    root = drawn(stacked(NAMED, 760, series, plain, "moments", peak="peak 13", moments=["w", "x", "y", "z"]))
    (dot,) = of_class(root, "dot")
    left, right = (float(v) for v in re.findall(r"[MH]([\d.]+)", of_class(root, "band")[0].attrib["d"])[0:4:3])
    assert dot[0].text == "x"
    # tolerance: a chart is drawn in tenths of a pixel
    assert at(dot, "cx") == pytest.approx(left + (760 - 12 - left) * 1.5 / 4, abs=0.2) and right > left


def test_bars_are_as_long_as_their_parts() -> None:
    rows = [
        Bar("x", [("k0", 30.0, "a"), ("k1", 10.0, "b")], "40"),
        Bar("y", [("k0", 80.0, "a")], "80", (70.0, 90.0)),
    ]
    root = drawn(bars(NAMED, 760, rows, plain, "bytes"))
    first, second, third = of_class(root, "bar")
    per_unit = at(third, "width") / 80
    # tolerance: a chart is drawn in tenths of a pixel
    assert at(first, "width") / per_unit == pytest.approx(30, abs=0.05)
    assert at(second, "x") == pytest.approx(at(first, "x") + at(first, "width"), abs=0.11)  # tolerance: two of them
    low, high = map(float, re.match(r"M([\d.]+) .*H([\d.]+)m", of_class(root, "whisker")[0].attrib["d"]).groups())  # type: ignore[union-attr]
    # tolerance: a chart is drawn in tenths of a pixel
    assert (high - low) / per_unit == pytest.approx(20, abs=0.05)
    assert [one.text for one in of_class(root, "value")] == ["40", "80"]


def test_a_schedule_stands_where_it_was_played() -> None:
    spans = [Span(0, Action(0, "F", 0), 0, 2), Span(1, Action(1, "F", 0), 2, 4), Span(1, Action(1, "B", 0), 4, 8),
             Span(0, Action(0, "B", 0), 8, 12)]  # fmt: skip
    assert idle_seconds(spans, 2) == [6, 6]
    root = drawn(gantt(NAMED, 760, spans, 2, plain, "s"))
    rects = of_class(root, "act")
    assert [rect.get("class") for rect in rects] == [
        "act forward",
        "act forward",
        "act backward",
        "act backward",
    ]
    unit = (760 - 12 - at(rects[0], "x")) / 12
    # tolerance: a chart is drawn in tenths of a pixel
    assert [(at(rect, "x") - at(rects[0], "x")) / unit for rect in rects] == pytest.approx([0, 2, 4, 8], abs=0.01)
    # tolerance: a chart is drawn in tenths of a pixel
    assert [(at(rect, "width") + 0.6) / unit for rect in rects] == pytest.approx([2, 2, 4, 4], abs=0.01)
    assert at(rects[0], "y") == at(rects[3], "y") < at(rects[1], "y") == at(rects[2], "y")


@pytest.mark.parametrize("width", [760.0, 320.0])
def test_ratios_are_seen_from_one(width: float) -> None:
    root = drawn(ratios(NAMED, width, [("a, memory", "q0", 1.2), ("a, time", "q2", 0.8), ("b", "q1", 1.0)], 0.1))
    one = at(of_class(root, "one")[0], "x1")
    above, below, exact = (at(point, "cx") - one for point in of_class(root, "point"))
    # tolerance: a chart is drawn in tenths of a pixel
    assert above == pytest.approx(-below, abs=0.2) and above > 20 and exact == 0
    near = of_class(root, "near")[0]
    assert at(near, "width") == pytest.approx(above, abs=0.2)  # tolerance: the same
    assert one - at(near, "x") == pytest.approx(above / 2, abs=0.2)  # tolerance: the same
