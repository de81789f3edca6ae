"""The command line: the options of each verb. A verb imports what it needs when it runs, so that `plan` never loads torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright import __version__
from shardwright.errors import ConfigError, ExitCode, ModelError, ShardwrightError
from shardwright.launch.output import tolerate_lost_output

if TYPE_CHECKING:
    from shardwright.config import Loaded

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
Processes = Annotated[int, typer.Option(help="Number of ranks on this machine", min=1)]


def _load(run_file: Path, arguments: list[str]) -> Loaded:
    """The run file with the overrides of the command line."""
    from shardwright.config import load_run_file, parse_overrides

    return load_run_file(run_file, parse_overrides(arguments))


@app.command(context_settings=_OVERRIDES, epilog=_EPILOG)
def train(
    context: typer.Context,
    run_file: RunFilePath,
    nproc_per_node: Annotated[
        str,
        typer.Option(
            help="Ranks on this machine. 2:4 starts 4 and goes on with 3 or 2 when ranks keep failing (needs --max-restarts)"
        ),
    ] = "1",
    max_restarts: Annotated[
        int,
        typer.Option(help="How many times to restart failed ranks, each time from the newest valid checkpoint", min=0),
    ] = 0,
    until_eval_loss: Annotated[
        float | None,
        typer.Option(help="Stop when the evaluation loss reaches this value, and print the time that training took"),
    ] = None,
    print_config: Annotated[
        bool, typer.Option(help="Print every value of the run file and where the value comes from, then exit")
    ] = False,
) -> None:
    """Train. Starts the ranks of this machine itself, or runs as one rank under torchrun or Slurm."""
    least, most = _ranks(nproc_per_node)
    reach = [] if until_eval_loss is None else [f"--training.until_eval_loss={until_eval_loss}"]
    loaded = _load(run_file, [*context.args, *reach])
    if print_config:
        typer.echo(loaded.to_yaml(origins=True), nl=False)
        return
    from shardwright.train.start import start_training

    if least < most and not max_restarts:
        raise ConfigError(
            f"--nproc-per-node {nproc_per_node} without --max-restarts.",
            "A run goes on with fewer ranks only after a restart.",
            "Add --max-restarts N.",
        )
    raise typer.Exit(start_training(loaded, most, least, max_restarts))


def _ranks(text: str) -> tuple[int, int]:
    """The fewest and the most ranks that `4` or `2:4` allows."""
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts) or int(parts[0]) > int(parts[-1]):
        raise ConfigError(
            f"--nproc-per-node {text} is not a number of ranks.",
            "",
            "Write one number such as 4, or a range such as 2:4.",
        )
    return int(parts[0]), int(parts[-1])


@app.command(context_settings=_OVERRIDES, epilog=_EPILOG)
def check(
    context: typer.Context,
    run_file: RunFilePath,
    layouts: Annotated[
        str,
        typer.Option(
            help="Layouts to check, separated by commas: ddp, zero1, zero2, zero3, hsdp2, tp2, pp2, cp2, zero3+tp2, or all"
        ),
    ] = "all",
    nproc_per_node: Processes = 2,
    dtype: Annotated[
        str,
        typer.Option(
            help="fp64: compare in float64. run: compare in the dtypes of the run file, with wider tolerances"
        ),
    ] = "fp64",
    updates: Annotated[int, typer.Option(help="Number of updates to compare", min=1)] = 3,
    plant: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Check that each layout trains the same objective as one process. Exits with 3 when a layout does not."""
    loaded = _load(run_file, context.args)
    from shardwright.tools.check.verb import run_check

    raise typer.Exit(run_check(loaded, layouts, nproc_per_node, dtype=dtype, updates=updates, plant=plant))


@app.command(context_settings=_OVERRIDES, epilog=_EPILOG)
def plan(
    context: typer.Context,
    run_file: Annotated[
        Path | None, typer.Argument(help="The run file. Without a run file, give --model or the sizes of a model")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A config.json, the directory that holds it, or a known model such as llama-3-8b")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="Number of blocks, for a model given by its sizes (with --hidden, --heads, --vocab)"),
    ] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of the model")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads of a block")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads of a block; default: --heads")] = None,
    ffn: Annotated[int | None, typer.Option(help="Width of the feed-forward layer; default: 4 x --hidden")] = None,
    vocab: Annotated[int | None, typer.Option(help="Entries of the vocabulary")] = None,
    gated: Annotated[bool, typer.Option(help="The feed-forward layer has a gate (three matrices, as in Llama)")] = True,
    devices: Annotated[int | None, typer.Option(help="Number of devices")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="A known device such as h100-sxm-80gb, or a hardware file (YAML), for example from doctor"),
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Length of a row, in tokens")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Rows per update, over all ranks")] = None,
    document_length: Annotated[
        float | None,
        typer.Option(help="For packed rows: mean length of a document in tokens, each document weighted by its length"),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens of the whole run; the answer then includes the duration in days")
    ] = None,
    param_dtype: Annotated[str | None, typer.Option(help="fp32 or bf16: dtype of forward and backward")] = None,
    reduce_dtype: Annotated[str | None, typer.Option(help="Dtype in which gradients are reduced")] = None,
    master_dtype: Annotated[str | None, typer.Option(help="Dtype of stored weights and optimizer states")] = None,
    compiled: Annotated[bool, typer.Option(help="Assume that each block is compiled (torch.compile)")] = False,
    offload: Annotated[
        bool, typer.Option(help="Also consider layouts that keep optimizer states and weights in host memory")
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(
            help="Show the arithmetic behind one field of the answer, or behind `all` fields; `examples`: worked examples"
        ),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="Compare two layouts, for example zero3 zero3+tp2")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON")] = False,
) -> None:
    """Plan: list the layouts that fit in memory, the fastest first, without a GPU. Exits with 4 when no layout fits."""
    from shardwright.planner.verb import Request, run_plan

    request = Request(
        run_file, model, layers, hidden, heads, kv_heads, ffn, vocab, gated, devices, device, max_length,
        global_batch_size, document_length, tokens, param_dtype, reduce_dtype, master_dtype, compiled, offload,
        tuple(context.args),
        inventory=_inventory,
    )  # fmt: skip
    raise typer.Exit(run_plan(request, as_json=as_json, compare=compare, explain=explain, write=typer.echo))


def _inventory(section: dict[str, Any]) -> dict[str, Any]:
    """The parameters and products of the model of a `model` section. A process of its own builds it: plan loads no torch."""
    from shardwright.launch.processes import output_of

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
    layouts: Annotated[str, typer.Option(help="Layouts to measure, separated by commas, as for check; or all")] = (
        "ddp,zero1,zero2,zero3"
    ),
    nproc_per_node: Processes = 2,
    vs: Annotated[
        str,
        typer.Option(
            help="peers: also measure the other programs that are installed (DeepSpeed, Accelerate, ...) on the same rows"
        ),
    ] = "",
    updates: Annotated[int, typer.Option(help="Number of updates to time", min=2)] = 12,
    warmup: Annotated[int, typer.Option(help="Warm-up updates, reported separately", min=1)] = 3,
    device: Annotated[
        str | None,
        typer.Option(help="Also predict step times, for a known device or a hardware file that doctor has written"),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Directory that keeps the profiler trace of each layout and rank")
    ] = None,
) -> None:
    """Bench: measure speed, memory and communication of layouts, beside the predictions.

    Each layout is checked first; exits with 3 as check does.
    """
    loaded = _load(run_file, context.args)
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
        typer.Option(
            help="Faults to inject, separated by commas: kill, save, async, signal, write, hang, damage, reshard; or all"
        ),
    ] = "all",
    soak: Annotated[
        int, typer.Option(help="Inject this number of random kills of ranks and launchers instead of the trials", min=0)
    ] = 0,
    updates: Annotated[int, typer.Option(help="Length of the run that the faults interrupt, in updates", min=16)] = 40,
    seed: Annotated[int, typer.Option(help="Seed for which ranks fail, and when")] = 0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the directories of the runs even when every trial passes")
    ] = False,
) -> None:
    """Drill: inject faults into a run, resume it, and compare it with an undisturbed run. Exits with 3 on a difference."""
    loaded = _load(run_file, context.args)
    from shardwright.tools.drill.verb import DrillPlan, parse_trials, run_drill

    plan = DrillPlan(nproc_per_node, parse_trials(trials), seed, soak, updates, keep)
    raise typer.Exit(run_drill(loaded, plan))


@app.command(context_settings=_OVERRIDES, epilog=_EPILOG)
def inspect(
    context: typer.Context,
    run_file: RunFilePath,
    samples: Annotated[int, typer.Option(help="Number of rows to show, in the order of training", min=0)] = 3,
    row: Annotated[int | None, typer.Option(help="Show only the row with this number")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON")] = False,
) -> None:
    """Inspect: show rows as the model sees them (trained tokens, context, padding), and the cost of each kind of batching."""
    from rich.console import Console

    from shardwright.tools.inspect.verb import run_inspect

    loaded = _load(run_file, context.args)
    raise typer.Exit(run_inspect(loaded, Console(), samples=samples, row=row, as_json=as_json))


@app.command()
def report(
    directories: Annotated[
        list[Path],
        typer.Argument(help="Output directories of runs (checkpoint.output_dir) or of bench", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="File to write. Default: report.html in the directory, or in the current directory when there are several"
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Also predict step times, for a known device or a hardware file that doctor has written"),
    ] = None,
) -> None:
    """Report: write one self-contained HTML page about runs and measured layouts."""
    from shardwright.tools.report.verb import run_report

    raise typer.Exit(run_report(directories, output, device, typer.echo, _inventory))


@app.command()
def doctor(
    nproc_per_node: Processes = 2,
    device: Annotated[str, typer.Option(help="Devices to measure: auto, cpu or cuda")] = "auto",
    output: Annotated[Path, typer.Option(help="Hardware file to write")] = Path("hardware.yaml"),
) -> None:
    """Doctor: test the devices and collectives of this machine, and measure their speed for plan and bench.

    Exits with 1 on a failure.
    """
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
    """The console script. A `ShardwrightError` is printed without a traceback, and sets the exit code."""
    tolerate_lost_output()
    try:
        app()
    except ShardwrightError as error:
        print(f"shardwright: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
