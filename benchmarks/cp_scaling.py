"""One process with two threads (cp 1) against two processes with one thread each (cp 2), interleaved.

python -m benchmarks.cp_scaling
"""

from __future__ import annotations

import statistics
import sys

from benchmarks.common import Contender, build_ours, interleave, ratio, write_results

ROUNDS = {4096: 7, 16384: 3, 32768: 2}


def main() -> None:
    results = []
    lengths = [int(a) for a in sys.argv[1:]] or list(ROUNDS)
    for seq_len in lengths:
        one = Contender("cp1", 1, 2, build_ours, (seq_len, 1))
        two = Contender("cp2", 2, 1, build_ours, (seq_len, 2))
        for contender in (one, two):
            contender.start()
        seconds = interleave([one, two], ROUNDS.get(seq_len, 3))
        activations = {c.name: max(c.step("activations")[1]) for c in (one, two)}
        for contender in (one, two):
            contender.stop()
        row = {"seq_len": seq_len}
        for name, took in seconds.items():
            row[f"{name}_tokens_per_s"] = round(seq_len / statistics.median(took))
            row[f"{name}_peak_activation_MiB"] = round(activations[name] / 2**20)
        row["speed_ratio"] = round(ratio(seconds["cp1"], seconds["cp2"]), 3)
        row["activation_ratio"] = round(activations["cp2"] / activations["cp1"], 3)
        print(row)
        results.append(row)
    write_results("cp_scaling", results)


if __name__ == "__main__":
    main()
