"""The commands `kvota serve`, `kvota gateway`, `kvota reload` and `kvota rollout …`."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import msgspec
import typer

from kvota.cli_errors import fail
from kvota.cli_settings import ReadSettings, with_settings
from kvota.config import Config
from kvota.core.errors import ConfigError, KvotaError
from kvota.gateway.settings import BackendEntry
from kvota.gateway.settings_checks import check_fleet
from kvota.gateway.upstream.kinds import BackendKind
from kvota.tools.server import ServerUnusable

GATEWAY_FLAGS: Final = (
    "config",
    "host",
    "port",
    "cors_origin",
    "heartbeat_s",
    "drain_timeout_s",
    "max_body_bytes",
    "request_timeout_s",
    "queue_timeout_s",
)
_UrlOption = Annotated[str, typer.Option(envvar="KVOTA_URL", help="The gateway's address.")]
_KeyOption = Annotated[str | None, typer.Option(envvar="KVOTA_API_KEY", help="An operator's key.")]
_URL: Final = "http://127.0.0.1:8000"

rollouts = typer.Typer(no_args_is_help=True, help="Versions of a model: weights, live.")


def main() -> None:
    """These commands alone, for a process that is to be a server."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    register(app)
    try:
        app()
    except KvotaError as error:
        fail(error)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(with_settings(serve))
    app.command()(with_settings(gateway, only=GATEWAY_FLAGS))
    app.command()(reload)
    app.add_typer(rollouts, name="rollout")


def serve(read: ReadSettings) -> None:
    """Serve MODEL over an OpenAI-compatible API. Ctrl-C drains; a second one ends at once."""
    settings = read()
    check_fleet(settings.fleet, has_own_node=True)
    # Imported here: the commands that only talk to a server need none of it.
    from kvota.serving import node_plan, run

    if settings.gateway.engine == "vllm":
        # Imported here: the planner behind it is nothing that our own node needs.
        from kvota.serving_vllm import require_command, vllm_plan

        require_command(settings.gateway.vllm_command)
        sys.exit(run(read, vllm_plan(settings)))
    sys.exit(run(read, node_plan(settings)))


def gateway(
    read: ReadSettings,
    *,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="URL of an engine server, e.g. vllm=http://10.0.0.5:8000; repeatable."),
    ] = None,
) -> None:
    """Stand in front of engine servers, without a node of its own."""
    given = tuple(_backend(text, number) for number, text in enumerate(backend or (), 1))

    def read_with_backends() -> Config:
        settings = read()
        fleet = settings.fleet
        fleet = msgspec.structs.replace(fleet, backends=(*fleet.backends, *given))
        if not fleet.backends:
            raise ConfigError(
                "There is nothing to stand in front of: give --backend URL, or [[backends]] in a "
                "kvota.toml (--config)."
            )
        check_fleet(fleet, has_own_node=False)
        return msgspec.structs.replace(settings, fleet=fleet)

    # Imported here: the commands that only talk to a server need none of it.
    from kvota.serving import run

    sys.exit(run(read_with_backends, None))


def _backend(text: str, number: int) -> BackendEntry:
    """`URL` or `KIND=URL`. Raises ConfigError."""
    kind, separator, url = text.partition("=")
    if not separator or "://" in kind:
        kind, url = BackendKind.OPENAI.value, text
    known = [one.value for one in BackendKind]
    if kind not in known:
        raise ConfigError(f"--backend {text}: {kind} is none of {', '.join(known)}.")
    return BackendEntry(name=f"backend-{number}", url=url, kind=BackendKind(kind))


# --- talking to a running gateway


def reload(url: _UrlOption = _URL, api_key: _KeyOption = None) -> None:
    """Make a running gateway read its settings again. A broken file changes nothing."""
    typer.echo(_call("POST", url, "/admin/reload", api_key)["note"])


@rollouts.command("status")
def rollout_status(url: _UrlOption = _URL, api_key: _KeyOption = None) -> None:
    """Every model's versions and their weights."""
    for model in _call("GET", url, "/admin/rollouts", api_key)["data"]:
        _show_rollout(model)


@rollouts.command("set")
def rollout_set(
    model: str,
    weights: Annotated[list[str], typer.Argument(help="VERSION=WEIGHT, e.g. v2=0.1")],
    url: _UrlOption = _URL,
    api_key: _KeyOption = None,
) -> None:
    """Give versions new weights."""
    _change_rollout(model, {"weights": dict(map(_weight, weights))}, url, api_key)


@rollouts.command("promote")
def rollout_promote(
    model: str,
    version: str,
    url: _UrlOption = _URL,
    api_key: _KeyOption = None,
    require: Annotated[
        Path | None,
        typer.Option(help="Only if this JSON of `kvota evaluate` says that the version is good."),
    ] = None,
) -> None:
    """Make a version the stable one, with all requests."""
    if require is not None:
        _require_evaluation(require, model, version, url, api_key)
    _change_rollout(model, {"promote": version}, url, api_key)


def _require_evaluation(
    file: Path, model: str, version: str, url: str, api_key: str | None
) -> None:
    """Raises NotProven unless the file is about the version and finds it good."""
    # Imported here: servers are started by this module too, and have no use for it.
    from kvota.tools.evaluate.result import NotProven, Served, require_good

    routes = _call("GET", url, "/admin/rollouts", api_key)["data"]
    route = next((one for one in routes if model in (one["model"], *one.get("aliases", ()))), None)
    served = {
        one["name"]: Served(one["name"], one["served_as"], one.get("urls"))
        for one in (route["versions"] if route is not None else ())
    }
    if route is None or version not in served:
        raise NotProven(f"{url} has no version {version} of a model {model} to promote.")
    before = None if route["stable"] == version else served[route["stable"]]
    require_good(file, candidate=served[version], baseline=before, now_s=time.time())


@rollouts.command("rollback")
def rollout_rollback(
    model: str, version: str, url: _UrlOption = _URL, api_key: _KeyOption = None
) -> None:
    """Take a version out."""
    _change_rollout(model, {"roll_back": version}, url, api_key)


def _change_rollout(model: str, change: dict[str, Any], url: str, api_key: str | None) -> None:
    changed = _call("POST", url, f"/admin/rollouts/{model}", api_key, change)
    _show_rollout(changed)
    if not changed.get("kept", True):
        typer.echo("This counts now, but could not be stored yet: the gateway's log says why.")


def _weight(text: str) -> tuple[str, float]:
    version, _, weight = text.rpartition("=")
    try:
        return version, float(weight)
    except ValueError:
        raise typer.BadParameter(f"{text} is not VERSION=WEIGHT, such as v2=0.1.") from None


def _show_rollout(model: dict[str, Any]) -> None:
    typer.echo(model["model"])
    for one in model["versions"]:
        stable = "  stable" if one["name"] == model["stable"] else ""
        why = f"  rolled back: {one['rolled_back']}" if one["rolled_back"] else ""
        where = ", ".join(one["backends"])
        typer.echo(f"  {one['name']:<16} {one['weight']:<8g} {where}{stable}{why}")


def _call(
    method: str, url: str, path: str, api_key: str | None, body: Any = None
) -> dict[str, Any]:
    """The answer's JSON. Raises ServerUnusable with what the server says is wrong."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = httpx.request(method, url + path, json=body, headers=headers, timeout=30)
    except httpx.HTTPError as error:
        raise ServerUnusable(f"No answer from {url}: {error}.") from error
    try:
        said: dict[str, Any] = reply.json()
    except ValueError:
        raise ServerUnusable(f"{url} answered with status {reply.status_code}.") from None
    if reply.status_code != 200:
        message = said.get("error", {}).get("message", f"status {reply.status_code}")
        raise ServerUnusable(f"{url} says: {message}")
    return said
