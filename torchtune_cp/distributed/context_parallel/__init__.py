"""Context parallelism: where a sequence is cut and attention is distributed."""

from torchtune_cp.distributed.context_parallel.balance import (
    attention_flops,
    attention_imbalance,
    attention_work,
)
from torchtune_cp.distributed.context_parallel.manager import context_parallel, unshard
from torchtune_cp.distributed.context_parallel.options import ContextParallelOptions

__all__ = [
    "ContextParallelOptions",
    "attention_flops",
    "attention_imbalance",
    "attention_work",
    "context_parallel",
    "unshard",
]
