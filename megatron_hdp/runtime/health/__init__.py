"""Ranks watch over each other: who disagrees, stalls, fails or is asked to stop.

Design: `docs/design/health.md`.
"""

from megatron_hdp.runtime.health.agreement import (
    DisagreementError,
    fingerprint,
    meet,
    require_agreement,
    restart_meetings,
)
from megatron_hdp.runtime.health.attempt import store_of_attempt, tell_torchrun
from megatron_hdp.runtime.health.calls import CallsHeartbeat
from megatron_hdp.runtime.health.heartbeat import (
    DataFailure,
    Heartbeat,
    RankFailure,
    is_communication_error,
)
from megatron_hdp.runtime.health.signals import StopSignals

__all__ = [
    "CallsHeartbeat",
    "DataFailure",
    "DisagreementError",
    "Heartbeat",
    "RankFailure",
    "StopSignals",
    "fingerprint",
    "is_communication_error",
    "meet",
    "require_agreement",
    "restart_meetings",
    "store_of_attempt",
    "tell_torchrun",
]
