"""The verb `plan`: from a run file or flags to the printed answer and the exit code."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.arch.model_shape import Inventory, shape_of_model
from shardwright.arch.shape import generic_shape
from shardwright.dtypes import DTYPE_BYTES
from shardwright.errors import ConfigError, ExitCode, did_you_mean
from shardwright.planner.advice import first_to_test
from shardwright.planner.answer import answer, describe, layout_keys, layout_name
from shardwright.planner.hardware import find_device
from shardwright.planner.problem import problem_of_flags, shape_of_run
from shardwright.planner.search import Choice, Search
from shardwright.planner.show import bar, keys_line, layout_table, parts_line, text
from shardwright.planner.space import KINDS, ON_DEVICE, tensor_reason

if TYPE_CHECKING:  # planning by flags loads no pydantic
    from shardwright.arch.shape import Shape
    from shardwright.config.schema import RunFile

PACKED = (
    "Rows are packed, and attention is counted over whole rows: more than their documents need. Give --document-length, which "
    "`shardwright inspect` prints."
)


@dataclass(frozen=True)
class Request:
    """What `plan` is asked: flags, or a run file whose values the flags replace. None: the flag was not given."""

    run_file: Path | None = None
    model: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    gated: bool = True
    devices: int | None = None
    device: str | None = None
    max_length: int | None = None
    global_batch_size: int | None = None
    document_length: float | None = None
    tokens: float | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    master_dtype: str | None = None
    compiled: bool = False
    offload: bool = False
    overrides: tuple[str, ...] = ()
    inventory: Inventory | None = None  # builds a model that is not read from its config.json; None: cannot be built


def _shape(request: Request, run: RunFile | None) -> Shape:
    sizes = {name: getattr(request, name) for name in ("layers", "hidden", "heads", "vocab")}
    if request.layers is not None:
        missing = ", ".join(f"--{name}" for name, size in sizes.items() if size is None)
        if missing:
            raise ConfigError(f"--layers needs {missing} too.", "These sizes together give the shape of the model.")
        rest = {name: getattr(request, name) for name in ("ffn", "kv_heads", "gated")}
        return generic_shape(**sizes, **rest, tied=False, biases=False)
    if request.model is not None:
        return shape_of_model(request.model, request.inventory, {"attn_implementation": "eager"})
    if run is not None:
        return shape_of_run(run, request.inventory)
    raise ConfigError(
        "No model is given.",
        "",
        "Give a run file, --model (a known model, a config.json or its directory), or --layers --hidden --heads --vocab.",
    )


def make_search(request: Request) -> tuple[Search, RunFile | None]:
    """The search of a request, and its run file if there is one. Raises `ConfigError` for missing and unknown values."""
    run: RunFile | None = None
    if request.run_file is not None:
        from shardwright.config.load import load_run_file, parse_overrides
        from shardwright.layout.legality import check_settings

        loaded = load_run_file(request.run_file, parse_overrides(request.overrides))
        check_settings(loaded)
        run = loaded.run
    needed = {
        "devices": request.devices,
        "max_length": request.max_length or (run.data.max_length if run else None),
        "global_batch_size": request.global_batch_size or (run.training.global_batch_size if run else None),
    }
    for key, value in needed.items():
        if value is None:
            flag = "--" + key.replace("_", "-")
            raise ConfigError(
                f"{flag} is not given.",
                "Every layout trains the same update on the same devices, so plan needs their sizes.",
                f"Add {flag}, or a run file." if key != "devices" else f"Add {flag}.",
            )
        if value < 1:
            raise ConfigError(f"{key} = {value}, but must be at least 1.")
    if request.document_length is not None and request.document_length <= 0:
        raise ConfigError(f"--document-length {request.document_length}, but must be above 0.")
    devices, dtypes = needed.pop("devices") or 0, ("param_dtype", "reduce_dtype", "master_dtype")
    for name in dtypes:
        dtype = getattr(request, name)
        known = [known for known in DTYPE_BYTES if known.startswith(("fp", "bf"))]
        if dtype is not None and dtype not in known:
            raise ConfigError(f"--{name.replace('_', '-')} {dtype} is not known.", "", did_you_mean(dtype, known))
    on_cpu = run is not None and run.hardware.device == "cpu"
    device = find_device(request.device or ("cpu" if on_cpu else "h100-sxm-80gb"))
    given = {**needed, **{name: getattr(request, name) for name in (*dtypes, "document_length")}}
    problem = problem_of_flags(_shape(request, run), device, run, request.compiled, given)
    offload = request.offload or (run is not None and run.memory.cpu_offload != "none")
    return Search(problem, devices, KINDS if offload else ON_DEVICE), run


def named(search: Search, name: str) -> Choice | None:
    """The fastest layout of this name that fits; None when none fits. Raises `ConfigError` when the name is not legal here."""
    from shardwright.layout.names import parse_layout

    keys, problem = parse_layout(name), search.problem
    tp, cp, pp = (keys.get(f"{axis}_size", 1) for axis in ("tp", "cp", "pp"))
    replicate, kind = keys.get("dp_replicate_size"), keys.get("data_parallel", "zero3")
    if replicate and kind == "zero3":
        kind = "hsdp"
    taken = tp * cp * pp * (replicate or 1)
    if search.devices % taken:
        raise ConfigError(
            f"`{name}` needs a multiple of {taken} devices, not {search.devices}.", "", "Change --devices or a size."
        )
    reason = tensor_reason(problem.shape, tp)
    if reason:
        raise ConfigError(f"`{name}`: {reason}.", "Each rank must hold whole heads and equal columns.")
    data = search.devices // (tp * cp * pp)
    if problem.global_batch_size % data:
        raise ConfigError(
            f"`{name}`: the {problem.global_batch_size} rows of an update cannot be divided over {data} data ranks.",
            "The batch is part of the objective.",
        )
    return search.only(tp, cp, pp, kind, replicate, keys.get("pp_schedule"))


def _compared(search: Search, found: dict[str, Choice | None]) -> Iterator[str]:
    """Layouts side by side, by the name that each was asked for: time, memory, and what each is made of."""
    described = {name: describe(search, choice) for name, choice in found.items() if choice is not None}
    if described:
        yield from layout_table(tuple(described.values()))
    for name in found:
        if name not in described:
            yield f"  {name}: does not fit on {search.device.name} with any microbatch, recomputation or schedule"
            continue
        d = described[name]
        yield f"\n{name}: {keys_line(d)}"
        yield f"  {parts_line(d)}"
        yield from bar(d, search.capacity)
    if len(described) == 2:
        a, b = described.values()
        yield (
            f"\n{a.name} takes {a.seconds / b.seconds:.2f} times the time and "
            f"{a.device_bytes / b.device_bytes:.2f} times the memory of {b.name}"
        )


def _explain(search: Search, field: str, tokens: float | None, write: Callable[[str], object]) -> int:
    """The arithmetic of the layout to test first or, where nothing fits, of the layout that needs least memory."""
    from shardwright.planner.explain import Subject, explain
    from shardwright.planner.explain_time import time_lines

    found = search.run()
    choice = first_to_test(search, found)
    name = None if field == "all" else field
    if choice is not None:
        layout, time = choice.layout, choice.time
    else:
        rejections = [(r.device_bytes, r.layout) for r in found.rejected.values() if r.layout is not None]
        if not rejections:
            raise ConfigError("No layout is legal.", "; ".join(found.illegal), "Change the devices or the batch.")
        layout, time = min(rejections, key=itemgetter(0))[1], None
    lines = list(explain(name, Subject(search.problem, layout, search.devices, time, tokens)))
    if choice is None:
        write("Nothing fits. These lines are about the layout that needs least memory.")
    write(f"{layout_name(layout)}: " + " ".join(f"{key} {value}" for key, value in layout_keys(layout).items()))
    for line in (*lines, *(f"  {line}" for line in time_lines(name, search.clock, layout))):
        write(line)
    return ExitCode.DONE if choice is not None else ExitCode.NOTHING_FITS


def run_plan(
    request: Request,
    *,
    as_json: bool = False,
    compare: tuple[str, str] | None = None,
    explain: str | None = None,
    write: Callable[[str], object] = print,
) -> int:
    """Prints the plan and returns the exit code: 4 when nothing fits with all states on the devices.

    compare: two layout names. explain: a field of the answer, `all`, or `examples`. write: gets each line.
    """
    if explain == "examples":
        from shardwright.planner.examples import worked_examples

        for line in worked_examples():
            write(line)
        return ExitCode.DONE
    # The search makes many small objects and no cycles: the garbage collector would take a tenth of the time for nothing.
    collects = gc.isenabled()
    gc.disable()
    try:
        search, run = make_search(request)
        if explain is not None:
            return _explain(search, explain, request.tokens, write)
        if compare is not None:
            asked = {name: named(search, name) for name in compare}
            lines, fits = list(_compared(search, asked)), any(asked.values())
        else:
            result = answer(search)
            lines, fits = list(text(result, request.tokens)), result.fits
            if as_json:
                lines = [json.dumps(result.as_dict(), indent=1)]
            if not as_json and run is not None and run.data.batching == "pack" and request.document_length is None:
                lines.append(PACKED)
        for line in lines:
            write(line)
        return ExitCode.DONE if fits else ExitCode.NOTHING_FITS
    finally:
        if collects:
            gc.enable()
