"""Builds everything that a config may name, in a process of its own, and reports what each did.

``python -m tests.unit.config.walk FOLDER`` prints, of every component of every role, what Python's audit
events say it did to files, processes, the network and with code that is not installed; and the same of a few
callables that do such things, to show that it is seen.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Events by what they do; the first argument of those on files is the path.
FILE_EVENTS = {
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink"),
    *("os.chmod", "os.chown", "os.utime", "shutil.rmtree", "shutil.move", "shutil.copyfile"),
}
OTHER_EVENTS = {
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"),
    *("os.forkpty", "pty.spawn", "os.startfile"),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"),
    *("socket.sendto", "urllib.Request", "http.client.connect", "ftplib.connect"),
    *("pickle.find_class", "code.__new__", "marshal.loads"),
}
CHECKOUT = Path(__file__).resolve().parents[3]
#: Installed code: running it on import is no act of a config.
INSTALLED = tuple(os.path.realpath(p) for p in (*sys.path, *sysconfig.get_paths().values()))
#: Libraries that components import when they are built. What these do on import, such as asking git for
#: its version, a config cannot change.
LIBRARIES = ("datasets", "requests", "wandb", "torch.utils.tensorboard", "torch.profiler")


class Watch:
    """Collects what happens while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _, flags = args
            if isinstance(path, int) or not flags & WRITES or os.fspath(path) == os.devnull:
                return
            self._note(event, path)
        elif event in FILE_EVENTS:
            self._note(event, args[0])
        elif event in OTHER_EVENTS and not (event == "marshal.loads" and _is_import()):
            self._note(event, args[0] if args else "")
        elif event == "exec":
            file = str(getattr(args[0], "co_filename", "<string>"))
            # Generated code has no file.
            if not file.startswith("<") and not os.path.realpath(file).startswith(INSTALLED):
                self._note(event, file)

    def _note(self, event: str, what: object) -> None:
        self.seen.append(f"{event} {os.fsdecode(what) if isinstance(what, bytes) else what}")

    @contextmanager
    def watching(self) -> Iterator[list[str]]:
        self.seen = []
        self.on = True
        try:
            yield self.seen
        finally:
            self.on = False


def _is_import() -> bool:
    """Whether compiled code is being read by the import of an installed module."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap_external>":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def main(folder: Path) -> None:
    """Build everything and print the report."""
    watch = Watch()
    for library in LIBRARIES:
        importlib.import_module(library)
    import torch

    from torchtune_cp.config import allow
    from torchtune_cp.data import byte_tokenizer, esm_tokenizer
    from torchtune_cp.models.llama3 import llama3

    torch.manual_seed(0)
    tokenizer_folder = folder / "tokenizer"
    byte_tokenizer().save(tokenizer_folder)
    sizes = {
        "vocab_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
        "embed_dim": 8,
        "intermediate_dim": 16,
        "max_seq_len": 32,
    }
    hf = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(hf))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"text": "a", "sequence": "MK", "messages": turns, "input": "a", "output": "b"}
    (folder / "rows.json").write_text(json.dumps({**row, "instruction": "a"}) + "\n")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.py").write_text("a\n")
    (folder / "a.fasta").write_text(">a\nMKV\n")

    def weights() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.ones(256, 256))]

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(weights(), lr=0.1, momentum=0.9)

    rows = {"source": "json", "data_files": str(folder / "rows.json")}
    # What the recipe gives, and arguments for what has no default.
    given: dict[str, Any] = {
        "masking": lambda: [esm_tokenizer()],
        "dataset": lambda: [byte_tokenizer(max_seq_len=512)],
        "optimizer": lambda: [weights()],
        "lr_scheduler": lambda: [optimizer()],
        "tensor_parallel_plan": lambda: [llama3(**sizes)],
        "collate_fn": lambda: [[{"tokens": [1, 2], "labels": [1, 2]}]],
    }
    needed: dict[str, dict[str, Any]] = {
        "model": {**sizes, "checkpoint_dir": str(folder / "hf")},
        "tokenizer": {"path": str(tokenizer_folder)},
        "dataset": {"conversation_column": "messages", "conversation_style": "openai"},
        "optimizer": {"lr": 0.1},
        "metric_logger": {"log_dir": str(folder / "logs")},
        "lr_scheduler": {
            **{"num_warmup_steps": 1, "num_training_steps": 4, "num_decay_steps": 2},
            **{"step_size": 1, "milestones": [1], "gamma": 0.5, "T_max": 4, "T_0": 2},
            **{"base_lr": 0.1, "max_lr": 0.2, "min_lr": 0.01},
        },
    }
    # Other ways to the same component, and those whose defaults ask for a download or a service.
    also: dict[str, list[dict[str, Any]]] = {
        "FullModelHFCheckpointer": [{}, {"output_dir": str(folder / "run")}],
        "setup_torch_profiler": [{}, {"enabled": True, "output_dir": str(folder / "run")}],
        "OneCycleLR": [{"total_steps": 4}],
        "get_cosine_with_min_lr_schedule_with_warmup": [{"min_lr": 0.01}],
        "get_cosine_with_min_lr_schedule_with_warmup_lr_rate": [{"min_lr": 0.01}],
        "get_wsd_schedule": [{"num_training_steps": 8}],
        "WandBLogger": [{"mode": "disabled"}],
        "DiskLogger": [{"filename": "old.txt"}],
        "TensorBoardLogger": [{"organize_logs": False}],
        "text_completion_dataset": [rows, {**rows, "packed": True, "max_seq_len": 8}],
        "chat_dataset": [rows],
        "instruct_dataset": [rows],
        "text_folder_dataset": [{"path": str(folder / "texts")}],
        "protein_dataset": [{"path": str(folder / "a.fasta")}, rows],
        "alpaca_dataset": [rows],
        "alpaca_cleaned_dataset": [rows],
    }
    report = []
    for role, sources in allow.ROLES.items():
        for source in sources:
            for path, component in source.components(role):
                required = [
                    p.name
                    for p in inspect.signature(component).parameters.values()
                    if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
                ]
                for more in also.get(component.__name__, [{}]):
                    first = given.get(role, list)()
                    names = [n for n in required[len(first) :] if n not in more]
                    arguments = {n: needed[role][n] for n in names} | more
                    device = "meta" if role == "model" else "cpu"
                    with watch.watching() as seen, torch.device(device):
                        built = component(*first, **arguments)
                    report.append({"role": role, "path": path, "did": seen})
                    if hasattr(built, "close"):
                        built.close()
    from torchtune_cp.durable import delete_hidden
    from torchtune_cp.metrics import MetricsFile

    (folder / "control").mkdir()
    (folder / "stranger.py").write_text("found = 1\n")
    sys.path.append(str(folder))
    for doing in (
        lambda: MetricsFile(folder / "run2"),
        lambda: delete_hidden(folder / "control"),
        lambda: subprocess.run(["true"], check=True),
        lambda: socket.getaddrinfo("localhost", 80),
        lambda: importlib.import_module("stranger"),
    ):
        with watch.watching() as seen:
            doing()
        report.append({"role": "control", "path": "", "did": seen})
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
