"""What an operator sees when a gateway listens."""

from rich.console import Console


def show_address(screen: Console, host: str, port: int, *, is_open: bool) -> None:
    shown = f"[{host}]" if ":" in host else host
    screen.print(f"Listening on [bold]http://{shown}:{port}[/bold]  (Ctrl-C drains and stops)")
    if is_open:
        screen.print(
            "No API key exists, so everybody on this machine may call, as an operator. "
            "`kvota keys create` changes that at once.",
            soft_wrap=True,
        )
