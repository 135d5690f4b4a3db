"""Tables as text and as HTML."""

from __future__ import annotations

from jupyter_distrib.kernel.views.table import WIDE_CHARACTERS, TextTable

POOLS = TextTable(head=("pool", "node", "ranks"), rows=[("local", "", "2 CPU"), ("laboratory", "", "none up")])


def test_columns_are_aligned() -> None:
    assert POOLS.as_text().splitlines() == [
        "pool        node  ranks",
        "local             2 CPU",
        "laboratory        none up",
    ]


def test_empty_columns_are_left_out_where_that_is_asked() -> None:
    assert POOLS.without_empty("node").head == ("pool", "ranks")
    assert POOLS.without_empty().rows == [("local", "2 CPU"), ("laboratory", "none up")]
    assert POOLS.without_empty("pool") == TextTable(head=POOLS.head, rows=list(POOLS.rows))


def test_a_text_of_several_lines_stays_in_its_column() -> None:
    table = TextTable(rows=[("!", "pool", "does not answer\n-> start it"), ("", "logs", "/tmp")])
    assert table.as_text().splitlines() == ["!  pool  does not answer", "         -> start it", "   logs  /tmp"]
    assert "does not answer</div><div>-&gt; start it" in table.as_html()
    assert "<b>" not in table.as_html()


def test_html_is_escaped_and_long_texts_may_be_broken() -> None:
    html = TextTable(head=("<b>",), rows=[("<script>",), ("x" * WIDE_CHARACTERS,)]).as_html()
    assert "&lt;b&gt;" in html
    assert "&lt;script&gt;" in html
    assert f'<td style="text-align:left">{"x" * WIDE_CHARACTERS}</td>' in html


def test_a_sentence_in_a_table_may_be_broken_and_a_number_not() -> None:
    html = TextTable(head=("at", "s"), rows=[("Cell In[5], line 12, in train", "12 s")]).as_html()
    assert '<td style="text-align:left">Cell In[5]' in html
    assert 'white-space:nowrap;font-variant-numeric:tabular-nums">12 s' in html


def test_a_table_without_rows_has_its_head() -> None:
    assert TextTable(head=("a", "bc")).as_text() == "a  bc"
    assert TextTable().as_text() == ""
