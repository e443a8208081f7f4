"""The composability table: a compact run of its benchmark, its page, and replicas that do not drift."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap

import pytest
import torch

from benchmarks import composability, refusals
from benchmarks.composability import EXACT, Bench, Cell, Option
from benchmarks.tables import with_tables
from tests.distributed.fixtures import recipe_config, run_recipe, save_llama
from tests.distributed.harness import run_ranks
from torchtune_cp.config import combinations

CP2 = composability.MESHES[0]
OPTION = {option.name: option for option in composability.OPTIONS}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.distributed
def test_a_few_rows_and_a_pair_of_the_table_pass(bench):
    rows = [
        (),
        (OPTION["checkpointing, every layer"], OPTION["accumulation 2"]),
        (OPTION["optimizer in backward"],),
    ]
    for options in rows:
        cell = bench.cell(CP2, options)
        assert cell.refused is None, cell
        assert cell.passes(composability.tolerance_of(options)), (options, cell)


@pytest.mark.distributed
def test_the_table_would_show_a_run_that_is_off_and_one_that_is_refused(bench):
    clipped = Option("off", {"clip_grad_norm": 0.001})
    cell = bench.cell(CP2, (clipped,))
    assert not cell.passes(EXACT)
    both = (OPTION["optimizer in backward"], OPTION["accumulation 2"])
    cell = bench.cell(CP2, both)
    assert "gradient_accumulation_steps" in cell.refused
    assert cell.passes(EXACT)
    assert not Cell(failed="RuntimeError: x").passes(EXACT)


@pytest.mark.distributed
def test_peak_activation_bytes_fall_with_cp(bench, monkeypatch):
    monkeypatch.setattr(composability, "MEMORY_TOKENS", 2048)
    one, two = bench.peak(1, ()), bench.peak(2, ())
    assert 0 < two < 0.65 * one


def test_every_pair_of_options_is_run_but_for_those_that_exclude_each_other():
    run = list(composability.combinations_on())
    assert len({composability._key(*c) for c in run}) == len(run)
    on_four = [o for mesh, o in run if mesh.world == 4]
    for a, b in composability.pairs():
        assert (a, b) in on_four
    for mesh in composability.MESHES:
        assert all((mesh, (option,)) in run for option in composability.OPTIONS)


def test_the_pages_show_the_figures_and_the_refusals_as_they_are():
    figures = composability.json.loads(composability.FIGURES.read_text(encoding="utf-8"))
    measured = composability.MEASUREMENTS_PAGE.read_text(encoding="utf-8")
    refused = composability.REFUSALS_PAGE.read_text(encoding="utf-8")
    again = "run python -m benchmarks.composability --render"
    assert measured == with_tables(measured, composability.render(figures)), again
    assert refused == with_tables(refused, refusals.render_refusals(), "refusals"), again
    assert "**" not in composability.render(figures), "something failed or is off"
    for mesh, options in composability.combinations_on():
        assert composability._key(mesh, options) in figures["cells"], "run it with --missing"
    for options in [(), *((option,) for option in composability.OPTIONS)]:
        if composability.measurable(options):
            assert composability.name_of(options) in figures["memory"], "run it with --missing"


def _sentences(rule) -> int:
    tree = ast.parse(textwrap.dedent(inspect.getsource(rule)))
    return sum(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(tree))


@pytest.mark.parametrize("rule", combinations.COMBINATIONS, ids=lambda rule: rule.__name__)
def test_every_sentence_of_a_rule_has_an_example_on_the_page(rule):
    said = {sentence for values in refusals.EXAMPLES for sentence in rule(values)}
    assert len(said) >= _sentences(rule) > 0, said


def test_no_example_is_allowed():
    for values in refusals.EXAMPLES:
        assert combinations.combination_problems(values), values


# --- replicas (case N27) --------------------------------------------------------------------------


class KeptAdamW(torch.optim.AdamW):
    """AdamW that can be looked at after a run."""

    last: KeptAdamW | None = None

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, lr=lr)
        KeptAdamW.last = self


def _digest(tensors) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.to_local().contiguous().numpy().tobytes())
    return whole.hexdigest()


def _shards_after(cfgs):
    """Digests of this rank's shards of the weights and of Adam's moments, after each run."""
    digests = []
    for cfg in cfgs:
        run_recipe([cfg])
        params = KeptAdamW.last.param_groups[0]["params"]
        with torch.no_grad():
            weights = _digest(params)
            moments = _digest(KeptAdamW.last.state[p]["exp_avg"] for p in params)
        digests.append((weights, moments))
    return digests


@pytest.mark.distributed
def test_replicas_stay_bit_identical(tmp_path):
    save_llama(tmp_path / "base")
    cfgs = [
        recipe_config(
            tmp_path / "base",
            tmp_path / f"steps{steps}",
            data_parallel_replicate_dim=2,
            context_parallel_dim=2,
            max_steps_per_epoch=steps,
            optimizer={"_component_": f"{__name__}.KeptAdamW", "lr": 0.01},
        )
        for steps in (2, 3)
    ]
    by_rank = run_ranks(4, _shards_after, cfgs)
    # Ranks 0 and 1 share the sequences of the first replica, 2 and 3 those of the second.
    for step in range(len(cfgs)):
        first = [by_rank[rank][step] for rank in (0, 1)]
        assert first == [by_rank[rank][step] for rank in (2, 3)]
        assert first[0] != first[1], "two shards cannot be equal"
    assert by_rank[0][0] != by_rank[0][1], "the third step changed nothing"
