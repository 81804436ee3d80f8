"""What a decoder layer is made of, one layer a file.

Invariant: a layer declares its parameters by shape alone, on the meta device; `models/weights.py` gives them
memory. So what a checkpoint has to hold can be read off the model before a byte is loaded.
"""

import torch
from torch import nn


def declare_parameter(*shape: int) -> nn.Parameter:
    """A parameter that has a shape but no memory yet (meta device); never trained."""
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
