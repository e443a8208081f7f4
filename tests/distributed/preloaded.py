"""Imports what the ranks of most tests need; see :mod:`tests.distributed.harness`."""

# ruff: noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torchao.float8

import tests.distributed.fixtures
import torchtune_cp.checkpointing
import torchtune_cp.data
import torchtune_cp.datasets
import torchtune_cp.distributed.context_parallel
import torchtune_cp.metrics
import torchtune_cp.models
import torchtune_cp.training.setup
