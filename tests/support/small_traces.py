"""Small files in the formats of public traces that are not shipped. All rows are made up.

Layouts: BurstGPT's two (HPMLL/BurstGPT, `BurstGPT_1.csv` and `BurstGPT_3.csv`), and Qwen-Bailian's
(alibaba-edu/qwen-bailian-usagetraces-anon, `qwen_traceA_blksz_16.jsonl`).
"""

import json
from pathlib import Path
from typing import Any

BURSTGPT_6 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
50,ChatGPT,600,0,600,Conversation log
55,ChatGPT,96,4,100,Conversation log
"""
BURSTGPT_8 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,0b1f-a,43,GPT-4,90,44,134,Conversation log
19440161.5,,2,ChatGPT,36,29,65,API log
19440192.0,0b1f-a,7,GPT-4,180,60,240,Conversation log
"""  # noqa: E501 the header is one line
BURSTGPT = {"6 columns": BURSTGPT_6, "8 columns": BURSTGPT_8}


def write_burstgpt(folder: Path, layout: str) -> Path:
    """Of 6 columns: four requests, one of which failed; of 8: three, two of them of a session."""
    path = folder / "burstgpt.csv"
    path.write_text(BURSTGPT[layout])
    return path


def write_bailian(folder: Path) -> Path:
    """A conversation of two turns, whose second begins with all of the first, and a stranger."""
    path = folder / "bailian.jsonl"
    first = list(range(100, 133))
    rows = [
        _turn(7, -1, 61.114, 521, 132, 1, first),
        _turn(9, -1, 61.5, 40, 5, 1, [900, 901, 902]),
        _turn(11, 7, 75.25, 700, 20, 2, [*first[:32], *range(200, 212)]),
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _turn(
    own: int, parent: int, at_s: float, prompt: int, output: int, turn: int, blocks: list[int]
) -> dict[str, Any]:
    return {
        "chat_id": own, "parent_chat_id": parent, "timestamp": at_s, "input_length": prompt,
        "output_length": output, "type": "text", "turn": turn, "hash_ids": blocks,
    }  # fmt: skip
