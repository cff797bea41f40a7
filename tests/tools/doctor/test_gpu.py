"""Outputs in the form that nvidia-smi prints, for machines that we do not have at hand."""

import stat
from pathlib import Path

import msgspec

from kvota.tools.doctor.finding import Level
from kvota.tools.doctor.gpu import Gpus, examine_gpus, parse_gpus, parse_matrix
from kvota.tools.doctor.gpu_probe import read_gpus

MIB = 2**20
ONE = "0, NVIDIA H200, 580.159.04, 143771, 0, 34, Default, Disabled\n"
TWO = (
    "0, NVIDIA L40S, 550.54.15, 46068, 512, 41, Default, [N/A]\n"
    "1, NVIDIA L40S, 550.54.15, 46068, 12, [N/A], Default, [N/A]\n"
)
TOPO = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPIX\t0-15\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t16-31\t1\t\tN/A
NIC0\tPIX\tPIX\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PEERS = """\
 \t\x1b[4mGPU0\tGPU1\t\x1b[0m
 GPU0\tX\tCNS\t
 GPU1\tCNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""
ALL_WELL = {(0, 1): "OK", (1, 0): "OK"}
BY_LINK = {(0, 1): "NV18", (1, 0): "NV18"}
PAIR = Gpus(gpus=parse_gpus(TWO), links=BY_LINK, peers=ALL_WELL, shm_bytes=16 * 2**30)


def problems(found: Gpus) -> dict[str, str]:
    """What is not in order, by name, with its remedy."""
    return {one.name: one.change for one in examine_gpus(found) if one.level is not Level.OK}


def test_a_card_is_read_with_its_sizes() -> None:
    (card,) = parse_gpus(ONE)
    assert (card.index, card.name, card.driver) == (0, "NVIDIA H200", "580.159.04")
    assert (card.total, card.used, card.celsius) == (143771 * MIB, 0, 34)
    assert parse_gpus(TWO)[1].celsius is None
    assert parse_gpus("No devices were found\n") == ()


def test_a_topology_is_read_without_its_network_cards_and_its_legend() -> None:
    links = parse_matrix(TOPO)
    assert links[0, 1] == links[1, 0] == "NV18"
    assert links[0, 2] == links[2, 1] == "SYS"
    assert len(links) == 6


def test_peer_access_is_read_alike() -> None:
    assert parse_matrix(PEERS) == {(0, 1): "CNS", (1, 0): "CNS"}
    assert parse_matrix("") == {}


def test_a_machine_without_gpus_is_in_order() -> None:
    (only,) = examine_gpus(Gpus())
    assert only.level is Level.OK


def test_one_idle_card_and_two_linked_ones_are_in_order() -> None:
    assert problems(Gpus(gpus=parse_gpus(ONE))) == {}
    assert problems(PAIR) == {}


def test_a_dead_driver_is_a_problem_in_its_own_words() -> None:
    (found,) = examine_gpus(Gpus(error="NVIDIA-SMI has failed because it couldn't communicate.\n"))
    assert found.level is Level.PROBLEM
    assert found.said == "NVIDIA-SMI has failed because it couldn't communicate."
    assert "--gpus all" in found.change


def test_hot_forbidden_and_busy_cards_are_named() -> None:
    hot = parse_gpus("0, A, 1, 1000, 0, 91, Default, Disabled")
    shut = parse_gpus("0, A, 1, 1000, 0, 30, Prohibited, Disabled")
    busy = parse_gpus("0, A, 1, 1000, 900, 30, Default, Disabled")
    assert "air" in problems(Gpus(gpus=hot))["gpu 0"]
    assert "-c DEFAULT" in problems(Gpus(gpus=shut))["gpu 0"]
    assert "gpu_memory_utilization" in problems(Gpus(gpus=busy))["gpu 0"]


def test_pairs_without_peer_access_or_across_sockets_are_named() -> None:
    blocked = msgspec.structs.replace(PAIR, peers=parse_matrix(PEERS))
    assert "ACS" in problems(blocked)["gpu links"]
    apart = msgspec.structs.replace(PAIR, links={(0, 1): "SYS", (1, 0): "SYS"})
    assert "CUDA_VISIBLE_DEVICES" in problems(apart)["gpu links"]


def test_nccl_needs_shared_memory_and_its_ways_open() -> None:
    small = msgspec.structs.replace(PAIR, shm_bytes=64 * MIB)
    assert "--ipc=host" in problems(small)["shared memory"]
    off = msgspec.structs.replace(PAIR, variables={"NCCL_P2P_DISABLE": "1", "NCCL_VERSION": "2.28"})
    assert "NCCL_P2P_DISABLE" in problems(off)["nccl"]
    on = msgspec.structs.replace(PAIR, variables={"NCCL_P2P_DISABLE": "0"})
    assert problems(on) == {}


def test_unlike_cards_are_named() -> None:
    mixed = msgspec.structs.replace(PAIR, gpus=parse_gpus(TWO.replace("L40S", "A10", 1)))
    assert "gateway" in problems(mixed)["gpus differ"]


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_nvidia_smi_is_asked_and_its_failure_kept(tmp_path: Path) -> None:
    works = program(tmp_path / "works", f"printf '{ONE.strip()}\\n'")
    assert read_gpus({"NCCL_DEBUG": "INFO"}, works).gpus == parse_gpus(ONE)
    assert read_gpus({"NCCL_DEBUG": "INFO", "HOME": "/"}, works).variables == {"NCCL_DEBUG": "INFO"}
    fails = program(tmp_path / "fails", "echo 'No driver.'; exit 9")
    assert read_gpus({}, fails).error == "No driver."
    assert read_gpus({}, str(tmp_path / "absent")) == Gpus()


def test_two_cards_are_asked_for_their_links(tmp_path: Path) -> None:
    (tmp_path / "two").write_text(TWO)
    (tmp_path / "topo").write_text(TOPO)
    (tmp_path / "peers").write_text(PEERS)
    script = f"""case "$*" in
    *query-gpu*) cat {tmp_path}/two;;
    "topo -m") cat {tmp_path}/topo;;
    "topo -p2p r") cat {tmp_path}/peers;;
    *) exit 1;;
    esac"""
    found = read_gpus({}, program(tmp_path / "smi", script))
    assert len(found.gpus) == 2
    assert found.links[0, 1] == "NV18"
    assert found.peers[0, 1] == "CNS"
