"""nanoapc: offline batch inference for LLMs, built around automatic prefix caching."""

import os

# Before torch loads OpenMP: its threads wait for each other for microseconds before they sleep, not for 10 ms and more,
# which would make a step ten times as long wherever another process needs the core.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from nanoapc.config import EngineConfig
from nanoapc.inputs import PromptType, TextPrompt, TokensPrompt
from nanoapc.llm import LLM
from nanoapc.outputs import CompletionOutput, Logprob, RequestOutput
from nanoapc.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]
