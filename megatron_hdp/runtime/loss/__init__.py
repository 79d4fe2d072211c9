"""What a step minimises: sums over tokens that are the same for every plan.

Design: `docs/design/loss.md`.
"""

from megatron_hdp.runtime.loss.balance import (
    RoutedCounts,
    RouterTokens,
    balancing_scores,
    count_routed,
    sequence_balance_loss,
    z_loss,
)
from megatron_hdp.runtime.loss.fused_cross_entropy import linear_cross_entropy
from megatron_hdp.runtime.loss.log_probs import linear_log_probs
from megatron_hdp.runtime.loss.preference import Preference, RewardFigures
from megatron_hdp.runtime.loss.sums import LossSums
from megatron_hdp.runtime.loss.token_sum import token_sum_loss

__all__ = [
    "LossSums",
    "Preference",
    "RewardFigures",
    "RoutedCounts",
    "RouterTokens",
    "balancing_scores",
    "count_routed",
    "linear_cross_entropy",
    "linear_log_probs",
    "sequence_balance_loss",
    "token_sum_loss",
    "z_loss",
]
