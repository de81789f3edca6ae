"""Transformers' Trainer with DDP. The Trainer owns the loop, so the loop runs in a thread that waits between steps."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.config.schema import RunFile
from shardwright.data.loader import UpdateBatch
from shardwright.tools.bench.peers import UpdateLoop

KINDS = ("ddp",)
STEP_SECONDS = 1800
"""A longer step counts as failed."""


class Feed:
    """An endless data loader that yields the batches of a queue."""

    def __init__(self) -> None:
        self.rows: Queue[dict[str, torch.Tensor]] = Queue()

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield self.rows.get()

    def __len__(self) -> int:
        return 10**9


def make(run: RunFile, kind: str, model: nn.Module, device: torch.device) -> UpdateLoop:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    t, ranks, feed = run.training, dist.get_world_size(), Feed()
    done: Queue[float | BaseException] = Queue()
    total = torch.zeros((), device=device)

    class Fed(Trainer):
        def get_train_dataloader(self) -> Any:
            return feed

        def compute_loss(self, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(*arguments, **options)
            total.add_((loss[0] if isinstance(loss, tuple) else loss).detach())
            return loss

    class Telling(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            dist.all_reduce(total)
            done.put(total.item() / ranks)  # the Trainer multiplies by ranks, since DDP averages
            total.zero_()

    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=10**6,
        per_device_train_batch_size=t.per_device_train_batch_size,
        gradient_accumulation_steps=t.global_batch_size // (t.per_device_train_batch_size * ranks),
        learning_rate=t.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=t.weight_decay,
        adam_beta1=t.adam_beta1,
        adam_beta2=t.adam_beta2,
        adam_epsilon=t.adam_epsilon,
        max_grad_norm=t.max_grad_norm or 0.0,
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=True,
        bf16=run.precision.param_dtype == "bf16",
        use_cpu=device.type == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Fed(model, arguments, train_dataset=[{}], callbacks=[Telling()])
    threads = torch.get_num_threads()

    def work() -> None:
        torch.set_num_threads(threads)
        try:
            trainer.train()
        except BaseException as error:  # handed to the thread that waits
            done.put(error)

    threading.Thread(target=work, daemon=True).start()

    def update(batch: UpdateBatch) -> float:
        for microbatch in batch.microbatches:
            labels = microbatch.labels.to(device)
            ids = microbatch.input_ids.to(device)
            feed.rows.put({"input_ids": ids, "labels": labels, "shift_labels": labels})
        found = done.get(timeout=STEP_SECONDS)
        if isinstance(found, BaseException):
            raise found
        return found

    return update
