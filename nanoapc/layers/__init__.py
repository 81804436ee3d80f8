"""What a decoder layer is made of, one layer a file.

Invariant: a layer declares its parameters by shape alone, on the meta device; `models/weights.py` gives them
memory. So what a checkpoint has to hold can be read off the model before a byte is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Layer(nn.Module):
    """nn.Module without its detours: no hooks, and children and parameters are plain attributes, too.

    A decode step makes hundreds of calls and look-ups; through nn.Module they cost a small model 10 % of its time.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module | nn.Parameter):
            self.__dict__[name] = value

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


def declare_parameter(*shape: int) -> nn.Parameter:
    """A parameter that has a shape but no memory yet (meta device); never trained."""
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
