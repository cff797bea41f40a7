"""What scripts/golden.py asks: prompts, strings, conversations and chat templates."""

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A prompt: messages through the chat template, or plain text cut to `num_ids` tokens."""

    name: str
    text: str | None = None
    messages: list[Message] | None = None
    num_ids: int | None = None
    wants_prompt_logprobs: bool = False


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


SHELVES = "\n".join(
    f"Shelf {n}: {3 * n + 2} boxes of {item}, last counted on day {7 * n % 30 + 1}."
    for n, item in enumerate(
        (
            *("nails", "screws", "bolts", "washers", "hinges", "brackets", "hooks", "chains"),
            *("ropes", "wires", "lamps", "fuses", "plugs", "cables", "pipes", "valves"),
            *("pumps", "filters", "seals", "belts", "gears", "springs", "bearings", "pulleys"),
            *("rivets", "clamps", "levers", "casters"),
        ),
        start=1,
    )
)
PROSE = (
    "The lighthouse stood at the end of a narrow spit of land, and every evening for forty years "
    "the keeper climbed its one hundred and twelve steps to light the lamp. He knew the sound of "
    "each stair, the places where the iron rail was cold and the places where it was worn smooth, "
    "and he knew the sea below in all of its moods. On clear nights he could count the fishing "
    "boats by their lanterns; on bad ones he could only trust that they could count on him. When "
    "the new automatic light was installed across the bay, a young engineer came to tell him that "
    "his work was finished. The keeper made tea, listened politely, and asked only one question: "
)
TURNS: list[Message] = [
    {"role": "system", "content": "You are a patient science teacher. Answer in two sentences."},
    {"role": "user", "content": "Why is the sky blue?"},
    {
        "role": "assistant",
        "content": "Air scatters short wavelengths of sunlight more than long ones. "
        "Blue light therefore reaches our eyes from every direction.",
    },
    {"role": "user", "content": "And why are sunsets red?"},
    {"role": "assistant", "content": "The light crosses more air, so most of the blue is lost."},
    {"role": "user", "content": "Does the same happen on Mars?"},
]

CASES = [
    Case("ends_by_itself", messages=user("What is the capital of France?")),
    Case("one_token", text="Once"),
    Case("short_text", text="The three primary colours are", wants_prompt_logprobs=True),
    Case(
        "code_text", text='def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number'
    ),
    Case("code_chat", messages=user("Write a Python function that reverses a string.")),
    Case("chinese_chat", messages=user("请用中文介绍一下北京。")),
    Case("chinese_text", text="春天来了,花园里的花都开了。孩子们在"),
    Case("emoji", messages=user("What do these mean? 🎉🚀 👩‍👩‍👧 ❤️")),
    Case("digits", text="1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233,"),
    Case("spaces_before_digits", text="qty   price\n   12    300\n    7   1250\n"),
    Case("turns", messages=TURNS),
    Case("french", messages=user("Traduis en anglais : « Où est passée la forêt d’hier ? »")),
    Case("json", text='{"name": "Ada Lovelace", "born": 1815, "occupation": "'),
    Case("html", text="<!DOCTYPE html>\n<html>\n  <head>\n    <title>"),
    Case("prose", text=PROSE, wants_prompt_logprobs=True),
    Case("one_block", text=PROSE, num_ids=32),
    Case("one_block_and_one", text=PROSE, num_ids=33),
    Case("long", messages=user(SHELVES + "\n\nWhich shelf has the most boxes, and of what?")),
]

TOKENIZER_TEXTS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "  leading and trailing  ",
    "a  12",
    "x\n 3",
    "   1234567890   ",
    "3.14159e-10 0x1F ½ ² Ⅷ ٣",
    "don't we'll I'M they'RE",
    "tab\tnew\nline\r\nend\n\n\n",
    "snake_case camelCase SCREAMING-KEBAB",
    "请用中文介绍一下北京。",
    "日本語のテキスト と 한국어",
    "Ünïcödé e\u0301 \u00e9 ﬁ",
    "🎉🚀 👩‍👩‍👧 ❤️ 🏳️‍🌈",
    "شكرا جزيلا לילה טוב",
    "\u200bzero\u00a0width\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><|im_end|>",
    "if (a<b && c>>d) { return !x; } // \\n",
]

CHATS: dict[str, dict[str, Any]] = {
    "user": {"messages": user("Hi")},
    "system_and_user": {"messages": TURNS[:2]},
    "turns": {"messages": TURNS},
    "assistant_last": {"messages": TURNS[:3], "add_generation_prompt": False},
    "empty_content": {"messages": user("")},
    "spaces_kept": {"messages": user("  two  \n\n")},
    "system_later": {"messages": [*user("Hi"), TURNS[0], *user("Go on")]},
    "tools_ignored": {
        "messages": user("What is the weather?"),
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
    },
}

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather <now> & "here", auf Größe in 北京',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "北京", "n": 1}}}
TOOL_TURNS: list[Message] = [
    *user("Weather in 北京?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"c": 21}'},
]
TEMPLATES: dict[str, dict[str, Any]] = {
    "blocks_are_trimmed": {
        "chat_template": "{% for m in messages %}\n"
        "    {% if m.role == 'user' %}\n[{{ m.content }}]\n    {% endif %}\n"
        "{% endfor %}\nend\n",
        "messages": TURNS[:2],
    },
    "tojson_keeps_characters": {
        "chat_template": "{{ tools | tojson }}|{{ tools[0].function | tojson(indent=2) }}",
        "messages": user("x"),
        "tools": [WEATHER_TOOL],
    },
    "tool_calls": {
        "chat_template": "{{ tools | length }}{% for m in messages %}"
        "<{{ m.role }}>{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}",
        "messages": TOOL_TURNS,
        "tools": [WEATHER_TOOL],
    },
    "loop_controls": {
        "chat_template": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}"
        "{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m.role }};{% endfor %}",
        "messages": TURNS,
    },
    "generation_block": {
        "chat_template": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.role }}: {% endif %}{% endfor %}",
        "messages": TURNS[:4],
    },
    "namespace_and_methods": {
        "chat_template": "{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% set ns.n = ns.n + m.content.split(' ') | length %}{% endfor %}{{ ns.n }}"
        "{{ messages[0].content.strip().upper()[:7] }}{{ bos_token }}{{ eos_token }}",
        "messages": TURNS,
    },
    "keyword_reaches_template": {
        "chat_template": "{% if enable_thinking is defined and not enable_thinking %}<no>"
        "{% endif %}{% if add_generation_prompt %}A:{% endif %}",
        "messages": user("x"),
        "enable_thinking": False,
    },
    "defined_tests": {
        "chat_template": "{{ tools is defined }} {{ tools is none }} {{ documents is none }} "
        "{{ nothing is defined }} {{ messages[0] is mapping }} {{ messages[0].content is string }}",
        "messages": user("x"),
    },
}
