"""What a model directory holds: JSON files and tensors in safetensors files. Nothing else is ever opened.

    config.json, generation_config.json        see models/config.py
    model.safetensors.index.json               which tensor is in which file; others are left alone
    model.safetensors, or one *.safetensors    where there is no index

Invariant: reading a model runs none of its code (pickled .bin and .pt files are refused), and names, shapes
and dtypes are known from the files' headers before any weight is read.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
TOKENIZER_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model"]
HUB_PATTERNS = [*TOKENIZER_PATTERNS, "*.safetensors"]
HUB_IGNORED = ["original/*", "consolidated*", "*/*.safetensors"]
"""Second copies of the weights in the vendor's own layout, and what is never read: checkpoints of the training."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Safetensors' names of the dtypes that weights can have; others are parts of quantised checkpoints."""


def resolve_model(model: str | Path, patterns: list[str] = HUB_PATTERNS) -> Path:
    """The local directory of a model: itself, or a snapshot from the Hugging Face hub (cached on disk).

    patterns: the files of the snapshot that are wanted.

    Raises:
        ValueError: a file (GGUF among them), a path that does not exist, a hub name that cannot be fetched.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        raise ValueError(f"{model}: GGUF files are not supported; pass a directory with config.json and safetensors")
    if path.is_file():
        raise ValueError(f"{model} is a file; pass the model's directory")
    if str(model).startswith((".", "/", "~")) or str(model).count("/") > 1:
        raise ValueError(f"{model}: there is no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=patterns, ignore_patterns=HUB_IGNORED))
    except Exception as error:  # those of the hub, of its HTTP library, of the disk
        reason = " ".join(str(error).split())  # what a gated model wants stands in later lines
        if (cached := getattr(error, "snapshot_path", None)) is not None:
            # No network, and not all matching files were fetched before; one that is needed is named where it is read.
            logger.warning("model %r: %s", str(model), reason)
            return Path(cached)
        raise ValueError(
            f"model {str(model)!r} is no local directory, and fetching it from the Hugging Face hub failed "
            f"({type(error).__name__}: {reason}); check the name, the network and (gated or private models) HF_TOKEN, "
            "or pass a local directory"
        ) from error


def check_directory(directory: Path) -> None:
    """Refuses (ValueError) what is not a model's directory: no config.json, a LoRA adapter, GGUF files."""
    if (directory / "adapter_config.json").exists():
        raise ValueError(f"{directory} holds a LoRA adapter (adapter_config.json); merge it into its base model first")
    if not (directory / "config.json").exists():
        hint = "; GGUF files are not supported" if any(directory.glob("*.gguf")) else ""
        # A training's checkpoints lie one level below its directory, the snapshots of the hub's cache two.
        if below := sorted([*directory.glob("*/config.json"), *directory.glob("snapshots/*/config.json")]):
            hint = f"; did you mean {below[-1].parent}?"
        raise ValueError(f"{directory} is not a model directory: it has no config.json{hint}")


def load_tokenizer(directory: str, trust_remote_code: bool = False) -> Any:
    """The transformers tokenizer of a directory: what tokenizer.json says, if there is one.

    AutoTokenizer goes by the class that the configs name, and that class may put rules of its own in place of the
    file's (a byte-level file that is labelled LlamaTokenizer would lose all spaces). Code of its own, if trusted, wins.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    config = Path(directory) / "tokenizer_config.json"
    has_code = trust_remote_code and config.is_file() and "auto_map" in read_json(config)
    if (Path(directory) / "tokenizer.json").is_file() and not has_code:
        return PreTrainedTokenizerFast.from_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a ValueError names a file that holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))  # with or without a byte order mark
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {why_unreadable(path, error)}") from error
    if (kind := type(value).__name__) != "dict":
        raise ValueError(f"{path} must hold a JSON object, not a {kind}")
    return value


def tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file to read it from.

    Raises:
        ValueError: no safetensors file, several without an index, an index of files that do not exist.
    """
    if (directory / INDEX).exists():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(Path(str(f)).name == f for f in weight_map.values()):
            raise ValueError(f"{directory / INDEX} needs a weight_map from tensor names to files beside it")
        if absent := sorted({f for f in weight_map.values() if not (directory / f).exists()}):
            raise ValueError(f"{directory}: {INDEX} lists {', '.join(absent)}, not found; is the download complete?")
        return {name: directory / file for name, file in weight_map.items()}
    files = sorted(directory.glob("*.safetensors"))
    if directory / "model.safetensors" in files:
        files = [directory / "model.safetensors"]
    if len(files) > 1:
        raise ValueError(f"{directory} has {len(files)} safetensors files and no {INDEX} that tells which to read")
    if not files:
        pickled = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        why = f": {', '.join(pickled)} could run code when opened" if pickled else ", the only format that is read"
        raise ValueError(f"{directory} holds no weights in safetensors{why}; convert pickled or GGUF files to it")
    with _open(files[0]) as file:
        return dict.fromkeys(file.keys(), files[0])


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """An open safetensors file; that it is corrupt or lacks a tensor asked for is a ValueError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: {why_unreadable(path, error)}") from error


def why_unreadable(path: Path, error: Exception) -> Exception | str:
    """Why a file cannot be read: what it is instead of itself, or the error."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return f"{path.name} is a Git LFS pointer, no more than a name; fetch the file itself with `git lfs pull`"
    return error


def read_headers(files: Mapping[str, Path]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Tensor name -> (shape, dtype), read from the headers; ValueError for a dtype that is not in DTYPES."""
    headers = {}
    for path, names in itertools.groupby(sorted(files, key=lambda n: (files[n], n)), key=files.__getitem__):
        with _open(path) as file:
            for name in names:
                entry = file.get_slice(name)
                if (dtype := entry.get_dtype()) not in DTYPES:
                    raise ValueError(f"{path}: {name} has dtype {dtype}; quantised checkpoints are not supported")
                headers[name] = tuple(entry.get_shape()), DTYPES[dtype]
    return headers


def read_tensors(files: Mapping[str, Path], names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) in the order of `names`, one at a time.

    A file is opened anew for each: what has been read of an open one stays mapped, and counts as this process's memory.
    """
    for name in names:
        with _open(files[name]) as file:
            tensor = file.get_tensor(name)
        yield name, tensor
        del tensor
