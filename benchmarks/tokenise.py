"""Rows a second from files to samples, nothing being cached: this checkout against an earlier one.

python -m benchmarks.tokenise --before 7cd56ce [--rows 20000] [--rounds 3]
python -m benchmarks.tokenise --rows 1000000 --rounds 1

`--before` is the commit to compare with. Short rows made of the standard library's sources, with a
BPE tokenizer trained on them: text, conversations with a chat template of this project's and with
one that it does not know (rendered in a process with limits), and proteins, each packed. Every
start runs in a separate process; the two checkouts take turns. Seconds are those from the call of the
factory to the last pack's place, without imports; `cpu` counts all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
CASES = ("text", "conversations", "conversations, other template", "proteins")
MAX_SEQ_LEN = 1024


def _blocks() -> Iterator[str]:
    """Pieces of the standard library's sources, of 40 to 600 characters."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for block in file.read_text(encoding="utf-8", errors="ignore").split("\n\n"):
            if 40 < len(block.strip()) < 600:
                yield block.strip()


def make_data(folder: Path, rows: int) -> None:
    """Write the three files and the tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from torchtune_cp.data.chat_templates import CHATML
    from torchtune_cp.data.esm_tokenizer import STANDARD_RESIDUES

    blocks, draw = list(_blocks()), random.Random(0)
    with (
        (folder / "text.jsonl").open("w") as text,
        (folder / "conversations.jsonl").open("w") as conversations,
        (folder / "proteins.fasta").open("w") as proteins,
    ):
        for i in range(rows):
            question, answer = draw.choice(blocks), draw.choice(blocks)
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            text.write(json.dumps({"text": f"{question} {i}"}) + "\n")
            conversations.write(json.dumps({"messages": turns}) + "\n")
            residues = "".join(draw.choices(STANDARD_RESIDUES, k=draw.randint(50, 500)))
            proteins.write(f">p{i}\n{residues}\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(blocks, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def one_start(case: str, folder: Path) -> dict[str, float]:
    """Make and pack a dataset in this process, with whatever version is imported."""
    import datasets

    from torchtune_cp.data import esm_tokenizer, hf_tokenizer
    from torchtune_cp.data.chat_templates import CHATML
    from torchtune_cp.datasets import chat_dataset, protein_dataset, text_completion_dataset

    other = CHATML + "{# not this project's #}" if case == "conversations, other template" else None
    tokenizer: Any = hf_tokenizer(folder, max_seq_len=MAX_SEQ_LEN, chat_template=other)
    given: dict[str, Any] = {"packed": True, "split_across_pack": True}
    if case != "proteins":
        name = case.partition(",")[0]
        given |= {"source": "json", "data_files": str(folder / f"{name}.jsonl")}
        # The library's own copy of the rows is made by the first start of all.
        datasets.load_dataset("json", data_files=given["data_files"], split="train")
    start, cpu = time.perf_counter(), _cpu_seconds()
    if case == "text":
        packs: Any = text_completion_dataset(tokenizer, **given)
    elif case.startswith("conversations"):
        columns = {"conversation_column": "messages", "conversation_style": "openai"}
        packs = chat_dataset(tokenizer, **given, **columns)
    else:
        esm = esm_tokenizer(max_seq_len=MAX_SEQ_LEN)
        packs = protein_dataset(esm, str(folder / "proteins.fasta"), **given)
    tokens = packs.build().tokens
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": _cpu_seconds() - cpu,
        "tokens": tokens,
    }


def _cpu_seconds() -> float:
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _start(checkout: Path, case: str, folder: Path) -> dict[str, float]:
    """A start in a separate process that imports the package from a checkout, with an empty cache."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout),
            "TUNE_CACHE_DIR": cache,
            "HF_DATASETS_CACHE": str(folder / "rows"),
        }
        done = subprocess.run(
            [sys.executable, __file__, "--once", case, "--folder", str(folder)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _check_out(commit: str, folder: Path) -> None:
    folder.mkdir()
    tree = subprocess.run(
        ["git", "archive", commit], cwd=CHECKOUT, stdout=subprocess.PIPE, check=True
    ).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=tree, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", help="the commit to compare with")
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(json.dumps(one_start(args.once, args.folder)))
        return
    from benchmarks.common import ratio, write_results

    checkouts = {"after": CHECKOUT}
    results = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if args.before is not None:
            checkouts = {"before": folder / "before", **checkouts}
            _check_out(args.before, folder / "before")
        make_data(folder, args.rows)
        for case in CASES:
            found: dict[str, list[dict[str, float]]] = {who: [] for who in checkouts}
            for _ in range(args.rounds):
                for who, checkout in checkouts.items():
                    found[who].append(_start(checkout, case, folder))
            tokens = {start["tokens"] for starts in found.values() for start in starts}
            assert len(tokens) == 1, f"different tokens: {tokens}"
            row: dict[str, Any] = {"rows": case, "count": args.rows}
            row |= {name: version(name) for name in ("datasets", "tokenizers")}
            row["tokens_a_row"] = round(tokens.pop() / args.rows, 1)
            for who, starts in found.items():
                seconds = statistics.median(start["seconds"] for start in starts)
                cpu = statistics.median(start["cpu_seconds"] for start in starts)
                row[f"rows_per_s_{who}"] = round(args.rows / seconds)
                row[f"cpu_us_a_row_{who}"] = round(1e6 * cpu / args.rows)
            if "before" in found:
                series = [[s["seconds"] for s in found[who]] for who in ("before", "after")]
                row["times_faster"] = round(ratio(*series), 2)
            print(row)
            results.append(row)
    write_results("tokenise" if args.before else "tokenise_alone", results)


if __name__ == "__main__":
    main()
