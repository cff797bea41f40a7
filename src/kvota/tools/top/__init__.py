"""`kvota top`: a running server, live in a terminal.

server.py ── Reading ──▶ scene.py ── Scene ──▶ app.py        the only part that needs a terminal
                                     carpark.py  words.py
"""
