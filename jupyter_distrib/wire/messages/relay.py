"""Messages between the coordinator and the relay of one node, where both are the ends of a pipe."""

from __future__ import annotations

from jupyter_distrib.wire.messages.shared import RelayMessage, message


@message
class RelayCall(RelayMessage):
    """Call a method of the relay."""

    number: int
    """Number to be repeated in the answer; 0: no answer is wanted."""
    method: str
    arguments: tuple[object, ...] = ()


@message
class RelayContent(RelayMessage):
    """A part of a large value, in order from its beginning; sent before the message that it belongs to."""

    number: int
    """Number of the call whose answer it belongs to; 0: the next `RelayPassed`."""
    part: bytes
    size_bytes: int
    """Size of the whole value."""


@message
class RelayReturned(RelayMessage):
    """The result of a call."""

    number: int
    value: object = None
    contents: tuple[str, ...] | None = None
    """Names of the large values that came before it, one after another, if they are the result."""


@message
class RelayFailed(RelayMessage):
    """The exception that ended a call."""

    number: int
    type_name: str
    text: str


@message
class RelayPassed(RelayMessage):
    """Frames from the node's agent, one after another."""

    frames: bytes
    has_content: bool = False
    """Whether it is a single frame whose content was sent before it."""


@message
class RelayEnded(RelayMessage):
    """The node's agent has ended: no more frames follow."""


@message
class RelayAlive(RelayMessage):
    """Keep-alive of either side, which is not counted."""

    heard: int = 0
    """Number of messages that have come from the other side so far."""


@message
class RelayResumed(RelayMessage):
    """The first message of the relay on a connection that takes the place of a broken one; not counted."""

    heard: int
    """Number of messages that have come from the other side so far: it sends the later ones again."""
