from kvota.node.options import DeskOptions, ServerSettings, http_settings
from kvota.node.settings import HttpSettings


def test_the_http_side_is_told_what_the_operator_says() -> None:
    server = ServerSettings(
        max_body_bytes=1, heartbeat_s=2.0, send_timeout_s=3.0, cors_origins=("https://a.example",),
        trust_gateway=True,
    )  # fmt: skip
    desk = DeskOptions(queue_timeout_s=4.0, request_timeout_s=5.0)
    assert http_settings(server, desk) == HttpSettings(
        max_body_bytes=1, heartbeat_s=2.0, send_timeout_s=3.0, cors_origins=("https://a.example",),
        trusts_gateway=True, queue_timeout_s=4.0, request_timeout_s=5.0,
    )  # fmt: skip


def test_whoever_may_connect_to_a_unix_socket_is_trusted_like_a_gateway() -> None:
    assert http_settings(ServerSettings(unix_socket="/run/kvota"), DeskOptions()).trusts_gateway
    assert not http_settings(ServerSettings(), DeskOptions()).trusts_gateway
