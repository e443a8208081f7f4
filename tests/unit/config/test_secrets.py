"""Secrets are known by their key, by the environment and by their form; nothing else is masked."""

import logging

import pytest
from omegaconf import OmegaConf

from torchtune_cp.config import load, secrets
from torchtune_cp.config.environment import from_environment
from torchtune_cp.config.schema import naming_problems
from torchtune_cp.config.secrets import MaskingFormatter, is_secret_key, mask_secrets, mask_text

from .examples import write


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.setattr(secrets, "_remembered", set())


HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "key",
    [
        *("token", "hf_token", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "api_key"),
        *("apiKey", "accessToken", "password", "db.password", "AWS_SECRET_ACCESS_KEY", "api_keys"),
    ],
)
def test_secret_keys(key):
    assert is_secret_key(key)


@pytest.mark.parametrize(
    "key",
    ["eos_token", "tokenizer", "max_tokens", "num_tokens", "tokens", "keys", "pad-token", "seed"],
)
def test_keys_that_are_no_secrets(key):
    assert not is_secret_key(key)


def test_a_config_is_masked_by_key_by_form_and_by_the_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted-in-the-environment")
    config = OmegaConf.create(
        {
            "hub": {
                "hf_token": "abcdef",
                "credentials": {"user": "u", "pass": "p"},
                "password": 1234,
            },
            "url": "https://user:p@ss:word@host/data?X-Amz-Signature=aa&page=2",
            "wandb": HEX,
            "note": "key hf_abcdefghijklmnopqrstuvwx and planted-in-the-environment",
            "nested": [{"apiKey": "k"}, "ghp_abcdefghijklmnopqrstuvwx"],
            "copied": "${hub.hf_token}",
        }
    )
    assert mask_secrets(config) == {
        "hub": {"hf_token": "***", "credentials": "***", "password": "***"},
        "url": "https://***@host/data?X-Amz-Signature=***&page=2",
        "wandb": "***",
        "note": "key *** and ***",
        "nested": [{"apiKey": "***"}, "***"],
        "copied": "***",
    }


def test_config_nodes_inside_a_plain_mapping_become_plain_and_are_masked():
    node = OmegaConf.create({"files": ["a", "b"], "hub": {"token": "planted-in-a-node"}})
    masked = mask_secrets({"dataset": node, "parts": node.files})
    assert masked == {
        "dataset": {"files": ["a", "b"], "hub": {"token": "***"}},
        "parts": ["a", "b"],
    }
    assert type(masked["dataset"]["files"]) is type(masked["parts"]) is list
    assert mask_text("planted-in-a-node") == "***"


def test_what_looks_alike_is_left_alone():
    config = {
        "eos_token": "<|im_end|>",
        "token": 128009,
        "dataset": {"revision": HEX, "commit_sha": HEX},
        "checkpoint_dir": f"/cache/models--a--b/snapshots/{HEX}",
        "url": "ssh://git@github.com/a/b?tokens=3",
        "output_dir": "/tmp/hf_models/run",
    }
    assert mask_secrets(config) == config
    line = f"sample 3 has token: 5, revision={HEX} eos_token='</s>' x=1 loss:2.5 lr=0.1"
    assert mask_text(line) == line


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("cannot read 'hub.hf_token=abc def'", "cannot read 'hub.hf_token=*** def'"),
        ("got {'api_key': 'abc', 'x': 1}", "got {'api_key': '***', 'x': 1}"),
        ("--hub.password=x", "--hub.password=***"),
        (f"login with {HEX} failed", "login with *** failed"),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer ***"),
        ("clone https://u:p@h/x", "clone https://***@h/x"),
        ("https://abcdefghijklmnopqrstu@h/x", "https://***@h/x"),
    ],
)
def test_lines_are_masked(text, masked):
    assert mask_text(text) == masked


def test_the_values_of_a_loaded_config_are_known_everywhere(tmp_path):
    path = write(tmp_path / "c.yaml", {"hub": {"token": "planted-in-the-file"}})
    load(path, ["hub.password=planted-on-the-command-line"])
    text = "tried planted-in-the-file, then planted-on-the-command-line"
    assert mask_text(text) == "tried ***, then ***"


def test_log_lines_and_their_tracebacks_are_masked():
    record = logging.LogRecord("x", logging.INFO, "f", 1, "api_key=%s", ("abc",), None)
    try:
        raise ValueError("hf_abcdefghijklmnopqrstuvwx")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    text = MaskingFormatter("%(message)s").format(record)
    assert text.startswith("api_key=***\n")
    assert "hf_abcdef" not in text.split("raise")[0] + text.splitlines()[-1]


@pytest.mark.parametrize(
    ("variable", "value", "given", "is_refused"),
    [
        ("MY_THING", "hunter2hunter", "/tmp/${oc.env:MY_THING}", True),
        ("OPENAI_KEY", "/tmp/looks/like/a/path", "${oc.env:OPENAI_KEY}", True),
        ("MY_THING", "/9j/4AAQSkZJRgABAQ", "${oc.env:MY_THING}", True),  # base64
        ("MY_THING", "/" + "a" * 5000, "${oc.env:MY_THING}", True),
        ("MY_THING", "/tmp\nhunter2", "${oc.env:MY_THING}", True),
        ("SLURM_JWT", "hunter2hunter", "/tmp/${oc.env:SLURM_JWT}", True),
        ("USER", "hf_abcdefghijklmnopqrstuvwx", "/tmp/${oc.env:USER}", True),
        ("MY_THING", "hunter2hunter", "${oc.env:HOME}/${oc.env:MY_THING}", True),
        ("SCRATCH", "/tmp/not/there/yet", "${oc.env:SCRATCH}/run", False),
        ("USER", "somebody", "/tmp/${oc.env:USER}", False),
        ("SLURM_JOB_ID", "1234567", "/tmp/${oc.env:SLURM_JOB_ID}", False),
        ("HOME", "/somewhere", "${oc.env:HOME}/${oc.env:NOT_SET,run}", False),
    ],
)
def test_a_variable_becomes_a_name_only_if_it_is_a_path_or_public(
    monkeypatch, variable, value, given, is_refused
):
    monkeypatch.setenv(variable, value)
    whole = OmegaConf.create({"metric_logger": {"log_dir": "${x}/logs"}, "x": given})
    decoded = OmegaConf.create(
        {"a": "${oc.decode:'{dir: \"${x}\"}'}", "x": given.replace("\n", "")}
    )
    for config in (whole, decoded):
        lines = list(naming_problems(from_environment(config)))
        assert bool(lines) == is_refused
        for line in lines:
            assert f"holds the value of {variable}" in line
            assert line.isprintable()
            assert value not in line


def test_a_secret_beside_a_public_variable_is_known_everywhere(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_THING", "planted-beside-home")
    load(write(tmp_path / "c.yaml", {"x": "${oc.env:HOME}/${oc.env:MY_THING}"}))
    assert mask_text("tried planted-beside-home") == "tried ***"
