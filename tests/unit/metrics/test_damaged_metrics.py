"""A damaged ``metrics.jsonl`` never keeps a run from resuming, and what is lost is said."""

from __future__ import annotations

import logging
import os
import random
import re
from pathlib import Path

import pytest

from torchtune_cp.errors import UserError
from torchtune_cp.metrics import MetricsFile, read_metrics
from torchtune_cp.metrics.run_notes import RunNotes

LINES = [b'{"step": %d, "loss": %d.50}\n' % (step, step) for step in range(1, 7)]
WHOLE = b"".join(LINES)


def resume(folder: Path, caplog: pytest.LogCaptureFixture, step: int = 4) -> str:
    """Continue a run at a checkpoint, write its next line, and return what was said."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "torchtune_cp"):
        RunNotes(folder, step)
        file = MetricsFile(folder, step)
        file.write({"step": step + 1, "loss": 0.0})
        file.close()
    assert len(caplog.messages) <= 1
    assert all("\n" not in message for message in caplog.messages)
    return "".join(caplog.messages)


@pytest.mark.parametrize(
    ("content", "kept", "said"),
    [
        (WHOLE, LINES[:4], None),
        (b"", [], "it is empty; of those up to the checkpoint's step 4 lost is step 1 to 4"),
        (WHOLE[:-5], LINES[:4], "line 6 is incomplete"),
        (WHOLE[:60], LINES[:2], "line 3 is incomplete; .* lost is step 3 to 4"),
        (WHOLE[:-1], LINES[:4], None),
        (WHOLE.replace(b"\n", b"\r\n"), [x[:-1] + b"\r\n" for x in LINES[:4]], None),
        (LINES[0] + b"\xff\xfe\n" + b"".join(LINES[2:]), None, "line 2 is not UTF-8; .* step 2$"),
        (LINES[0] + b"\0" * 5000 + b"\n" + WHOLE, [LINES[0], *LINES[:4]], "line 2 is not JSON"),
        (b"[" * 200_000 + b"\n" + WHOLE, LINES[:4], "line 1 is not JSON"),
        (WHOLE + b'{"a":' * 200_000, LINES[:4], "line 7 is incomplete"),
        (b"x" * 3_000_000 + b"\n" + WHOLE, LINES[:4], "line 1 is longer than"),
        (b'[1]\n"x"\n7\nnull\n' + WHOLE, LINES[:4], "line 1 is not a JSON object and 3 more"),
        (b'{"loss": 1}\n{"step": true}\n{"step": "2"}\n' + WHOLE, LINES[:4], "line 1 has no step"),
        (b'{"step": ' + b"9" * 9000 + b"}\n" + WHOLE, LINES[:4], "line 1 is not JSON"),
        (
            LINES[0] + b"".join(LINES[3:]),
            [LINES[0], LINES[3]],
            "lines are missing; .* step 2 to 3$",
        ),
        (LINES[2] + WHOLE, [LINES[2], *LINES[:4]], "line 2 goes back from step 3 to 1"),
        ("a folder", [], "not a regular file|Is a directory"),
        ("a pipe", [], "not a regular file"),
        ("a link to nothing", [], "No such file"),
    ],
)
def test_the_run_resumes_what_is_lost_is_said_and_lines_up_to_the_checkpoint_stay(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: bytes | str,
    kept: list[bytes] | None,
    said: str | None,
) -> None:
    path = tmp_path / "metrics.jsonl"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "a folder":
        path.mkdir()
    elif content == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "gone")
    if kept is None:
        kept = [LINES[0], *LINES[2:4]]
    message = resume(tmp_path, caplog)
    assert path.read_bytes() == b"".join(kept) + b'{"step": 5, "loss": 0.0}\n'
    if said is None:
        assert message == ""
    else:
        assert f"{path} is damaged: " in message
        assert re.search(said, message.partition("; the file as it was")[0]), message
    aside = [p for p in tmp_path.iterdir() if p.name.startswith("metrics.damaged")]
    if aside and isinstance(content, bytes):
        assert aside[0].read_bytes() == content, "the file as it was is kept"
    resume(tmp_path, caplog)
    assert len([p for p in tmp_path.iterdir() if p.name.startswith("metrics.damaged")]) == len(
        aside
    ), "what cannot be read is gone"


def test_a_pipe_is_not_waited_for_by_readers(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match="not a regular file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_run_that_began_at_another_ones_checkpoint_misses_no_earlier_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(LINES[2] + LINES[3] + b"\xff\n")
    assert "no step is lost" in resume(tmp_path, caplog)


def test_a_hundred_mutated_files_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(5)
    path = tmp_path / "metrics.jsonl"
    for _ in range(100):
        data = bytearray(WHOLE)
        for _ in range(rng.randrange(1, 5)):
            at, length = rng.randrange(len(data) + 1), rng.randrange(60)
            junk = rng.choice([b"", b"\n", b"\0", b"[", b"{", b'"', b"\xff", rng.randbytes(7)])
            data[at : at + rng.choice([0, length])] = junk * rng.randrange(1, 400)
        path.write_bytes(data)
        whole = [line for line in data.splitlines(keepends=True) if line in LINES[:4]]
        message = resume(tmp_path, caplog)
        found = path.read_bytes()
        assert all(line in found for line in whole)
        assert [r["step"] for r in read_metrics(path)][-1] == 5
        if any(line not in found for line in LINES[:4]) and not whole:
            assert "damaged" in message
