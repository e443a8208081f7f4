"""Configs and JSON files that went wrong: every kind of damage, by chance from a seed."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from torchtune_cp.config.allow import ROLES

ROOT = Path(__file__).parents[2]
TORCHTUNE = ROOT / "tests" / "assets" / "torchtune"

_NUMBERS = [
    *(0, -1, 1, 2, 3, 2**31, 2**63, -(2**63), 10**9, 10**12, 10**40, -(10**40), 0.5, -0.0),
    *(1e30, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
]
_TEXTS = [
    *("", " ", "null", "true", "~", "1", "1e30", "nan", "abc", "x" * 3000, "ü\u202e\u2028"),
    *("a\nb", "\x1b[31mred", "a\tb", "\x00", "\ud800", "\x85", "{}", "{0.__class__}", "%s%n"),
    *("../../etc/passwd", "~nobody_here/x", "$HOME/x", "file:///etc/passwd", "s3://b/k", "C:\\x"),
    *("os.system", "builtins.eval", "torch.load", "..", ".a", "a.", "a..b", "a b.c", "__main__.x"),
    *(
        "torchtune_cp",
        "torchtune_cp.nothing",
        "torch.optim",
        "torch.optim.Optimizer",
        "torch.nn.Linear",
    ),
    *("torchtune_cp.checkpointing.durable.delete_hidden", "torchtune_cp.metrics.jsonl.MetricsFile"),
    *("torchtune.models.llama3.llama3_8b", "transformers.AutoModel", "torchao.optim.AdamW8bit"),
]
_REFERENCES = [
    *("${output_dir}", "${model}", "${model.vocab_size}", "${nothing}", "${.}", "${..}", "${", "}"),
    *("${oc.env:HOME}", "${oc.env:FUZZ_NUMBER}", "${oc.env:FUZZ_TEXT}", "${oc.env:FUZZ_LONG}"),
    *(
        "${oc.env:NOT_SET}",
        "${oc.env:NOT_SET,null}",
        "${oc.env:NOT_SET,3}",
        "${oc.env:}",
        "${oc.env}",
    ),
    *("${oc.decode:${oc.env:FUZZ_NUMBER}}", "${oc.decode:'[1, {a: 2}]'}", "${oc.decode:'[1'}"),
    *("${oc.select:nothing,5}", "${oc.dict.keys:model}", "${oc.dict.values:optimizer}", "${seed}"),
    *(
        "${oc.create:{a: 1}}",
        "${oc.create:${model}}",
        "${oc.deprecated:seed}",
        "${oc.coerce:1,os.system}",
    ),
    *("${no.such:resolver}", "${${seed}}", "${model.}", "${a}" * 60, "${" * 30 + "a" + "}" * 30),
    *("???", "${model[_component_]}", "x${model}y", "\\${seed}", "${oc.env:FUZZ_NUMBER}0"),
]
_TAGS = [
    *("!!timestamp 2001-99-99", '!!int "abc"', "!!float x", "!!python/object/apply:os.system [id]"),
    *("!!python/name:os.system", "!!binary aGFsbG8=", "!!set {a, b}", "!!omap [a: 1]", "!mine 3"),
    *("!!bool maybe", "!!null x", "!!map [1]", "!!seq {a: 1}", "!!str 5", "!", "!!", "!<x> 1"),
    *("2001-12-14", "2001-99-99", "2001-12-14t21:59:43.10-05:00", "1:60:61", "0o9", "0x", "1_000"),
    *(
        "&a *a",
        "*nothing",
        "&a [*a]",
        "<<",
        "=",
        "? a",
        "|",
        ">",
        "- - -",
        "[",
        "{",
        "'",
        '"',
        "@x",
    ),
    *("`x`", "%YAML 9.9", "---", "...", "[" * 900 + "]" * 900, "{a: " * 60 + "1" + "}" * 60),
]
_KEYS = [
    *("", " ", "a\nb", "x" * 500, "_component_", "0", "None", "null", "true", "1.5", "<<", "a.b"),
    *(
        "${seed}",
        "\x1b[0m",
        "self",
        "cls",
        "args",
        "kwargs",
        "__class__",
        "path",
        "*",
        "ключ",
        "???",
    ),
]

_KINDS = [
    *("value", "value", "value", "value", "number", "file", "reference", "component", "component"),
    *("delete", "rename", "add", "add", "swap", "nest", "copy", "key"),
]

#: What mutated configs are made of: every kind of config that is shipped, and torchtune's own.
SEEDS = [
    *(ROOT / "configs" / f"{name}.yaml" for name in ("tiny/llama_cpu", "tiny/esm2_cpu")),
    *(ROOT / "configs" / f"{name}.yaml" for name in ("llama3_1/8B_full", "qwen3/8B_full")),
    *(ROOT / "configs" / f"{name}.yaml" for name in ("esm2/8M_mlm", "mistral/7B_full")),
    *(ROOT / "configs" / f"{name}.yaml" for name in ("quickstart/smollm2_cp2", "qwen2_5/7B_full")),
    *sorted((ROOT / "configs" / "long_context").glob("*_8xH100.yaml"))[:3],
    *sorted((TORCHTUNE / "full_finetune_distributed").glob("*.yaml")),
    *sorted(TORCHTUNE.glob("*/*.yaml"))[::12],
]


def odd_files(folder: Path) -> list[str]:
    """Make files that are none, and return their paths: opening some of them would wait forever."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "folder").mkdir()
    (folder / "file").write_text("text\n")
    (folder / "binary.json").write_bytes(b"\xff\xfe\0{")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    names = ("folder", "file", "binary.json", "dangling", "loop", "pipe", "missing", "file/below")
    made = [str(folder / name) for name in names]
    return [*made, "/dev/null", "/dev/zero", "/proc/self/mem", "/proc/x", "."]


def _component_names() -> list[str]:
    sources = [(role, source) for role, all_of in ROLES.items() for source in all_of]
    return sorted(
        {
            path
            for role, source in sources
            if source.package != "transformers"  # imported by those configs only that name it
            for path, _ in source.components(role)
        }
    )


class Mutator:
    """Damages configs; everything follows from the seed.

    Attributes:
        done: What was done to the config at hand, for messages.
    """

    def __init__(self, seed: int, files: list[str]) -> None:
        """Begin.

        Args:
            seed: Of all choices.
            files: See :func:`odd_files`.
        """
        self.rng = random.Random(seed)
        self.done: list[str] = []
        self._files = files
        self._components = _component_names()

    def mutate(self, text: str) -> bytes:
        """Return a config with one to three damages."""
        self.done = []
        comments = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("#"))
        tree = yaml.safe_load(text)
        in_text = self.rng.random() < 0.3
        if not in_text:
            for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
                self._damage_tree(tree)
            dumped = yaml.dump(tree, sort_keys=False, allow_unicode=self.rng.random() < 0.5)
            return (comments + dumped).encode("utf-8", "surrogatepass")
        return self.mutate_text(text)

    def mutate_json(self, text: str) -> bytes:
        """Return a JSON file with one to three damages: mostly valid JSON that says something else."""
        self.done = []
        if self.rng.random() < 0.2:
            return self.mutate_text(text)
        tree = json.loads(text)
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            self._damage_tree(tree)
        return json.dumps(tree, default=str).encode()

    def mutate_text(self, text: str) -> bytes:
        """Return a text with one to three damages, none of which knows what it says."""
        self.done = []
        data = text.encode()
        for _ in range(self.rng.choice([1, 2, 3])):
            data = self._damage_text(data)
        return data

    def value(self) -> Any:
        """A value that hardly any key takes."""
        rng = self.rng
        kind = rng.randrange(8)
        if kind == 0:
            return rng.choice(_NUMBERS)
        if kind == 1:
            return rng.choice(_TEXTS)
        if kind == 2:
            return rng.choice(_REFERENCES)
        if kind == 3:
            return rng.choice(self._files)
        if kind == 4:
            return {"_component_": rng.choice(self._components + _TEXTS)}
        if kind == 5:
            return [self.value() for _ in range(rng.randrange(4))]
        if kind == 6:
            return {rng.choice(_KEYS): self.value() for _ in range(rng.randrange(4))}
        return rng.choice([None, True, False, [], {}, [[[[]]]], [None], 3, "text", 0.1])

    def _damage_tree(self, tree: dict[str, Any]) -> None:
        rng = self.rng
        places = list(_places(tree))
        if not places:  # an earlier damage has left nothing
            tree["x"] = self.value()
            return
        kind = rng.choice(_KINDS)
        node, key = rng.choice(places) if rng.random() < 0.5 else self._way_down(tree)
        if kind == "component":
            named = [(n, k) for n, k in places if k == "_component_"]
            node, key = rng.choice(named or places)
            node[key] = rng.choice(self._components + _TEXTS[-12:])
        elif kind == "number":
            numbers = [(n, k) for n, k in places if type(n[k]) in (int, float)]
            node, key = rng.choice(numbers or places)
            node[key] = rng.choice(_NUMBERS)
        elif kind == "file":
            texts = [(n, k) for n, k in places if isinstance(n[k], str)]
            node, key = rng.choice(texts or places)
            node[key] = rng.choice(self._files)
        elif kind == "value":
            node[key] = self.value()
        elif kind == "reference":
            node[key] = rng.choice(_REFERENCES)
        elif kind == "delete":
            del node[key]
        elif kind in ("rename", "key") and isinstance(node, dict):
            new = rng.choice(
                [f"{key}x", str(key)[:-1], str(key).upper()] if kind == "rename" else _KEYS
            )
            node[new] = node.pop(key)
        elif kind == "nest":
            for _ in range(rng.choice([1, 2, 60])):
                node[key] = rng.choice([[node[key]], {"a": node[key]}])
        elif kind == "swap":
            other, other_key = rng.choice(places)
            one, two = copy.deepcopy(node[key]), copy.deepcopy(other[other_key])
            node[key], other[other_key] = two, one
        elif kind == "copy":
            other, other_key = rng.choice(places)
            node[key] = copy.deepcopy(other[other_key])
        else:
            mappings = [tree, *(n[k] for n, k in places if isinstance(n[k], dict))]
            key = rng.choice([*_KEYS, *(k for _, k in places if isinstance(k, str))])
            rng.choice(mappings)[key] = self.value()
        self.done.append(f"{kind} at {key!r:.60}")

    def _way_down(self, node: Any) -> tuple[Any, Any]:
        """A place that is as likely high up as far below, where most values are."""
        while True:
            key = self.rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
            if not isinstance(node[key], (dict, list)) or not node[key] or self.rng.random() < 0.3:
                return node, key
            node = node[key]

    def _damage_text(self, data: bytes) -> bytes:
        rng = self.rng
        lines = data.split(b"\n")
        at = rng.randrange(len(lines))
        with_value = [
            i for i, line in enumerate(lines) if b": " in line and line.strip()[:1] != b"#"
        ]
        kind = rng.choice(
            ["tag", "tag", "tag", "double", "flip", "cut", "byte", "drop", "indent", "move"]
        )
        if kind == "tag" and with_value:
            at = rng.choice(with_value)
            spelt = rng.choice(_TAGS)
            lines[at] = lines[at].partition(b": ")[0] + b": " + spelt.encode()
            self.done.append(f"{spelt[:40]!r} in line {at + 1}")
            return b"\n".join(lines)
        self.done.append(f"{kind} in line {at + 1}")
        if kind == "double":
            lines.insert(at, lines[at])
        elif kind == "drop":
            del lines[at]
        elif kind == "indent":
            lines[at] = rng.choice([b" ", b"\t", b"- ", b"      "]) + lines[at]
        elif kind == "move":
            lines.insert(rng.randrange(len(lines)), lines.pop(at))
        elif kind == "cut":
            return data[: rng.randrange(len(data) + 1)]
        else:
            flat = bytearray(data or b" ")
            place = rng.randrange(len(flat))
            if kind == "flip":
                flat[place] ^= 1 << rng.randrange(8)
            else:
                junk = [
                    b"\0",
                    b"\xff",
                    b"\x1b[2J",
                    b"\r",
                    b"\xc2\x85",
                    b"{",
                    b"]",
                    b"'",
                    b": ",
                    b"\xef\xbb\xbf",
                ]
                flat[place:place] = rng.choice(junk)
            return bytes(flat)
        return b"\n".join(lines)


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a tree, as the container and the key in it."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], (dict, list)):
            yield from _places(node[key])
