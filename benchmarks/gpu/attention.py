"""Attention through `context_parallel` with each CUDA kernel, against plain attention in float64.

Shape legend: b batch, h heads, g KV heads, s sequence, n this rank's slice, d head dimension.

Two ranks share ONE GPU: NCCL refuses that, so they talk through gloo with CUDA tensors.
"""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.measure import relative_error, worst_row_error
from benchmarks.gpu.report import STATUSES, Report, Setting, short

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch's choice": None,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Largest relative error (2-norm) of the output and of dQ, dK, dV. The reference takes the same,
#: already rounded, inputs, so that only the kernel's own roundings count. A kernel in half precision
#: rounds the probabilities, the score gradients and its results once each, to eps / 2 at most and
#: about eps / 5 in the mean square; two ranks round the partial results of two blocks besides.
#: Three to six independent ones of eps / 5 make about eps / 2: 2 eps leaves a factor of four. fp16
#: gets twice that: probabilities near 1 / 8192 lie where its numbers become subnormal and lose bits.
#: The fp32 kernels multiply in three TF32 products or in fp32, 1e-6 after sums of thousands of terms.
TOLERANCES = {"fp32": 1e-5, "bf16": 2 * 2**-7, "fp16": 4 * 2**-10}

#: The worst single row may be off by this many tolerances: the largest of about 1e5 rows that each
#: have a spread of their own (seen on a CPU: 2 to 3). A row of a wrong position is off by about 1.
ROW_FACTOR = 8

#: Seconds without an answer after which ranks count as lost.
RANK_LIMIT_S = 60

HEADS, KV_HEADS, BATCH = 8, 2, 2


@dataclass(frozen=True)
class Case:
    """One call of attention.

    Attributes:
        kernel: Key of `BACKENDS`.
        dtype: Key of `DTYPES`.
        kv_heads: `HEADS`, or a quarter of it (grouped queries, 4:1).
        seq_len: Tokens.
        rotate_method: How KV reach the other rank; without meaning at cp 1.
        pad_to_multiple_of: An option of `context_parallel`.
    """

    kernel: str
    dtype: str
    kv_heads: int
    seq_len: int
    rotate_method: str = "allgather"
    pad_to_multiple_of: int = 1


def single_cases(device: str) -> list[Case]:
    """The cases of one rank: every kernel, dtype, number of KV heads and length."""
    if device == "cuda":
        kernels = [("flash", "bf16"), ("flash", "fp16"), ("efficient", "fp32")]
        kernels += [("efficient", "bf16"), ("cudnn", "bf16")]
        lengths = [40, 2999, 8192]
    else:  # the CPU has one fused kernel, which takes all three dtypes
        kernels = [("flash", "fp32"), ("flash", "bf16"), ("flash", "fp16")]
        lengths = [40, 299, 512]
    cases = [
        Case(kernel, dtype, kv_heads, seq_len)
        for kernel, dtype in kernels
        for kv_heads in (HEADS, KV_HEADS)
        for seq_len in lengths
    ]
    # What a model gets that selects no kernel, as the recipe does.
    return cases + [
        Case("torch's choice", dtype, kv_heads, lengths[1])
        for dtype in ("fp32", "bf16")
        for kv_heads in (HEADS, KV_HEADS)
    ]


def sharded_cases(device: str, taken: list[Case]) -> list[Case]:
    """The cases of two ranks: those that one rank's kernel took, with both rotate methods."""
    cases = [
        Case(**{**asdict(case), "rotate_method": method})
        for case in taken
        for method in ("allgather", "alltoall")
    ]
    if device == "cuda":
        # The efficient kernel pads its logsumexp to a multiple of 32 rows, and torch's ring adds
        # block results with unpadded ones: half of each rank's slice has to be such a multiple.
        cases += [
            Case(**{**asdict(case), "pad_to_multiple_of": 2 * 2 * 32})
            for case in taken
            if case.kernel == "efficient" and case.seq_len % (2 * 2 * 32)
        ]
    return cases


def inputs(case: Case, head_dim: int, device: torch.device) -> list[Tensor]:
    """Q, K, V and the gradient of the output, [b, s, heads, d] each, the same on every rank."""
    g = torch.Generator().manual_seed(case.seq_len)
    heads = (HEADS, case.kv_heads, case.kv_heads, HEADS)
    return [
        torch.randn(BATCH, case.seq_len, h, head_dim, generator=g).to(device, DTYPES[case.dtype])
        for h in heads
    ]


def reference(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, is_causal: bool = True, rows: int = 512
) -> list[Tensor]:
    """Softmax attention written out in float64, `rows` queries at a time.

    Args:
        q: [b, s, h, d].
        k: [b, s, g, d].
        v: [b, s, g, d].
        grad_out: [b, s, h, d].
        is_causal: Whether a query sees its own and earlier positions only.
        rows: Bounds the memory: scores are [b, h, rows, s].

    Returns:
        The output, dQ, dK and dV, float64, in the inputs' shapes.
    """
    q, k, v, grad_out = (t.double().transpose(1, 2) for t in (q, k, v, grad_out))
    k, v = k.detach().requires_grad_(), v.detach().requires_grad_()
    groups, s = q.size(1) // k.size(1), q.size(2)
    outputs, grads = [], []
    for start in range(0, s, rows):
        part = q[:, :, start : start + rows].detach().requires_grad_()
        seen = min(start + rows, s) if is_causal else s
        keys = k[:, :, :seen].repeat_interleave(groups, dim=1)
        values = v[:, :, :seen].repeat_interleave(groups, dim=1)
        scores = part @ keys.transpose(-1, -2) / q.size(-1) ** 0.5
        if is_causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(start)
            scores = scores.masked_fill(~visible, float("-inf"))
        out = scores.softmax(-1) @ values
        out.backward(grad_out[:, :, start : start + rows])
        assert part.grad is not None
        outputs.append(out.detach())
        grads.append(part.grad)
    assert k.grad is not None
    assert v.grad is not None
    whole = [torch.cat(outputs, dim=2), torch.cat(grads, dim=2), k.grad, v.grad]
    return [t.transpose(1, 2) for t in whole]


def kernel_of(out: Tensor) -> str:
    """Which kernel made a result, read off the graph of its gradient."""
    todo, seen = [out.grad_fn], set()
    while todo:
        node = todo.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name.startswith("ScaledDotProduct"):
            return name.removeprefix("ScaledDotProduct").removesuffix("Backward0")
        todo += [following for following, _ in node.next_functions]
    return "math (composed of several operators)"


def attend(case: Case, whole: list[Tensor], mesh: DeviceMesh | None) -> tuple[list[Tensor], str]:
    """Output, dQ, dK, dV of the whole sequence through the context manager, and the kernel's name.

    Args:
        case: What to call.
        whole: From `inputs`.
        mesh: The two ranks' mesh, or None for one rank.
    """
    from torchtune_cp.distributed import ContextParallelOptions, context_parallel, unshard

    q, k, v, grad_out = whole
    positions = torch.arange(case.seq_len, device=q.device).expand(BATCH, -1)
    batch = {"tokens": positions, "input_pos": positions}
    backend = BACKENDS[case.kernel]
    chosen = contextlib.nullcontext() if backend is None else sdpa_kernel([backend])
    with (
        chosen,
        context_parallel(
            mesh,
            batch,
            rotate_method=case.rotate_method,
            options=ContextParallelOptions(pad_to_multiple_of=case.pad_to_multiple_of),
        ) as local,
    ):
        real = local["input_pos"][0] < case.seq_len
        index = torch.where(real, local["tokens"][0], 0)
        # Padding carries values too: they must not reach a real token's output or gradient. The
        # leaves lie in memory as a model's projections do, heads behind the sequence.
        parts = [t.index_select(1, index).requires_grad_() for t in (q, k, v)]
        out = F.scaled_dot_product_attention(
            parts[0].transpose(1, 2),
            parts[1].transpose(1, 2),
            parts[2].transpose(1, 2),
            is_causal=True,
            enable_gqa=case.kv_heads != HEADS,
        ).transpose(1, 2)
        kernel = kernel_of(out)
        out.backward(grad_out.index_select(1, index) * real[:, None, None])
    results = [out.detach()] + [t.grad for t in parts if t.grad is not None]
    assert len(results) == 4
    return [unshard(t, mesh, seq_len=case.seq_len) for t in results], kernel


def judge(case: Case, results: list[Tensor], expected: list[Tensor]) -> dict[str, Any]:
    """Errors of the four results and the status they make."""
    names = ("out", "dq", "dk", "dv")
    errors = {
        f"{name}_error": relative_error(a, e)
        for name, a, e in zip(names, results, expected, strict=True)
    }
    worst_row = max(worst_row_error(a, e) for a, e in zip(results, expected, strict=True))
    limit = TOLERANCES[case.dtype]
    # Written so that a NaN fails.
    good = all(e <= limit for e in errors.values()) and worst_row <= ROW_FACTOR * limit
    return {
        "status": "passed" if good else "failed",
        **errors,
        "worst_row_error": worst_row,
        "tolerance": limit,
    }


def _is_refusal(error: Exception) -> bool:
    """Whether torch says that the selected kernel does not take these inputs."""
    return any(words in str(error) for words in ("No available kernel", "No viable backend"))


def run_case(
    case: Case, mesh: DeviceMesh | None, head_dim: int, device: torch.device, *, judging: bool
) -> dict[str, Any]:
    """Run a case; errors become a row.

    Args:
        case: What to call.
        mesh: The two ranks' mesh, or None.
        head_dim: d.
        device: Where to compute.
        judging: Whether this rank compares with the reference (one of them is enough: both hold the
            same whole results).
    """
    try:
        whole = inputs(case, head_dim, device)
        results, kernel = attend(case, whole, mesh)
        row = {"status": "passed", "ran": kernel}
        return {**row, **judge(case, results, reference(*whole))} if judging else row
    except Exception as error:  # noqa: BLE001 - whatever a kernel or a collective raises is the result
        if mesh is None and _is_refusal(error):
            status = "not_taken" if case.kv_heads != HEADS else "unsupported"
        elif isinstance(error, torch.OutOfMemoryError):
            status = "out_of_memory"
        else:
            status = "failed"
        return {"status": status, "error": short(error)}
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # two ranks share the device


def check_reference(device: torch.device, head_dim: int) -> dict[str, Any]:
    """The chunked reference against one written without chunks, and a control that must fail.

    The control compares causal with full attention: a comparison that cannot tell those apart would
    pass anything.
    """
    case = Case("torch's choice", "fp32", KV_HEADS, 40)
    whole = inputs(case, head_dim, device)
    q, k, v = (t.double().transpose(1, 2).detach().requires_grad_() for t in whole[:3])
    groups = HEADS // KV_HEADS
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) / head_dim**0.5
    hidden = ~torch.ones(40, 40, dtype=torch.bool, device=device).tril()
    out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.repeat_interleave(groups, 1)
    out.backward(whole[3].double().transpose(1, 2))
    once = [t.transpose(1, 2) for t in (out.detach(), q.grad, k.grad, v.grad) if t is not None]
    chunked = reference(*whole, rows=7)
    error = max(relative_error(a, b) for a, b in zip(chunked, once, strict=True))
    control = judge(case, reference(*whole, is_causal=False), chunked)
    return {
        "status": "passed" if error < 1e-12 and control["status"] == "failed" else "failed",
        "chunked_against_whole_error": error,
        "control_full_against_causal_error": control["out_error"],
    }


# --- two ranks -----------------------------------------------------------------------------------


def probe_collectives(device: torch.device) -> dict[str, str]:
    """Try the collectives that context parallelism needs; returns the error of each, "" for none.

    Args:
        device: Where the tensors lie: gloo takes CUDA tensors in some collectives only.
    """
    ranks = dist.get_world_size()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=40))
    mine = torch.full((ranks,), float(dist.get_rank()), device=device)

    def gather_into_tensor() -> list[float]:
        whole = torch.empty(ranks * ranks, device=device)
        dist.all_gather_into_tensor(whole, mine, group=group)
        return whole[::ranks].tolist()

    def gather() -> list[float]:
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(parts, mine, group=group)
        return [p[0].item() for p in parts]

    def all_to_all() -> list[float]:
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine, group=group)
        return received.tolist()

    errors = {}
    for name, collective in {
        "all_gather_into_tensor": gather_into_tensor,
        "all_gather": gather,
        "all_to_all_single": all_to_all,
    }.items():
        try:
            with warnings.catch_warnings():
                # torch 2.13 has new names for some of them, which torch 2.11 does not know.
                warnings.simplefilter("ignore", FutureWarning)
                received = collective()
            right = received == [float(r) for r in range(ranks)]
            errors[name] = "" if right else f"wrong values received: {received}"
        except Exception as error:  # noqa: BLE001 - what it refuses with is the result
            errors[name] = short(error)
    return errors


def _rank(
    rank: int, folder: str, device_type: str, head_dim: int, cases: list[Case], answers: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0")
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=RANK_LIMIT_S),
    )
    answers.put((rank, -1, probe_collectives(device)))
    for number, case in enumerate(cases):
        # A group of its own for each case: one that broke off in the middle of a collective leaves
        # nothing behind for the next. A name of its own, since meshes over the same ranks are equal.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=40))
        mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"cp{number}",))
        row = run_case(case, mesh, head_dim, device, judging=rank == 0)
        answers.put((rank, number, row))
    dist.barrier()
    dist.destroy_process_group()


def _gloo_lacks_it(error: str) -> bool:
    # Not every error that names gloo: a rank whose peer failed reports a gloo timeout.
    lowered = error.lower()
    lacking = ("not support", "unsupported", "not implemented", "no backend", "invalid tensor")
    return "gloo" in lowered and any(words in lowered for words in lacking)


def _merge(rows: list[dict[str, Any]], collectives: dict[str, str]) -> dict[str, Any]:
    """One row of both ranks' rows: the worse status, rank 0's figures, whichever error there is."""
    status = max((row["status"] for row in rows), key=STATUSES.index)
    errors = [row["error"] for row in rows if "error" in row]
    refused = {name: text for name, text in collectives.items() if text}
    if errors and (refused or all(_gloo_lacks_it(e) for e in errors)):
        # Not this project's doing, and nothing shown about it either.
        status = "unsupported"
    return {**rows[0], "status": status, **({"error": errors[0]} if errors else {})}


def run_two_ranks(report: Report, head_dim: int, cases: list[Case]) -> None:
    """Start two ranks and report every case as both have answered.

    Args:
        report: Gets the rows.
        head_dim: d.
        cases: From `sharded_cases`.
    """
    context = mp.get_context("spawn")
    answers = context.Queue()
    done = 0
    with tempfile.TemporaryDirectory() as folder:
        args = (folder, report.setting.device, head_dim, cases, answers)
        ranks = [context.Process(target=_rank, args=(r, *args), daemon=True) for r in range(2)]
        for process in ranks:
            process.start()
        rows: dict[int, dict[int, dict[str, Any]]] = {}
        collectives: dict[str, str] = {}
        lost = ""
        while done < len(cases) and not lost:
            try:
                rank, number, row = answers.get(timeout=RANK_LIMIT_S)
            except queue.Empty:
                codes = [process.exitcode for process in ranks]
                lost = f"no answer for {RANK_LIMIT_S} s; exit codes of the ranks: {codes}"
                continue
            if number < 0:
                if rank == 0:
                    collectives = row
                    for name, error in row.items():
                        extra = {"error": error} if error else {}
                        status = "unsupported" if error else "passed"
                        report.add(status, cp=2, collective=f"gloo {name}", **extra)
                continue
            rows.setdefault(number, {})[rank] = row
            if len(rows[number]) == 2:
                merged = _merge([rows[number][0], rows[number][1]], collectives)
                report.add(merged.pop("status"), cp=2, **asdict(cases[number]), **merged)
                done += 1
        for number, case in enumerate(cases):
            if lost and len(rows.get(number, {})) < 2:
                report.add("failed", cp=2, **asdict(case), error=lost)
        for process in ranks:
            process.join(timeout=0 if lost else 20)
            if process.is_alive():
                process.kill()
                process.join()


def run(setting: Setting) -> str:
    """Check attention at cp 1 and cp 2; returns the part's status."""
    device = torch.device(setting.device)
    head_dim = 16 if setting.rehearsal else 128
    report = Report(
        "attention",
        setting,
        tolerances={
            **{f"relative_error_{name}": value for name, value in TOLERANCES.items()},
            "worst_row_error": f"{ROW_FACTOR} times the dtype's",
            "reason": "2 eps for bf16, 4 eps for fp16, 1e-5 for fp32 (sums of thousands of terms);"
            " see TOLERANCES in benchmarks/gpu/attention.py",
        },
        notes={
            "shapes": f"batch {BATCH}, {HEADS} heads, {HEADS} or {KV_HEADS} KV heads of {head_dim},"
            " causal",
            "errors": "2-norm of the difference / 2-norm of plain attention in float64 on the same"
            " rounded inputs",
            "not_taken": "the kernel does not take grouped queries: so torch says at cp 1",
            "two ranks": "two processes on one device over gloo",
        },
    )
    row = check_reference(device, head_dim)
    report.add(row.pop("status"), case="reference", **row)
    taken = []
    for case in single_cases(setting.device):
        row = run_case(case, None, head_dim, device, judging=True)
        if row["status"] == "passed":
            taken.append(case)
        described = {k: v for k, v in asdict(case).items() if k in ("kernel", "dtype", "kv_heads")}
        report.add(row.pop("status"), cp=1, **described, seq_len=case.seq_len, **row)
    run_two_ranks(report, head_dim, sharded_cases(setting.device, taken))
    return report.finish()
