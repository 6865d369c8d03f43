"""A message as it arrives at a cell of FLARE: the headers that a gate checks before FLARE decodes the message."""

import re
from dataclasses import dataclass
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import CellChannel, Encoding, MessageHeaderKey, MessagePropKey, MessageType
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamHeaderKey
from nvflare.fuel.utils.fobs import FOBSContextKey

from feddp.errors import PolicyError

# headers on which a cell acts at once, and which our federations do not need
NEVER = {
    MessageHeaderKey.CONN_URL: "it makes the cell connect to an address that the sender chooses, without TLS",
    MessageHeaderKey.ENCRYPTED: "it makes the cell request a certificate",
}


class Refused(PolicyError):
    """The message does not pass; the text gives the reason."""


@dataclass(frozen=True)
class Arrival:
    """The claims of a message's headers and the identity that its connection proves.

    `channel` and `topic` are the stream's if the message is a frame of a stream (`stream`). `origin` and `destination` are
    claims of the sender. `endpoint` is the neighbouring cell, `person` the common name of its certificate; `neighbours`
    compares the two.
    """

    kind: str
    channel: str
    topic: str
    stream: bool
    origin: str
    destination: str
    endpoint: str
    person: str

    @classmethod
    def of(cls, message: Message) -> "Arrival":
        """Reads the headers; raises Refused if no cell of FLARE writes such headers."""
        headers = message.headers or {}
        kind, origin, destination = (
            _text(headers, key) for key in (MessageHeaderKey.MSG_TYPE, MessageHeaderKey.ORIGIN, MessageHeaderKey.DESTINATION)
        )
        channel, topic = _text(headers, MessageHeaderKey.CHANNEL), _text(headers, MessageHeaderKey.TOPIC)
        if kind not in (MessageType.REQ, MessageType.REPLY, MessageType.RETURN):
            raise Refused("it is neither a request nor a reply")
        if FQCN.validate(origin) or FQCN.validate(destination):
            raise Refused("its origin or destination is not a cell's name")
        for key, why in NEVER.items():
            if headers.get(key):
                raise Refused(why)
        stream = kind == MessageType.REQ and channel == STREAM_CHANNEL and topic == STREAM_DATA_TOPIC
        if channel == STREAM_CHANNEL and headers.get(MessageHeaderKey.PAYLOAD_ENCODING) not in (Encoding.BYTES, Encoding.NONE):
            raise Refused("a frame of a stream must hold plain bytes, and this one asks to be decoded")
        if stream:
            channel, topic = _text(headers, StreamHeaderKey.CHANNEL), _text(headers, StreamHeaderKey.TOPIC)
        endpoint = message.get_prop(MessagePropKey.ENDPOINT)
        person = message.get_prop(MessagePropKey.COMMON_NAME) or ""
        return cls(kind, channel, topic, stream, origin, destination, endpoint.name if endpoint else "", person)


def _text(headers: dict[str, Any], key: str) -> str:
    value = headers.get(key, "")
    if not isinstance(value, str):
        raise Refused(f"its header {key} is not text")
    return value


def require_awaited(cell: CoreCell, message: Message, arrival: Arrival) -> None:
    """Checks that this cell waits for the reply, streamed or not, and that it comes from the cell that was asked.

    Raises:
        Refused: it does not.
    """
    if arrival.channel == CellChannel.RETURN_ONLY and arrival.stream:
        if not _stream_is_awaited(cell, message, arrival.origin):
            raise Refused("this cell does not wait for such an answer")
    elif arrival.kind != MessageType.REQ and not _reply_is_awaited(cell, message, arrival):
        raise Refused("this cell does not wait for such a reply")


def _reply_is_awaited(cell: CoreCell, message: Message, arrival: Arrival) -> bool:
    asked = message.get_header(MessageHeaderKey.REQ_ID)
    ids = [asked] if isinstance(asked, str) else asked
    of: str | None = arrival.origin
    if arrival.kind == MessageType.RETURN:  # returned on its way; the expected sender is the cell that it did not reach
        headers = message.get_header(MessageHeaderKey.ORIGINAL_HEADERS)
        of = headers.get(MessageHeaderKey.DESTINATION) if isinstance(headers, dict) else None
    if not isinstance(ids, list) or not ids or not all(isinstance(one, str) for one in ids):
        return False
    waiters = [cell.waiters.get(one) for one in ids]
    return all(waiter is not None and of in waiter.targets for waiter in waiters)


def _stream_is_awaited(cell: CoreCell, message: Message, origin: str) -> bool:
    """Whether the cell waits for the stream or has begun to receive it: repeated last frames come after the waiting ended."""
    stream = message.get_header(StreamHeaderKey.STREAM_ID)
    if isinstance(stream, int) and (origin, stream) in RxTask.rx_task_map:
        return True
    streaming = cell.fobs_ctx.get(FOBSContextKey.CELL)
    asked = message.get_header(StreamHeaderKey.STREAM_REQ_ID)
    waiter = streaming.requests_dict.get(asked) if streaming is not None and isinstance(asked, str) else None
    return waiter is not None and waiter.target == origin


def shown(word: object, limit: int = 80) -> str:
    """Returns a sender's text for a line of the audit file: bounded, without line breaks or brackets."""
    return re.sub(r"[^A-Za-z0-9_.:@/*-]", "?", "" if word is None else str(word)[:limit]) or "-"
