"""The attention benchmark's counting and its table: what is divided by the time, and how it is shown."""

from __future__ import annotations

from benchmarks.attention_kernels import Case, cases
from benchmarks.attention_report import MARKER, markdown, write_report

BEGIN, END = f"<!-- {MARKER} -->", f"<!-- /{MARKER} -->"


def test_operations_count_every_visible_pair_twice_for_each_product():
    case = Case("prefill", (2, 1), (5, 4), heads=3, kv_heads=1, head_dim=8)
    pairs = (4 + 5) + 4  # two queries that end a context of 5, one that ends a context of 4
    assert case.operations == pairs * 2 * 2 * 3 * 8


def test_bytes_count_keys_values_queries_and_outputs_once():
    case = Case("decode", (1, 1), (10, 6), heads=4, kv_heads=2, head_dim=8)
    assert case.bytes_moved == 2 * (2 * 16 * 2 * 8 + 2 * 2 * 4 * 8)


def test_every_case_can_be_an_attention_call():
    for case in cases():
        assert case.heads % case.kv_heads == 0
        assert all(0 < q <= c for q, c in zip(case.query_lens, case.context_lens, strict=True))


def made_up_result():
    row = {"case": "decode a", "kind": "decode", "seconds": 1e-5, "tb_per_s": 2.0, "tflop_per_s": 1.0, "page": 64}
    other = {**row, "case": "prefill b", "kind": "prefill", "tflop_per_s": 300.0}
    return {
        "cases": [{"name": "decode a"}, {"name": "prefill b"}],
        "rows": [
            {**row, "backend": "triton", "preferred_page": True},
            {**row, "backend": "triton", "preferred_page": False, "page": 16, "tb_per_s": 1.0},
            {**other, "backend": "flash", "page": 256, "preferred_page": True},
        ],
        "ceilings": {"copy_bytes_per_s": 4e12, "matmul_operations_per_s": 6e14},
        "environment": {"versions": {}, "device": {"name": "a GPU"}, "date": "2026-01-01T00:00:00"},
        "options": {"repeats": 3},
    }


def test_the_table_shows_rates_and_shares_and_a_dash_where_nothing_was_measured():
    table = markdown(made_up_result())
    assert "| decode a | 10.0 µs, 2.00 TB/s (50 % of copy) | – |" in table
    assert "| prefill b | – | 10.0 µs, 300 TFLOP/s (50 % of matmul) |" in table
    assert "| decode a | 1.00 TB/s (25 % of copy) | 2.00 TB/s (50 % of copy) |" in table  # pages of 16, of 64


def test_the_report_replaces_what_stands_between_its_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write_report(made_up_result(), tmp_path)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n| case |") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert (tmp_path / "attention.png").stat().st_size > 0
