"""Which architectures run here. Adding one: a file beside this one, and a line below.

Invariant: an architecture that is not listed is refused by name; nothing is guessed from tensor names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoapc.models.decoder import CausalLM
from nanoapc.models.llama import LlamaForCausalLM
from nanoapc.models.mistral import MistralForCausalLM
from nanoapc.models.qwen2 import Qwen2ForCausalLM
from nanoapc.models.qwen3 import Qwen3ForCausalLM

FAMILIES: list[type[CausalLM]] = [LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM]


def find_family(raw: Mapping[str, Any]) -> type[CausalLM]:
    """The class for a config.json: by `architectures`, or by `model_type` where there is none.

    Raises:
        ValueError: the architecture is not supported; the message lists those that are.
    """
    names, model_type = raw.get("architectures"), raw.get("model_type")
    for family in FAMILIES:
        if family.__name__ in names if names else family.model_type == model_type:
            return family
    supported = ", ".join(family.__name__ for family in FAMILIES)
    raise ValueError(f"architecture {names or model_type!r} is not supported; supported: {supported}")
