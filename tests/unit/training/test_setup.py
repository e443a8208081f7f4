import logging

import torch

from torchtune_cp.config import load, to_typed
from torchtune_cp.training.setup import build_optimizer, setup_logging


def test_only_rank_zero_speaks_below_errors(monkeypatch):
    assert setup_logging("INFO").isEnabledFor(logging.INFO)
    monkeypatch.setattr("torchtune_cp.training.setup.is_rank_zero", lambda: False)
    assert not setup_logging("INFO").isEnabledFor(logging.WARNING)
    assert setup_logging("DEBUG").isEnabledFor(logging.DEBUG)


def test_a_warm_up_longer_than_the_run_is_a_warning_that_names_both_numbers(caplog):
    logging.getLogger("torchtune_cp").setLevel("WARNING")
    cfg = to_typed(load("tiny/llama_cpu", ["lr_scheduler.num_warmup_steps=50"]))
    build_optimizer(cfg, torch.nn.Linear(1, 1), 51)
    assert not caplog.messages
    build_optimizer(cfg, torch.nn.Linear(1, 1), 7)
    (line,) = caplog.messages
    assert "lr_scheduler.num_warmup_steps=50 is not shorter than the run of 7 steps" in line
