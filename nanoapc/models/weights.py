"""From a checkpoint's tensors to a model that runs: check everything, then stream tensor by tensor.

    checkpoint            model                              kernels
    q_proj.weight  --+
    k_proj.weight  --+--> qkv_proj.weight (rows of each) --> packed, the merged weight is dropped
    v_proj.weight  --+

Invariants: names and shapes are compared, in both directions, before the first tensor is read, so a wrong
checkpoint changes nothing; beyond the weights themselves, memory holds about one tensor at a time. Weights are plain
tensors, also where the caller is in torch.inference_mode(): they can be replaced in it and outside.
"""

from __future__ import annotations

import logging
import reprlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from nanoapc.kernels import Kernels
from nanoapc.layers.linear import Linear
from nanoapc.layers.norm import RMSNorm
from nanoapc.models.checkpoint import DTYPES, read_headers, read_tensors, tensor_files
from nanoapc.models.config import ModelConfig
from nanoapc.models.decoder import CausalLM
from nanoapc.models.registry import find_family

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""Old Llama checkpoints store this; it follows from config.json."""


class Destination(NamedTuple):
    """Where a checkpoint tensor goes: rows [first_row, first_row + shape[0]) of a module's parameter."""

    module: nn.Module
    parameter: str
    first_row: int
    shape: tuple[int, ...]


class WeightsDigest:
    """A hash of all weights, taken tensor by tensor as they are read; it depends on no order and no file layout."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """A weight under its checkpoint's name; one that was there before is replaced."""
        data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data
        self._digests[name] = xxhash.xxh3_128_hexdigest(data)

    def __str__(self) -> str:
        return xxhash.xxh3_128_hexdigest(repr(sorted(self._digests.items())).encode())


def load_model(
    model_dir: str | Path,
    config: ModelConfig,
    *,
    device: torch.device,
    kernels: Kernels,
    max_len: int,
    load_format: str = "auto",
    digest: WeightsDigest | None = None,
) -> CausalLM:
    """Builds a model and fills it from a directory of safetensors, or with noise (load_format "dummy").

    Args:
        model_dir, config: the directory (not read for "dummy"), and what `ModelConfig.from_directory` says of it.
        device: of weights and activations; their dtype is the config's.
        kernels: the device's functions; they take over the linear layers' weights.
        max_len: the longest sequence in tokens.
        digest: takes down what is read.

    Raises:
        ValueError: files are missing or unreadable; tensors are missing, surplus or of the wrong shape.
    """
    family = find_family({"architectures": [config.architecture]})
    model = family(config, kernels, max_len, device).eval()
    if load_format == "dummy":
        destinations = _destinations(model)
        tensors = _noise(destinations, config.dtype, device)
    elif load_format == "auto":
        files = tensor_files(Path(model_dir))
        shapes = {name: shape for name, (shape, _) in read_headers(files).items()}
        destinations = _destinations(model, shapes)
        tensors = read_tensors(files, _check(str(model_dir), config, destinations, shapes))
    else:
        raise ValueError(f"load_format must be 'auto' or 'dummy', got {load_format!r}")
    _fill(model, destinations, tensors, device, digest)
    return model


def check_weights(model: CausalLM, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """(name, tensor) pairs with a checkpoint's names and shapes -> what `replace_weights` takes. Changes nothing.

    Tensors may have any float dtype and device.

    Raises:
        ValueError: no pairs; tensors are missing, given twice, surplus, of the wrong shape, or no plain ones of floats.
    """
    given = _by_name(tensors)
    for name, tensor in given.items():
        plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_meta
        if not plain or tensor.dtype not in DTYPES.values():
            kind = (
                f"{tensor.layout} of {tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor)
            )
            raise ValueError(f"{name} must be a dense tensor of floats (16 to 64 bits) with data, not {kind}")
    shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
    names = _check("the given weights", model.config, _destinations(model, shapes), shapes)
    return {name: given[name] for name in names}


def _by_name(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    remedy = "pass (name, tensor) pairs, such as state_dict().items()"
    if not isinstance(tensors, Iterable):
        raise ValueError(f"the weights are {reprlib.repr(tensors)}; {remedy}")
    given: dict[str, Tensor] = {}
    for i, entry in enumerate(tensors):
        if not isinstance(entry, tuple | list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise ValueError(f"entry {i} of the weights is {reprlib.repr(entry)}; {remedy}")
        if entry[0] in given:
            raise ValueError(f"the weights have {entry[0]!r} twice; give each tensor once")
        given[entry[0]] = entry[1]
    return given


def replace_weights(model: CausalLM, checked: Mapping[str, Tensor], digest: WeightsDigest | None = None) -> None:
    """Replaces all weights of a loaded model, which keeps dtype and device.

    If this is interrupted, the model has old weights and new ones; once it has run to its end, new ones alone.
    """
    _fill(model, _destinations(model, checked), checked.items(), model.model.embed_tokens.weight.device, digest)


def _destinations(model: CausalLM, names: Container[str] = ()) -> dict[str, Destination]:
    """Every tensor that a checkpoint of this model must have, by its name there; names: those that it does have."""
    found = {}
    for path, module in model.named_modules():
        parent, _, own_name = path.rpartition(".")
        parts = model.packed_modules_mapping.get(own_name, (own_name,))
        for parameter, tensor in module.named_parameters(recurse=False):
            sizes = module.output_sizes if isinstance(module, Linear) else tensor.shape[:1]
            first_row = 0
            for part, size in zip(parts, sizes, strict=True):
                name = f"{parent}.{part}.{parameter}".lstrip(".")
                found[name] = Destination(module, parameter, first_row, (size, *tensor.shape[1:]))
                first_row += size
    if model.config.tie_word_embeddings:
        del found[HEAD]
        if HEAD in names and EMBEDDING not in names:  # one tensor, and either name will do
            found[HEAD] = found.pop(EMBEDDING)
    return found


def _check(
    source: str, config: ModelConfig, destinations: Mapping[str, Destination], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """The names to read, in the order of `shapes`: all that the model needs, and last a tied head to compare."""
    spare = {HEAD} if config.tie_word_embeddings else set()
    names = [name for name in shapes if not name.endswith(IGNORED_SUFFIX)]
    problems = [
        f"{name} has shape {list(shapes[name])}, expected {list(destinations[name].shape)}"
        for name in names
        if name in destinations and shapes[name] != destinations[name].shape
    ]
    if missing := [name for name in destinations if name not in shapes]:
        problems.append(f"missing: {_some(missing)}")
    if surplus := [name for name in names if name not in destinations and name not in spare]:
        problems.append(f"not part of a {config.architecture} with this config.json: {_some(surplus)}")
    if problems:
        raise ValueError(f"{source} does not fit its config.json. {_some(problems, '; ')}")
    return sorted(names, key=spare.__contains__)


def _some(items: Sequence[str], separator: str = ", ") -> str:
    """The first few of a list that may be very long."""
    more = f"{separator}and {len(items) - 8} more" if len(items) > 8 else ""
    return separator.join(items[:8]) + more


def _noise(
    destinations: Mapping[str, Destination], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Weights for runs that only time: normal with deviation 0.02, norms 1, the same every time."""
    generator = torch.Generator(device).manual_seed(0)
    for name, destination in destinations.items():
        tensor = torch.ones(destination.shape, dtype=dtype, device=device)
        if not isinstance(destination.module, RMSNorm):
            tensor.normal_(0.0, 0.02, generator=generator)
        yield name, tensor


@torch.inference_mode(False)
@torch.no_grad()
def _fill(
    model: CausalLM,
    destinations: Mapping[str, Destination],
    tensors: Iterable[tuple[str, Tensor]],
    device: torch.device,
    digest: WeightsDigest | None,
) -> None:
    """Copies tensors to their destinations and packs each linear layer as soon as it is complete."""
    dtype = model.config.dtype
    waiting = Counter(destination.module for destination in destinations.values())
    for name, tensor in tensors:
        if name not in destinations:  # a tied head: last in the order, so the embedding is there
            embedding = model.model.embed_tokens.weight
            if not torch.equal(tensor.to(embedding.device, embedding.dtype), embedding):
                logger.warning("%s is ignored: it differs from the embedding, to which config.json ties it", name)
            continue
        module, parameter, first_row, shape = destinations[name]
        whole = getattr(module, parameter)
        if whole.is_meta:
            whole = nn.Parameter(torch.empty(whole.shape, dtype=dtype, device=device), requires_grad=False)
            setattr(module, parameter, whole)
        whole.data[first_row : first_row + shape[0]].copy_(tensor)
        if digest is not None:
            is_tied = name == HEAD and model.config.tie_word_embeddings
            digest.add(EMBEDDING if is_tied else name, tensor.to(dtype))
        waiting[module] -= 1
        if isinstance(module, Linear) and waiting[module] == 0:
            module.pack(model.kernels)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight  # type: ignore[assignment]
        model.lm_head.pack(model.kernels)
