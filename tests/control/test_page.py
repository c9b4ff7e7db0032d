"""The web page in a real Chromium, with a real daemon and real agents."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

import kvxfer
from kvxfer.control import Client, schema
from tests.control.serving import Program, program

pytest.importorskip("selenium", reason="selenium is not installed")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.control.browser import BOUND_S, Page, browser, missing
from tests.waiting import until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())}"),
]

FOLDER = Path(kvxfer.__file__).parent / "control/web"
MOST_NBYTES = 100 * 1024
HOSTILE = "<img src=x onerror=document.title='owned'>"
SHAPE = (4, 2, 64, 16, 2, 8)  # [layers, keys and values, blocks, tokens, heads, dims]
# Contrast of text with its background: https://www.w3.org/TR/WCAG22/#contrast-minimum
LEAST_CONTRAST = 4.5


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as found:
        yield found


@dataclass
class Pair:
    """Two attached agents; the name of one is hostile HTML."""

    source: kvxfer.Agent
    destination: kvxfer.Agent
    region: kvxfer.Region
    remote: kvxfer.RegionDescriptor

    def write(self, context: str, *, hold: bool = False) -> kvxfer.Transfer:
        blocks = [1, 2]
        return self.source.write(
            self.region, self.remote, blocks, blocks, context=context, timeout_s=BOUND_S, hold=hold
        )


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Program]:
    with program(tmp_path, "--pool-gib", "0.02", agent=True) as found:
        yield found


@pytest.fixture
def pair(daemon: Program) -> Iterator[Pair]:
    options = kvxfer.AgentOptions(
        daemon=str(daemon.folder / "run"), daemon_may=("show", "drain", "move", "grant")
    )
    with kvxfer.Agent("prefill-0", options) as source, kvxfer.Agent(HOSTILE, options) as destination:
        memory = [np.zeros(SHAPE, np.float16) for _ in range(2)]
        regions = [
            agent.register("kv", each, kvxfer.KVLayout.from_tensor(each, axes="l2bthd"))
            for agent, each in zip((source, destination), memory, strict=True)
        ]
        peer = source.connect_blocking(destination.address)
        regions[1].grant(destination.accept_blocking(), mode="write", ttl_s=600)
        remote = peer.region_blocking("kv", BOUND_S)
        with Client(daemon.folder / "run") as client:
            # A transfer that ends before its agent is attached is not reported.
            until(lambda: len(list(client.regions())) == 2, "the agents are not attached")
        yield Pair(source, destination, regions[0], remote)


@pytest.mark.smoke
def test_a_transfer_is_shown_while_it_runs_and_when_it_has_ended(
    page: Page, daemon: Program, pair: Pair
) -> None:
    page.open(daemon.url, daemon.token)
    held = pair.write("req-held", hold=True)
    row = page.row("open", "req-held")
    assert "prefill-0: kv" in row
    assert "0 B of" in row
    assert page.text("total-open") == "1"
    held.mark_ready(SHAPE[0])
    held.wait(BOUND_S)
    row = page.row("ended", "req-held")
    assert "done" in row
    page.until(lambda: "req-held" not in "".join(page.rows("open")), "it is still shown as in flight")
    # Its stages, as an image with a label, and in full in a dialog.
    assert page.all("#ended-rows svg[aria-label*='source: '][aria-label*='destination: ']")
    page.activate(page.all("#ended-rows button")[0])
    page.until(lambda: page.element("detail").is_displayed(), "the dialog is not shown")
    words = page.text("detail-body")
    assert "First piece after" in words
    assert "req-held" in words
    page.press(Keys.ESCAPE)
    page.until(lambda: not page.element("detail").is_displayed(), "the dialog stays")


def test_a_request_s_way_is_shown_and_saved(page: Page, daemon: Program, pair: Pair, tmp_path: Path) -> None:
    page.open(daemon.url, daemon.token)
    pair.write("req-way").wait(BOUND_S)
    page.row("ended", "req-way")
    page.activate(page.all("#ended-rows button")[0])
    page.until(lambda: page.element("detail").is_displayed(), "the dialog is not shown")
    page.activate(page.all("#detail-body button")[0])
    page.until(lambda: page.text("detail-title") == "Request req-way", "its way is not shown")
    words = page.text("detail-body")
    assert "pages move" in words
    assert HOSTILE in words
    assert len(page.all("#detail-body tbody tr")) >= 4
    assert page.all("#detail-body tbody svg .moves")
    page.script("URL.createObjectURL = (blob) => (window.saved = blob, 'blob:none')")
    page.activate(page.all("#detail-body button")[0])
    page.until(lambda: page.script("return window.saved ? window.saved.size : 0") > 500, "nothing is saved")
    page.press(Keys.ESCAPE)
    # For an unknown request the page says so.
    page.element("context").send_keys("req-unknown")
    page.activate(page.element("way"))
    page.until(lambda: "is not known (any more)" in page.text("said"), "it is not said")


def test_cancel_cancels_a_transfer_that_runs(page: Page, daemon: Program, pair: Pair) -> None:
    page.open(daemon.url, daemon.token)
    held = pair.write("req-unwanted", hold=True)
    page.row("open", "req-unwanted")
    # By keyboard alone.
    page.script("arguments[0].focus()", page.all("#open-rows button.danger")[0])
    page.press(Keys.ENTER)
    with pytest.raises(kvxfer.TransferError) as caught:
        held.wait(BOUND_S)
    assert caught.value.code == "cancelled"
    page.until(lambda: "is cancelled" in page.text("said"), "the page does not say so")
    assert "cancelled" in page.row("ended", "req-unwanted")
    page.until(lambda: not page.rows("open"), "it is still shown as in flight")


def test_what_agents_call_themselves_is_text(page: Page, daemon: Program, pair: Pair) -> None:
    page.open(daemon.url, daemon.token)
    hostile = "<script>document.title='owned'</script>"
    pair.write(hostile).wait(BOUND_S)
    page.row("ended", hostile)
    page.row("agent", HOSTILE)
    page.row("link", HOSTILE)
    page.row("lease", HOSTILE)
    assert page.all("img, body script, main script") == []
    assert "owned" not in page.driver.title


def test_the_page_outlives_its_daemon(page: Page, tmp_path: Path) -> None:
    with program(tmp_path, agent=True) as first:
        port = str(urlsplit(first.url).port)
        page.open(first.url, first.token)
        page.row("agent", "daemon/node-a")
        first.end(signal.SIGKILL)
        page.until(lambda: "does not answer" in page.text("connection"), "the page does not say so")
        with program(tmp_path, "--listen", f"127.0.0.1:{port}", agent=True) as second:
            page.until(lambda: "was restarted" in page.text("connection"), "the page stays away")
            assert second.url == first.url
            page.row("agent", f"{second.process.pid} on ")
            before = f"{first.process.pid} on "
            page.until(lambda: before not in "".join(page.rows("agent")), "what is gone is still shown")
            with Client(tmp_path / "run") as client:
                client.begin_drain(deadline_s=60)
            # Events come as before.
            page.until(lambda: "ready to stop" in page.text("drain-state"), "no event came")


def test_every_control_is_reached_by_keyboard_and_shows_it(page: Page, daemon: Program, pair: Pair) -> None:
    page.open(daemon.url, daemon.token)
    held = pair.write("req-held", hold=True)
    page.row("open", "req-held")
    page.until(lambda: page.element("drain-begin").is_displayed(), "the page is not whole")
    page.activate(page.element("hold"))  # new rows would move the focus
    wanted = set(
        page.script(
            """window.numbers = new Map();
            const all = document.querySelectorAll('a[href], button, input, select, [tabindex="0"]');
            for (const each of all)
              if (each.checkVisibility() && !each.disabled) window.numbers.set(each, window.numbers.size);
            return Array.from(window.numbers.values());"""
        )
    )
    page.script("document.activeElement.blur(); window.scrollTo(0, 0)")
    reached = set()
    for _ in range(2 * len(wanted) + 10):
        page.press(Keys.TAB)
        number, outline = page.script(
            """const at = document.activeElement;
            return [window.numbers.get(at) ?? null, getComputedStyle(at).outlineStyle]"""
        )
        if number is not None:
            assert outline == "solid", f"control {number} does not show its focus"
            reached.add(number)
        if reached == wanted:
            break
    assert reached == wanted
    assert len(wanted) > 15
    held.cancel()


def test_controls_and_tables_have_names(page: Page, daemon: Program, pair: Pair) -> None:
    page.open(daemon.url, daemon.token)
    page.row("agent", HOSTILE)
    for table in page.all("main table"):
        assert table.find_elements(By.TAG_NAME, "caption")[0].get_attribute("textContent")
    for control in page.all("a, button, input, select"):
        if control.is_displayed():
            assert control.accessible_name, control.get_attribute("outerHTML")
    roles = {each.aria_role for each in page.all("header, nav, main, #search")}
    assert {"banner", "navigation", "main", "search"} <= roles
    for section in page.all("main section"):
        assert section.accessible_name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(
    page: Page, daemon: Program, pair: Pair, scheme: str, tmp_path: Path
) -> None:
    page.wear(scheme)
    page.open(daemon.url, daemon.token)
    held = pair.write("req-held", hold=True)
    page.row("open", "req-held")
    worst = page.script(
        """const light = (text) => {
          const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((n) => {
            const part = n / 255;
            return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
          });
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const groundOf = (node) => {
          for (; node; node = node.parentElement) {
            const color = getComputedStyle(node).backgroundColor;
            if (!/, 0\\)$/.test(color) && color !== "transparent") return color;
          }
          return "rgb(255, 255, 255)";
        };
        let worst = [99, ""];
        for (const node of document.querySelectorAll("body *")) {
          const own = Array.from(node.childNodes).some((c) => c.nodeType === 3 && c.data.trim());
          if (!own || !node.checkVisibility()) continue;
          const [a, b] = [light(getComputedStyle(node).color), light(groundOf(node))];
          const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
          if (ratio < worst[0]) worst = [ratio, node.outerHTML.slice(0, 200)];
        }
        return worst;"""
    )
    assert worst[0] >= LEAST_CONTRAST, worst
    if folder := os.environ.get("KVXFER_SCREENSHOTS"):
        page.driver.save_screenshot(f"{folder}/page-{scheme}.png")
    held.cancel()
    page.wear("")


def test_a_request_is_found_by_its_id(page: Page, daemon: Program, pair: Pair) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for context in ("req-1", "req-2", trace):
        pair.write(context).wait(BOUND_S)
    page.open(daemon.url, daemon.token)
    page.until(lambda: len(page.rows("ended")) == 3, "not all of them are shown")

    def only(context: str) -> bool:
        return [context in row for row in page.rows("ended")] == [True]

    for context, asked in (("req-2", "req-2"), (trace, trace.split("-")[1])):
        page.element("context").clear()
        page.element("context").send_keys(asked, Keys.ENTER)
        page.until(
            partial(only, context),
            f"{context} alone is not shown",
        )
    page.activate(page.element("clear"))
    page.until(lambda: len(page.rows("ended")) == 3, "not all of them are shown again")


def test_a_node_is_drained_once_that_is_confirmed(page: Page, daemon: Program) -> None:
    page.open(daemon.url, daemon.token)
    page.until(lambda: page.text("drain-state") == "The node accepts work.", "the state is not shown")
    page.activate(page.element("drain-begin"))
    page.press(Keys.ENTER)  # the focus is on "No"
    assert "accepts work" in page.text("drain-state")
    page.activate(page.element("drain-begin"))
    page.press(Keys.TAB)
    page.press(Keys.ENTER)
    page.until(lambda: "ready to stop" in page.text("drain-state"), "it is not drained")
    page.activate(page.element("drain-end"))
    page.until(lambda: page.text("drain-state") == "The node accepts work.", "the drain is not taken back")


def test_who_may_only_read_gets_no_controls(page: Page, daemon: Program, pair: Pair) -> None:
    with Client(daemon.folder / "run") as client:
        reader = client.create_token(schema.TokenRequest(name="eyes", role="read"))
    assert reader.secret is not None
    page.open(daemon.url, reader.secret)
    held = pair.write("req-held", hold=True)
    page.row("open", "req-held")
    assert page.all("#open-rows button.danger") == []
    assert not page.element("drain-begin").is_displayed()
    with Client(daemon.folder / "run") as client:
        client.revoke_token(reader.id)
    # The token's stream ends, and the page asks for another token.
    page.until(lambda: page.element("sign-in").is_displayed(), "it shows what it may not see")
    assert not page.element("main").is_displayed()
    held.cancel()


def test_a_wrong_token_is_refused_in_words_and_kept_nowhere(page: Page, daemon: Program) -> None:
    page.driver.get(daemon.url)
    page.script("sessionStorage.clear(); localStorage.clear()")
    page.driver.get(daemon.url)
    page.sign_in("kvx_0_wrong")
    page.until(lambda: "not valid" in page.text("sign-in-error"), "it does not say so")
    page.sign_in(daemon.token)
    page.until(lambda: page.text("connection") == "Live", "the right one is not taken")
    assert daemon.token not in page.driver.page_source
    assert page.script("return [localStorage.length, document.cookie]") == [0, ""]
    page.activate(page.element("sign-out"))
    page.until(page.element("sign-in").is_displayed, "the token is not forgotten")
    assert page.script("return sessionStorage.length") == 0


def test_nothing_comes_from_elsewhere(page: Page, daemon: Program) -> None:
    page.log()
    page.open(daemon.url, daemon.token)
    page.row("agent", "daemon/node-a")
    asked = page.script("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert asked
    assert all(url.startswith(f"{daemon.url}/") for url in asked)
    # The browser logs violations of the policy, and failing scripts, there.
    said = [each["message"] for each in page.log() if "401" not in each["message"]]
    assert said == []
    # Injected code does not run.
    page.script(
        """const made = document.createElement("script");
        made.textContent = "document.title = 'owned'";
        document.body.append(made);
        document.body.insertAdjacentHTML("beforeend", "<img src=x onerror=\\"document.title='owned'\\">");"""
    )
    page.until(
        lambda: any("Content Security Policy" in each["message"] for each in page.log()),
        "the policy is not said to be broken",
    )
    assert "owned" not in page.driver.title


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MOST_NBYTES
