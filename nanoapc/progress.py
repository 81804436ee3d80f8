"""The progress bars of an LLM: whether there is one, which, and what it says while prompts are processed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from nanoapc.outputs import RequestOutput


def make_bar(use_tqdm: bool | Callable[..., Any], **options: Any) -> Any:
    """A progress bar (a context manager) with tqdm's options; use_tqdm: whether it is shown, or what makes it.

    Without a standard error, or with a closed one, tqdm's own shows nothing.
    """
    if callable(use_tqdm):
        return use_tqdm(**options)
    is_usable = sys.stderr is not None and not getattr(sys.stderr, "closed", False)
    return tqdm(disable=not (use_tqdm and is_usable), **options)


class Speed:
    """The progress bar's text: prompt tokens (computed, and cached apart) and output tokens a second."""

    def __init__(self, bar: Any):
        self.bar = bar
        self.computed = self.cached = self.generated = 0

    def count(self, output: RequestOutput) -> None:
        """One more finished request."""
        self.computed += len(output.prompt_token_ids) - output.num_cached_tokens
        self.cached += output.num_cached_tokens
        self.generated += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = max(self.bar.format_dict["elapsed"], 1e-9)
        prompt, generated = self.computed / seconds, self.generated / seconds
        text = f"prompt {prompt:.0f} tok/s + {self.cached} cached, output {generated:.0f} tok/s"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(1)
