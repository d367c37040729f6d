"""What a prefill worker requires of a decode worker that opens a link to it. Pure."""

from __future__ import annotations

from tasuki.errors import TransferError
from tasuki.kv.layout import require_same_layout
from tasuki.messages import LinkHello
from tasuki.transfer.link import LinkSettings


def require_acceptable(hello: LinkHello, settings: LinkSettings, block_bytes: int) -> None:
    """Raise TransferError naming what does not fit: epoch, layout, connector or segment size."""
    if (hello.prefill_worker_id, hello.prefill_epoch) != (
        settings.worker_id,
        settings.worker_epoch,
    ):
        raise TransferError(
            f"the link is meant for {hello.prefill_worker_id} epoch {hello.prefill_epoch:x}; "
            f"this is {settings.worker_id} epoch {settings.worker_epoch:x}",
            reason="refused",
        )
    require_same_layout(settings.layout, hello.layout)
    if hello.connector != settings.connector:
        raise TransferError(
            f"the decode worker moves KV by {hello.connector!r} and this worker by "
            f"{settings.connector!r}; start both with the same --connector",
            reason="refused",
        )
    if hello.max_segment_bytes < block_bytes:
        raise TransferError(
            f"the decode worker takes segments of {hello.max_segment_bytes} bytes; one block "
            f"has {block_bytes}",
            reason="refused",
        )
