"""A TCP relay between a client and a head that a test can cut: what a load balancer or a port forward does to people."""
import contextlib
import socket
import threading


class Cutter:
    """Relays to target ("HOST:PORT"). cut(): every connection is reset; away: new ones are reset at once."""

    def __init__(self, target, listen="127.0.0.1"):
        host, port = target.rsplit(":", 1)
        self.to, self.pairs, self.lock = (host.strip("[]"), int(port)), set(), threading.Lock()
        self.away, self.cuts, self.refused, self.on_down = False, 0, 0, lambda data: None
        self.server = socket.create_server((listen, 0))
        self.url = f"http://{listen}:{self.server.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.server.accept()
                if self.away:
                    self.refused += 1
                    self.reset(client)
                    continue
                try:
                    head = socket.create_connection(self.to)
                except OSError:
                    self.reset(client)
                    continue
                with self.lock:
                    self.pairs.add((client, head))
                threading.Thread(target=self.pump, args=(client, head, None), daemon=True).start()
                threading.Thread(target=self.pump, args=(head, client, True), daemon=True).start()

    def pump(self, a, b, down):
        with contextlib.suppress(OSError):
            while data := a.recv(65536):
                if down:
                    self.on_down(data)
                b.sendall(data)
        for s in (a, b):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def reset(s):
        with contextlib.suppress(OSError):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            s.close()

    def cut(self):
        with self.lock:
            pairs, self.pairs = self.pairs, set()
        for client, head in pairs:
            for s in (client, head):
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_RDWR)
                self.reset(s)
        self.cuts += 1

    def close(self):
        self.server.close()
        self.cut()


@contextlib.contextmanager
def cutter(target):
    c = Cutter(target)
    try:
        yield c
    finally:
        c.close()
