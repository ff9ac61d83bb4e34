class Error(Exception):
    status: int

class Again(Error):
    status: int

class Invalid(Error):
    status: int

class Exhausted(Error):
    status: int

class Unreachable(Error):
    status: int

class Unsupported(Error):
    status: int

class Corrupt(Error):
    status: int

class Stale(Error):
    status: int

class Denied(Error):
    status: int

class Exists(Error):
    status: int

class NotFound(Error):
    status: int

class Timeout(Error):
    status: int

class Cancelled(Error):
    status: int

class Internal(Error):
    status: int


BY_STATUS: tuple[type[Error], ...]
