"""HDP under a loop of one's own: batches as arrays, weights by token, log-probabilities, losses."""

from megatron_hdp.megatron.media import Encoding, MediaEncoder, MediaItem
from megatron_hdp.megatron.model import add_adapters
from megatron_hdp.runtime.loss import Preference
from megatron_hdp.session.batch import TokenBatch
from megatron_hdp.session.data_steps import DataSteps
from megatron_hdp.session.losses import FromHidden, FromLogProbs, FromValues, weights_of
from megatron_hdp.session.outcome import SessionReport
from megatron_hdp.session.preference import PreferenceReport, preference_step
from megatron_hdp.session.session import HdpSession

__all__ = [
    "DataSteps",
    "Encoding",
    "FromHidden",
    "FromLogProbs",
    "FromValues",
    "HdpSession",
    "MediaEncoder",
    "MediaItem",
    "Preference",
    "PreferenceReport",
    "SessionReport",
    "TokenBatch",
    "add_adapters",
    "preference_step",
    "weights_of",
]
