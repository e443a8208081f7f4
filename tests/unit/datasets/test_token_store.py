"""Tokens of many rows: the same whatever the number of processes, made once, kept by their content."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchtune_cp.data import HFTokenizer, byte_tokenizer, esm_tokenizer
from torchtune_cp.datasets import (
    PackedDataset,
    SFTDataset,
    chat_dataset,
    mapping,
    protein_dataset,
    text_completion_dataset,
    text_folder_dataset,
    token_store,
)
from torchtune_cp.datasets.fingerprint import fingerprint
from torchtune_cp.datasets.mapping import processes_for
from torchtune_cp.datasets.token_store import cache_dir
from torchtune_cp.errors import UserError

Write = Callable[..., str]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a few rows are many enough for it."""
    folder = tmp_path_factory.mktemp("tokens")
    monkeypatch.setenv("TUNE_CACHE_DIR", str(folder))
    monkeypatch.setattr(token_store, "FEW_ROWS", 0)
    monkeypatch.setattr(mapping, "_ROWS_A_PROCESS", 1)
    monkeypatch.setattr(mapping, "_ROWS_A_BATCH", 2)
    return folder / "tokens"


def folder_dataset(folder: Path, **kwargs: Any) -> SFTDataset:
    ds = text_folder_dataset(kwargs.pop("tokenizer", byte_tokenizer()), str(folder), **kwargs)
    assert isinstance(ds, SFTDataset)
    return ds


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in {"a.py": "a" * 30, "b.py": "bb", "c.py": "c" * 7}.items():
        (folder / name).write_text(text)
    return folder


def keys(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir()}


def conversation(i: int) -> dict[str, Any]:
    turns = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "i" * i}]
    return {"messages": turns, "text": f"text {i}"}


class TestProcesses:
    """The same samples in the same order, the same counts and messages, from one process and from three."""

    def read(self, make: Callable[..., Any], processes: int, cache: Path) -> tuple[list, str]:
        shutil.rmtree(cache, ignore_errors=True)
        ds = make(num_proc=processes)
        (folder,) = keys(cache)
        assert len(list((cache / folder).glob("*.arrow"))) == processes
        again = make(num_proc=processes + 1)  # from the cache: the counts survive
        assert (list(again), again.describe_stats()) == (list(ds), ds.describe_stats())
        assert len(keys(cache)) == 1, "the number of processes is no part of the key"
        return list(ds), ds.describe_stats()

    def check(self, make: Callable[..., Any], cache: Path) -> tuple[list, str]:
        found = self.read(make, 3, cache)
        assert found == self.read(make, 1, cache)
        monkeypatch = pytest.MonkeyPatch()
        with monkeypatch.context() as m:
            m.setattr(token_store, "FEW_ROWS", 4000)
            plain = make()
        assert found == (list(plain), plain.describe_stats())
        return found

    def test_text_with_bad_and_empty_rows(self, jsonl: Write, cache: Path) -> None:
        rows = [{"text": t} for t in ("one", "", "three", None, "five", " ", "seven", None)]
        files = jsonl(*rows)

        def make(**kwargs: Any) -> Any:
            return text_completion_dataset(
                byte_tokenizer(6), "json", data_files=files, on_bad_row="skip", **kwargs
            )

        samples, counts = self.check(make, cache)
        assert [bytes(s["tokens"][1:4]) for s in samples] == [b"one", b"thr", b"fiv", b"sev"]
        assert counts == (
            "8 rows, 4 samples, 2 empty rows skipped, 2 malformed rows skipped, 2 rows truncated"
        )

    def test_conversations(self, jsonl: Write, cache: Path) -> None:
        files = jsonl(*map(conversation, range(1, 8)))
        make = lambda **kwargs: chat_dataset(  # noqa: E731
            byte_tokenizer(),
            source="json",
            data_files=files,
            conversation_column="messages",
            conversation_style="openai",
            **kwargs,
        )
        samples, _ = self.check(make, cache)
        assert [sum(label != -100 for label in s["labels"]) for s in samples] == list(range(2, 9))

    @pytest.mark.parametrize("zipped", [False, True])
    def test_proteins_and_what_was_unknown_in_them(
        self, tmp_path: Path, cache: Path, zipped: bool
    ) -> None:
        import gzip

        text = ">a\nMKJJV*L\n>b\nBZUOX-.\n>c\nMK1\n>d\nML\n>e\n\n"
        file = tmp_path / ("x.fasta.gz" if zipped else "x.fasta")
        file.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
        make = lambda **kwargs: protein_dataset(esm_tokenizer(), str(file), **kwargs)  # noqa: E731
        _, counts = self.check(make, cache)
        assert counts == (
            "5 rows, 4 samples, 1 empty rows skipped, 4 residues outside the alphabet in 2 rows "
            "(J 2, * 1, 1 1)"
        )

    def test_files(self, texts: Path, cache: Path) -> None:
        (texts / "d.py").write_bytes(b"\xff")
        make = lambda **kwargs: folder_dataset(  # noqa: E731
            texts, max_seq_len=20, on_bad_row="skip", **kwargs
        )
        _, counts = self.check(make, cache)
        assert counts == "4 rows, 4 samples, 1 malformed rows skipped, 1 over-long rows split"

    def test_a_malformed_row_is_named_and_nothing_is_left(self, texts: Path, cache: Path) -> None:
        (texts / "d.py").write_bytes(b"\xff\xfe")
        (texts / "e.py").write_bytes(b"\xff\xfe")
        for tried_first in (100, 0):
            with pytest.MonkeyPatch.context() as m:
                m.setattr(token_store, "_TRIED_FIRST", tried_first)
                for _ in range(2):  # made, and from the cache
                    with pytest.raises(UserError, match=r"file d\.py: not UTF-8"):
                        folder_dataset(texts, num_proc=2)
        assert not list(cache.glob(".*.tmp"))

    def test_how_many_processes_are_worth_their_start(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(mapping, "_ROWS_A_PROCESS", 2000)
        cores = len(os.sched_getaffinity(0))
        assert processes_for(5000, 0, None) == min(cores, 2)
        assert processes_for(10**6, 0, 7) == 7
        assert processes_for(1999, 1 << 20, 7) == 1
        assert processes_for(3, 1 << 30, 7) == 3
        with pytest.raises(UserError, match=r"dataset\.num_proc must be 1 or more, not 0"):
            folder_dataset(Path(__file__).parent, num_proc=0)
        with pytest.raises(UserError, match="num_proc is not for streaming=true"):
            protein_dataset(esm_tokenizer(), "x.fasta", streaming=True, num_proc=2)

    def test_few_rows_start_nothing_and_leave_nothing(
        self, texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(token_store, "FEW_ROWS", 4000)
        assert len(folder_dataset(texts)) == 3
        assert not cache.exists()

    def test_an_error_that_is_nobodys_mistake_names_the_row(
        self, jsonl: Write, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def encode(self: HFTokenizer, text: str, **_: Any) -> list[int]:
            return [0] * (1 // (text != "text 5"))

        monkeypatch.setattr(HFTokenizer, "encode", encode)
        files = jsonl(*map(conversation, range(8)))
        monkeypatch.setattr(token_store, "_TRIED_FIRST", 0)
        with pytest.raises(RuntimeError, match=r"row 5 of .*data\.jsonl: ZeroDivisionError"):
            text_completion_dataset(byte_tokenizer(), "json", data_files=files, num_proc=2)

    def test_a_killed_process_ends_the_run_with_one_line(
        self, jsonl: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def encode(self: HFTokenizer, text: str, **_: Any) -> list[int]:
            if text == "text 5":
                os.kill(os.getpid(), signal.SIGKILL)
            return [0]

        monkeypatch.setattr(HFTokenizer, "encode", encode)
        monkeypatch.setattr(token_store, "_TRIED_FIRST", 0)
        files = jsonl(*map(conversation, range(8)))
        with pytest.raises(UserError, match=r"tokenised .* was killed.*dataset\.num_proc"):
            text_completion_dataset(byte_tokenizer(), "json", data_files=files, num_proc=2)
        assert keys(cache) == set()

    def test_the_environment_and_the_tokenizers_threads_are_given_back(
        self, texts: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        environment = os.environ
        for threads in (None, "true"):
            if threads is None:
                monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
            else:
                monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
            folder_dataset(texts, num_proc=2, add_eos=threads is None)
            assert os.environ is environment
            assert os.environ.get("TOKENIZERS_PARALLELISM") == threads


def test_a_small_folder_of_texts_imports_neither_datasets_nor_pandas() -> None:
    code = (
        "import sys; from torchtune_cp.data import byte_tokenizer\n"
        "from torchtune_cp.datasets import text_folder_dataset\n"
        "text_folder_dataset(byte_tokenizer(), None, glob='heapq.py', max_seq_len=256)[0]\n"
        "print({'datasets', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


_SLOW = """
import os, sys, time
from torchtune_cp.data import HFTokenizer, byte_tokenizer
from torchtune_cp.datasets import mapping, text_folder_dataset, token_store
token_store.FEW_ROWS, mapping._ROWS_A_PROCESS = 0, 1
def encode(self, text, **_):
    os.write(1, b"begun\\n")
    time.sleep(300)
HFTokenizer.encode, token_store._TRIED_FIRST = encode, 0
text_folder_dataset(byte_tokenizer(), sys.argv[1], num_proc=2)
"""


def _group(pid: int) -> list[int]:
    """The processes of a session that run."""
    running = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == pid and state != "Z":
            running.append(int(stat.parent.name))
    return running


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel to end the processes")
def test_a_killed_rank_leaves_no_process_behind(texts: Path) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", _SLOW, str(texts)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == b"begun\n"
    assert len(_group(rank.pid)) == 4, "the rank, two processes, and the library's own"
    rank.kill()
    rank.wait(30)
    give_up = time.monotonic() + 30
    while (left := _group(rank.pid)) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert left == []


class TestCache:
    def test_a_second_start_reads_no_document_and_gives_the_same_samples(
        self, texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: dict[str, Any] = {"max_seq_len": 20, "packed": True}
        packs = text_folder_dataset(byte_tokenizer(), str(texts), **given)
        first = [{k: v.tolist() for k, v in pack.items()} for pack in packs]  # type: ignore[attr-defined]
        plain = list(folder_dataset(texts))
        assert len(keys(cache)) == 1

        def encode(*_: Any, **__: Any) -> None:
            raise AssertionError("tokenised again")

        monkeypatch.setattr(HFTokenizer, "encode", encode)
        packs = text_folder_dataset(byte_tokenizer(), str(texts), **given)
        assert isinstance(packs, PackedDataset)
        assert [{k: v.tolist() for k, v in pack.items()} for pack in packs] == first
        # Nothing but the tokens is kept, so other samples come from the same files.
        assert list(folder_dataset(texts)) == plain
        for other in ({"max_seq_len": 15}, {"min_tokens": 5}, {"overlong": "drop"}):
            folder_dataset(texts, on_bad_row="skip", **other)
        assert len(keys(cache)) == 1

    def test_whatever_changes_the_tokens_changes_the_key(
        self, texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried = 0

        def check(**kwargs: Any) -> None:
            nonlocal tried
            tried += 1
            folder_dataset(texts, **kwargs)
            assert len(keys(cache)) == tried, kwargs

        check()
        check(add_eos=False)
        check(max_files=2)
        check(glob=["a.py", "b.py"])
        (texts / "b.py").write_text("bc")
        check()
        (texts / "b.py").rename(texts / "d.py")
        check()
        other = byte_tokenizer()
        other.eos_id = 3
        check(tokenizer=other)
        moved = texts.with_name("moved")
        shutil.copytree(texts, moved)
        folder_dataset(moved)
        assert len(keys(cache)) == tried, "the folder's own place does not matter"
        monkeypatch.setattr("torchtune_cp.datasets.fingerprint._code", lambda: "edited")
        check()

    def test_every_part_of_a_tokenizer_and_of_a_conversation_counts(
        self, jsonl: Write, cache: Path
    ) -> None:
        files = jsonl({"messages": [{"role": "assistant", "content": "x"}], "text": "x"})
        tried = 0

        def check(tokenizer: HFTokenizer | None = None, *, new: int = 1, **kwargs: Any) -> None:
            nonlocal tried
            tried += new
            given = {
                "source": "json",
                "data_files": files,
                "conversation_column": "messages",
                "conversation_style": "openai",
                "max_seq_len": 900,
                **kwargs,
            }
            chat_dataset(tokenizer or byte_tokenizer(), **given)
            assert len(keys(cache)) == tried, kwargs

        template = byte_tokenizer()
        template.chat_template = str(template.chat_template) + " "
        check()
        check(template)
        check(masking_strategy="train_on_last")
        check(new_system_prompt="be brief")
        check(new=0)
        check(new=0, max_seq_len=14, on_bad_row="skip")
        check(byte_tokenizer(7), new=0, packed=True, split_across_pack=True)
        jsonl({"messages": [{"role": "assistant", "content": "yy"}], "text": "x"})
        check()

    @pytest.mark.parametrize("harm", ["flip", "cut", "no meta", "meta", "missing", "empty"])
    def test_a_damaged_folder_is_made_again_with_a_line(
        self, texts: Path, cache: Path, harm: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = list(folder_dataset(texts))
        (folder,) = (p for p in cache.iterdir() if p.is_dir())
        file = sorted(folder.glob("*.arrow"))[0]
        content = file.read_bytes()
        if harm == "flip":
            file.write_bytes(content[:-90] + b"\x01" + content[-89:])
        elif harm == "cut":
            file.write_bytes(content[:-4])
        elif harm == "no meta":
            (folder / "meta.json").unlink()
        elif harm == "meta":
            (folder / "meta.json").write_text('{"format": 2, "files": [')
        elif harm == "empty":
            (folder / "meta.json").write_text('{"format": 2, "files": {}}')
        else:
            file.unlink()
        assert list(folder_dataset(texts)) == first
        (line,) = [message for message in caplog.messages if "damaged" in message]
        assert str(folder) in line
        assert file.read_bytes() == content
        assert len(keys(cache)) == 1, "no scratch folder is left"

    def test_what_a_killed_process_left_is_removed(self, texts: Path, cache: Path) -> None:
        folder_dataset(texts)
        (key,) = keys(cache)
        shutil.rmtree(cache / key)
        (cache / f".{key}.killed.tmp").mkdir()
        folder_dataset(texts)
        assert keys(cache) == {key}

    def test_a_folder_that_cannot_be_written_costs_a_warning(
        self, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        first = list(folder_dataset(texts))
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TUNE_CACHE_DIR", str(tmp_path / "file"))
        assert list(folder_dataset(texts)) == first
        assert "TUNE_CACHE_DIR chooses another folder" in caplog.text

    def test_a_disk_that_takes_no_more_is_one_line_that_names_the_folder(
        self, texts: Path, cache: Path
    ) -> None:
        import resource

        (texts / "long.py").write_text("x" * 100_000)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for processes in (1, 2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            try:
                with pytest.raises(
                    UserError, match=r"cannot be kept in .*TUNE_CACHE_DIR"
                ) as raised:
                    folder_dataset(texts, num_proc=processes)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert str(cache) in str(raised.value)
            assert "File too large" in str(raised.value)
            assert "\n" not in str(raised.value)
        assert keys(cache) == set()

    def test_the_folder_is_the_users_cache_unless_chosen(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TUNE_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", "/x")
        assert cache_dir() == Path("/x/torchtune_cp")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_dir() == Path.home() / ".cache" / "torchtune_cp"

    def test_what_has_no_fingerprint_is_made_in_memory(self, texts: Path, cache: Path) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.fingerprint = None  # type: ignore[assignment,method-assign]
        tokenizer.own = lambda text: text  # type: ignore[attr-defined]
        samples = list(folder_dataset(texts, tokenizer=tokenizer))
        assert not cache.exists()
        assert samples == list(folder_dataset(texts))

    def test_pickling_sends_the_place_not_the_tokens(self, tmp_path: Path) -> None:
        (tmp_path / "long.py").write_text("x" * 10_000)
        ds = folder_dataset(tmp_path, num_proc=1)
        sent = pickle.dumps(ds._tokens)
        assert len(sent) < 1000
        assert pickle.loads(sent).read(0, 5, 2)[0].tolist() == [120, 120]


def _build(folder: Path, barrier: Any, results: Any) -> None:
    encode = HFTokenizer.encode

    def noting(self: HFTokenizer, text: str, **kwargs: Any) -> list[int]:
        if text == "bb":
            with (folder / "note").open("a") as file:
                file.write("read\n")
        return encode(self, text, **kwargs)

    HFTokenizer.encode = noting  # type: ignore[method-assign]
    token_store._TRIED_FIRST = 0
    barrier.wait(60)
    results.put(list(folder_dataset(folder)))


def test_processes_that_start_together_tokenise_once_and_have_the_same_samples(
    texts: Path,
) -> None:
    context = multiprocessing.get_context("fork")  # spawned ones would import torch for seconds
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_build, args=(texts, barrier, results)) for _ in "123"]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(30)
    assert found[0] == found[1] == found[2]
    assert (texts / "note").read_text() == "read\n"


def test_two_lines_tell_where_no_terminal_is(
    texts: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, logger="torchtune_cp"):
        folder_dataset(texts, num_proc=2)
    lines = [message for message in caplog.messages if "tokenis" in message]
    assert lines[0] == f"tokenising {texts}: 3 rows, 2 processes"
    assert lines[1].startswith(f"tokenised {texts} in ")
    assert len(lines) == 2
    assert capfd.readouterr().err == ""


def test_fingerprints_tell_values_apart_that_join_to_the_same_text() -> None:
    values: list[Any] = [
        *(None, 0, False, "", "0", b"", [], {}, [[]], [0], ["0"], {"a": "b"}, ["a", "b"]),
        *(["ab"], [["a"], "b"], [["a", "b"]], {"a": None}),
    ]
    assert len({fingerprint(value) for value in values}) == len(values)
    assert fingerprint((1, "x")) == fingerprint([1, "x"])
    with pytest.raises(TypeError, match="function cannot be told"):
        fingerprint([lambda: 1])
