"""Attention over head chunks: the same run as without, by every method; the bytes that it sends."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.live_storage import LiveStorage
from tests.distributed.dispatch_watchers import BytesSent
from tests.distributed.fixtures import (
    DIM,
    VOCAB,
    recipe_config,
    reference_step,
    run_recipe,
    uneven_samples,
)
from tests.distributed.harness import run_ranks
from tests.distributed.packs import documents
from torchtune_cp.distributed import ContextParallelOptions, context_parallel
from torchtune_cp.distributed.context_parallel.heads import HeadChunks, ulysses_degree
from torchtune_cp.models.llama3 import llama3
from torchtune_cp.models.rope import inverse_frequencies, rotary_cos_sin
from torchtune_cp.training.memory import apply_chunked_attention

LR = 2.0
TILE = 5  # divides none of the slices' lengths
HEADS = 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
DATA = {
    "samples": ({"_component_": "tests.distributed.fixtures.uneven_samples"}, 6),
    "packs": ({"_component_": "tests.distributed.packs.packs"}, 4),
}
METHODS = {
    "ring": {},
    "alltoall": {"context_parallel_rotate_method": "alltoall"},
    "allgather": {"context_parallel_method": "allgather"},
    "ulysses": {"context_parallel_method": "ulysses"},
    "two_rings": {"context_parallel_method": "ulysses", "context_parallel_ulysses_dim": 2},
    "all_heads": {"context_parallel_method": "ulysses", "context_parallel_ulysses_dim": 4},
}
FULL = {"enable_activation_checkpointing": True}
LEVERS = {
    "full": FULL,
    "every_2nd": {"ac_mode": "selective", "ac_option": 2},
    "offload": {"enable_activation_offloading": True},
    "accumulated": {"gradient_accumulation_steps": 3, "batch_size": 2},
    "in_backward": {"optimizer_in_bwd": True},
    "on_host": {"optimizer_on_host": True},
    "shards_on_host": {"fsdp_cpu_offload": True},
    "kept_gathered": {"fsdp_reshard_after_forward": False},
    "no_tiles": {"mlp_tile_tokens": None},
}
EVERYTHING = (
    FULL
    | LEVERS["offload"]
    | LEVERS["on_host"]
    | {"loss": {"reuse_hidden": True}, "mlp_tile_tokens": 3}
)
COMPILED = {"compile": True, **FULL}


def _save(folder, name):
    """A random model of transformers; query heads per KV head are 4, or 1 of the "mha" one."""
    import transformers as hf

    torch.manual_seed(0)
    kv = {"num_key_value_heads": HEADS if name == "mha" else 2}
    configs = {
        "gqa": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **kv)),
        "mha": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **kv)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, **kv)),
        "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, **kv, head_dim=8)),
        "mistral": lambda: hf.MistralForCausalLM(
            hf.MistralConfig(**SIZES, **kv, sliding_window=13)
        ),
    }
    model = configs[name]()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):  # transformers starts them at 0
                parameter.normal_(std=0.2)
    model.save_pretrained(folder)


#: (name, model, data, mesh and method, chunks, further keys); each has its counterpart without chunks.
def _cp(degree, method, **more):
    return {"context_parallel_dim": degree, **METHODS[method], **more}


_TWO = [
    ("ring", "gqa", "samples", _cp(2, "ring"), 2, {}),
    ("alltoall", "gqa", "samples", _cp(2, "alltoall"), 4, {}),
    ("allgather", "gqa", "packs", _cp(2, "allgather"), 2, {}),
    ("ulysses", "gqa", "samples", _cp(2, "ulysses"), 4, {}),
    ("everything", "gqa", "samples", _cp(2, "ring"), 2, EVERYTHING),
]
_ONE = [
    ("one", "gqa", "samples", {}, 2, {}),
    ("one_packs", "qwen3", "packs", {}, 8, EVERYTHING),
    ("one_window", "mistral", "samples", {}, 4, {}),
]
_SLOW = {
    1: [("one_mha", "mha", "samples", {}, 8, FULL)],
    2: [
        *(
            (f"{model}_{method}_{chunks}_{data}", model, data, _cp(2, method), chunks, {})
            for model, method, chunks, data in (
                ("gqa", "ring", 8, "packs"),
                ("gqa", "allgather", 4, "samples"),
                ("gqa", "ulysses", 2, "packs"),
                ("mha", "ring", 4, "samples"),
                ("mha", "allgather", 8, "samples"),
                ("mha", "ulysses", 2, "packs"),
                ("mha", "ulysses", 4, "samples"),
                ("qwen2", "ring", 2, "samples"),
                ("qwen2", "ulysses", 4, "packs"),
                ("qwen3", "alltoall", 2, "packs"),
                ("qwen3", "ulysses", 2, "samples"),
                ("mistral", "ring", 2, "samples"),
                ("mistral", "ulysses", 4, "packs"),
            )
        ),
        *((name, "gqa", "samples", _cp(2, "ring"), 2, keys) for name, keys in LEVERS.items()),
        *(
            (f"ulysses_{name}", "gqa", "samples", _cp(2, "ulysses"), 4, LEVERS[name])
            for name in ("full", "offload", "shards_on_host")
        ),
        ("compiled", "gqa", "samples", _cp(2, "ring"), 2, COMPILED),
        ("compiled_ulysses", "gqa", "samples", _cp(2, "ulysses"), 2, COMPILED),
    ],
    4: [
        *((f"cp4_{m}", "gqa", "samples", _cp(4, m), 2, {}) for m in METHODS),
        ("cp4_ring_4", "gqa", "packs", _cp(4, "ring"), 4, {}),
        ("cp4_two_rings_4", "gqa", "packs", _cp(4, "two_rings"), 4, FULL),
        ("cp4_alltoall_rings", "mha", "samples", _cp(4, "two_rings") | METHODS["alltoall"], 2, {}),
        ("cp4_mha", "mha", "packs", _cp(4, "ulysses"), 2, {}),
        ("cp4_qwen3", "qwen3", "samples", _cp(4, "all_heads"), 2, EVERYTHING),
        ("dp2", "gqa", "samples", _cp(2, "ring", data_parallel_shard_dim=2), 2, {}),
        ("dp2_ulysses", "gqa", "packs", _cp(2, "ulysses", data_parallel_shard_dim=2), 4, FULL),
        ("hsdp", "gqa", "samples", _cp(2, "ring", data_parallel_replicate_dim=2), 2, EVERYTHING),
    ],
}


def _configs(folder, case):
    """The case's config with chunks and without."""
    name, model, data, mesh, chunks, more = case
    source, rows = DATA[data]
    dp = mesh.get("data_parallel_shard_dim", 1) * mesh.get("data_parallel_replicate_dim", 1)
    shape = {"dataset": source, "dataset_val": source, "batch_size": rows // dp}
    keys = {"optimizer": {"lr": LR}, "mlp_tile_tokens": TILE} | shape | mesh | more
    return [
        recipe_config(
            folder / model, folder / f"{name}_{kind}", **keys, attention_head_chunks=wanted
        )
        for kind, wanted in (("chunks", chunks), ("plain", None))
    ]


def _run_and_watch(cfgs):
    """Run the recipe; return the numbers of query heads that were attended to at a time, by run."""
    from torchtune_cp.distributed.context_parallel.head_chunks import KeysAndValues

    plain, seen = KeysAndValues.attend, set()

    def attend(self, query, *args):
        seen.add(query.size(1))
        return plain(self, query, *args)

    KeysAndValues.attend = attend
    watched = []
    for cfg in cfgs:
        seen.clear()
        run_recipe([cfg])
        watched.append(set(seen))
    return watched


def _difference(weights, expected):
    assert set(weights) == set(expected)
    return max(
        ((weights[key] - e).abs().max() / e.abs().max()).item() for key, e in expected.items()
    )


def _check(folder, world, cases):
    for model in {case[1] for case in cases}:
        _save(folder / model, model)
    cfgs = [cfg for case in cases for cfg in _configs(folder, case)]
    for rank in run_ranks(world, _run_and_watch, cfgs):
        for case, with_chunks, without in zip(cases, rank[::2], rank[1::2], strict=True):
            assert with_chunks == {HEADS // case[4]}, case[0]
            assert without == set(), case[0]
    samples = {"samples": uneven_samples(), "packs": documents()}
    references = {}
    for name, model, data, *_ in cases:
        if (model, data) not in references:
            references[model, data] = reference_step(folder / model, samples[data], LR)["after"]
        chunks, plain = (
            load_file(folder / f"{name}_{kind}" / "final" / "model.safetensors")
            for kind in ("chunks", "plain")
        )
        errors = _difference(chunks, plain), _difference(chunks, references[model, data])
        assert errors[0] < 1e-6, (name, errors)
        assert errors[1] < 1e-5, (name, errors)


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "cases"), [(1, _ONE), (2, _TWO)])
def test_a_step_with_chunks_is_the_step_without_and_transformers(tmp_path, world, cases):
    _check(tmp_path, world, cases)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world", _SLOW)
def test_a_step_with_chunks_of_every_method_model_mesh_and_lever(tmp_path, world):
    _check(tmp_path, world, _SLOW[world])


@pytest.mark.slow
@pytest.mark.distributed
def test_bfloat16_with_chunks_is_no_further_from_float32_than_without(tmp_path):
    cases = [
        ("ring", "gqa", "samples", _cp(2, "ring"), 2, {"dtype": "bf16"}),
        ("ulysses", "qwen3", "samples", _cp(2, "ulysses"), 4, {"dtype": "bf16", **FULL}),
    ]
    for _, model, *_ in cases:
        _save(tmp_path / model, model)
    cfgs = [cfg for case in cases for cfg in _configs(tmp_path, case)]
    run_ranks(2, _run_and_watch, cfgs)
    for name, model, *_ in cases:
        reference = reference_step(tmp_path / model, uneven_samples(), LR)["after"]

        def distance(kind, name=name, reference=reference):
            weights = load_file(tmp_path / f"{name}_{kind}" / "final" / "model.safetensors")
            return sum((weights[k] - e).norm().item() ** 2 for k, e in reference.items()) ** 0.5

        assert distance("chunks") < 1.1 * distance("plain"), name


# --- bytes and memory -------------------------------------------------------------------------------

SEQ, HEAD_DIM = 2048, 8
ALL_HEADS_TWICE = ("all_heads", 2, 2)


def _formula(cp, method, kv_heads, chunks):
    """Elements that a rank sends in the forward and the backward pass of one layer; see the docs."""
    shared = METHODS[method].get("context_parallel_ulysses_dim")
    if method == "ulysses":
        shared = ulysses_degree(cp, HEADS, kv_heads)
    p = shared or 1
    own, own_kv = HEADS // p, max(kv_heads // p, 1)
    times = max(1, chunks // own_kv)  # that a KV head goes round a ring
    ring = (cp // p - 1) * 2 * own_kv * p * times
    exchange = (p - 1) * (2 * own + 2 * own_kv)
    n = SEQ // cp * HEAD_DIM
    return n * (ring + exchange), n * (2 * ring + 2 * exchange)


def _layer(kv_heads):
    torch.manual_seed(0)
    sizes = {"num_heads": HEADS, "num_kv_heads": kv_heads, "embed_dim": HEADS * HEAD_DIM}
    return llama3(vocab_size=8, num_layers=1, max_seq_len=SEQ, intermediate_dim=8, **sizes)


def _sent_and_peaks(runs):
    """Of each run: bytes sent forward and backward by half a layer; its peaks without chunks and with."""
    cp = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    results = []
    for method, kv_heads, chunks in runs:
        keys = METHODS[method]
        options = {
            "method": keys.get("context_parallel_method", "ring"),
            "rotate_method": keys.get("context_parallel_rotate_method", "allgather"),
        }
        parts = keys.get("context_parallel_ulysses_dim")
        if method == "ulysses":
            parts = ulysses_degree(cp, HEADS, kv_heads)
        options["options"] = ContextParallelOptions(ulysses_dim=parts, by_documents=True)
        heads = HeadChunks.of(chunks, HEADS, kv_heads, parts or 1)
        peaks = []
        for chunked in (False, True):
            model = _layer(kv_heads)
            if chunked:
                apply_chunked_attention(model, heads, 16)
            batch = {"tokens": torch.zeros(1, SEQ, dtype=torch.int64)}
            with context_parallel(mesh, batch, **options) as local:
                frequencies = inverse_frequencies(model.config)
                rope = rotary_cos_sin(frequencies, local["input_pos"], torch.float32)
                x = torch.randn(1, SEQ // cp, HEADS * HEAD_DIM, requires_grad=True)
                with LiveStorage() as storage:
                    model.layers[0].attend(x, rope).sum().backward()
                peaks.append(storage.peak)
                with BytesSent() as forward:
                    out = model.layers[0].attend(x, rope)
                with BytesSent() as backward:
                    out.sum().backward()
        results.append((sum(forward.sent.values()), sum(backward.sent.values()), *peaks))
    return results


def _check_bytes(world, runs):
    for rank in run_ranks(world, _sent_and_peaks, runs):
        for run, (forward, backward, plain, chunked) in zip(runs, rank, strict=True):
            expected = _formula(world, *run)
            assert (forward, backward) == (4 * expected[0], 4 * expected[1]), run
            if run != ALL_HEADS_TWICE:  # repeated for several ranks, keys and values take most
                assert chunked < 0.9 * plain, (run, plain, chunked)


@pytest.mark.distributed
def test_bytes_sent_are_those_of_the_table_and_the_peak_falls():
    methods = ("ring", "alltoall", "allgather", "ulysses")
    _check_bytes(2, [(m, kv, c) for m in methods for kv, c in ((4, 2), (2, 4))])


@pytest.mark.slow
@pytest.mark.distributed
def test_bytes_sent_are_those_of_the_table_also_by_groups_of_ranks():
    runs = [("two_rings", 4, 2), ("two_rings", 2, 4), ALL_HEADS_TWICE, ("all_heads", 8, 2)]
    _check_bytes(4, [*runs, ("ring", 8, 4), ("allgather", 2, 8), ("alltoall", 2, 2)])
