"""A proxy in front of a server that falls silent: it reads, and answers nothing more."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit


class Proxy:
    """Forwards to the server of a URL. A connection that was silent once stays so."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._target = (place.hostname or "", place.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.silent = False
        #: How many connections and messages have had no reply.
        self.swallowed = 0
        self._kept: list[socket.socket] = []
        user = f"{place.username}:{place.password}" if place.password else place.username
        port = self._listener.getsockname()[1]
        self.url = place._replace(netloc=f"{user}@127.0.0.1:{port}").geturl()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            self._kept.append(client)
            if self.silent:
                self.swallowed += 1
                continue
            server = socket.create_connection(self._target)
            self._kept.append(server)
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        silent = False
        try:
            while data := source.recv(65536):
                silent = silent or self.silent
                if silent:
                    self.swallowed += 1
                else:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return  # The other half has ended both.
