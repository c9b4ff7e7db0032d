"""The verbs by which a caller reads notifications and messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from kvxfer.message import Message
from kvxfer.notification import Notification

if TYPE_CHECKING:
    from kvxfer.session.inbox import Inbox


class Receiving:
    """The verbs of `kvxfer.Agent` that read what peers sent."""

    _notifications: Inbox[Notification]
    _messages: Inbox[Message]

    def notifications(self) -> AsyncIterator[Notification]:
        """Yields notifications as they arrive, each to one reader; ends when the agent closes.

        Unread notifications are kept. When a peer's unread notifications reach a limit, its next transfer
        with a notification is refused with a message. Of lost peers the newest 16,384 are kept.
        """
        return self._notifications.stream()

    async def notification(self, timeout_s: float | None = None) -> Notification:
        """Waits for a notification and returns it; each goes to one reader.

        Cancelling loses no notification.

        Parameters
        ----------
        timeout_s
            None waits without bound.

        Raises
        ------
        TimeoutError
            None came in time.
        AgentError
            The agent closed.
        """
        return await self._notifications.next(timeout_s)

    def notification_blocking(self, timeout_s: float | None = None) -> Notification:
        """Blocks until a notification is there and returns it: the twin of `notification`."""
        return self._notifications.next_blocking(timeout_s)

    def take_notification(self) -> Notification | None:
        """Takes the oldest unread notification; None if there is none. Never waits."""
        return self._notifications.take()

    def messages(self) -> AsyncIterator[Message]:
        """Yields messages that peers sent by `Peer.send`, each to one reader; ends when the agent closes.

        Messages of one peer come in the order of sending. Unread messages are kept, up to 1 MiB for each
        peer; the peer cannot send more until some are read. Of lost peers the newest 16,384 are kept, and no
        more than 64 MiB.
        """
        return self._messages.stream()

    async def message(self, timeout_s: float | None = None) -> Message:
        """Waits for a message and returns it; each goes to one reader.

        Cancelling loses no message.

        Parameters
        ----------
        timeout_s
            None waits without bound.

        Raises
        ------
        TimeoutError
            None came in time.
        AgentError
            The agent closed.
        """
        return await self._messages.next(timeout_s)

    def message_blocking(self, timeout_s: float | None = None) -> Message:
        """Blocks until a message is there and returns it: the twin of `message`."""
        return self._messages.next_blocking(timeout_s)

    def take_message(self) -> Message | None:
        """Takes the oldest unread message; None if there is none. Never waits."""
        return self._messages.take()
