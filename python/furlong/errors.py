"""What the library refuses with: one class for each status. str(e) is one sentence with who, where and which value."""


class Error(Exception):
    """Base of all; `status` says what may be done next, and travels as a number."""

    status = 13


class Again(Error):
    """Not now, nothing was started: call again."""

    status = 1


class Invalid(Error):
    """An argument, a setting or a message is wrong: never again as it is."""

    status = 2


class Exhausted(Error):
    """A limit was met; it may fit later."""

    status = 3


class Unreachable(Error):
    """The peer or the device is gone; what was in flight may or may not have happened."""

    status = 4


class Unsupported(Error):
    """This build or this machine cannot."""

    status = 5


class Corrupt(Error):
    """A checksum, a frame or a digest is wrong."""

    status = 6


class Stale(Error):
    """It carries an older attempt, epoch or version."""

    status = 7


class Denied(Error):
    """Credentials, or a call that another role may make."""

    status = 8


class Exists(Error):
    """It is there already."""

    status = 9


class NotFound(Error):
    """There is no such thing."""

    status = 10


class Timeout(Error):
    """Not in time; the text names who is late."""

    status = 11


class Cancelled(Error):
    """It was given up, or the run has been left."""

    status = 12


class Internal(Error):
    """A defect of ours, or of a handler that failed by an exception of another kind."""

    status = 13


BY_STATUS = (Error, Again, Invalid, Exhausted, Unreachable, Unsupported, Corrupt, Stale, Denied, Exists, NotFound,
             Timeout, Cancelled, Internal)
