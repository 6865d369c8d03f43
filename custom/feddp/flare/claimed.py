"""Requests to the server's process of a job may name only the site that sends them.

FLARE takes the sender's name from the content: of an auxiliary message from the peer properties; of a command from the peer
context and from the client to whom the token belongs. It compares none of them with the connection, so a site could give
signs of life for another one.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from nvflare.apis.fl_constant import ReservedKey, ServerCommandKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.message import Message

Check = Callable[[Any, Message, dict[str, Any]], str | None]
REASON = "a site may send for itself only"


def only_own_name(check: Check, refused: Callable[[Any, Message, str], None]) -> Check:
    """Returns FLARE's `authentication_check` with ours before it. It returns the error that the sender gets, or None.

    Args:
        refused: called with the server, the request and the reason.
    """

    @wraps(check)
    def checked(server: Any, request: Message, state_check: dict[str, Any]) -> str | None:
        origin = FQCN.get_root(request.get_header(MessageHeaderKey.ORIGIN))  # the gate has compared it with the connection
        named = _names(request.get_header(MessageHeaderKey.CHANNEL), request.payload)
        if origin != FQCN.ROOT_SERVER and any(name != origin for name in named):
            refused(server, request, REASON)
            return REASON
        return check(server, request, state_check)

    return checked


def _names(channel: str, content: Any) -> list[Any]:
    """Returns what FLARE reads from a request as its sender's name; nothing where it reads none and refuses the request."""
    if not isinstance(content, Shareable):
        return []
    if channel == CellChannel.AUX_COMMUNICATION:
        properties = content.get_peer_props()
        return [properties.get(ReservedKey.IDENTITY_NAME)] if properties and isinstance(properties, dict) else []
    context, client = content.get_peer_context(), content.get_header(ServerCommandKey.FL_CLIENT)
    return [context.get_identity_name() if isinstance(context, FLContext) else None, getattr(client, "name", None)]
