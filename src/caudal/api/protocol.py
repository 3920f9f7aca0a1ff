"""uvicorn's HTTP protocol with limits on the head of a request, which uvicorn keeps in memory without any."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128


class BoundedHeadProtocol(HttpToolsProtocol):
    """Refuses a request whose request line and headers are larger than 64 KiB or more than 128 headers."""

    _in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        if not (was_in_head and self._in_head):
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Request header fields too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise ValueError("too many headers")  # the parser turns it into 400

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
