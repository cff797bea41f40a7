import io

from rich.console import Console

from kvota.model.package_fetch import FetchStep
from kvota.node.startup import Startup
from kvota.sizing.memory import draw_bill


def screen() -> tuple[Startup, io.StringIO]:
    out = io.StringIO()
    return Startup(Console(file=out, highlight=False)), out


def test_the_bill_is_a_table_whose_lines_do_not_break() -> None:
    startup, out = screen()
    startup.show_bill(
        draw_bill(
            limit_bytes=16 * 10**9,
            limit_from="free on this machine",
            used_bytes=10**9,
            weights_bytes=9 * 10**8,
            kv_budget_ratio=0.85,
            kv_memory_bytes=None,
            block_size=32,
            bytes_per_block=737_280,
            max_model_len=8192,
        )
    )
    lines = out.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[0].strip().startswith("16 GB  memory this process may use")
    assert lines[0].endswith("free on this machine")
    assert "KV budget" in lines[3]
    assert "what is left × kv_budget_ratio 0.85" in lines[3]


def test_without_a_terminal_a_fetch_is_one_line_a_stage() -> None:
    startup, out = screen()
    with startup.fetching() as show:
        for done in range(0, 101, 10):
            show(FetchStep("downloading", done, 100))
        show(FetchStep("checking", 1, 1))
    assert out.getvalue() == "downloading…\nchecking…\n"


def test_an_address_that_others_reach_comes_with_a_warning() -> None:
    startup, out = screen()
    startup.show_address("127.0.0.1", 8000)
    assert "http://127.0.0.1:8000" in out.getvalue()
    assert "Note" not in out.getvalue()
    startup.show_address("::", 8000)
    assert "http://[::]:8000" in out.getvalue()
    assert "reachable from other machines" in out.getvalue()
