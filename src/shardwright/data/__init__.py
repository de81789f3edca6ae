"""From files to the rows of an update: reading and tokenising, row tables, order, batches."""

from shardwright.data.loader import Loader, Microbatch, UpdateBatch, evaluation_loader
from shardwright.data.order import Order
from shardwright.data.prepare import Prepared, prepare
from shardwright.data.table import Table

__all__ = [
    "Loader",
    "Microbatch",
    "Order",
    "Prepared",
    "Table",
    "UpdateBatch",
    "evaluation_loader",
    "prepare",
]
