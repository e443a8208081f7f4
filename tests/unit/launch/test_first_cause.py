"""Which of several failures a run reports."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtune_cp.launch.launcher import _first_cause

NOW = 1_700_000_000


def recorded(summary: str, time_ns: int, **extra: Any) -> SimpleNamespace:
    info = {"summary": summary, "time_ns": time_ns, "kind": "error", "lost_peer": False, **extra}
    message = {"message": summary, "extraInfo": info}
    return SimpleNamespace(
        exitcode=1, timestamp=NOW, message=message, error_file_data={"message": message}
    )


def unrecorded(exitcode: int) -> SimpleNamespace:
    return SimpleNamespace(
        exitcode=exitcode, timestamp=NOW, message="", error_file_data={"message": "<NONE>"}
    )


EARLY, LATE = NOW * 10**9 + 5, NOW * 10**9 + 9


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        # the same second, told apart by the finer stamp
        ([recorded("late", LATE), recorded("early", EARLY)], "rank 1: early"),
        # who only lost its peer is no cause, even when its record is older
        ([recorded("lost", EARLY, lost_peer=True), recorded("cause", LATE)], "rank 1: cause"),
        # a rank killed from outside is the cause of the others losing it
        ([recorded("lost", EARLY, lost_peer=True), unrecorded(-9)], "rank 1 was ended by SIGKILL"),
        # ranks that the agent ended come last
        ([unrecorded(-15), recorded("cause", LATE)], "rank 1: cause"),
        ([unrecorded(-15), unrecorded(3)], "rank 1 failed with exit code 3"),
        # a record of torch's own ``record`` decorator has no finer stamp
        (
            [
                SimpleNamespace(
                    exitcode=1,
                    timestamp=NOW,
                    message={},
                    error_file_data={
                        "message": {
                            "message": "ValueError: x\nmore",
                            "extraInfo": {"py_callstack": "...", "timestamp": str(NOW)},
                        }
                    },
                ),
                unrecorded(-15),
            ],
            "rank 0: ValueError: x",
        ),
    ],
)
def test_the_first_cause_is_reported(failures: list[Any], said: str) -> None:
    failed = _first_cause(dict(enumerate(failures)))
    assert str(failed).startswith(said)
    assert failed.exit_code == 1


def test_a_refused_config_keeps_exit_code_2_and_its_lines() -> None:
    failed = _first_cause({0: recorded("a: wrong\nb: wrong", EARLY, kind="config")})
    assert str(failed) == "a: wrong\nerror: b: wrong"
    assert failed.exit_code == 2
