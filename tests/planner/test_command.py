"""``tune plan`` on the command line: tables, JSON, pictures, refusals of one line."""

from __future__ import annotations

import json

import pytest

from torchtune_cp.cli.main import main
from torchtune_cp.planner.devices import DEVICES

TINY = ("plan", "--config", "tiny/llama_cpu")
CP2 = ("--world-size", "2", "context_parallel_dim=2")


def planned(capsys, *words):
    code = main([*TINY, *words])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_table_json_and_picture_of_the_same_plan(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    picture = tmp_path / "plan.png"
    words = ("--seq-len", "512", "--device", "h200", "dtype=bf16", *CP2)
    table = planned(capsys, *words, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "2 x h200: cp 2; sequences of 512 tokens (--seq-len), 1,024 tokens a step" in table
    for line in (
        "parameters",
        "activations",
        "CUDA context",
        "Estimated step",
        "have not been compared",
    ):
        assert line in table
    assert "all_gather" in table

    plan = json.loads(planned(capsys, *words, "--json"))
    assert plan["device"] == "h200"
    assert plan["seq_len"] == 512
    assert plan["mesh"] == {"dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 1}
    assert plan["fits"] is True
    assert set(plan["ranks"]) == {"0", "1"}
    peak = plan["ranks"][str(plan["rank"])]
    assert sum(peak["peak_parts_bytes"].values()) == peak["peak_bytes"]
    assert plan["needed_bytes"] == peak["peak_bytes"] + sum(plan["estimates_bytes"].values())
    assert plan["estimated_step_seconds"] > 0
    assert 0 < plan["estimated_mfu"] < 1


def test_without_seq_len_it_is_that_of_the_dataset_and_the_cpu_has_no_estimates(capsys):
    plan = json.loads(planned(capsys, "--json"))
    assert (plan["seq_len"], plan["seq_len_from"]) == (256, "dataset.max_seq_len")
    assert plan["device"] == "cpu"
    assert plan["estimates_bytes"] == {}
    assert plan["needed_bytes"] == plan["ranks"]["0"]["peak_bytes"]
    assert plan["ranks"]["0"]["sent"] == []


def test_packed_rows_are_planned_by_documents_and_the_plan_says_so(capsys):
    words = ("--seq-len", "512", *CP2)
    plain = json.loads(planned(capsys, *words, "--json"))
    packed = json.loads(planned(capsys, *words, "dataset.packed=true", "--json"))
    assert [note for note in packed["notes"] if note.startswith("dataset.packed=true: planned as")]
    assert not [note for note in plain["notes"] if "packed" in note]
    # The same pairs in all, but by operators that hold other buffers.
    assert packed["needed_bytes"] != plain["needed_bytes"]
    assert sum(r["model_flops"] for r in packed["ranks"].values()) == pytest.approx(
        sum(r["model_flops"] for r in plain["ranks"].values()), rel=0.01
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "b200"), f"--device: 'b200': allowed are {', '.join(DEVICES)}"),
        (("--world-size", "2048"), "--world-size: must be 1 to 1024, got 2048"),
        (("--world-size", "0"), "--world-size: must be 1 to 1024, got 0"),
        (("--world-size", "6", "context_parallel_dim=4"), "context_parallel_dim"),
        (("--nnodes", "3", "--world-size", "8"), "--nnodes 3"),
        (("--seq-len", "0"), "--seq-len: must be at least 1, got 0"),
        (("--seq-len", "512", "--max-seq-len"), "give one of them"),
        (("--suggest", "--max-seq-len"), "give one of them"),
        (("--suggest", "--exact"), "--suggest: cannot be combined"),
        (("--max-seq-len",), "--max-seq-len: this device's memory has no limit"),
        (("optimizer.lr=-1", "batch_size=0"), "batch_size"),
        (
            ("~model", "model._component_=torchtune_cp.models.esm2.esm2_8m"),
            "a plan is made for the decoders",
        ),
        (("model._component_=torch.nn.Identity",), "'torch.nn.Identity' is refused"),
    ],
)
def test_refusals_are_lines_without_a_traceback(words, said, capsys):
    assert main([*TINY, *words]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert lines
    assert said in captured.err
    assert "Traceback" not in captured.err
