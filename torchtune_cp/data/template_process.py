"""A process of its own that renders chat templates: a stranger's program gets so much time and memory.

jinja2's sandbox keeps a template away from everything but text, not from computing without end: nested
loops, widths of billions of characters, powers, lists that contain themselves twice. Python cannot stop
a single operation of that kind, but the kernel can stop a process. This file is both ends of it: what
callers import, and the program itself (started by path: it must not import torch).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

#: Seconds of processor time for one conversation; templates need a few milliseconds.
MOST_SECONDS = 5
_MOST_BYTES = 2 * 1024**3
_MOST_CHARACTERS = 100_000_000
# A call of the process costs a quarter of a millisecond, so what comes again and again is kept: requests
# of up to so many characters, unless the template makes something else of them each time.
_MOST_KEPT = 4096
_CHANGING = ("strftime_now", "random", "lipsum")
# What Python needs to start as this one did; secrets among the variables are none of its business.
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TZ")


class Outcome(NamedTuple):
    """What came of rendering.

    Attributes:
        kind: ``refused`` is about this conversation, ``broken`` about the template.
        text: The rendered text, or what went wrong, in one line.
    """

    kind: Literal["text", "refused", "broken"]
    text: str


class _Renderer:
    """The running process and the templates that it knows."""

    def __init__(self) -> None:
        program = Path(__file__).resolve()
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(program.parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        )
        self._known: dict[str, int] = {}

    def render(self, template: str, inputs: str, marks_generation: bool) -> Outcome:
        is_new = template not in self._known
        number = self._known.setdefault(template, len(self._known))
        request = [number, template if is_new else None, marks_generation]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{json.dumps(request)}\n{inputs}\n".encode())
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        return Outcome(*json.loads(answer)) if answer else Outcome("broken", self._end())

    def _end(self) -> str:
        """Collect the process that has ended and say why."""
        self.close()
        code = self._process.wait()
        if code == -signal.SIGPROF:
            return f"it is not done after {MOST_SECONDS} s"
        return f"the process that renders it ended with code {code}"

    def close(self) -> None:
        """Let the process end: its input does."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


_renderer: _Renderer | None = None
_lock = threading.Lock()


def render_apart(
    template: str, inputs: Mapping[str, Any], marks_generation: bool = False
) -> Outcome:
    """Render a template in the process for that; it is started when it is first needed.

    Args:
        template: The jinja2 source.
        inputs: What it may read; plain JSON values.
        marks_generation: See `chat_templates.render_chat`.

    Raises:
        TypeError: An input that is no plain value.
    """
    text = json.dumps(inputs)
    if len(text) > _MOST_KEPT or any(name in template for name in _CHANGING):
        return _render(template, text, marks_generation)
    return _render_once(template, text, marks_generation)


def _render(template: str, inputs: str, marks_generation: bool) -> Outcome:
    global _renderer
    with _lock:
        if _renderer is None:
            _renderer = _Renderer()
        outcome = _renderer.render(template, inputs, marks_generation)
        if outcome.kind == "broken":
            _renderer.close()
            _renderer = None
        return outcome


# Where messages stand in a text is found by rendering short marks in their place: the same ones for
# conversations of the same roles.
_render_once = lru_cache(maxsize=4096)(_render)


def _forget() -> None:
    """In a forked process: the pipes are the parent's."""
    global _renderer, _lock
    _renderer, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _close() -> None:
    if _renderer is not None:
        _renderer.close()


# --- the program ------------------------------------------------------------------------------------


def _answer(
    render_here: Any, template: str, inputs: Mapping[str, Any], marks_generation: bool
) -> Outcome:
    try:
        text = render_here(template, inputs, marks_generation)
    except RecursionError:
        return Outcome("broken", "it calls itself without end, or is nested too deeply")
    except MemoryError:
        return Outcome("broken", f"it needs more than {_MOST_BYTES} bytes of memory")
    except (TypeError, LookupError, AttributeError) as error:
        return Outcome("refused", str(error))
    except Exception as error:  # noqa: BLE001  (a template can raise whatever Python can)
        # jinja2's own are what a template says of a conversation; its syntax errors are not.
        own = [kind.__name__ for kind in type(error).__mro__]
        kind: Any = "refused" if "TemplateError" in own else "broken"
        if "TemplateSyntaxError" in own:
            line = getattr(error, "lineno", 0)
            return Outcome("broken", f"it is not valid jinja2 (line {line}): {error}")
        return Outcome(
            kind, str(error) if kind == "refused" else f"{type(error).__name__}: {error}"
        )
    if len(text) > _MOST_CHARACTERS:
        return Outcome("broken", f"it makes more than {_MOST_CHARACTERS} characters")
    return Outcome("text", text)


def _main() -> None:
    sys.path[0] = sys.argv[1]  # where the package lies, instead of this folder
    spec = importlib.util.spec_from_file_location(
        "chat_templates", Path(__file__).with_name("chat_templates.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chat_templates"] = module
    spec.loader.exec_module(module)
    # The signals that stop a run are for its ranks, which may render while they save; this process ends
    # when its input does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    for limit, most in ((resource.RLIMIT_AS, _MOST_BYTES), (resource.RLIMIT_FSIZE, 0)):
        with contextlib.suppress(ValueError, OSError):  # not every system has each
            resource.setrlimit(limit, (most, most))
    templates: dict[int, str] = {}
    for line in sys.stdin.buffer:
        number, new, marks_generation = json.loads(line)
        if new is not None:
            templates[number] = new
        inputs = json.loads(sys.stdin.buffer.readline())
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)  # ends a single long operation, too
        outcome = _answer(module.render_here, templates[number], inputs, marks_generation)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(outcome).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _main()
