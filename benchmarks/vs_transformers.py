"""Tokens/s and memory of one process: ours against transformers' plain loop, interleaved.

python -m benchmarks.vs_transformers
"""

from __future__ import annotations

import statistics
import sys

from benchmarks.common import (
    Contender,
    build_ours,
    build_transformers,
    interleave,
    ratio,
    write_results,
)

ROUNDS = {4096: 7, 16384: 3}


def main() -> None:
    results = []
    lengths = [int(a) for a in sys.argv[1:]] or list(ROUNDS)
    for seq_len in lengths:
        theirs = Contender("transformers", 1, 2, build_transformers, (seq_len,))
        eager = Contender("eager", 1, 2, build_ours, (seq_len, 1))
        compiled = Contender("compiled", 1, 2, build_ours, (seq_len, 1, True))
        contenders = [theirs, eager, compiled]
        for contender in contenders:
            contender.start()
        seconds = interleave(contenders, ROUNDS.get(seq_len, 3))
        memory = {c.name: c.step()[1][0] for c in contenders}
        for contender in contenders:
            contender.stop()
        row = {"seq_len": seq_len}
        for name, took in seconds.items():
            row[f"{name}_tokens_per_s"] = round(seq_len / statistics.median(took))
            row[f"{name}_peak_resident_MiB"] = round(memory[name] / 2**20)
        for name in ("eager", "compiled"):
            row[f"{name}_speed_ratio"] = round(ratio(seconds["transformers"], seconds[name]), 3)
            row[f"{name}_memory_ratio"] = round(memory[name] / memory["transformers"], 3)
        print(row)
        results.append(row)
    write_results("vs_transformers", results)


if __name__ == "__main__":
    main()
