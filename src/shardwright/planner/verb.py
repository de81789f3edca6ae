"""The verb `plan`: from a run file or flags to the printed answer and the exit code."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.arch.model_shape import Inventory, built_by, shape_of_model
from shardwright.arch.shape import generic_shape
from shardwright.errors import ConfigError, ExitCode
from shardwright.planner.advice import first_to_test
from shardwright.planner.answer import answer, describe, layout_keys, layout_name
from shardwright.planner.hardware import find_device
from shardwright.planner.job import Job
from shardwright.planner.of_run import loss_of
from shardwright.planner.own_software import own_software
from shardwright.planner.program import SHARDWRIGHT, SHARDWRIGHT_COMPILED
from shardwright.planner.search import Choice, Search
from shardwright.planner.show import bar, keys_line, layout_table, parts_line, text
from shardwright.planner.space import KINDS, ON_DEVICE, tensor_reason

if TYPE_CHECKING:
    from shardwright.arch.shape import Shape

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
    inventory: Inventory | None = (
        None  # builds a model that is not read from its config.json; None: no model can be built
    )


def _generic(request: Request, layers: int) -> Shape:
    hidden, heads, vocab = request.hidden, request.heads, request.vocab
    if hidden is None or heads is None or vocab is None:
        sizes = {"--hidden": hidden, "--heads": heads, "--vocab": vocab}
        missing = ", ".join(name for name, value in sizes.items() if value is None)
        raise ConfigError(f"--layers needs {missing} too.", "These sizes together give the shape of the model.")
    return generic_shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        ffn=request.ffn,
        kv_heads=request.kv_heads,
        gated=request.gated,
        tied=False,
        biases=False,
    )


def _shape(request: Request, run: Any) -> Shape:
    if request.layers is not None:
        return _generic(request, request.layers)
    name = request.model or (run.model.model_name_or_path if run else None)
    if name is None:
        raise ConfigError(
            "No model is given.",
            "",
            "Give a run file, --model (a known model, a config.json or its directory), or --layers --hidden --heads --vocab.",
        )
    if request.model or run is None:
        return shape_of_model(name, request.inventory, {"attn_implementation": "eager"})
    return shape_of_model(name, request.inventory, built_by(run.model.model_dump()))


def make_search(request: Request) -> tuple[Search, Any]:
    """The search of a request, and its run file if there is one. Raises `ConfigError` for what is missing or
    unknown.
    """
    run = None
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
    precision = run.precision if run else None
    on_cpu = bool(run and run.hardware.device == "cpu")
    device = find_device(request.device or ("cpu" if on_cpu else "h100-sxm-80gb"))
    job = Job(
        _shape(request, run),
        int(needed["max_length"] or 0),
        int(needed["global_batch_size"] or 0),
        param_dtype=request.param_dtype or (precision.param_dtype if precision else "bf16"),
        reduce_dtype=request.reduce_dtype or (precision.reduce_dtype if precision else "fp32"),
        master_dtype=request.master_dtype or (precision.master_dtype if precision else "fp32"),
        optimizer=run.training.optimizer if run else "adamw",
        attention="eager" if run and run.model.attn_implementation == "eager" else "flash",
        loss=loss_of(run) if run else "auto",
        packed=request.document_length is not None or bool(run and run.data.batching == "pack"),
        document_length=request.document_length,
        device_kind=device.kind,
    )
    compiled = request.compiled or bool(run and run.memory.compile)
    software = own_software(job.device_kind, compiled)
    program = SHARDWRIGHT_COMPILED if compiled else SHARDWRIGHT
    offload = request.offload or bool(run and run.memory.cpu_offload != "none")
    kinds = KINDS if offload else ON_DEVICE
    return Search(job, device, int(needed["devices"] or 0), software, program, kinds), run


def named(search: Search, name: str) -> Choice | None:
    """The fastest layout of this name that fits; None when none fits. Raises `ConfigError` when the name is not legal here."""
    from shardwright.layout.names import parse_layout

    keys, job = parse_layout(name), search.job
    tp, cp, pp = (keys.get(f"{axis}_size", 1) for axis in ("tp", "cp", "pp"))
    replicate, kind = keys.get("dp_replicate_size"), keys.get("data_parallel", "zero3")
    if replicate and kind == "zero3":
        kind = "hsdp"
    taken = tp * cp * pp * (replicate or 1)
    if search.devices % taken:
        raise ConfigError(
            f"`{name}` needs a multiple of {taken} devices, not {search.devices}.", "", "Change --devices or a size."
        )
    reason = tensor_reason(job.shape, tp)
    if reason:
        raise ConfigError(f"`{name}`: {reason}.", "Each rank must hold whole heads and equal columns.")
    data = search.devices // (tp * cp * pp)
    if job.global_batch_size % data:
        raise ConfigError(
            f"`{name}`: the {job.global_batch_size} rows of an update cannot be divided over {data} data ranks.",
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
            raise ConfigError("No layout is legal.", "; ".join(found.refused), "Change the devices or the batch.")
        layout, time = min(rejections, key=itemgetter(0))[1], None
        write("Nothing fits. These lines are about the layout that needs least memory.")
    write(f"{layout_name(layout)}: " + " ".join(f"{key} {value}" for key, value in layout_keys(layout).items()))
    subject = Subject(
        search.job, layout, search.device, search.devices, time=time, program=search.program, tokens=tokens
    )
    for line in explain(name, subject):
        write(line)
    for line in time_lines(name, search.clock, layout):
        write(f"  {line}")
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
