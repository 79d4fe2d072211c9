"""Conversations: rows of data to tokens, and which of them carry loss."""

from megatron_hdp.data.chat.conversations import ChatTokens, Conversations
from megatron_hdp.data.chat.media import MediaConversations
from megatron_hdp.data.chat.preferences import Preferences
from megatron_hdp.data.chat.rows import BadConversationError

__all__ = [
    "BadConversationError",
    "ChatTokens",
    "Conversations",
    "MediaConversations",
    "Preferences",
]
