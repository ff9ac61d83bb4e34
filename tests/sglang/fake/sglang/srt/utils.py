"""A process group as far as furlong_sglang.group and the stand-in need one: rank 0 and a socket to each other rank."""
import socket
import time


class Group:
    def __init__(self, rank, sockets):
        self.rank, self.sockets = rank, sockets


def init_custom_process_group(backend, init_method, world_size, rank, group_name):
    assert group_name and backend
    host, _, port = init_method.removeprefix("tcp://").rpartition(":")
    if rank == 0:
        with socket.create_server((host, int(port))) as s:
            s.settimeout(20)
            return Group(0, [s.accept()[0] for _ in range(world_size - 1)])
    end = time.monotonic() + 20
    while True:
        try:
            return Group(rank, [socket.create_connection((host, int(port)))])
        except ConnectionRefusedError:
            assert time.monotonic() < end, "rank 0 does not come"
            time.sleep(0.02)
