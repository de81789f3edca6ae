"""The verbs: what they take and what they print. Work is done elsewhere and imported when a verb runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwright import __version__
from shardwright.errors import ExitCode, ShardwrightError

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
    nproc_per_node: Processes = 1,
    print_config: Annotated[
        bool, typer.Option(help="Print the resolved run file with the origin of every value, and stop")
    ] = False,
) -> None:
    """Train: local ranks from one command, or as a rank under torchrun or Slurm."""
    from shardwright.config import load_run_file, parse_overrides

    loaded = load_run_file(run_file, parse_overrides(context.args))
    if print_config:
        typer.echo(loaded.to_yaml(origins=True), nl=False)
        return
    from shardwright.train.start import start_training

    raise typer.Exit(start_training(loaded, nproc_per_node))


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
    from shardwright.check.verb import run_check

    raise typer.Exit(run_check(loaded, layouts, nproc_per_node, dtype=dtype, updates=updates, plant=plant))


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
    try:
        app()
    except ShardwrightError as error:
        print(f"shardwright: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
