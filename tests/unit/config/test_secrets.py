"""Secrets are known by their key, by the environment and by their form; nothing else is masked."""

import logging

import pytest
from omegaconf import OmegaConf

from torchtune_cp.config import load, secrets
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
