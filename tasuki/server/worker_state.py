"""What the server process of a worker knows about its own fitness, and whom it must refuse."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tasuki.config import WorkerConfig
from tasuki.errors import TasukiError, UnavailableError, WrongRoleError
from tasuki.messages import EngineReady, LoadReport, Role
from tasuki.wire.watch import WorkerReport

_SERVES = {"Decode": Role.DECODE, "Prefill": Role.PREFILL, "Link": Role.PREFILL}


@dataclass
class WorkerState:
    """One per server process; `config` names the bound port and the final worker_id."""

    role: Role
    config: WorkerConfig
    address: str  # host:port of the gRPC server
    engine: EngineReady | None = None  # None while it starts
    draining: bool = False
    end: TasukiError | None = None  # why it serves nothing any more

    @property
    def worker_id(self) -> str:
        return self.config.worker_id

    def require_role(self, method: str) -> None:
        """Raise WrongRoleError for a call that a worker of this role does not serve."""
        needed = _SERVES[method]
        if self.role is not needed:
            raise WrongRoleError(
                f"{method} was called on {self.address}, a {self.role} worker; "
                f"only {needed} workers serve it: correct the caller's list of workers"
            )

    def require_engine(self) -> EngineReady:
        """The engine's facts. Raises why there is none: it died, it is stopping, it starts."""
        if self.end is not None:
            raise type(self.end)(self.end.message, reason=self.end.reason)
        if self.engine is None:
            raise UnavailableError(
                f"worker {self.worker_id} is still starting; try another, or again in a moment"
            )
        return self.engine

    def require_accepting(self) -> None:
        """Raise UnavailableError unless new work may begin."""
        self.require_engine()
        if self.draining:
            raise UnavailableError(
                f"worker {self.worker_id} is draining; try another", reason="draining"
            )

    def why_not_ready(self) -> str | None:
        """None when new work may begin, else the reason in words."""
        try:
            self.require_accepting()
        except TasukiError as error:
            return error.message
        return None

    def report(self, load: LoadReport) -> WorkerReport:
        """A load report as routers get it: the engine's numbers with this process's view."""
        engine = self.require_engine()
        seen = msgspec.structs.replace(
            load,
            worker_id=self.worker_id,
            ready=load.ready and self.why_not_ready() is None,
            draining=load.draining or self.draining,
        )
        return WorkerReport(
            load=seen,
            block_size=engine.layout.block_size,
            max_model_len=engine.max_model_len,
            model_id=engine.layout.model_id,
        )


def limit_timeout(timeout: float | None, remaining: float | None) -> float | None:
    """The smaller of a request's own time left and that of the call it came with. Seconds."""
    known = [value for value in (timeout, remaining) if value is not None]
    return min(known, default=None)
