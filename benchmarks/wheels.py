"""Which wheels a machine lacks for this project: walked from the requirements of installed packages, without any import.

A package that is missing cannot say what it needs itself. `wheels.json` says that: the same walk, recorded where everything is
installed (`python benchmarks/wheels.py --record`). torch is taken as it is, with all that torch needs.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "benchmarks" / "wheels.json"
TESTS = ("hypothesis", "pytest", "pytest-timeout")
"""What the tests on a GPU need of the extra `dev`."""
PEERS = ("accelerate",)
"""What a comparison in `make gpu` needs; without them the comparison is left out."""
GIVEN = "torch"
"""Installed with the image of a GPU machine: what it needs is not walked."""


def _packaging() -> Any:
    """`packaging.requirements`; pip brings its own copy to a machine that lacks the package."""
    try:
        from packaging import requirements
    except ImportError:
        from pip._vendor.packaging import requirements  # type: ignore[no-redef]
    return requirements


def roots() -> list[str]:
    """The project's own requirements, and those of its tests on a GPU."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["dev"]
    return [*project["dependencies"], *(one for one in extra if _key(re.split("[^A-Za-z0-9-]", one)[0]) in TESTS)]


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def walk(texts: list[str], recorded: Mapping[str, list[str]]) -> dict[str, tuple[str | None, list[str], list[str]]]:
    """Name -> (installed version or None, version specifiers that are not met, its own requirements)."""
    parse = _packaging().Requirement
    found: dict[str, tuple[str | None, list[str], list[str]]] = {}
    waiting = [(parse(text), frozenset[str]()) for text in texts]
    while waiting:
        one, extras = waiting.pop()
        if one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        key = _key(one.name)
        if key not in found:
            try:
                known = metadata.distribution(key)
                version, own = known.version, list(known.requires or [])
            except metadata.PackageNotFoundError:
                version, own = None, list(recorded.get(key, []))
            found[key] = (version, [], [] if key == GIVEN else own)
            waiting += [(parse(text), frozenset(one.extras)) for text in found[key][2]]
        version, unmet, _ = found[key]
        if (
            version is not None
            and not one.specifier.contains(version, prereleases=True)
            and str(one.specifier) not in unmet
        ):
            unmet.append(str(one.specifier))
    return found


def missing() -> tuple[list[str], list[str]]:
    """(names of missing wheels, `name version, where this project needs specifier`) of this machine."""
    found = walk(roots(), json.loads(RECORDED.read_text(encoding="utf-8")))
    lacking = sorted(name for name, (version, _, _) in found.items() if version is None)
    wrong = [
        f"{name} {version}, needed: {', '.join(unmet)}" for name, (version, unmet, _) in sorted(found.items()) if unmet
    ]
    return lacking, wrong


def record() -> dict[str, list[str]]:
    """What `wheels.json` holds: name -> requirements that hold on some machine, without those of extras."""
    return {
        name: [text for text in own if "extra ==" not in text]
        for name, (_, _, own) in sorted(walk(roots(), {}).items())
    }


if __name__ == "__main__":
    if "--record" in sys.argv:
        RECORDED.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    lacking, wrong = missing()
    print("Missing:", " ".join(lacking) or "nothing", *(f"Wrong version: {one}" for one in wrong), sep="\n")
