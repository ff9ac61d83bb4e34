"""Weights of a Furlong run inside an SGLang server.

    python3 -m sglang.launch_server --custom-weight-loader furlong_sglang.load ...

SGLang imports this by name and calls load(model, tensors) in every rank when furlong-sglang has a new version. The
tensors do not travel with the request: the rank connects to the adapter's socket and maps its memory, read-only."""
from .arena import Refused, fetch

__all__ = ["load", "fetch", "Refused"]


def load(model, tensors):
    """A custom weight loader. Never raises: SGLang ends the whole server on an exception here, and the adapter, which
    hears the reason by the socket, has another way to give it the same version."""
    del tensors  # an empty list
    try:
        version = fetch()
    except Exception:  # noqa: nobody to tell; the adapter counts who came
        return
    try:
        with version:
            model.load_weights(version.tensors())
            _device_done()
        version.say(None)
    except Exception as e:  # noqa: whatever a model's loader raises
        version.say(f"{type(e).__name__}: {e}")


def _device_done():
    """Copies from the mapped memory may be under way on the device: the mapping goes next."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
