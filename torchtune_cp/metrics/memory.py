"""How much memory a rank has used."""

import sys
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device | str) -> int:
    """Return the most memory this process has used so far.

    Args:
        device: On a GPU the peak of torch's allocator on it since
            `torch.cuda.reset_peak_memory_stats`; on the CPU the peak resident set of the whole
            process (code and libraries included), which no call can reset.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        # Not getrusage: its ru_maxrss survives exec, so that a process begins with its parent's peak.
        return _linux_peak_resident_bytes()
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # in bytes there, in KiB elsewhere


def _linux_peak_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def memory_stats(device: torch.device | str) -> dict[str, int]:
    """Return a rank's memory use in bytes, for loggers.

    Args:
        device: The device the rank trains on.

    Returns:
        On a GPU `peak_memory_active`, `peak_memory_alloc` and `peak_memory_reserved` of
        torch's allocator; on the CPU `peak_memory_resident`.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return {"peak_memory_resident": peak_memory_bytes(device)}
    stats = torch.cuda.memory_stats(device)
    return {
        "peak_memory_active": stats.get("active_bytes.all.peak", 0),
        "peak_memory_alloc": torch.cuda.max_memory_allocated(device),
        "peak_memory_reserved": torch.cuda.max_memory_reserved(device),
    }
