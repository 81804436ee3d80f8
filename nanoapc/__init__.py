"""nanoapc: offline batch inference for LLMs, built around automatic prefix caching."""

from nanoapc.config import EngineConfig
from nanoapc.llm import LLM
from nanoapc.outputs import CompletionOutput, Logprob, RequestOutput
from nanoapc.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "EngineConfig", "Logprob", "RequestOutput", "SamplingParams", "__version__"]
