"""A file says by its first line what it is; its name does not matter."""

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest

from kvota.core.errors import ConfigError
from kvota.traffic.arrival import Arrival
from kvota.traffic.opening import TraceFormat, Traffic, format_of, open_traffic
from kvota.traffic.traces import TraceError

TRACES = Path("bench/traces")

AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.259930+00:00,2399,6
"""
AZURE_2025 = """TIMESTAMP,NumImages,ContextTokens,GeneratedTokens
2025-01-10 00:00:00.00,2,300,5
"""
BURSTGPT_6 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""
BURSTGPT_8 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,\
Total tokens,Log Type
5,abc,2,ChatGPT,472,18,490,Conversation log
"""
SHAREGPT = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n12,4,16,3.0\n"
MOONCAKE = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
BAILIAN = """{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 30, \
"output_length": 2, "type": "text", "turn": 1, "hash_ids": [10, 11]}
{"chat_id": 8, "parent_chat_id": 7, "timestamp": 65.0, "input_length": 40, "output_length": 3, \
"type": "text", "turn": 2, "hash_ids": [10, 11, 12]}
{"chat_id": 9, "parent_chat_id": 8, "timestamp": 65.5, "input_length": 41, "output_length": 3, \
"type": "text", "turn": 3, "hash_ids": [10, 11, 13]}
"""
JOURNAL = (
    '{"v":1,"at":10.0,"id":"r1","model":"m","outcome":"completed","prompt_tokens":600,'
    '"output_tokens":20,"total_s":1.0}\n'
)


def opened(tmp_path: Path, content: str, **how: float) -> tuple[Traffic, list[Arrival]]:
    path = tmp_path / "traffic.dat"
    path.write_text(content)
    traffic = open_traffic(path, **how)  # type: ignore[arg-type]
    return traffic, list(traffic.arrivals)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (AZURE_2024, TraceFormat.AZURE),
        (AZURE_2025, TraceFormat.AZURE),
        (BURSTGPT_6, TraceFormat.BURSTGPT),
        (BURSTGPT_8, TraceFormat.BURSTGPT),
        (SHAREGPT, TraceFormat.SHAREGPT),
        (MOONCAKE, TraceFormat.MOONCAKE),
        (BAILIAN, TraceFormat.BAILIAN),
        (JOURNAL, TraceFormat.JOURNAL),
        ("\ufeff" + AZURE_2024.replace("\n", "\r\n"), TraceFormat.AZURE),
    ],
)
def test_each_format_is_told_by_its_first_line(
    tmp_path: Path, content: str, expected: TraceFormat
) -> None:
    traffic, arrivals = opened(tmp_path, content)
    assert traffic.format is expected
    assert arrivals


def test_the_shipped_traces_are_what_they_are() -> None:
    formats = {path.name.split("_")[0]: format_of(path) for path in TRACES.glob("*.gz")}
    assert formats == {
        "azure": TraceFormat.AZURE,
        "mooncake": TraceFormat.MOONCAKE,
        "servegen": TraceFormat.SERVEGEN,
    }


def test_packed_files_are_known_by_their_content(tmp_path: Path) -> None:
    path = tmp_path / "no-ending"
    path.write_bytes(gzip.compress(BAILIAN.encode()))
    assert len(list(open_traffic(path).arrivals)) == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "it is empty"),
        ("hello\n", "its first line is 'hello'"),
        ('{"prompt": "x", "answer": "y"}\n', "JSON with the fields answer, prompt"),
        ("[1, 2]\n", "its first line is '\\[1, 2\\]'"),
    ],
)
def test_an_unknown_file_is_told_by_what_it_holds(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(TraceError, match=rf"notes\.txt: .*{says}.*Mooncake, ServeGen, Bailian"):
        open_traffic(path)


def test_a_file_that_is_not_there_or_not_text_is_an_operators_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        open_traffic(tmp_path / "nothing.csv")
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read as traffic"):
        open_traffic(tmp_path / "picture")
    (tmp_path / "cut").write_bytes(gzip.compress(BAILIAN.encode())[:20])
    with pytest.raises(ConfigError, match="cannot be read as traffic"):
        open_traffic(tmp_path / "cut")


def test_azure_times_with_a_zone_count_from_the_first(tmp_path: Path) -> None:
    _, (first, second) = opened(tmp_path, AZURE_2024)
    assert (first.at_s, second.at_s) == (0.0, 1.25)
    assert (second.prompt_tokens, second.output_tokens) == (2399, 6)


def test_bailian_turns_belong_to_the_session_that_they_follow(tmp_path: Path) -> None:
    _, arrivals = opened(tmp_path, BAILIAN)
    assert [one.session for one in arrivals] == ["7", "7", "7"]
    assert [one.prefix for one in arrivals] == [(10, 11), (10, 11, 12), (10, 11, 13)]
    assert {one.prefix_block for one in arrivals} == {16}


def test_burstgpt_requests_that_failed_are_passed_over_and_counted(tmp_path: Path) -> None:
    traffic, arrivals = opened(tmp_path, BURSTGPT_6)
    assert [(one.at_s, one.prompt_tokens, one.output_tokens) for one in arrivals] == [
        (0.0, 472, 18),
        (113.0, 417, 276),
    ]
    assert traffic.passed_over.num == 1


def test_burstgpt_with_eight_columns_has_sessions(tmp_path: Path) -> None:
    _, [only] = opened(tmp_path, BURSTGPT_8)
    assert only.session == "abc"


def test_without_a_limit_clients_allow_what_their_answers_had(tmp_path: Path) -> None:
    _, arrivals = opened(tmp_path, BAILIAN)
    assert [one.max_tokens for one in arrivals] == [2, 3, 3]
    _, limited = opened(tmp_path, BAILIAN, max_tokens=2)
    assert [(one.output_tokens, one.max_tokens) for one in limited] == [(2, 2)] * 3


def test_times_that_were_rounded_are_spread_and_others_left_alone(tmp_path: Path) -> None:
    rounded = "".join(mooncake(at_ms) for at_ms in (0, 0, 2999, 3001, 6000))
    _, arrivals = opened(tmp_path, rounded)
    buckets = [int(one.at_s // 3) for one in arrivals]
    assert buckets == [0, 0, 1, 1, 2]
    assert len({one.at_s for one in arrivals}) == 5
    _, as_they_are = opened(tmp_path, rounded, spreads=False)
    assert [one.at_s for one in as_they_are] == [0.0, 0.0, 2.999, 3.001, 6.0]
    exact = "".join(mooncake(at_ms) for at_ms in (0, 3000, 4200))
    _, left = opened(tmp_path, exact)
    assert [one.at_s for one in left] == [0.0, 3.0, 4.2]


def mooncake(at_ms: int) -> str:
    row = {"timestamp": at_ms, "input_length": 100, "output_length": 5, "hash_ids": [0]}
    return json.dumps(row) + "\n"


def test_one_seed_gives_one_traffic() -> None:
    path = TRACES / "servegen_r1_two_hours.jsonl.gz"
    one, same, other = (
        list(islice(open_traffic(path, seed=seed, from_s=50_400, until_s=50_700).arrivals, 50))
        for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


def azure(*rows: str) -> str:
    return "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""])


def test_times_that_go_back_a_little_are_taken_as_the_same(tmp_path: Path) -> None:
    content = azure("2024-05-10 00:00:02.00,5,5", "2024-05-10 00:00:01.50,6,6")
    assert [(one.at_s, one.prompt_tokens) for one in opened(tmp_path, content)[1]] == [
        (0.0, 5),
        (0.0, 6),
    ]


def test_a_file_that_is_not_in_order_of_time_is_refused(tmp_path: Path) -> None:
    content = azure("2024-05-10 00:00:20.00,5,5", "2024-05-10 00:00:01.00,5,5")
    with pytest.raises(TraceError, match=r"request 2 is at -19 s, .* 0 s\. Sort the file"):
        opened(tmp_path, content)


def test_a_time_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="request 1 is at nan s"):
        opened(tmp_path, MOONCAKE.replace("27482", "NaN"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (azure("2024-05-10 00:00:20.00,-5,5"), ":2: .*a length is -5"),
        (BURSTGPT_6.replace("276", "-1"), ":4: .*a length is -1"),
        (SHAREGPT.replace("12,4", "12,-4"), ":2: .*a length is -4"),
        (MOONCAKE.replace("6955", "-6955"), ":1: .*a length is -6955"),
    ],
    ids=["Azure", "BurstGPT", "ShareGPT", "Mooncake"],
)
def test_a_length_below_nothing_is_refused_with_its_line(
    content: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match=says):
        opened(tmp_path, content)


@pytest.mark.parametrize("name", ["mooncake_conversation_head.jsonl.gz", None])
def test_a_packed_file_that_ends_in_the_middle_says_so(name: str | None, tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    clients = json.dumps({"windows": [], "dataset": {}, "client": 1}) + "\n"
    packed = gzip.compress(clients.encode() * 9) if name is None else (TRACES / name).read_bytes()
    path.write_bytes(packed[: len(packed) - 9])
    with pytest.raises(TraceError, match="cannot be read as traffic: Compressed file ended"):
        list(open_traffic(path).arrivals)
