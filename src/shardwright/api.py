"""Shardwright for people with their own training loop: any model, any loss, any layout.

    with api.connect() as connection:
        engine = api.Engine(make_model, loss_sum, layout="zero3+tp2", updates=100, device=connection.device)
        for microbatches in my_data(engine.data_rank, engine.data_ranks):
            targets = engine.total(sum(len(y) for _, y in microbatches))
            engine.forward_backward(microbatches, targets)
            result = engine.step()

Start it as one process, with torchrun or with srun. See examples/custom_loop.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.checkpoint.manifest import Manifest, read_config, read_manifest
from shardwright.checkpoint.restore import current_state, restore
from shardwright.checkpoint.resume import find_checkpoint
from shardwright.checkpoint.saver import save
from shardwright.checkpoint.settings import changes, refuse_unaccepted
from shardwright.config.load import Loaded, load_run_file
from shardwright.data.loader import Microbatch, UpdateBatch
from shardwright.errors import ConfigError
from shardwright.layout.axes import AXES, ROW_AXES
from shardwright.layout.import_path import is_import_path
from shardwright.layout.legality import check_run
from shardwright.layout.names import parse_layout
from shardwright.mesh.device_mesh import make_mesh
from shardwright.mesh.process_group import connect
from shardwright.models.build import build_model
from shardwright.models.torch_dtypes import TORCH_DTYPES
from shardwright.parallel.apply import parallelize as _parallelize
from shardwright.parallel.strategy import DataParallel
from shardwright.train.decision import UpdateResult
from shardwright.train.optimizer import OPTIMIZER_KEYS, optimizer_change
from shardwright.train.update import UpdateEngine

__all__ = ["Engine", "UpdateResult", "connect", "parallelize"]

LossSum = Callable[[Callable[..., Any], Any], Tensor]
"""(model, microbatch) -> sum of the loss over this microbatch's targets, a scalar with its graph."""


@dataclass(frozen=True)
class _Given:
    """A microbatch of the caller's own kind, with its number within the update over all data ranks."""

    index: int
    content: Any


class _OwnLossEngine(UpdateEngine):
    """The engine of `train` with the caller's loss."""

    def __init__(self, loss_sum: LossSum, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._given = loss_sum

    def loss_sum(self, microbatch: Microbatch) -> Tensor:
        return self._given(self.strategy, cast(_Given, microbatch).content)


class Engine:
    """A model under a layout with its optimizer. Collective: every rank makes one and calls the same methods.

    The loss of an update is the sum of `loss_sum` over its microbatches on all data ranks, divided once by its targets.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module] | str,
        loss_sum: LossSum,
        *,
        layout: str = "zero3",
        updates: int,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        """Builds `model` without memory, splits it as `layout` says and fills this rank's part.

        model: a function at the top of a module that takes nothing and returns an `nn.Module`, or a Hugging Face
        directory. loss_sum: see `LossSum`; it must call the model that it gets as its first argument. layout: a name such as
        `zero3+tp2`. updates: their number in the whole run, for the learning rate. options: keys of the run file, with `__`
        for the dot: training__learning_rate=1e-3, parallelism__tp_plan={...}, precision__param_dtype="bf16".
        Raises as `shardwright train` does.
        """
        loaded = _run(model, layout, options, updates)
        self._loaded, self._axes = loaded, check_run(loaded, dist.get_world_size())
        self._engine = _OwnLossEngine(loss_sum, loaded.run, self._axes, torch.device(device), updates)
        self.update = 0

    @property
    def module(self) -> nn.Module:
        """The split model; `named_parameters()` has the unsplit names."""
        return self._engine.module

    @property
    def data_ranks(self) -> int:
        """How many ranks hold different data."""
        return self._axes.data_ranks

    @property
    def data_rank(self) -> int:
        """The number of this rank's data, from 0. Tensor-parallel ranks share one number, and must be given the same data."""
        return self._axes.data_rank(self._engine.rank)

    def total(self, targets: int) -> int:
        """The sum of `targets` over all data ranks; collective."""
        peers = dist.get_world_size() // self.data_ranks
        count = torch.tensor(targets, dtype=torch.int64, device=self._engine.device)
        dist.all_reduce(count)
        return int(count.item()) // peers

    def forward_backward(self, microbatches: Sequence[Any], targets: int) -> None:
        """Runs this rank's microbatches, each of a type that `loss_sum` takes. Every data rank needs the same number of them.

        targets: of the whole update over all data ranks (see `total`). Gradients are those of SUM(loss) / targets.
        """
        own = tuple(
            _Given(number * self.data_ranks + self.data_rank, content) for number, content in enumerate(microbatches)
        )
        if not own:
            raise ConfigError("forward_backward() without a microbatch.", "Every rank takes part in an update.")
        self._check_ranks_agree(len(own), targets)
        batch = UpdateBatch(self.update, cast(tuple[Microbatch, ...], own), targets, targets, targets, ())
        self._engine.forward_backward(batch)

    def _check_ranks_agree(self, microbatches: int, targets: int) -> None:
        """Raises `ConfigError` on every rank where ranks disagree: a rank would wait for ever, or use another divisor."""
        bounds = torch.tensor([microbatches, -microbatches, targets, -targets], device=self._engine.device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        most, least, high, low = bounds.tolist()
        if most != -least:
            raise ConfigError(
                f"Ranks have {-least} to {most} microbatches in update {self.update}.",
                "Each microbatch is a collective of all ranks.",
                "Give every data rank the same number; a microbatch without targets is allowed.",
            )
        if high != -low:
            raise ConfigError(
                f"Ranks were given {-low} to {high} targets for update {self.update}.",
                "The loss is divided by the targets of all ranks together.",
                "Use total().",
            )

    def step(self) -> UpdateResult:
        """Clips over all parameters and updates them once. `loss` and `grad_norm` of the result are equal on all ranks."""
        result = self._engine.step()
        self.update += 1
        return result

    def save(self, directory: str | Path) -> Path:
        """Writes weights and optimizer as a checkpoint that any layout reads; returns `directory/checkpoint-{update}`."""
        layout = f"{self._loaded.run.parallelism.data_parallel} {self._axes}"
        manifest = Manifest(self.update, 0, "", "", dist.get_world_size(), layout, torch.__version__)
        state = current_state(self.module, self._engine.optimizer, self._engine.params)
        return save(Path(directory), state, manifest, self._loaded.to_yaml(), None)

    def load(self, directory: str | Path) -> None:
        """Reads the newest checkpoint in `directory`, of any layout, and continues after its update."""
        found = find_checkpoint(Path(directory), "auto")
        if found is None:
            raise ConfigError(f"{directory} holds no complete checkpoint.")
        changed = [change for change in changes(read_config(found), self._loaded) if change.key in OPTIMIZER_KEYS]
        refuse_unaccepted(str(found), changed, self._loaded.run.checkpoint.accept_changes)
        engine = self._engine
        kind = optimizer_change(changed, self._loaded.run.training.optimizer)
        _, optimizer_match = restore(found, self.module, engine.optimizer, engine.params, change=kind)
        for line in optimizer_match.lines(found.name) if engine.rank == 0 else ():
            print(line)
        self.update = read_manifest(found).update


def parallelize(
    model: Callable[[], nn.Module] | str,
    *,
    layout: str = "zero3",
    device: torch.device | str = "cpu",
    **options: Any,
) -> DataParallel:
    """`model` split as `layout` says and filled, without optimizer or loop. The arguments are those of `Engine`.

    Call the result like the model, each microbatch within `with result.microbatch(last=...)`. After the last backward of an
    update call `result.finish_gradients()`. Gradients are sums over data ranks: divide the loss by the targets of all ranks.
    """
    loaded = _run(model, layout, options)
    run = loaded.run
    mesh = make_mesh(check_run(loaded, dist.get_world_size()), torch.device(device))
    built = build_model(run.model, TORCH_DTYPES[run.precision.master_dtype])
    strategy = _parallelize(built, run, mesh, torch.device(device))
    return cast(DataParallel, strategy)  # _run refuses pipelines


def _run(model: Callable[[], nn.Module] | str, layout: str, options: Mapping[str, Any], updates: int = 1) -> Loaded:
    """The run file of these arguments. Its data section is a placeholder: the caller brings the data."""
    given = {key.replace("__", "."): value for key, value in options.items()}
    values: dict[str, Any] = {
        "model.model_name_or_path": model if isinstance(model, str) else _path_of(model),
        "data.train": ["-"],
        "data.max_length": 1024
        * dist.get_world_size(),  # only sequence parallelism reads it, and checks each row again
        "training.global_batch_size": dist.get_world_size(),
        "training.max_steps": updates,
    }
    if is_import_path(values["model.model_name_or_path"]):
        values["model.init"] = "random"
    values |= {f"parallelism.{key}": value for key, value in parse_layout(layout).items()}
    for key in given:
        if key.startswith(("data.", "training.loss", "memory.loss")) or key in (
            "training.global_batch_size",
            "training.per_device_train_batch_size",
        ):
            raise ConfigError(
                f"`{key}` has no effect here.", "The caller brings microbatches and loss.", "Leave it out."
            )
    loaded = load_run_file(None, {**values, **given})
    for axis in ("pp", *ROW_AXES):
        if getattr(loaded.run.parallelism, AXES[axis].key) > 1:
            raise ConfigError(
                f"{AXES[axis].key} > 1 with a loss function of your own.",
                "The loss function gets whole rows and a whole model. This axis cuts the rows or the model.",
                f"Leave {axis} out of the layout.",
            )
    return loaded


def _path_of(function: Callable[[], nn.Module]) -> str:
    """`module:name` of a function; raises `ConfigError` where no other rank could find it."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if getattr(sys.modules.get(module), name, None) is not function:
        raise ConfigError(
            f"{name or function} is not defined at the top of a module.",
            "Every rank, and every checkpoint, names the model as package.module:function.",
            "Move the function out of the function or class around it.",
        )
    return f"{module}:{name}"
