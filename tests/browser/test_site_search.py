"""The site's search shows the section that answers, not the top of its page (docs/searching.js)."""

from __future__ import annotations

from playwright.sync_api import Page, Route, expect

from tests.browser.lab import TOP

FOUND = """<article><nav>Start Questions out</nav><section id="questions"><h1>Questions</h1><p>Short answers about memory.</p>
<section id="stop"><h2>How do I stop a run?<a class="headerlink">#</a></h2><p>Press Stop. Memory is freed.</p></section>
<section id="oom"><span id="older"></span><h2>The GPU is out of memory (OOM)</h2><p>Use a smaller batch.</p></section>
</section></article>"""
SEARCH = """<!DOCTYPE html><ul class="search"><li><a href="/faq.html">Questions</a></li></ul>
<script>{script}</script><script>const Search = {{}};</script>"""
"""Sphinx's own, as far as it matters: a global that is no property of the window, and the item of a page."""


def summary_of(page: Page, typed: str) -> None:
    script = (TOP / "docs" / "searching.js").read_text("utf-8")

    def answer(route: Route) -> None:
        route.fulfill(body=SEARCH.format(script=script), content_type="text/html")

    page.route("http://site.test/**", answer)
    page.goto(f"http://site.test/search.html?q={typed}")
    page.evaluate(
        "page => { const found = Search.makeSearchSummary(page); if (found) document.querySelector('li').append(found); }",
        FOUND,
    )


def test_a_page_that_is_found_leads_to_the_section_that_has_most_of_the_words(blank: Page) -> None:
    summary_of(blank, "out+of+memory")
    expect(blank.locator(".context")).to_have_text("The GPU is out of memory (OOM): Use a smaller batch.")
    expect(blank.locator(".context a")).to_have_attribute("href", "http://site.test/faq.html#oom")

    summary_of(blank, "stopping+(run?")
    expect(blank.locator(".context")).to_have_text("How do I stop a run?: Press Stop. Memory is freed.")

    summary_of(blank, "answer")
    expect(blank.locator(".context")).to_have_text("Short answers about memory.")
    expect(blank.locator(".context a")).to_have_count(0)
