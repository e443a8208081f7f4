import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from torchtune_cp.errors import UserError
from torchtune_cp.training.optim_in_bwd import GradientNorm, OptimizerInBackward


def _model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3))
    model[2].bias.requires_grad_(False)
    return model


def _groups(model):
    """Two groups with rates of their own, the second without decay; one parameter is frozen."""
    return [
        {"params": [*model[0].parameters(), model[2].bias], "lr": 0.1},
        {"params": [model[2].weight, *model[3].parameters()], "lr": 0.02, "weight_decay": 0.0},
    ]


def _train(model, optimizer, scheduler, steps, norm=None, first=0):
    norms = []
    for step in range(first, first + steps):
        x = torch.randn(7, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(norm() if norm else torch.nn.utils.get_total_norm(grads))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
    return torch.stack(norms)


def _adamw(model):
    optimizer = torch.optim.AdamW(_groups(model), weight_decay=0.1)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def test_weights_state_rates_and_norm_are_those_of_a_step_after_backward():
    ordinary, inside = _model(), _model()
    optimizer, scheduler = _adamw(ordinary)
    inner, inner_scheduler = _adamw(inside)
    in_backward = OptimizerInBackward(inner)
    expected = _train(ordinary, optimizer, scheduler, 5)
    norms = _train(inside, inner, inner_scheduler, 5, in_backward.gradient_norm)
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
    for a, b in zip(inside.parameters(), ordinary.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(inside[0].weight, _model()[0].weight)
    assert torch.equal(inside[2].bias, _model()[2].bias)
    torch.testing.assert_close(inner.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    assert [g["lr"] for g in inner.param_groups] == pytest.approx([0.1 / 6, 0.02 / 6])


def test_the_step_is_taken_and_the_gradient_freed_before_the_next_one_comes():
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    alive = []
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(
                lambda _: alive.append(sum(q.grad is not None for q in model.parameters()))
            )
    OptimizerInBackward(optimizer)
    model(torch.ones(2, 6)).sum().backward()
    assert alive == [1] * 5
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == [p.requires_grad for p in model.parameters()]
    after = copy.deepcopy(model.state_dict())
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), after, rtol=0, atol=0)


def test_a_saved_state_goes_on_with_or_without():
    straight = _model()
    _train(straight, *_adamw(straight), 4)
    for first_inside, then_inside in ((True, False), (False, True), (True, True)):
        model = _model()
        optimizer, scheduler = _adamw(model)
        norm = OptimizerInBackward(optimizer).gradient_norm if first_inside else None
        _train(model, optimizer, scheduler, 2, norm)
        resumed = _model()
        resumed.load_state_dict(model.state_dict())
        optimizer2, scheduler2 = _adamw(resumed)
        # Hooks first, then the state: loading it makes new parameter groups.
        norm = OptimizerInBackward(optimizer2).gradient_norm if then_inside else None
        optimizer2.load_state_dict(optimizer.state_dict())
        scheduler2.load_state_dict(scheduler.state_dict())
        _train(resumed, optimizer2, scheduler2, 2, norm, first=2)
        torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), rtol=0, atol=0)


def test_removing_the_hooks_makes_it_an_ordinary_optimizer():
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    OptimizerInBackward(optimizer).remove()
    model(torch.ones(2, 6)).sum().backward()
    assert sum(p.grad is not None for p in model.parameters()) == 5


class _CountsInItsGroup(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_an_optimizer_that_counts_steps_in_its_groups_is_refused():
    model = _model()
    OptimizerInBackward(_CountsInItsGroup(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match=r"optimizer_in_bwd=true: _CountsInItsGroup keeps 'k'"):
        model(torch.ones(2, 6)).sum().backward()


class _Wraps(torch.optim.SGD):
    @property
    def param_groups(self):
        return self.__dict__["wrapped"]

    @param_groups.setter
    def param_groups(self, value):
        self.__dict__["wrapped"] = value


def test_an_optimizer_without_groups_of_its_own_is_refused():
    with pytest.raises(UserError, match="optimizer_in_bwd=true: _Wraps wraps another optimizer"):
        OptimizerInBackward(_Wraps(_model().parameters(), lr=0.1))


def test_the_norm_without_any_gradient_is_zero_and_each_total_starts_again():
    norm = GradientNorm()
    assert norm.total() == 0
    norm.add(torch.tensor([3.0]))
    norm.add(torch.tensor([4.0], dtype=torch.bfloat16))
    assert norm.total() == 5
    norm.add(torch.tensor([2.0]))
    assert norm.total() == 2
