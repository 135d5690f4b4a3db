"""What a saved notebook holds of a run: markup that needs nothing, and in which nothing that ranks wrote can run."""

from __future__ import annotations

import base64
import re
import struct
import sys
import time
import zlib
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_distrib.kernel.record.record import RunRecord
from jupyter_distrib.kernel.views import chart, markup, png, sanitize_html, shares, timeline
from jupyter_distrib.kernel.views import html as html_view
from jupyter_distrib.kernel.views.html import DISPLAY_BYTES, DISPLAYS_S, as_html
from jupyter_distrib.kernel.views.table import TextTable
from jupyter_distrib.kernel.views.text import as_text
from jupyter_distrib.wire import messages as m
from tests.kernel.record import golden_run

ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)><script>alert(1)</script></svg>",
    '<a href="javascript:alert(1)">x</a>',
    '<a href=" javascript:alert(1)">x</a>',
    '<iframe srcdoc="<script>alert(1)</script>"></iframe>',
    '<img src="data:text/html;base64,PHNjcmlwdD4=">',
    "<scr<script>ipt>alert(1)</script>",
    "<b onmouseover=alert(1) style='background:url(javascript:alert(1))'>x</b>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
    "<noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
    "<table><td background='javascript:alert(1)'>",
    "<object data=x></object><embed src=x><meta http-equiv=refresh content=0><link rel=stylesheet href=x><base href=x>",
    "\x1b]8;;javascript:alert(1)\x1b\\click\x1b]8;;\x1b\\",
    "</pre></div></details><script>alert(1)</script>",
    "<!--><script>alert(1)</script>-->",
    "<textarea></textarea><script>alert(1)</script>",
    '<a href="java&#9;script:alert(1)">x</a><a href="java\nscript:alert(1)">x</a><a href="&#x6A;avascript:alert(1)">x</a>',
    '<a href="\x01javascript:alert(1)">x</a><a href="JaVaScRiPt&colon;alert(1)">x</a><a href="vbscript:x">x</a>',
    '<a href="data:text/html,<script>alert(1)</script>">x</a><a xlink:href="javascript:alert(1)" ping=x>x</a>',
    '<svg><a xlink:href="javascript:alert(1)"><animate attributeName=href to=javascript:alert(1) /></a></svg>',
    "<svg><foreignObject><iframe srcdoc='x'></iframe></foreignObject></svg><form action=javascript:x><button>x",
    "[x](javascript:alert(1)) [y]( javascript:alert(1)) [z](data:text/html;base64,PHNjcmlwdD4=) <javascript:alert(1)>",
    "![x](javascript:alert(1)) [x][1]\n\n[1]: javascript:alert(1)\n\n<a href='javascript:alert(1)'>y</a>",
    "<p style='background-image:url(https://t.example);width:expression(alert(1))'>x</p><style>@import url(x)</style>",
]
FORMULAS = [
    r"$\href{javascript:alert(1)}{x}$",
    r"$$\href {javascript:alert(1)} {x}$$",
    r"\(\href{java{}script:alert(1)}{x}\)",
    r"\begin{align}\url{javascript:alert(1)}\end{align}",
    r"$\\href{javascript:alert(1)}{x}$",
    r"$\hr\href{a}{b}ef{javascript:alert(1)}{x}$",
    r"$\hr<wbr>ef{javascript:alert(1)}{x}$",
    r"$\hr<!-- -->ef{javascript:alert(1)}{x}$",
    r"$\hr<custom>ef{javascript:alert(1)}{x}$",
    r"$&#92;href{javascript:alert(1)}{x}$",
    r"$\let\x=\href \x{javascript:alert(1)}{x}$",
    r"$\def\x{\href}\newcommand{\y}{\href}\gdef\z{}$",
    r"$\require{html}\style{position:fixed}{x}\class{a}{x}\cssId{a}{x}\data{a=b}{x}$",
    r"$\htmlStyle{position:fixed}{x}\htmlData{a=b}{x}\htmlId{a}{x}\htmlClass{a}{x}\html@mathml{a}{b}$",
    r"$\includegraphics[width=1em]{https://t.example/x.png}\unicode{65}\bbox[position:fixed]{x}$",
    r"$\mmlToken{mi}[href='javascript:alert(1)']{x}$</pre>$\href{javascript:alert(1)}{x}$",
    r"<pre>x</pre>$\href{javascript:alert(1)}{x}$<pre>",
    r"$<b>\href{a}</b>{javascript:alert(1)}<i>\style{</i>}{x}$",
]
QUOTED = [
    r'<b title="$\href{">} {q<i title=" onmouseover=alert(1) x=">x</i></b>',
    r'$<i title="\class{">} {q<img alt=" onerror=alert(1) src=x x=">x</i>',
    r'$<a href="https://x/\url{">} {q<abbr title=" onclick=alert(1) x=">x</abbr></a>',
    r'$<td title="\htmlData{">} { <p title="><script>alert(1)</script>" id="x">x</p></td>',
    r'$\cssId{<b title="} {x onmouseover=alert(1) ">x</b>',
]
"""TeX commands whose argument begins in an attribute and ends outside of it, or the other way round."""
COMMAND = re.compile(
    r"\\(?:href|url|includegraphics|html\w*|data|style|class|cssId|require|unicode|bbox|mmlToken|let|\w*def|newcommand)"
    r"(?![A-Za-z])"
)


class Elements(HTMLParser):
    """Collects the elements of a page, and checks that all are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("img", "br", "hr", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class Typeset(HTMLParser):
    """Collects the text in which front ends look for formulas."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._verbatim = 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._verbatim += tag == "pre"
        self.parts.append("" if tag == "wbr" else "\n")

    def handle_endtag(self, tag: str) -> None:
        self._verbatim -= tag == "pre"
        self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        self.parts.append("" if self._verbatim else data)


def is_harmless(html: str) -> bool:
    page = Elements(html)
    assert not page.open
    for tag, attributes in page.found:
        if tag in ("script", "style", "iframe", "object", "embed", "svg", "math", "form", "meta", "link", "base"):
            return False
        for name, value in attributes.items():
            links = name in ("href", "src") and not str(value).startswith(("https://", "http://", "data:image/"))
            if name.startswith("on") or links:
                return False
    return True


def a_record(*events: m.RunEvent, ranks: int = 2, ended: bool = True) -> RunRecord:
    record = RunRecord(run="r-7", label="Cell In[5]", ranks=range(ranks), world_size=ranks)
    for rank in range(ranks):
        record.apply(m.Started(run="r-7", rank=rank, pid=100 + rank, device="cpu", at_s=1.0))
    for event in events:
        record.apply(event)
    if ended:
        for rank in range(ranks):
            record.apply(m.Returned(run="r-7", rank=rank, value=None, at_s=2.0))
        record.apply(m.Ended(run="r-7", at_s=3.0))
    return record


def displayed(rank: int = 0, **data: str) -> m.Displayed:
    bundle = {kind.replace("_", "/"): content for kind, content in data.items()}
    return m.Displayed(run="r-7", rank=rank, data=bundle, metadata={}, at_s=2.0)


def measured(step: int, rank: int = 0, **values: float) -> m.Measured:
    return m.Measured(run="r-7", rank=rank, step=step, values=values, at_s=2.0)


# ---------------------------------------------------------------------------------------------------- nothing can run


def test_addresses_in_notes_are_links_and_nothing_else_is() -> None:
    notes = ('see https://a.example/x?y=1&z="2".', "javascript:alert(1) <a href='http://b.example'>")
    html = as_html(a_record(*(m.Noted(run="r-7", rank=None, text=text) for text in notes)), 1.0)
    assert is_harmless(html)
    links = [attributes["href"] for tag, attributes in Elements(html).found if tag == "a"]
    assert links == ["https://a.example/x?y=1&z=", "http://b.example"]
    assert "&lt;a href=" in html


@pytest.mark.parametrize("attack", [*ATTACKS, *FORMULAS, *QUOTED])
def test_nothing_that_a_rank_writes_or_displays_can_run(attack: str) -> None:
    html = as_html(
        a_record(
            m.Wrote(run="r-7", rank=0, stream="stdout", text=attack + "\n"),
            displayed(text_html=attack, text_plain=attack),
            displayed(text_plain=attack),
            displayed(text_markdown=attack),
            displayed(text_latex=attack),
            displayed(rank=1, **{"image_svg+xml": attack}),
            displayed(rank=1, image_png=attack),
            *(measured(step, **{attack: step}) for step in range(3)),
        ),
        1.0,
    )
    assert is_harmless(html)
    assert "\x1b" not in html


@pytest.mark.parametrize("attack", [*FORMULAS, *QUOTED])
def test_no_formula_that_a_rank_writes_or_displays_can_do_anything(attack: str) -> None:
    """Front ends typeset formulas in all text of a page but `pre`; over some tags and comments in it they read."""
    html = as_html(
        a_record(
            m.Noted(run="r-7", rank=None, text=attack),
            m.Wrote(run="r-7", rank=0, stream="stdout", text=attack + "\n"),
            *(displayed(**{kind: attack}) for kind in ("text_html", "text_markdown", "text_latex", "text_plain")),
            *(measured(step, **{attack: step}) for step in range(3)),
        ),
        1.0,
    )
    whole = html + TextTable(head=(attack,), rows=[(attack,), (f"{attack}\n{attack}",)]).as_html()
    typeset = "".join(Typeset(whole).parts)
    assert COMMAND.search(typeset) is None


def test_other_formulas_and_output_stay() -> None:
    formula = r"$\frac{\partial f}{\partial x} \text{ where } \mathcal{L}\textstyle\dataset$"
    assert formula in as_html(a_record(displayed(text_latex=formula)), 1.0)
    printed = r"$\href{https://pytorch.org}{x}$ C:\data"
    assert printed in as_html(a_record(m.Wrote(run="r-7", rank=0, stream="stdout", text=f"{printed}\n")), 1.0)
    assert r"C:\data" in TextTable(rows=[(r"C:\data",)]).as_html()
    assert "<div>$ {x}$</div>" in as_html(a_record(displayed(text_latex=r"$\href{https://pytorch.org}{x}$")), 1.0)


def test_markdown_and_latex_are_shown_as_such_and_not_as_the_name_of_their_class() -> None:
    no_text = "<IPython.core.display.Markdown object>"
    record = a_record(
        displayed(text_plain=no_text, text_markdown="# Loss\n\n| a | b |\n|---|---|\n| *1* | 2 |\n"),
        displayed(text_plain=no_text, text_latex="$\\frac{a}{b} < 1$"),
        displayed(text_plain="sqrt(2)", text_latex="$\\sqrt{2}$"),
    )
    html, text = as_html(record, 1.0), as_text(record, 1.0)

    assert is_harmless(html)
    assert "<h1>Loss</h1>" in html
    assert "<em>1</em>" in html
    assert "<td>" in html
    assert "<div>$\\frac{a}{b} &lt; 1$</div>" in html
    assert "<div>$\\sqrt{2}$</div>" in html
    assert "[0] # Loss" in text
    assert "[0] $\\frac{a}{b} < 1$" in text
    assert "[0] sqrt(2)" in text
    assert "object>" not in html + text


STYLED = """<style type="text/css">
#T_1_row0_col0, #T_1_row1_col0 { color: red; background-color: #ff0 }
#T_1 th { font-weight: bold; position: fixed; }
#T_1 .low td, .nothing > td:hover { background: url(javascript:alert(1)); font-style: italic }
#T_1_row1_col0 { background-color: rgb(1, 2, 3) !important }
</style><table id="T_1"><tr><th class="col_heading">loss</th></tr><tr><td id="T_1_row0_col0" class="data">0.5</td></tr>
<tr class="low"><td id="T_1_row1_col0" style="color: blue; top: 0">0.4</td></tr></table><td id="T_1_row0_col0">out</td>"""


def test_a_styled_table_keeps_its_colours_and_weights_and_nothing_else() -> None:
    html = as_html(a_record(displayed(text_html=STYLED)), 1.0)

    assert is_harmless(html)
    assert '<th style="font-weight:bold">loss</th>' in html
    assert '<td style="color:red;background-color:#ff0">0.5</td>' in html
    assert '<td style="color:blue;background-color:rgb(1, 2, 3);font-style:italic">0.4</td>' in html
    assert not [word for word in ("fixed", "url(", "top") if word in html]


def test_the_styles_in_the_head_of_a_page_count_as_well() -> None:
    page = (
        "<!DOCTYPE html><html><head><title>x</title><style>#a { color: red }</style></head><body><p id=a>y</p></body>"
    )
    assert safe(page) == '<p style="color:red">y</p>'


def test_styles_for_some_screens_or_for_paper_only_do_not_count() -> None:
    sheet = (
        "@media print { p { color: red } .a { color: red } } p { color: blue } @font-face { color: red } @charset 'x';"
    )
    assert safe(f"<style>{sheet} p {{ font-weight: bold }}</style><p>y</p>") == (
        '<p style="color:blue;font-weight:bold">y</p>'
    )


@pytest.mark.parametrize("piece", ["a", "/*", "@ ", "p,", "a{", "@{", "}"])
def test_the_time_for_a_sheet_grows_with_its_length_only(piece: str) -> None:
    """500,000 characters take milliseconds; with time that grew with the square, an hour."""
    sheet = piece * (500_000 // len(piece))
    began = time.process_time()
    assert safe(f"<style>{sheet}</style><p>y</p>") == "<p>y</p>"
    assert time.process_time() - began < 5


def test_what_ranks_print_keeps_its_colours() -> None:
    html = as_html(a_record(m.Wrote(run="r-7", rank=0, stream="stdout", text="\x1b[1;31m<b>\x1b[0m plain\n")), 1.0)

    assert '[0] <span style="color:#c62f33;font-weight:bold">&lt;b&gt;</span> plain' in html
    assert is_harmless(html)


def test_without_a_converter_the_source_of_markdown_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mistune", None)
    html = as_html(
        a_record(displayed(text_plain="<IPython.core.display.Markdown object>", text_markdown="# Only here")), 1.0
    )

    assert "># Only here</pre>" in html


def test_of_very_long_markdown_the_source_is_shown() -> None:
    """10 MB of it would occupy the kernel for half a minute."""
    short, long = ("**x** " * (length // 6) for length in (600, 10_000_000))
    assert "<strong>" in markup.with_html({"text/markdown": short})["text/html"]
    assert markup.with_html({"text/markdown": long}) == {"text/markdown": long}


def safe(html: str, most_s: float = DISPLAYS_S) -> str:
    return sanitize_html.safe(html, most_s)


ACTIVE = (
    "applet audio button canvas form frameset head iframe math noembed noframes noscript object script select style svg "
    "template textarea title video xmp"
)
"""Tags that run, load or ask something, or in which a browser reads text in another way: nothing of them stays."""


@pytest.mark.parametrize(
    ("html", "harmless"),
    [
        ("<b>x</b> &amp; y", "<b>x</b> &amp; y"),
        ("<table border=1><tr><td colspan=2>1", '<table><tr><td colspan="2">1</td></tr></table>'),
        *[(f"a<{tag}>b</{tag}>c", "ac") for tag in ACTIVE.split()],
        ("</div>a</b>", "a"),
        ("<b><i>x</b>y", "<b><i>x</i></b>y"),
        ("<custom>x</custom>", "x"),
        ("<a href='https://pytorch.org'>t</a>", '<a href="https://pytorch.org">t</a>'),
        ("<img src='data:image/png;base64,AAAA' alt='<'>", '<img src="data:image/png;base64,AAAA" alt="&lt;">'),
        ("<img src='https://tracker.example/x.png'>", "<img>"),
        ("<br/>x<p/>y", "<br>xy"),
        ("1 < 2 > 0", "1 &lt; 2 &gt; 0"),
    ],
)
def test_what_is_left_of_html(html: str, harmless: str) -> None:
    assert safe(html) == harmless


def test_markup_that_is_very_deep_is_cut_and_closed() -> None:
    assert is_harmless(safe("<div>" * 5000 + "x"))


@pytest.mark.parametrize("piece", ['<b a="', "<!--", "<?", "</a", "<b/", "<![CDATA["])
def test_tags_that_are_never_closed_take_no_time(piece: str) -> None:
    """8 MB of them took Python's parser hours, in which the kernel did nothing else."""
    began = time.process_time()
    html = safe(f"<i>x</i>{piece * 20_000}")
    assert time.process_time() - began < 2
    assert html.startswith("<i>x</i>")
    assert html.endswith("<p>The rest of this display is left out: it has a tag or comment that is not closed.</p>")
    assert is_harmless(html)


@pytest.mark.parametrize(
    "long",
    [f"<style>{'*{color:red}' * 40_000}</style>{'<b>x</b>' * 40_000}", "<svg>" * 40_000 + "</b>" * 400_000],
    ids=["rules times tags", "tags times tags"],
)
def test_html_that_takes_long_to_check_is_cut(long: str) -> None:
    began = time.process_time()
    html = safe(f"<div>y{long}</div>", most_s=0.5)
    assert time.process_time() - began < 5
    assert html.startswith("<div>y")
    assert html.endswith("</div><p>The rest of this display is left out: it takes too long to check.</p>")
    assert is_harmless(html)


def test_all_displays_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    used_s = iter(range(100))
    monkeypatch.setattr(html_view, "time", SimpleNamespace(thread_time=lambda: float(next(used_s))))
    monkeypatch.setattr(sanitize_html, "safe", lambda html, most_s: given.append(most_s) or html)
    as_html(a_record(*(displayed(rank=rank, text_html="x") for rank in (0, 1))), 1.0)
    assert given == [DISPLAYS_S - 1, DISPLAYS_S - 2]


@pytest.mark.parametrize("odd", ["<![x[y]]>", "<![>", f"&#{'9' * 5000};", f'<b title="&#{"9" * 5000};">'])
def test_html_that_python_cannot_parse_costs_no_view(odd: str) -> None:
    """Its errors ended the view of the run, and the cell with it."""
    html = as_html(a_record(displayed(text_html=f"<i>x</i>{odd} z")), 1.0)
    assert "<i>x</i><p>The rest of this display is left out: it cannot be parsed.</p>" in html


# ---------------------------------------------------------------------------------------------------- what is shown


def test_no_script_no_style_tag_and_every_tag_closed() -> None:
    html = as_html(golden_run.golden_record(), 17.0, "local", always=True)

    assert is_harmless(html)
    assert "4 ranks · ddp · local · 4 × A100 · 0:17" in html
    assert html.index("KeyError") < html.index("another rank") if "another rank" in html else "KeyError" in html
    assert "rank 0 has left the cell without all_reduce #3" in html


def test_a_picture_is_kept_with_its_data() -> None:
    html = as_html(a_record(displayed(rank=1, image_png=golden_run.PIXEL, text_plain="<Figure>")), 1.0)
    page = Elements(html)

    assert [attributes for tag, attributes in page.found if tag == "img"] == [
        {"alt": "rank 1", "src": f"data:image/png;base64,{golden_run.PIXEL}"}
    ]
    assert "<b>rank 1</b>" in html


def test_a_table_that_a_rank_displays_stays_a_table() -> None:
    html = as_html(a_record(displayed(text_html="<style>td{}</style><table><tr><td>1</table>", text_plain="1")), 1.0)

    assert "<table><tr><td>1</td></tr></table>" in html


def test_what_is_displayed_is_in_the_text_as_well() -> None:
    text = as_text(a_record(displayed(rank=1, image_png=golden_run.PIXEL, text_plain="<Figure>")), 1.0)

    assert "[1] <Figure>" in text


def test_the_newest_displays_are_kept_when_they_are_too_large() -> None:
    large = "A" * (DISPLAY_BYTES // 2 - 4)
    html = as_html(a_record(*(displayed(image_png=large[:-4] + f"{n:04}") for n in range(3))), 1.0)

    assert "1 earlier display not kept here" in html
    assert "0000" not in html
    assert html.index("0001") < html.index("0002")


def test_a_run_that_was_shown_leaves_at_least_its_header() -> None:
    assert as_html(a_record(), 12.0) == ""
    assert "2 ranks · cpu · 12 s" in as_html(a_record(), 12.0, always=True)


def test_our_own_markup_survives_the_sanitizer_of_nbconvert() -> None:
    html = as_html(golden_run.golden_record(), 17.0, "local", always=True, with_chart=False)
    allowed = {"a", "abbr", "b", "blockquote", "code", "div", "em", "i", "li", "ol", "pre", "span", "strong", "table"}
    of_displays = {"img"}
    assert {tag for tag, _ in Elements(html).found} <= allowed | {"td", "tr", "ul"} | of_displays
    record = a_record(*(measured(step, loss=step) for step in range(5)))
    assert [as_html(record, 1.0, with_chart=shown).count("<img") for shown in (True, False)] == [1, 0]


# ---------------------------------------------------------------------------------------------------- charts


def drawing_of(record: RunRecord) -> chart.Drawing:
    drawing = chart.chart_of(record)
    assert drawing
    return drawing


Pixel = tuple[int, ...]


def pixels(drawing: chart.Drawing) -> list[list[Pixel]]:
    """The rows of a picture, each pixel as red, green, blue and opacity."""
    data = base64.b64decode(drawing.as_png())
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, bits = struct.unpack(">IIB", data[16:25])
    assert (width, height) == (2 * drawing.width, 2 * drawing.height)

    def chunk(kind: bytes) -> bytes:
        at = data.index(kind)
        (size,) = struct.unpack(">I", data[at - 4 : at])
        return data[at + 4 : at + 4 + size]

    colours, opacities, rows = chunk(b"PLTE"), chunk(b"tRNS"), zlib.decompress(chunk(b"IDAT"))
    palette = [(*colours[3 * number : 3 * number + 3], opacity) for number, opacity in enumerate(opacities)]
    length = width * bits // 8
    found = []
    for start in range(1, len(rows), length + 1):
        row = rows[start : start + length]
        found.append([palette[each] for byte in row for each in ((byte >> 4, byte & 15) if bits == 4 else (byte,))])
    return found


def test_a_chart_has_a_line_for_each_rank_and_the_first_rank_is_on_top() -> None:
    record = a_record(*(measured(step, rank, loss=1 / (step + 1)) for step in range(30) for rank in range(2)))
    drawing = drawing_of(record)
    strokes = [mark for mark in drawing.marks if isinstance(mark, png.Stroke)]
    assert [stroke.colour for stroke in strokes] == [*["grid"] * 3, "others", "first", "first"], (
        "the axis, and the best"
    )
    assert {"loss", "rank 0", "1", "0.517", "0.0333", "step 0", "14", "29"} <= {
        mark.text for mark in drawing.marks if isinstance(mark, png.Text)
    }
    used = {colour for row in pixels(drawing) for colour in row}
    assert png.COLOURS["first"] in used
    assert png.COLOURS["others"] not in used, "under the first one"
    assert pixels(drawing)[0][0][3] == 0, "the ground is transparent"


def test_training_and_validation_share_a_chart_each_with_its_name_and_colour() -> None:
    values = ({"train/loss": 1 / (step + 1), "val/loss": 2 / (step + 1), "lr": step} for step in range(30))
    drawing = drawing_of(a_record(*(measured(step, **each) for step, each in enumerate(values))))
    assert drawing.names == ("loss", "lr")
    texts = {mark.text: mark.colour for mark in drawing.marks if isinstance(mark, png.Text)}
    assert (texts["train"], texts["val"]) == ("first", "second")
    strokes = [mark for mark in drawing.marks if isinstance(mark, png.Stroke)]
    assert [stroke.colour for stroke in strokes if stroke.colour != "grid"] == [
        *["first"] * 2,
        *["second"] * 2,
        "first",
    ]
    assert png.COLOURS["second"] in {colour for row in pixels(drawing) for colour in row}


def test_of_more_than_eight_ranks_the_mean_and_a_band_are_drawn() -> None:
    events = (measured(step, rank, loss=step + rank) for step in range(30) for rank in range(9))
    drawing = drawing_of(a_record(*events, ranks=9))
    (band,) = (mark for mark in drawing.marks if isinstance(mark, png.Band))
    line, best = (mark for mark in drawing.marks if isinstance(mark, png.Stroke) and mark.colour == "first")
    assert best.spots[0][0] < line.spots[0][0] < best.spots[1][0]
    for (x, top, bottom), (at, y) in zip(band.edges, line.spots, strict=True):
        assert x == at
        assert y - top == pytest.approx(bottom - y)
    texts = {mark.text for mark in drawing.marks if isinstance(mark, png.Text)}
    assert {"mean of 9 ranks", "37", "18.5", "0"} <= texts
    used = {colour for row in pixels(drawing) for colour in row}
    assert png.COLOURS["band"] in used
    assert png.COLOURS["others"] not in used


def test_the_text_of_a_chart_is_not_cut_and_can_be_read() -> None:
    record = a_record(*(measured(step, rank, a_name=-1.23e-5 * step) for step in range(3) for rank in range(2)))
    drawing = drawing_of(record)
    for mark in drawing.marks:
        if isinstance(mark, png.Text):
            wide = len(mark.text) * png.GLYPH_WIDTH / png.SCALE
            left = mark.x - wide if mark.right else mark.x
            assert 0 <= left < left + wide <= drawing.width, mark
    for colour in (*chart.FIRSTS, "text", "bad"):
        for ground in (WHITE, DARK):
            assert contrast(png.COLOURS[colour][:3], ground) >= 4.1


def test_colours_of_pictures_stand_out_from_both_grounds_and_more_where_the_sidebar_knows_the_theme() -> None:
    style = (Path(__file__).parents[3] / "labextension" / "style" / "base.css").read_text("utf-8")
    factors = [float(each) for each in re.findall(r"Distributed-picture img \{ filter: brightness\(([\d.]+)\)", style)]
    named = {name: colour[:3] for name, colour in png.COLOURS.items() if colour[3] == 255}
    others = [png._of_hex(each)[:3] for each in (*timeline.COLORS, *shares.COLORS.values())]
    for ground, factor in zip((WHITE, DARK), factors, strict=True):
        there = lambda colour: tuple(min(255, round(factor * part)) for part in colour)  # noqa: B023, E731
        for name, colour in named.items():
            assert contrast(colour, ground) >= 3, name
            assert name == "others" or contrast(there(colour), ground) >= 4.5, name
        for each in others:
            assert contrast(there(each), ground) >= 3, each


def test_the_ground_of_a_chart_is_transparent_and_its_alternative_text_has_the_numbers() -> None:
    values = [2.3, 1.0, 0.12, 0.13]
    drawing = drawing_of(
        a_record(*(measured(step, loss=value, accuracy=1 - value) for step, value in enumerate(values)))
    )
    assert {pixel[3] for row in pixels(drawing) for pixel in row} >= {0, 255}
    assert drawing.alt == (
        "loss fell from 2.3 to 0.13 in 3 steps, best 0.12 at step 2. "
        "accuracy rose from -1.3 to 0.87 in 3 steps, best 0.88 at step 2"
    )
    assert f'alt="{drawing.alt}"' in drawing.as_html()


WHITE, DARK = (0xFF, 0xFF, 0xFF), (0x11, 0x11, 0x11)
"""The grounds of JupyterLab's themes."""


def contrast(*colours: tuple[int, int, int]) -> float:
    def light(colour: tuple[int, int, int]) -> float:
        parts = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    dark, bright = sorted(map(light, colours))
    return (bright + 0.05) / (dark + 0.05)


def test_a_glyph_is_what_it_shows() -> None:
    column = [sum(each) for each in png._glyph("|")]
    assert max(column) > 40 and sum(column[:3] + column[-3:]) == 0  # noqa: PT018
    assert png._glyph("é") == png._glyph("?")


def test_numbers_that_never_change_and_single_ones_have_no_chart() -> None:
    assert chart.chart_of(a_record(*(measured(step, lr=0.1) for step in range(30)), measured(1, once=1.0))) is None


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1.7e308, -1.7e308, 1e-320])
def test_odd_numbers_do_not_break_a_chart(odd: float) -> None:
    drawing = drawing_of(
        a_record(measured(1, loss=1.0), measured(2, loss=odd), measured(3, loss=-1.7e308), measured(4, loss=2.0))
    )

    assert len({pixel for row in pixels(drawing) for pixel in row}) > 3


def test_metrics_that_are_not_drawn_are_counted() -> None:
    def drawn(count: int) -> str:
        values = [{f"n{index}": float(step) for index in range(count)} for step in range(5)]
        return drawing_of(a_record(*(measured(step, **each) for step, each in enumerate(values)))).as_html()

    assert drawn(chart.CHARTS).endswith('">')
    assert drawn(chart.CHARTS + 1).endswith("<div>1 more metric not drawn here</div>")
    assert drawn(chart.CHARTS + 3).endswith("<div>3 more metrics not drawn here</div>")


def test_a_chart_of_many_ranks_and_steps_stays_small() -> None:
    events = (measured(step, rank, loss=step * rank) for step in range(500) for rank in range(64))

    assert len(drawing_of(a_record(*events, ranks=64)).as_html()) < 30_000
