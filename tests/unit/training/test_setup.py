import logging

from torchtune_cp.training.setup import setup_logging


def test_only_rank_zero_speaks_below_errors(monkeypatch):
    assert setup_logging("INFO").isEnabledFor(logging.INFO)
    monkeypatch.setattr("torchtune_cp.training.setup.is_rank_zero", lambda: False)
    assert not setup_logging("INFO").isEnabledFor(logging.WARNING)
    assert setup_logging("DEBUG").isEnabledFor(logging.DEBUG)
