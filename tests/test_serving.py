from pathlib import Path

import msgspec

from kvota.config import Config, load
from kvota.node.options import (
    DeskOptions,
    EmbeddingOptions,
    EngineSettings,
    ModelSettings,
    ServerSettings,
)
from kvota.serving import NODE_SECTIONS, node_plan, node_toml


def test_the_node_is_told_every_setting_as_it_is(tmp_path: Path) -> None:
    settings = Config(
        model=ModelSettings(model='a "quoted" Bücher\\path\n', threads=3),
        engine=EngineSettings(kv_memory="2GiB", prefix_cache=False, kv_budget_ratio=0.5),
        desk=DeskOptions(tenant_weights={"team a": 2.0, "研究": 0.5}, request_timeout_s=33.0),
        embeddings=EmbeddingOptions(),
        server=ServerSettings(port=99, cors_origins=("http://a",), heartbeat_s=1.5),
    )
    file = tmp_path / "node.toml"
    file.write_text(node_toml(settings, tmp_path / "node.sock"), "utf-8")
    told = load(file=file)
    for section in set(NODE_SECTIONS) - {"server"}:
        assert getattr(told, section) == getattr(settings, section), section
    assert told.server == msgspec.structs.replace(
        settings.server, unix_socket=str(tmp_path / "node.sock"), cors_origins=()
    )


def test_the_node_reads_its_file_alone(tmp_path: Path) -> None:
    plan = node_plan(load(environment={"KVOTA_PORT": "1", "KVOTA_NODE_GROWTH_MAX": "1GB"}))
    assert not [name for name in plan.environment if name.startswith("KVOTA_")]
    assert plan.growth_bytes_max == 10**9
    command = plan.command(tmp_path, tmp_path / "node.sock")
    assert command[-1] == str(tmp_path / "node.toml")
