"""`tune download`: fetch a model folder from the Hugging Face Hub."""

import argparse
import os
from pathlib import Path

from torchtune_cp.cli.parser import Subparsers
from torchtune_cp.errors import UserError

# Weights in other formats than the safetensors that the checkpointer reads.
_IGNORED = ("*.bin", "*.pth", "*.pt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*")
_EXAMPLES = """\
examples:
  tune download HuggingFaceTB/SmolLM2-135M-Instruct
  tune download meta-llama/Meta-Llama-3-8B-Instruct --output-dir /data/llama3 --hf-token TOKEN
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add `tune download REPO_ID`."""
    parser = subparsers.add_parser(
        "download", help="download a model from the Hugging Face Hub", epilog=_EXAMPLES
    )
    parser.add_argument("repo_id", help="the repository's name on the Hub (owner/name)")
    parser.add_argument("--output-dir", type=Path, help="where the files go (default: /tmp/NAME)")
    parser.add_argument("--revision", help="a branch, tag or commit")
    parser.add_argument(
        "--hf-token",
        default=os.environ.get("HF_TOKEN"),
        help="a Hub token, for gated models (default: the environment's HF_TOKEN)",
    )
    parser.add_argument(
        "--ignore-patterns",
        nargs="*",
        default=list(_IGNORED),
        help=f"files not to fetch (default: {' '.join(_IGNORED)})",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    # Imported here: it takes a while, and the other commands do not need it.
    import huggingface_hub
    from huggingface_hub import errors

    output_dir: Path = args.output_dir or Path("/tmp") / args.repo_id.rpartition("/")[2]
    print(f"Downloading {args.repo_id} to {output_dir}, without {' '.join(args.ignore_patterns)}")
    try:
        folder = huggingface_hub.snapshot_download(
            args.repo_id,
            revision=args.revision,
            local_dir=output_dir,
            ignore_patterns=args.ignore_patterns,
            token=args.hf_token,
        )
    except errors.GatedRepoError:
        raise UserError(
            f"{args.repo_id} is gated: ask for access on its page, then give a token with"
            " --hf-token or log in with hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{args.repo_id} has no revision {args.revision!r}") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise UserError(
            f"the Hub has no repository {args.repo_id!r} (a private one needs --hf-token)"
        ) from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise UserError(
            f"cannot download {args.repo_id} from {endpoint}:"
            f" {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
            " (HF_ENDPOINT names a mirror)"
        ) from None
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    files = [path for path in files if ".cache" not in path.parts]
    print("Successfully downloaded model repo and wrote to the following locations:")
    print(*files, sep="\n")
