"""The verbs: what they take and what they print. Work is done elsewhere and imported when a verb runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright import __version__
from shardwright.errors import ConfigError, ExitCode, ModelError, ShardwrightError
from shardwright.launch.output import keep_going_without_output

app = typer.Typer(
    name="shardwright",
    help="Plan, check, run, measure and recover sharded training of PyTorch models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
_EPILOG = "Every key of the run file can be set on the command line: --section.key value."

RunFilePath = Annotated[Path, typer.Argument(help="The run file (YAML)", show_default=False)]
Processes = Annotated[int, typer.Option(help="Ranks on this machine", min=1)]


@app.command(context_settings=_OVERRIDES, epilog=_EPILOG)
def train(
    context: typer.Context,
    run_file: RunFilePath,
    nproc_per_node: Annotated[
        str, typer.Option(help="Ranks on this machine; 2:4 is as many of 4, 3, 2 as can go on after failures")
    ] = "1",
    max_restarts: Annotated[
        int,
        typer.Option(help="How often ranks that failed start again from the newest good checkpoint", min=0),
    ] = 0,
    until_eval_loss: Annotated[
        float | None, typer.Option(help="Stop at this evaluation loss and say how long it took")
    ] = None,
    print_config: Annotated[
        bool, typer.Option(help="Print the resolved run file with the origin of every value, and stop")
    ] = False,
) -> None:
    """Train: local ranks from one command, or as a rank under torchrun or Slurm."""
    from shardwright.config import load_run_file, parse_overrides

    least, most = _ranks(nproc_per_node)
    reach = [] if until_eval_loss is None else [f"--training.until_eval_loss={until_eval_loss}"]
    loaded = load_run_file(run_file, parse_overrides([*context.args, *reach]))
    if print_config:
        typer.echo(loaded.to_yaml(origins=True), nl=False)
        return
    from shardwright.train.start import start_training

    if least < most and not max_restarts:
        raise ConfigError(
            f"--nproc-per-node {nproc_per_node} without --max-restarts.",
            "Fewer ranks go on only when failed ones are started again.",
            "Add --max-restarts N.",
        )
    raise typer.Exit(start_training(loaded, most, least, max_restarts))


def _ranks(text: str) -> tuple[int, int]:
    """(fewest, most) of `4` or `2:4`."""
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts) or int(parts[0]) > int(parts[-1]):
        raise ConfigError(
            f"--nproc-per-node {text} is no number of ranks greater than or equal to 1.",
            "",
            "Write 4, or 2:4 for 2 to 4.",
        )
    return int(parts[0]), int(parts[-1])


@app.command(context_settings=_OVERRIDES, epilog=_EPILOG)
def check(
    context: typer.Context,
    run_file: RunFilePath,
    layouts: Annotated[
        str, typer.Option(help="Names joined by commas: ddp, zero1, zero2, zero3, hsdp2, or all")
    ] = "all",
    nproc_per_node: Processes = 2,
    dtype: Annotated[
        str, typer.Option(help="fp64: prove it. run: the run file's own dtypes, wider tolerances")
    ] = "fp64",
    updates: Annotated[int, typer.Option(help="Updates to compare", min=1)] = 3,
    plant: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Check that layouts train the same objective as one process; exit 3 when one does not."""
    from shardwright.config import load_run_file, parse_overrides

    loaded = load_run_file(run_file, parse_overrides(context.args))
    from shardwright.tools.check.verb import run_check

    raise typer.Exit(run_check(loaded, layouts, nproc_per_node, dtype=dtype, updates=updates, plant=plant))


@app.command(context_settings=_OVERRIDES, epilog=_EPILOG)
def plan(
    context: typer.Context,
    run_file: Annotated[Path | None, typer.Argument(help="The run file; or give --model and the sizes")] = None,
    model: Annotated[str | None, typer.Option(help="config.json, its directory, or a known name (llama-3-8b)")] = None,
    layers: Annotated[int | None, typer.Option(help="A generic model: with --hidden --heads --vocab")] = None,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    ffn: int | None = None,
    vocab: int | None = None,
    gated: Annotated[bool, typer.Option(help="Feed-forward with a gate")] = True,
    devices: Annotated[int | None, typer.Option(help="How many devices")] = None,
    device: Annotated[str | None, typer.Option(help="A name of the catalogue, or a YAML file of your own")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a row")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Rows of an update")] = None,
    document_length: Annotated[
        float | None, typer.Option(help="Packed rows: mean length of documents, weighted by their tokens")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help="Tokens to train on: gives days")] = None,
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    master_dtype: str | None = None,
    compiled: Annotated[bool, typer.Option(help="Blocks are compiled")] = False,
    offload: Annotated[bool, typer.Option(help="Consider state on the host too")] = False,
    explain: Annotated[str | None, typer.Option(help="A field's arithmetic, `all`, or `examples`")] = None,
    compare: Annotated[tuple[str, str] | None, typer.Option(help="Two layouts, for example zero3 zero3+tp2")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The answer as JSON")] = False,
) -> None:
    """Plan: which layouts fit, what each costs, which to test first; exit 4 when nothing fits."""
    from shardwright.planner.verb import Request, run_plan

    request = Request(
        run_file, model, layers, hidden, heads, kv_heads, ffn, vocab, gated, devices, device, max_length,
        global_batch_size, document_length, tokens, param_dtype, reduce_dtype, master_dtype, compiled, offload,
        tuple(context.args),
        inventory=_inventory,
    )  # fmt: skip
    raise typer.Exit(run_plan(request, as_json=as_json, compare=compare, explain=explain, write=typer.echo))


def _inventory(section: dict[str, Any]) -> dict[str, Any]:
    """What the model of a `model` section is made of, from a meta build in a process of its own."""
    from shardwright.launch.module import output_of

    purpose = f"Building `{section['model_name_or_path']}` to count its parameters"
    text = output_of("shardwright.models.parameter_inventory", [json.dumps(section)], purpose)
    result: dict[str, Any] = json.loads(text.splitlines()[-1])
    if "refused" in result:
        raise ModelError(*result["refused"])
    return result


@app.command(context_settings=_OVERRIDES, epilog=_EPILOG)
def bench(
    context: typer.Context,
    run_file: RunFilePath,
    layouts: Annotated[str, typer.Option(help="Names joined by commas, as for check; or all")] = (
        "ddp,zero1,zero2,zero3"
    ),
    nproc_per_node: Processes = 2,
    vs: Annotated[str, typer.Option(help="peers: other programs for the same rows, where installed")] = "",
    updates: Annotated[int, typer.Option(help="Updates to time", min=2)] = 12,
    warmup: Annotated[int, typer.Option(help="Updates before that are told apart", min=1)] = 3,
    device: Annotated[
        str | None, typer.Option(help="Predicts step times: the hardware file of doctor, or a known device")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Keep the trace of each layout and rank here")] = None,
) -> None:
    """Bench: speed, memory and communication of layouts side by side, beside what was planned; exit 3 as check."""
    from shardwright.config import load_run_file, parse_overrides

    loaded = load_run_file(run_file, parse_overrides(context.args))
    from shardwright.tools.bench.verb import Request, run_bench

    request = Request(nproc_per_node, layouts, vs, updates, warmup, device, trace)
    raise typer.Exit(run_bench(loaded, request))


@app.command(context_settings=_OVERRIDES, epilog=_EPILOG)
def drill(
    context: typer.Context,
    run_file: RunFilePath,
    nproc_per_node: Processes = 2,
    trials: Annotated[
        str,
        typer.Option(help="kill, save, async, signal, write, hang, damage, reshard, joined by commas, or all"),
    ] = "all",
    soak: Annotated[int, typer.Option(help="Instead: so many random kills of ranks and launchers", min=0)] = 0,
    updates: Annotated[int, typer.Option(help="Updates of the run that is broken", min=16)] = 40,
    seed: Annotated[int, typer.Option(help="Of moments and ranks: the same seed strikes the same ones")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the drill's runs also when all is well")] = False,
) -> None:
    """Drill: break the run on purpose, let it go on, compare with one that was left alone; exit 3 on a difference."""
    from shardwright.config import load_run_file, parse_overrides

    loaded = load_run_file(run_file, parse_overrides(context.args))
    from shardwright.tools.drill.verb import Plan, parse_trials, run_drill

    plan = Plan(nproc_per_node, parse_trials(trials), seed, soak, updates, keep)
    raise typer.Exit(run_drill(loaded, plan))


@app.command(context_settings=_OVERRIDES, epilog=_EPILOG)
def inspect(
    context: typer.Context,
    run_file: RunFilePath,
    samples: Annotated[int, typer.Option(help="Rows to show, in the order of training", min=0)] = 3,
    row: Annotated[int | None, typer.Option(help="Show this row only")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON")] = False,
) -> None:
    """Inspect: what the model sees (trained, given, padding), lengths, and what each way of batching costs."""
    from rich.console import Console

    from shardwright.config import load_run_file, parse_overrides
    from shardwright.tools.inspect.verb import run_inspect

    loaded = load_run_file(run_file, parse_overrides(context.args))
    raise typer.Exit(run_inspect(loaded, Console(), samples=samples, row=row, as_json=as_json))


@app.command()
def report(
    directories: Annotated[
        list[Path], typer.Argument(help="What runs (output_dir) or bench have left", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option(help="The page; default report.html in the directory, or here for several")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="For predicted times: a name of the catalogue, or a YAML file of your own"),
    ] = None,
) -> None:
    """Report: one self-contained HTML page about runs and measured layouts."""
    from shardwright.tools.report.verb import run_report

    raise typer.Exit(run_report(directories, output, device, typer.echo, _inventory))


@app.command()
def doctor(
    nproc_per_node: Processes = 2,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    output: Annotated[Path, typer.Option(help="The hardware file that is written")] = Path("hardware.yaml"),
) -> None:
    """Doctor: is this machine sane, and what does it reach? Writes a hardware file for plan and bench; exit 1 on a failure."""
    from shardwright.tools.doctor.verb import run_doctor

    raise typer.Exit(run_doctor(nproc_per_node, device, output))


@app.command()
def schema() -> None:
    """Print the JSON schema of the run file."""
    from shardwright.config.schema import RunFile

    typer.echo(json.dumps(RunFile.model_json_schema(), indent=1))


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version")] = False) -> None:
    if version:
        typer.echo(f"shardwright {__version__}")
        raise typer.Exit(ExitCode.DONE)


def main() -> None:
    """The console script. Errors made for a person are printed without a traceback; the exit code says which kind."""
    keep_going_without_output()
    try:
        app()
    except ShardwrightError as error:
        print(f"shardwright: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
