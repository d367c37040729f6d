"""Carries out what a chaos test asks of a worker's links, where the worker was started for it."""

from __future__ import annotations

import logging

from tasuki.messages import InjectFault
from tasuki.transfer.connector import Connector
from tasuki.transfer.connectors.faulty import FaultyConnector

log = logging.getLogger(__name__)


def inject(connector: Connector, message: InjectFault) -> bool:
    """Whether it was done: an ordinary connector takes no faults."""
    if not isinstance(connector, FaultyConnector):
        return False
    log.warning("a fault is injected: %s %g", message.kind, message.amount)
    match message.kind:
        case "cut":
            connector.faults.cut()
        case "slow":
            connector.faults.slow(message.amount)
        case "corrupt":
            connector.faults.corrupt(int(message.amount))
        case _:
            return False
    return True
