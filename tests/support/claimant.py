"""A process that says a cell's name over a connection of FLARE's, and what comes to it there."""

from contextlib import ExitStack

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.identity import CellIdentityResolver
from nvflare.fuel.f3.communicator import Communicator
from nvflare.fuel.f3.drivers.connector_info import Mode
from nvflare.fuel.f3.endpoint import Endpoint, EndpointMonitor
from nvflare.fuel.f3.message import MessageReceiver

from support.gated import PERSON, SERVER


class Claimant(MessageReceiver, EndpointMonitor):
    """Connects to a cell, or listens to it, with the credentials of a kit or none.

    `got` has the payloads that came, `headers` what stood on them, `states` those of its connection.
    """

    def __init__(self, name: str, url: str, credentials: dict, stack: ExitStack, secure=False, mode=Mode.ACTIVE):
        self.got, self.headers, self.states = [], [], []
        resolver = CellIdentityResolver(prefix_identity_map={SERVER: PERSON})
        self.communicator = Communicator(Endpoint(name, conn_props=dict(credentials)), resolver)
        self.communicator.register_message_receiver(CoreCell.APP_ID, self)
        self.communicator.register_monitor(self)
        self.communicator.add_connector(url, mode, secure)
        self.communicator.start()
        stack.callback(self.communicator.stop)

    def process_message(self, endpoint, connection, app_id, message) -> None:
        self.headers.append(message.headers)
        self.got.append(message.payload)

    def state_change(self, endpoint) -> None:
        self.states.append(endpoint.state)
