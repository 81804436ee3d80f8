"""What the GPU checks share: the size of a run, what it has found, and the file in which that is kept."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Report:
    """Failures and figures of one run, on the GPU or, dry, on the CPU.

    Args:
        dry: only try the script out: on the CPU, where `tiny` divides the sizes.
        path: the JSON file that holds the results so far; None: they are only printed.

    Attributes:
        about: what the file says of the machine.
        copy_rate: bytes a second that the card moves, once they have been measured.
    """

    def __init__(self, dry: bool, path: Path | None = None):
        self.dry, self.device, self.tiny = dry, "cpu" if dry else "cuda", 32 if dry else 1
        self.path = path
        self.about = {"device": "none" if dry else torch.cuda.get_device_name(), "torch": torch.__version__}
        self.figures: dict[str, dict[str, float]] = {}
        self.failures: list[str] = []
        self.copy_rate = float("nan")

    def expect(self, name: str, passed: bool, detail: str = "") -> None:
        """Prints a check's result; one that has not passed is a failure of the run."""
        print(f"{'ok  ' if passed else 'FAIL'} {name} {detail}".rstrip(), flush=True)
        if not passed:
            self.failures.append(name)
            self.save()

    def note(self, name: str, **values: float) -> None:
        """Figures, which are in the file at once, whatever happens to the rest of the run."""
        rounded = {key: float(f"{value:.4g}") for key, value in values.items()}
        self.figures[name] = rounded
        print(f"     {name:<42}", "  ".join(f"{key} {value:g}" for key, value in rounded.items()), flush=True)
        self.save()

    def attempt(self, part: Callable[..., None], *arguments: Any) -> None:
        """Runs part(self, *arguments) with as much of the device's memory as can be had; what it raises is a failure.

        The other parts go on, except in a dry run, which is there to find such errors.
        """
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()  # for other processes, too
        start = time.perf_counter()
        try:
            part(self, *arguments)
        except Exception as error:
            traceback.print_exc()
            self.expect(f"{part.__name__}: {type(error).__name__}: {error}", False)
            if self.dry:
                raise
        finally:
            if self.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        print(f"     ({part.__name__}: {time.perf_counter() - start:.0f} s)", flush=True)

    def save(self) -> None:
        """Writes the file."""
        if self.path is not None:
            results = {**self.about, "failures": self.failures, "figures": self.figures}
            self.path.write_text(json.dumps(results, indent=1))

    def finish(self) -> int:
        """Writes and prints the end of the run; returns its exit status."""
        self.save()
        print(f"{len(self.failures)} failed: {self.failures}" if self.failures else "all checks passed")
        return int(bool(self.failures))
