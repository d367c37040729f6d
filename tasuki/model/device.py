"""Which device computes: turns `--device` into one, and says what it is. The one place that asks
whether there is a GPU.
"""

from __future__ import annotations

import torch

from tasuki.errors import ConfigError

CPU = torch.device("cpu")


def open_device(name: str) -> torch.device:
    """The device of that name, made the calling thread's own. Raises ConfigError without one."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        reason = (
            "this build of torch has no CUDA; install one that has"
            if torch.version.cuda is None
            else "torch finds no usable GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
        raise ConfigError(f"--device is {name}, but {reason}, or start with --device cpu")
    device = torch.device("cuda", device.index or 0)
    count = torch.cuda.device_count()
    if device.index >= count:
        raise ConfigError(
            f"--device is {name}, but torch sees {count} GPU(s), cuda:0 to cuda:{count - 1}"
        )
    torch.cuda.set_device(device)
    return device


def machine(device: torch.device) -> str:
    """What decides, with the dtype and the kernels, which bits come out."""
    if device.type == "cpu":
        return f"cpu/{torch.backends.cpu.get_cpu_capability()}"
    return f"{device.type}/{torch.cuda.get_device_name(device)}"
