"""Which files of the package one thing passes through: an update under zero3, a row of data, a planned layout.

    python benchmarks/paths.py

A file counts when a function of the file is called; importing the file does not count. The update is the third one of
examples/tiny.yaml on two ranks: rank 0 is watched, from the building of the model to the optimizer step. The row of data is
watched from the files of text to the first microbatch, in the package `data` only. The planned layout is one answer of
`plan` for two devices.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
RUN = ROOT / "examples" / "tiny.yaml"


class Watch:
    """The files of the package whose functions are called while the watch is on."""

    def __init__(self) -> None:
        import shardwright

        self.package = str(Path(shardwright.__file__).parent) + "/"
        self.files: set[str] = set()

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and frame.f_code.co_name != "<module>" and file.startswith(self.package):
            self.files.add(file.removeprefix(self.package))

    def __enter__(self) -> Watch:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def show(title: str, files: set[str]) -> None:
    print(f"{title}: {len(files)} files\n  " + "\n  ".join(sorted(files)), flush=True)


def plan() -> None:
    from shardwright import cli

    watch = Watch()
    sys.argv = ["shardwright", "plan", str(RUN), "--devices", "2", "--device", "cpu", "--json"]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), suppress(SystemExit), watch:
        cli.main()
    show("A planned layout", watch.files)


def rank() -> None:
    from shardwright import cli
    from shardwright.train import update

    engine = next(getattr(update, name) for name in ("UpdateEngine", "Engine") if hasattr(update, name))
    data, one = Watch(), Watch()
    build, forward, step, count = engine.__init__, engine.forward_backward, engine.step, 0

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        with one:
            build(self, *args, **kwargs)
        data.__enter__()

    def forward_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        sys.setprofile(None)
        count += 1
        if count != 3:
            return forward(self, *args, **kwargs)
        with one:
            return forward(self, *args, **kwargs)

    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if count != 3:
            return step(self, *args, **kwargs)
        with one:
            result = step(self, *args, **kwargs)
        if os.environ["RANK"] == "0":
            with open(target, "w") as file, redirect_stdout(file):
                show("An update under zero3", one.files)
                show("A row of data", {name for name in data.files if name.startswith("data/")})
        return result

    engine.__init__, engine.forward_backward, engine.step = built, forward_backward, stepped
    target = sys.argv[2]
    sys.argv = ["shardwright", "train", str(RUN), *sys.argv[3:]]
    data.__enter__()
    cli.main()


def main() -> None:
    if len(sys.argv) > 1:
        {"plan": plan, "rank": rank}[sys.argv[1]]()
        return
    with tempfile.TemporaryDirectory() as directory:
        options = [
            f"--checkpoint.output_dir={directory}/run", f"--data.cache_dir={directory}/cache",
            "--training.max_steps=4", "--parallelism.data_parallel=zero3",
        ]  # fmt: skip
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        found = Path(directory) / "files.txt"
        command = [sys.executable, *launch, __file__, "rank", str(found), *options]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        print(found.read_text(), end="", flush=True)
        subprocess.run([sys.executable, __file__, "plan"], check=True)


if __name__ == "__main__":
    main()
