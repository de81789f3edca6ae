"""No bare tolerance in a test: each comes from tests/tolerance.py, or a comment `# tolerance: why` says why it is another.

What is meant are numbers written as `rel=`, `abs=`, `rtol=` or `atol=`, small ones that a value is compared with, the defaults
of torch's and math's own comparisons, and names like `tolerance` that are set to a number. `pytest.approx(x)` alone is for
formulas in Python's floats, which hold to far below its 1e-6 on any machine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests import tolerance
from tests.places import ROOT

TESTS = ROOT / "tests"
KEYWORDS = {"rel", "abs", "rtol", "atol", "rel_tol", "abs_tol"}
COMPARISONS = {"allclose", "assert_close", "isclose"}
SMALL = 0.01
"""A number below is taken for a tolerance, one above for a share that the test speaks of."""


def numbers(node: ast.AST | None, below: float = float("inf")) -> bool:
    """Whether an expression holds a float that is written out, not zero, and below a limit."""
    return node is not None and any(
        isinstance(one, ast.Constant) and isinstance(one.value, float) and 0 < abs(one.value) < below
        for one in ast.walk(node)
    )


def bare(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=function, keywords=keywords):
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            given = [keyword for keyword in keywords if keyword.arg in KEYWORDS]
            return any(numbers(keyword.value) for keyword in given) or (name in COMPARISONS and not given)
        case ast.Compare(left=left, ops=ops, comparators=others):
            orders = any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in ops)
            return orders and any(numbers(one, SMALL) for one in (left, *others))
        case ast.Assign(targets=targets, value=value):
            names = [one.id.lower() for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            return numbers(value) and any("tolerance" in name or name in KEYWORDS for name in names)
    return False


def found(source: str) -> Iterator[int]:
    """Lines with a bare tolerance that no comment explains, on the line before, or in the statement."""
    lines = source.splitlines()
    tree = ast.parse(source)
    checked = [
        node for node in ast.walk(tree) if isinstance(node, ast.Assert | ast.If | ast.Assign | ast.Expr | ast.Return)
    ]
    for statement in checked:
        parts = [statement.test] if isinstance(statement, ast.If) else [statement]
        hits = {node.lineno for part in parts for node in ast.walk(part) if bare(node)}  # type: ignore[attr-defined]
        last = statement.test.end_lineno if isinstance(statement, ast.If) else statement.end_lineno
        if hits and "# tolerance: " not in "\n".join(lines[statement.lineno - 2 : last]):
            yield min(hits)


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("assert a == pytest.approx(b, rel=1e-9)", True),
        ("assert a == pytest.approx(b, rel=tolerance.mixed(64))", False),
        ("assert a == pytest.approx(b, rel=0.1)  # tolerance: the plan is promised to a tenth", False),
        ("# tolerance: a chart is drawn in tenths of a pixel\nassert a == pytest.approx(b, abs=0.1)", False),
        ("assert torch.allclose(a, b)", True),
        ("assert torch.allclose(a, b, rtol=0, atol=tolerance.few(2))", False),
        ("torch.testing.assert_close(a, b)", True),
        ("assert abs(a - b) < 1e-12 * b", True),
        ("assert abs(a - b) < 2", False),
        ("assert share < 0.25", False),
        ("if abs(a - b) > 1e-9:\n    raise AssertionError(a)", True),
        ("tolerance = 1e-2 if half else 1e-6", True),
        ("assert a == pytest.approx(b)", False),
    ],
)
def test_what_is_bare(line: str, refused: bool) -> None:
    assert bool(list(found(line))) == refused


def test_no_tolerance_is_bare() -> None:
    """Where this fails: CONTRIBUTING.md, "Tolerances"."""
    wrong = [
        f"{path.relative_to(TESTS.parent)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        if path.name != Path(__file__).name
        for line in sorted(set(found(path.read_text(encoding="utf-8"))))
    ]
    assert not wrong, f"{len(wrong)} tolerances without a derivation: " + " ".join(wrong)


def summed(terms: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for term in terms:
        total = total + term
    return total


def test_bounds_hold_for_sums_in_any_order() -> None:
    """1,000 terms in float32, added one by one in 50 orders: within `positive` and `mixed`, and not all alike."""
    g = torch.Generator().manual_seed(0)
    for terms, bound in (
        (torch.rand(1000, generator=g), tolerance.positive(1000, dtype=torch.float32)),
        (torch.randn(1000, generator=g), tolerance.mixed(1000, dtype=torch.float32)),
    ):
        right = terms.double().sum()
        orders = [terms[torch.randperm(1000, generator=g)] for _ in range(50)]
        off = max(float(abs(summed(order).double() / right - 1)) for order in orders)
        assert 0 < off <= bound
    assert tolerance.unit_roundoff(torch.bfloat16) == 2.0**-8
    assert tolerance.few(3) == 2 * 3 * 2.0**-53 / (1 - 3 * 2.0**-53)
