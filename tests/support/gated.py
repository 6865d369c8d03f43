"""Cells of FLARE's network, as a server and sites have them, in one process and without a wire: what a cell gets is handed
to it as FLARE's connection manager would, with the neighbour's name and certificate."""

import io
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from aiohttp.web import TCPSite
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessageType
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.net_manager import NetManager
from nvflare.fuel.f3.cellnet.utils import encode_payload
from nvflare.fuel.f3.drivers import aio_http_driver, socket_conn
from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.stats_pool import StatsPoolManager
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamDataType, StreamHeaderKey
from nvflare.fuel.sec.audit import AuditService
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs import fobs as registry
from nvflare.fuel.utils.fobs import lobs
from nvflare.fuel.utils.fobs.datum import DatumManager
from nvflare.private.admin_defs import Message as AdminMessage
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.server.fed_server import FederatedServer

SERVER, A, B, CONSOLE = "server", "hospital-a", "hospital-b", "_admin_" + str(uuid.UUID(int=7, version=4))
PERSON = "server.example.org"  # the server's certificate
JOB, OTHER = str(uuid.UUID(int=1, version=4)), str(uuid.UUID(int=2, version=4))


class Federation:
    """Its cells by name, and the audit file of this process."""

    def __init__(self, audit):
        self.audit, self.cells, self._streams = audit, {}, iter(range(1000, 10**6))

    def cell(self, name: str) -> Cell:
        certificates = {FQCN.get_root(name): FQCN.get_root(name), SERVER: PERSON}  # as FLARE reads them from a kit
        urls = {"root_url": "tcp://localhost:1", "parent_url": "tcp://localhost:2"}
        cell = Cell(fqcn=name, secure=False, credentials={}, auth_identity_map=certificates, **urls)
        cell.core_cell.running = True  # it sends to its neighbours in this process; no socket is opened
        self.cells[name] = cell
        return cell

    def site(self, name: str, workspace) -> Cell:
        """A site's parent process: FLARE's own part that answers commands, all of them, in a kit's folder."""
        cell = self.cell(name)
        agent = FedAdminAgent("admin_agent", cell, Engine(workspace))
        for processor in ClientRequestProcessors.request_processors:
            agent.register_processor(processor)
        return cell

    def hand(self, to: str, channel: str, topic: str, payload=None, origin=SERVER, by=None, person=None, **headers) -> None:
        """A message of `origin`, handed to the cell `to` by its neighbour `by`, with the certificate of `person`, by default
        the neighbour's own."""
        kind = headers.pop("kind", MessageType.REQ)
        said = {
            MessageHeaderKey.MSG_TYPE: kind,
            MessageHeaderKey.CHANNEL: channel,
            MessageHeaderKey.TOPIC: topic,
            MessageHeaderKey.ORIGIN: origin,
            MessageHeaderKey.DESTINATION: headers.pop("destination", to),
        }
        message = Message(said, payload)
        encode_payload(message)
        message.payload = as_bytes(message.payload)
        message.add_headers(headers)
        if person is None:
            root = FQCN.get_root(by or origin)
            person = PERSON if root == SERVER else root
        connection = SimpleNamespace(get_conn_properties=lambda: {"peer_cn": person} if person else {})
        self.cells[to].core_cell.process_message(Endpoint(by or origin), connection, CoreCell.APP_ID, message)

    def stream(self, to: str, channel: str, topic: str, payload, asked="", **more) -> None:
        """The same as one piece of a stream, as `Cell` sends most messages."""
        more |= {
            StreamHeaderKey.CHANNEL: channel,
            StreamHeaderKey.TOPIC: topic,
            StreamHeaderKey.STREAM_ID: next(self._streams),
            StreamHeaderKey.SEQUENCE: 0,
            StreamHeaderKey.DATA_TYPE: StreamDataType.FINAL,
            StreamHeaderKey.STREAM_REQ_ID: asked,
            StreamHeaderKey.PAYLOAD_ENCODING: "fobs",
        }
        data = as_bytes(fobs.dumps(payload))
        self.hand(to, STREAM_CHANNEL, STREAM_DATA_TOPIC, data, **({StreamHeaderKey.SIZE: len(data)} | more))

    def command(self, topic: str, body="", to=A, origin=SERVER, by=SERVER, **headers) -> str:
        """What a site answers to a command as the server's console sends it, or nothing."""
        if topic == "train.deploy" and body == "":
            body = zipped({"config/config_fed_client.json": b"{}"})
        answered, sent = [], self.cells[to].core_cell._send_to_endpoint
        request = AdminMessage(topic, body)
        request.set_headers(headers)
        self.cells[to].core_cell._send_to_endpoint = lambda to_endpoint, message: answered.append(message) or ""
        expected = {MessageHeaderKey.REPLY_EXPECTED: True, MessageHeaderKey.REQ_ID: "1"}
        try:
            self.hand(to, "admin", "admin", request, origin, by, **expected)
        finally:
            self.cells[to].core_cell._send_to_endpoint = sent
        payloads = [getattr(message.payload, "body", message.headers.get(MessageHeaderKey.ERROR)) for message in answered]
        return str(*payloads) if payloads else ""

    def lines(self) -> list[str]:
        return [line for line in self.audit.read_text().splitlines() if "[gate refused" in line]


def zipped(files: dict[str, bytes]) -> bytes:
    """An app as FLARE's server sends it."""
    packed = io.BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


class Engine(ClientEngine):
    """Of FLARE's client, what it deletes runs by; contexts without a job."""

    def __init__(self, workspace):
        self.args = SimpleNamespace(workspace=str(workspace))
        self.new_context, self.fire_event = FLContext, lambda event, ctx: None


def as_bytes(payload):
    return b"".join(bytes(part) for part in payload) if isinstance(payload, list) else payload


@contextmanager
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Federation]:
    """No cell of another test's is here, and none of this one's stays."""
    monkeypatch.setattr(CoreCell, "ALL_CELLS", {})
    monkeypatch.setattr(CoreCell, "__init__", CoreCell.__init__)  # a gate wraps it
    monkeypatch.setattr(RxTask, "rx_task_map", {})
    monkeypatch.setattr(StatsPoolManager, "pools", {})
    monkeypatch.setattr(NetManager, "get_spec", NetManager.get_spec)
    for name in ("server_activate", "process_request", "finish_request", "request_queue_size"):
        monkeypatch.setattr(TcpStreamServer, name, getattr(TcpStreamServer, name))
    monkeypatch.setattr(TCPSite, "start", TCPSite.start)
    for driver in (socket_conn, aio_http_driver):
        monkeypatch.setattr(driver, "MAX_FRAME_SIZE", driver.MAX_FRAME_SIZE)
    monkeypatch.setattr(FederatedServer, "authentication_check", FederatedServer.authentication_check)
    monkeypatch.setattr(DatumManager, "add_datum", DatumManager.add_datum)
    monkeypatch.setattr(lobs, "get_datum_dir", lobs.get_datum_dir)
    flare_decomposers.register()
    monkeypatch.setattr(registry, "_decomposers", dict(registry._decomposers))
    AuditService.close()
    AuditService.initialize(str(tmp_path / "audit.txt"))
    yield Federation(tmp_path / "audit.txt")
    AuditService.close()


# what a console asks for with the right to it, as FLARE's server writes it
def with_right(right: str) -> dict[str, str]:
    return {RequestHeader.ADMIN_COMMAND: right, RequestHeader.REQUIRE_AUTHZ: "true"}
