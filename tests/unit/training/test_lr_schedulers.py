import pytest
import torch

from torchtune_cp.errors import UserError
from torchtune_cp.training import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)


def _rates(build, steps, **kwargs):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = build(optimizer, **kwargs)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_warm_up_rises_linearly_from_zero_to_the_optimizers_rate():
    for build in (get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup):
        rates = _rates(build, 5, num_warmup_steps=4, num_training_steps=100)
        assert rates == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])


def test_cosine_is_half_way_down_in_the_middle_and_zero_at_the_end():
    rates = _rates(get_cosine_schedule_with_warmup, 11, num_warmup_steps=0, num_training_steps=10)
    assert rates[5] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(0.0)


def test_linear_falls_evenly_and_stays_at_zero_after_the_end():
    rates = _rates(get_linear_schedule_with_warmup, 8, num_warmup_steps=1, num_training_steps=5)
    assert rates == pytest.approx([0.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0, 0.0])


def test_constant_stays_after_the_warm_up():
    rates = _rates(get_constant_schedule_with_warmup, 5, num_warmup_steps=2)
    assert rates == pytest.approx([0.0, 1.0, 2.0, 2.0, 2.0])


def test_negative_warm_up_is_refused_by_its_key():
    with pytest.raises(UserError, match="num_warmup_steps=-1"):
        _rates(get_constant_schedule_with_warmup, 1, num_warmup_steps=-1)
