"""The verb `plan`: from a run file or flags to the printed answer and the exit code."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.arch.inventory import generic_shape
from shardwright.arch.of_model import Inventory, built_by, shape_of_model
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
    "data.batching is pack: attention is counted over whole rows, more than documents need; `shardwright inspect` prints "
    "the --document-length to give here"
)


@dataclass(frozen=True)
class Request:
    """What `plan` is asked: flags, or a run file whose values the flags replace. None: not given."""

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
    inventory: Inventory | None = None
    """Builds a model of another kind, in a process of its own; None where that is not possible."""


def _generic(request: Request, layers: int) -> Shape:
    hidden, heads, vocab = request.hidden, request.heads, request.vocab
    if hidden is None or heads is None or vocab is None:
        sizes = {"--hidden": hidden, "--heads": heads, "--vocab": vocab}
        missing = ", ".join(name for name, value in sizes.items() if value is None)
        raise ConfigError(f"--layers needs {missing} too.", "Together they give the shape of the model.")
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
            "Give a run file, --model (a known name, config.json or its directory) or --layers --hidden "
            "--heads --vocab.",
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
                "The planner holds the objective fixed and needs its sizes.",
                f"Add {flag}, or a run file.",
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
    """The fastest layout that fits of those with this name; None when none fits. Raises `ConfigError` when it
    is not legal.
    """
    from shardwright.layout.names import parse_layout

    keys = parse_layout(name)
    tp, cp, pp = (keys.get(f"{axis}_size", 1) for axis in ("tp", "cp", "pp"))
    replicate = keys.get("dp_replicate_size")
    kind = keys.get("data_parallel", "zero3")
    if replicate and kind == "zero3":
        kind = "hsdp"
    taken = tp * cp * pp * (replicate or 1)
    if search.devices % taken:
        raise ConfigError(
            f"`{name}` takes multiples of {taken} devices, not {search.devices}.",
            "",
            "Change --devices or a size.",
        )
    reason = tensor_reason(search.job.shape, tp)
    if reason:
        raise ConfigError(f"`{name}`: {reason}.", "Each rank must hold whole heads and equal columns.")
    data = search.devices // (tp * cp * pp)
    if search.job.global_batch_size % data:
        raise ConfigError(
            f"`{name}`: {data} data ranks do not divide the {search.job.global_batch_size} rows of an update.",
            "The batch is part of the objective.",
        )
    return search.only(tp, cp, pp, kind, replicate, keys.get("pp_schedule"))


def _compare(search: Search, names: tuple[str, str], write: Callable[[str], object]) -> int:
    found = {name: named(search, name) for name in names}
    fitting = [describe(search, choice) for choice in found.values() if choice is not None]
    if fitting:
        for line in layout_table(tuple(fitting)):
            write(line)
    for name, choice in found.items():
        if choice is None:
            write(f"  {name}: does not fit {search.device.name} with any microbatch, recomputation or schedule")
            continue
        d = describe(search, choice)
        write(f"\n{name}: {keys_line(d)}")
        write(f"  {parts_line(d)}")
        for line in bar(d, search.capacity):
            write(line)
    if len(fitting) == 2:
        a, b = fitting
        write(
            f"\n{a.name} takes {a.seconds / b.seconds:.2f} times the time and "
            f"{a.device_bytes / b.device_bytes:.2f} times the memory of {b.name}"
        )
    return ExitCode.DONE if fitting else ExitCode.NOTHING_FITS


def _explain(search: Search, field: str, tokens: float | None, write: Callable[[str], object]) -> int:
    """The arithmetic of the layout to test first; where nothing fits, of the one that needs least."""
    from shardwright.planner.explain import Subject
    from shardwright.planner.explain import explain as explain_field
    from shardwright.planner.explain_time import time_lines

    found = search.run()
    choice = first_to_test(search, found)
    name = None if field == "all" else field
    if choice is not None:
        layout, time = choice.layout, choice.time
    else:
        rejections = [r for r in found.rejected.values() if r.layout is not None]
        if not rejections:
            raise ConfigError("No layout is legal.", "; ".join(found.refused), "Change the devices or the batch.")
        least = min(rejections, key=lambda r: r.device_bytes)
        assert least.layout is not None
        layout, time = least.layout, None
        write("Nothing fits; this is the layout that needs least.")
    write(f"{layout_name(layout)}: " + " ".join(f"{key} {value}" for key, value in layout_keys(layout).items()))
    subject = Subject(
        search.job, layout, search.device, search.devices, time=time, program=search.program, tokens=tokens
    )
    for line in explain_field(name, subject):
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
    """Prints the plan and returns the exit code: 4 when nothing fits with all state on the devices.

    compare: two layout names. explain: a field of the answer, `all`, or `examples` for the notes' worked
    examples, which need no job. write: gets each line.
    """
    if explain == "examples":
        from shardwright.planner.examples import worked_examples

        for line in worked_examples():
            write(line)
        return ExitCode.DONE
    # Nothing that the search makes is part of a cycle: the collector would only look at its many small objects
    # again and again, which takes a tenth of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _answered(request, as_json, compare, explain, write)
    finally:
        if collects:
            gc.enable()


def _answered(
    request: Request,
    as_json: bool,
    compare: tuple[str, str] | None,
    explain: str | None,
    write: Callable[[str], object],
) -> int:
    search, run = make_search(request)
    if explain is not None:
        return _explain(search, explain, request.tokens, write)
    if compare is not None:
        return _compare(search, compare, write)
    result = answer(search)
    if as_json:
        write(json.dumps(result.as_dict(), indent=1))
    else:
        for line in text(result, request.tokens):
            write(line)
        if run is not None and run.data.batching == "pack" and request.document_length is None:
            write(PACKED)
    return ExitCode.DONE if result.fits else ExitCode.NOTHING_FITS
