"""Replaces an earlier model folder by a finished one; files that no run writes are kept.

A user may have added files to the folder of a saved model. Only the files of the earlier model are
replaced, and the folder is complete under its name except in the moment between two renames.
"""

import errno
import logging
import os
import re
import shutil
from pathlib import Path

from torchtune_cp.checkpointing.folder import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from torchtune_cp.durable import first_free, rename_into_place
from torchtune_cp.models.tokenizer_files import TEMPLATES_FOLDER, TOKENIZER_FILES

_LOG = logging.getLogger(__name__)

OTHER_FILES = ("generation_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "USE_POLICY.md")

_WRITTEN = {CONFIG_NAME, INDEX_NAME, SINGLE_NAME, *TOKENIZER_FILES, *OTHER_FILES}
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def open_hidden(final: Path) -> None:
    """Make the hidden folder in which a model is written, and clear what a killed save has left.

    Args:
        final: The folder's final place.

    Raises:
        OSError: It cannot be created, or the final path is not a folder.
    """
    temporary, replaced = hidden_path(final), _replaced(final)
    if os.path.lexists(replaced):
        if os.path.lexists(final):
            _return_others(replaced, final)
        else:
            replaced.rename(final)
    if os.path.lexists(final) and not final.is_dir():
        raise FileExistsError(errno.EEXIST, "it exists and is not a folder; move it away")
    discard_hidden(final)
    temporary.mkdir(parents=True)


def discard_hidden(final: Path) -> None:
    """Delete the hidden folder of a save that did not come to its end.

    Raises:
        OSError: It cannot be deleted.
    """
    temporary = hidden_path(final)
    if temporary.is_dir() and not temporary.is_symlink():
        shutil.rmtree(temporary)
    else:
        temporary.unlink(missing_ok=True)


def put_in_place(final: Path) -> None:
    """Give the hidden folder its final name; it takes over the user's files from an earlier folder.

    Args:
        final: The final place.

    Raises:
        OSError: A rename failed.
    """
    replaced = _replaced(final)
    rename_into_place(hidden_path(final), final, replaced)
    if replaced.exists():
        _return_others(replaced, final)


def hidden_path(final: Path) -> Path:
    """Return the hidden folder in which the model for `final` is written.

    Args:
        final: The folder's final place.
    """
    return final.with_name(f".{final.name}.incomplete")


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def _return_others(replaced: Path, final: Path) -> None:
    """Delete an earlier model's files, and move all others from its folder to the new one."""
    for path in sorted(replaced.iterdir()):
        is_file = path.is_symlink() or path.is_file()
        if is_file and (path.name in _WRITTEN or _SHARD.fullmatch(path.name)):
            path.unlink()
        elif path.name == TEMPLATES_FOLDER and all(p.suffix == ".jinja" for p in path.iterdir()):
            shutil.rmtree(path)
        elif not os.path.lexists(final / path.name):
            path.rename(final / path.name)
        elif is_file:
            path.unlink()  # a file of a tokenizer of the user: the new model has one, too
    if not any(replaced.iterdir()):
        replaced.rmdir()
        return
    aside = first_free(lambda number: final.with_name(f"{final.name}.earlier_{number}"))
    replaced.rename(aside)
    _LOG.warning("%s contains files that had the names of files of the new %s", aside, final)
