"""Every Python example of the documentation runs and prints what the page says."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tests.docs.pages import CHECKOUT, PAGES, blocks, name_of, shown_files
from tests.forked import forked_python, forked_torchrun

STANDALONE = ("--standalone", "--local-addr", "localhost")
_PRINTED = [page for page in PAGES if any(b.is_output for b in blocks(page))]


def test_every_python_block_is_an_example_with_output_or_a_file_that_a_test_runs() -> None:
    run_elsewhere = {"cp_loop.py", "cp_loader_loop.py", "look_at_run.py", "my_data.py"}
    assert _PRINTED
    for page in PAGES:
        found = list(blocks(page))
        for block, following in zip(found, [*found[1:], None][: len(found)], strict=True):
            if block.language == "python" and block.file not in run_elsewhere:
                assert following is not None, block
                assert following.is_output, f"{name_of(page)}: no output is shown for\n{block.text}"


@pytest.mark.parametrize("page", _PRINTED, ids=name_of)
def test_examples_print_what_the_page_shows(page: Path) -> None:
    found = list(blocks(page))
    pairs = [(a, b) for a, b in itertools.pairwise(found) if b.is_output]
    for example, output in pairs:
        assert example.language == "python"
        done = forked_python(example.text, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout == output.text


@pytest.mark.distributed
def test_the_loop_of_ones_own_gives_the_same_losses_on_one_and_two_ranks(tmp_path: Path) -> None:
    program = tmp_path / "cp_loop.py"
    program.write_text(shown_files(CHECKOUT / "docs/context_parallel.md")["cp_loop.py"])
    losses = []
    for world in (1, 2):
        done = forked_torchrun([*STANDALONE, "--nproc_per_node", str(world), str(program)])
        assert done.returncode == 0, done.stderr
        printed = re.findall(r"^step (\d) loss (\S+)$", done.stdout, re.MULTILINE)
        assert [step for step, _ in printed] == list("0123")
        losses.append([float(loss) for _, loss in printed])
    one, two = losses
    assert two == pytest.approx(one, rel=1e-5)
    assert one[-1] < 0.99 * one[0], "the loop does not learn: equal losses would prove little"


@pytest.mark.distributed
def test_the_loop_around_the_loader_gives_each_rank_its_slices(tmp_path: Path) -> None:
    program = tmp_path / "cp_loader_loop.py"
    program.write_text(shown_files(CHECKOUT / "docs/esm2.md")["cp_loader_loop.py"])
    done = forked_torchrun([*STANDALONE, "--nproc_per_node", "2", str(program)])
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^two batches of \(1, [1-9]\d+\) tokens on each rank$", done.stdout, re.MULTILINE
    )
