"""Conversations with tools, for templates that know none."""

from kvota.model.tool_prompt import as_plain_messages


def test_answers_of_tools_and_what_the_user_says_right_after_are_one_message() -> None:
    said = ["user:a", "assistant:b", "tool:1", "tool:2", "user:c", "user:d", "tool:3"]
    pairs = [one.split(":") for one in [*said, "assistant:e"]]
    messages = [{"role": role, "content": content} for role, content in pairs]
    plain = [(one["role"], one["content"]) for one in as_plain_messages(messages)]
    answers = [f"<tool_response>\n{number}\n</tool_response>" for number in range(1, 4)]
    assert plain == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", f"{answers[0]}\n{answers[1]}\nc"),
        ("user", "d"),
        ("user", answers[2]),
        ("assistant", "e"),
    ]
