"""The pictures of README and docs show what the pages of today show."""

from __future__ import annotations

from dataclasses import replace

import pytest
from playwright.sync_api import Browser

from tests.browser.lab import Server
from tests.browser.pictures import SCENES, Scene, Shown, differences, outdated


@pytest.mark.timeout(300)  # a page with many cells, on a machine that does other work
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_pictures_show_what_the_page_shows(scene: Scene, browser: Browser, server: Server) -> None:
    found = [each for view in scene(browser, server) for each in outdated(view)]
    server.end_kernels()
    assert found == []


def test_a_picture_with_another_button_or_without_a_part_is_outdated() -> None:
    shown = Shown(code=["%%distributed"], words=["Stop"], parts=["jd-head"])
    assert differences(shown, shown) == []
    assert differences(replace(shown, words=["Halt"]), shown)[0].startswith("words are new: ['Stop'], gone: ['Halt']")
    assert differences(replace(shown, parts=[]), shown)[0].startswith("parts are new: ['jd-head'], gone: []")
