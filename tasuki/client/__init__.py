"""The public Python client of a tasuki cluster; everything else in `tasuki` is internal.

    async with Client("127.0.0.1:50051") as client:
        async for output in client.generate(prompt="Once upon a time", max_tokens=32):
            print(output.text, end="", flush=True)

Errors are those of `tasuki.errors`.
"""

from tasuki.client.client import Client
from tasuki.client.output import GenerateOutput, Placement, Timings, TokenLogprob, Usage
from tasuki.client.prompt import ChatMessage
from tasuki.client.sampling import SamplingOptions
from tasuki.client.served import ServedModel, ServerDescription

__all__ = [
    "ChatMessage",
    "Client",
    "GenerateOutput",
    "Placement",
    "SamplingOptions",
    "ServedModel",
    "ServerDescription",
    "Timings",
    "TokenLogprob",
    "Usage",
]
