"""The order in which a batch is best run.

Offline, the whole batch is known. Sorting it by (extra keys, tokens) IS a depth-first walk of its prefix tree:
sequences that share a prefix run together, a prefix is computed once and is still there for its last user, and
groups are as large as attention can use. Results go back in the caller's order.

    given      A x   B y   A z   B w   A x q
    run        A x   A x q   A z   B w   B y

Source: BatchLLM (arXiv 2412.03594); SGLang's depth-first order (which falls back to first-come above 128 requests).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceType

from nanoapc.engine.block_hash import encode_tokens
from nanoapc.engine.sequence import Sequence


def prefix_order(sequences: SequenceType[Sequence]) -> list[Sequence]:
    """The sequences in the order of their prefix tree; equal ones keep their order of arrival."""
    # Encoded tokens sort as token lists do, and comparing bytes costs a memcmp.
    return sorted(sequences, key=lambda seq: (seq.extra, encode_tokens(seq.prompt)))
