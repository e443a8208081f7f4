"""A hundred damaged checkpoint.json, most signed anew: a run resumes, or says why not in clear lines."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.config_mutations import Mutator, odd_files
from tests.forked import forked_tune
from torchtune_cp.checkpointing.manifest import FORMAT, FORMAT_VERSION

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

COUNT = 100
LIMIT_S = 240
#: How a line begins that shows an exception instead of saying what is wrong.
RAW = re.compile(
    r"error: (rank \d+: )?[A-Za-z_.]*(Error|Exception|Exit|Interrupt|Warning)\b(?! in)"
)


def signed(content: object) -> bytes:
    """A checkpoint.json whose checksum fits, as somebody would write it who means harm."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "content_sha256": digest}
    return json.dumps({**head, "content": content}).encode()


def fuzz_checkpoint(base: Path, seed: int, count: int) -> tuple[Counter[int], list[str]]:
    """Resume over and over from a checkpoint whose checkpoint.json is damaged anew each time."""
    run = ["run", "full_finetune_distributed", "--config", "tiny/llama_cpu", "overwrite=false"]
    run += ["dataset_val=null", "run_val_every_n_steps=null", "save_every_n_steps=1"]
    whole = base / "whole"
    first = [*run, f"output_dir={whole}", "max_steps_per_epoch=1"]
    done = forked_tune(first, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(whole / "final")
    manifest = (whole / "checkpoints" / "step_1" / "checkpoint.json").read_text()
    content = json.dumps(json.loads(manifest)["content"])
    mutator = Mutator(seed, odd_files(base / "odd"))
    codes: Counter[int] = Counter()
    findings = []
    for number in range(count):
        out = base / "run"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out)
        data = mutator.mutate_json(content)
        try:
            damaged = signed(json.loads(data))
        except ValueError:
            damaged = mutator.mutate_text(manifest)
        (out / "checkpoints" / "step_1" / "checkpoint.json").write_bytes(damaged)
        resume = [*run, f"output_dir={out}", "max_steps_per_epoch=2", "resume_from_checkpoint=true"]
        done = forked_tune(resume, timeout=LIMIT_S)
        code = done.returncode
        codes[code] += 1
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        errors = [line for line in lines if line.startswith("error: ")]
        raw = [line for line in lines if "Traceback" in line or RAW.match(line)]
        if code not in (0, 1, 2) or raw or (code != 0 and not errors):
            what = raw or lines[-3:]
            findings.append(f"seed {seed}, {number}, {mutator.done}: exit code {code}: {what}")
    return codes, findings


def test_a_damaged_checkpoint_json_is_resumed_from_or_refused_in_clear_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    codes, findings = fuzz_checkpoint(tmp_path, 4, COUNT)
    assert findings == []
    assert codes[1] + codes[2] > COUNT // 4
