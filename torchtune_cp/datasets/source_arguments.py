"""Arguments that data sets hand on to ``datasets.load_dataset``: refused where it has no such name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.data.messages import MaskingStrategy
from torchtune_cp.data.packing import STRATEGIES
from torchtune_cp.data.turns import CONVERSATION_STYLES
from torchtune_cp.datasets.sft import BAD_ROW_POLICIES, OVERLONG_POLICIES
from torchtune_cp.datasets.source import LOCAL_SOURCES, local_files
from torchtune_cp.did_you_mean import did_you_mean
from torchtune_cp.errors import NotFoundHereError, UserError

#: What most configs hand on: looking these up would import the library, which takes a second.
_COMMON = frozenset({"data_files", "data_dir", "name", "revision"})
#: Arguments of `load_dataset` that data sets here have under names of their own.
_OWN = frozenset({"path", "split"})

_CHOICES: dict[str, tuple[str, ...]] = {
    "conversation_style": CONVERSATION_STYLES,
    "masking_strategy": tuple(strategy.value for strategy in MaskingStrategy),
    "on_bad_row": BAD_ROW_POLICIES,
    "overlong": OVERLONG_POLICIES,
    "packing_strategy": STRATEGIES,
}
_LOWEST = {
    "max_files": 1,
    "max_rows": 1,
    "max_seq_len": 1,
    "min_tokens": 0,
    "num_proc": 1,
    "shuffle_buffer_size": 1,
}


def check_values(arguments: Mapping[str, Any], own: frozenset[str]) -> Iterator[UserError]:
    """Say which of the arguments that data sets share have values that none of them takes."""
    for name in arguments:
        if name not in own:
            continue
        value, choices, low = arguments[name], _CHOICES.get(name), _LOWEST.get(name)
        if choices and isinstance(value, str) and value not in choices:
            hint = did_you_mean(value, choices)
            yield UserError(f"{name}: {value!r} is not one of {', '.join(choices)}{hint}")
        if low is not None and type(value) is int and value < low:
            yield UserError(f"{name}: must be {low} or more, not {value}")


def load_dataset_names(source: object) -> frozenset[str]:
    """Return what `load_dataset` takes for a source.

    Args:
        source: "json", "csv", ...; for a hub data set, whose format is not known before it was
            looked at, the settings of all these formats.
    """
    import datasets

    parameters = inspect.signature(datasets.load_dataset).parameters.values()
    names = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    for kind in [source] if source in LOCAL_SOURCES else LOCAL_SOURCES:
        module = importlib.import_module(f"datasets.packaged_modules.{kind}.{kind}")
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, datasets.BuilderConfig):
                names |= {field.name for field in dataclasses.fields(value)}  # type: ignore[arg-type]
    return frozenset(names - _OWN)


def unknown_names(
    source: object, arguments: Mapping[str, Any], own: frozenset[str] = frozenset()
) -> Iterator[UserError]:
    """Say which arguments neither a data set nor `load_dataset` takes.

    Args:
        source: See `load_dataset_names`.
        arguments: The arguments given.
        own: The names in the data set's own signature.
    """
    others = [name for name in arguments if name not in own | _COMMON]
    if not others:
        return
    takes = load_dataset_names(source)
    for name in others:
        if name not in takes:
            hint = did_you_mean(name, sorted(own)) or did_you_mean(name, sorted(takes))
            yield UserError(
                f"{name}: is no argument of this data set, nor of datasets.load_dataset"
                f"{f' for {source!r}' if source else ''}{hint}"
            )


def check_source(arguments: Mapping[str, Any], own: frozenset[str]) -> Iterator[UserError]:
    """The check (see `checked_by`) of data sets that read a `source`."""
    source = arguments.get("source")
    yield from check_values(arguments, own)
    yield from unknown_names(source, arguments, own)
    files = arguments.get("data_files")
    if source not in LOCAL_SOURCES:
        return
    if not files and not arguments.get("data_dir"):
        yield UserError(f"data_files: source={source!r} needs the files to read")
        return
    try:
        local_files(files)
    except UserError as error:
        yield type(error)(str(error).removeprefix("dataset."))


def check_proteins(arguments: Mapping[str, Any], own: frozenset[str]) -> Iterator[UserError]:
    """The check of `protein_dataset`: FASTA at a path, or a source."""
    path = arguments.get("path")
    if (path is None) == (arguments.get("source") is None):
        yield UserError("path: give either path (FASTA) or source")
    elif path is None:
        yield from check_source(arguments, own)
    else:
        for name in arguments:
            if name not in own:
                hint = did_you_mean(name, sorted(own))
                yield UserError(f"{name}: is no argument of FASTA data at a path{hint}")
        yield from check_path(arguments, own)


def check_path(arguments: Mapping[str, Any], own: frozenset[str]) -> Iterator[UserError]:
    """The check of a data set that reads a path of its own."""
    path = arguments.get("path")
    yield from check_values(arguments, own)
    if isinstance(path, str) and not os.path.exists(expand_home(path)):
        yield NotFoundHereError(f"path: {path!r} does not exist")
