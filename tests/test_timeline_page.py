"""The page that shows a recording: what it says is what was counted, and it does what it says."""

import json
import os
import re
import shutil
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch

from hf_specbranch import SpecBranchConfig, load_demo_pair, specbranch
from hf_specbranch.timeline import record, timeline_page
from hf_specbranch.timeline.page import FOLDER

HOSTILE = "x = '</script><script>window.broken = 1</script><img src=x onerror=\"window.broken = 2\">'\ndef add(a, b):"


@pytest.fixture(scope="module")
def both():
    """Two recordings of one text, by a draft that is often wrong."""
    target, draft, tokenizer = load_demo_pair("weak")
    model = specbranch(target, draft)
    return [
        record(
            model, tokenizer, HOSTILE, specbranch=SpecBranchConfig(policy=policy), max_new_tokens=24, do_sample=False
        )
        for policy in ("specbranch", "vanilla")
    ]


def test_nothing_in_a_prompt_can_end_the_script_that_holds_it(both):
    page = timeline_page(both)
    assert page.count("</script") == timeline_page([]).count("</script") == 2
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert [run["prompt"] for run in data["runs"]] == [HOSTILE, HOSTILE]


def test_the_page_needs_nothing_from_elsewhere(both):
    page = timeline_page(both)
    assert not re.search(r"https?://|@import|url\(|\bfetch\(|XMLHttpRequest", page)
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]


def linear(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return torch.tensor([p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts])


def perceived(rgb):
    """CIE L*a*b* of linear sRGB."""
    to_xyz = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = (to_xyz @ rgb.clamp(0, 1) / torch.tensor([0.9505, 1.0, 1.089])).clamp(min=1e-6) ** (1 / 3)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


SIGHT = {  # what dichromats see of linear sRGB (Machado, Oliveira and Fernandes 2009, severity 1)
    "all cones": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", (0, 1), ids=("light", "dark"))
def test_the_three_fates_differ_to_colour_blind_eyes(theme, sight):
    style = (FOLDER / "timeline.css").read_text()
    colours = [re.findall(rf"--{name}: (#\w{{6}})", style)[theme] for name in ("accepted", "rolled", "wasted")]
    seen = [perceived(torch.tensor(SIGHT[sight]) @ linear(colour)) for colour in colours]
    assert min(float((a - b).norm()) for a, b in combinations(seen, 2)) > 25  # 2.3 is just noticeable


# ---- in a browser


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium: the system's, or the one that playwright has downloaded."""
    driver = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'hf_specbranch[browser]'")
    with driver.sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        found = next(filter(None, map(shutil.which, names)), playwright.chromium.executable_path)
        if not Path(found).exists():
            pytest.skip("no Chromium: install the system's package, or run `playwright install chromium`")
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(both, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "timeline.html"
    path.write_text(timeline_page(both), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tab(chromium):
    return chromium.new_page()


@pytest.fixture
def opened(tab, page_file):
    """Opens the page; at the end nothing may have been logged and nothing asked of the network."""
    said, asked = [], []
    listeners = {
        "console": lambda message: said.append(message.text),
        "pageerror": lambda error: said.append(str(error)),
        "request": lambda request: asked.append(request.url),
    }

    def open_page(width=1280, scheme="light"):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme=scheme)
        for event, note in listeners.items():
            tab.on(event, note)
        tab.goto(page_file.as_uri())
        tab.wait_for_function("document.querySelector('.axis .track').children.length > 0")
        return tab

    yield open_page
    for event, note in listeners.items():
        tab.remove_listener(event, note)
    assert said == [] and {url for url in asked if not url.startswith("data:")} == {page_file.as_uri()}


def settled(page):
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def shown_time(page):
    """The first and the last label of the axis, and the share of the recording that is shown."""
    settled(page)
    return page.locator(".axis").first.inner_text(), page.locator("#frame").evaluate("(frame) => frame.style.cssText")


def test_numbers_on_the_page_are_those_of_the_statistics(opened, both):
    page = opened()
    for place, recording in enumerate(both):
        shown = page.locator(".run").nth(place)
        stats = recording.stats.to_dict()
        read = "(all) => Object.fromEntries(all.map((each) => [each.dataset.stat, each.textContent]))"
        numbers = shown.locator("[data-stat]").evaluate_all(read)
        for name, said in numbers.items():
            value = stats[name]
            if said.endswith("%"):
                assert said == f"{value:.1%}"
            else:
                assert float(said) == pytest.approx(value, abs=0 if isinstance(value, int) else 0.05)
        assert set(numbers) >= {
            "new_tokens",
            "target_forwards",
            "mean_acceptance_length",
            "rollback_rate",
            "branch_hit_rate",
        }
        assert set(numbers) >= {"wasted_branch_tokens", "tokens_per_second", "rollback_tokens"}


def test_cells_and_text_on_the_page_are_what_was_recorded(opened, both):
    page = opened()
    for place, recording in enumerate(both):
        shown = page.locator(".run").nth(place)
        assert shown.locator(".token").count() == recording.stats.new_tokens
        drafting = shown.locator(".lane:not(.axis):not(.waits)").nth(1), shown.locator(".lane").nth(3)
        for name, fate in (("accepted", "accepted"), ("rolled", "rolled back"), ("wasted", "wasted")):
            assert sum(lane.locator(f".cell.{name}").count() for lane in drafting) == recording.fates()[fate]
        assert shown.locator(".given").inner_text() == HOSTILE
    assert page.evaluate("window.broken") is None


def test_pointing_at_a_token_of_the_text_marks_its_cells_and_the_other_way_round(opened, both):
    page = opened()
    run, recording = page.locator(".run").first, both[0]
    place = next(i for i, token in enumerate(recording.committed) if token.drafted is not None)
    drafted = recording.committed[place].drafted
    run.locator(".token").nth(place).hover()
    marked = {each.get_attribute("data-key") for each in run.locator(".linked").all()}
    assert marked == {f"c{place}", f"d{drafted}"}
    assert f"token {place + 1} of {recording.stats.new_tokens}" in run.locator(".detail").inner_text()
    page.locator("h1").hover()
    assert run.locator(".linked").count() == 0
    run.locator(f".cell[data-key=d{drafted}]:visible").first.hover()
    assert "linked" in run.locator(".token").nth(place).get_attribute("class")
    assert "accepted by the verify result" in run.locator(".detail").inner_text()


def test_a_click_pins_and_brings_both_into_view_until_escape(opened, both):
    page = opened()
    run, last = page.locator(".run").first, both[0].stats.new_tokens - 1
    before = shown_time(page)
    run.locator(".token").nth(last).click()
    assert shown_time(page) != before  # the end of the text is at the end of the time
    assert "pinned" in run.locator(".token").nth(last).get_attribute("class")
    page.locator("h1").hover()
    assert run.locator(".token.pinned").count() == 1
    page.keyboard.press("Escape")
    assert run.locator(".pinned").count() == 0


def test_a_click_on_a_cell_pins_it_and_scrolls_the_text_there(opened, both):
    page = opened()
    run, last = page.locator(".run").first, both[0].stats.new_tokens - 1
    page.locator("[data-do=all]").click()
    settled(page)
    run.locator(".text").evaluate("(box) => { box.style.maxHeight = '60px'; box.scrollTop = 0; }")
    key = f"c{last}" if both[0].committed[last].drafted is None else f"d{both[0].committed[last].drafted}"
    run.locator(f".cell[data-key={key}]:visible").last.click()
    assert run.locator(".text").evaluate("(box) => box.scrollTop") > 0
    assert "pinned" in run.locator(".token").nth(last).get_attribute("class")


def test_keys_in_the_text_go_from_token_to_token_and_enter_pins(opened):
    page = opened()
    run = page.locator(".run").first
    run.locator(".token").first.focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert "pinned" in run.locator(".token").nth(2).get_attribute("class")


@pytest.mark.parametrize("how", ("buttons", "keys", "mouse"))
def test_zoom_and_pan(opened, how):
    page = opened()
    lanes = page.locator(".lanes").first
    box = lanes.bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] - 6

    def drag():
        page.mouse.move(*middle)
        page.mouse.down()
        page.mouse.move(middle[0] - 200, middle[1], steps=4)
        page.mouse.up()

    def scroll(by):
        page.mouse.move(*middle)
        page.mouse.wheel(0, by)

    ways = {
        "buttons": [lambda name=name: page.locator(f"[data-do={name}]").click() for name in ("in", "right", "out")],
        "keys": [lambda key=key: lanes.press(key) for key in ("+", "ArrowRight", "-")],
        "mouse": [lambda: scroll(-200), drag, lambda: scroll(150)],
    }
    seen = [shown_time(page)]
    for act in ways[how]:
        act()
        page.wait_for_function(
            "(before) => document.getElementById('frame').style.cssText !== before", arg=seen[-1][1], timeout=5000
        )
        seen.append(shown_time(page))
    assert all(before[0] != after[0] for before, after in pairwise(seen))
    lanes.press("0")
    assert "width: 100%" in shown_time(page)[1]
    passes = ".block:not(.wait)"  # waits of less than a pixel are not drawn
    assert page.locator(f"{passes}:visible").count() == page.locator(passes).count()


def test_first_view_of_looked_up_drafts_shows_whole_passes(tab, tmp_path):
    """A lookup takes almost no time, and must not decide how much time is shown."""
    target, _, tokenizer = load_demo_pair("weak")
    prompt = "a = [1, 2, 3, 4, 5, 6]\na = [1, 2, 3, 4, 5, 6]\na ="
    found = record(specbranch(target, draft="lookup"), tokenizer, prompt, max_new_tokens=16, do_sample=False)
    assert found.stats.num_draft_tokens > 0 and found.stats.draft_forwards == 0
    path = tmp_path / "timeline.html"
    path.write_text(timeline_page([found]), encoding="utf-8")
    tab.goto(path.as_uri())
    settled(tab)
    assert tab.locator(".lane:not(.axis) .block:visible .cell.own").count() > 1
    assert tab.locator(".waits").count() == 0


def test_both_runs_share_one_scale_of_time(opened):
    page = opened()
    page.locator("[data-do=in]").click()
    settled(page)
    first, second = (page.locator(".axis").nth(place).inner_text() for place in (0, 1))
    assert first == second


@pytest.mark.parametrize("width", (1280, 390))
@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_the_page_fits_its_window_and_follows_the_scheme(opened, width, scheme):
    page = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    theme = page.locator("html").get_attribute("data-theme")
    assert theme == scheme
    edges = "(all) => all.map((each) => each.getBoundingClientRect()).map((box) => [box.left, box.right])"
    for left, right in page.locator("button, dd, h2, .label").evaluate_all(edges):
        assert 0 <= left and right <= width
    page.locator("#theme").click()
    assert page.locator("html").get_attribute("data-theme") != scheme
