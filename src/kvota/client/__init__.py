"""A client that a busy server can live with: the official SDK, with patience.

from kvota.client import connect

client = connect("http://127.0.0.1:8000/v1", api_key="…", fallback_model="small")
client.chat.completions.create(model="large", messages=[…])   # all else is the SDK's own

Needs the extra `client` (`pip install 'kvota[client]'`).
"""

from kvota.client.connect import connect, connect_async
from kvota.client.patience import Patience

__all__ = ["Patience", "connect", "connect_async"]
