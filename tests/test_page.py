"""The page of `powerinfer serve` in headless Chromium, with a server that answers from a script, and with the real one."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_server
import pytest
from fake_server import FakeServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TIMEOUT_S = 120.0  # of anything, on a machine that does much else
MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny-relu" / "tiny-relu.Q8_0.gguf"
MAX_PAGE_BYTES = 40_000
AA, AA_LARGE = 4.5, 3.0  # WCAG 2's contrast of text, and of large text
# Between neighbours of the colour scale, relative to their mean: 8-bit rounding, and greens just outside sRGB.
MAX_UNEVENNESS = 0.35
OPEN_POLICY_EVENTS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective + " " + event.blockedURI));
"""


def wait_for(condition: Callable[[], Any]) -> None:
    """Polls, because the page's policy forbids what Playwright's wait_for_function does."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.03)


class Opened:
    """The page in a window of its own, with what went wrong in it."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        self.address = address
        self.context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        self.context.set_default_timeout(TIMEOUT_S * 1000)
        self.errors: list[str] = []
        self.expected = "nothing"  # regular expression of console errors that a test provokes
        self.outside: list[str] = []
        self.page: Page = self.context.new_page()
        self.page.add_init_script(OPEN_POLICY_EVENTS)
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}"))
        self.page.on("request", self._note_request)
        self.page.goto(address)

    def _note_request(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:")):
            self.outside.append(request.url)

    def close(self) -> None:
        violations = self.page.evaluate("violations")
        self.context.close()
        assert not violations
        assert not self.outside
        assert not [error for error in self.errors if not re.search(self.expected, error)]

    def ask(self, question: str) -> None:
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")

    def text(self, selector: str) -> str:
        """Text as it is shown, of the last one that matches; "" when there is none or it is hidden."""
        found = self.page.locator(selector).locator("visible=true")
        return found.last.inner_text() if found.count() else ""

    def wait_for_text(self, selector: str, pattern: str) -> None:
        wait_for(lambda: re.search(pattern, self.text(selector).replace("\xa0", " ")))

    def wait_for_answer(self) -> None:
        wait_for(lambda: self.page.evaluate("!running"))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as started:
        yield started


@pytest.fixture
def open_page(browser: Browser, server: FakeServer) -> Iterator[Callable[..., Opened]]:
    """`open_page(**options of a browser context)`; afterwards nothing may have gone wrong in any page."""
    opened = []

    def open_one(**options: Any) -> Opened:
        opened.append(Opened(browser, server.address, **options))
        return opened[-1]

    yield open_one
    for page in opened:
        page.close()


# --- the files ---


def test_page_is_small_and_names_nothing_outside() -> None:
    files = sorted(fake_server.PAGE.iterdir())
    assert [path.name for path in files] == ["index.html", "page.css", "page.js"]
    assert sum(path.stat().st_size for path in files) < MAX_PAGE_BYTES
    text = "".join(path.read_text(encoding="ascii") for path in files)
    assert set(re.findall(r"https?://[^\s'\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)
    html = (fake_server.PAGE / "index.html").read_text(encoding="ascii")
    assert not re.search(r"<style|<script>|\sstyle=|\son\w+=", html)


# --- chat ---


def test_answer_streams_and_is_rendered(open_page: Callable[..., Opened], server: FakeServer) -> None:
    server.delay_s = 0.02
    window = open_page()
    window.ask("What is skipped?")
    window.wait_for_text(".answering .body", "Ten")
    assert "That is all." not in window.text(".body")
    window.wait_for_answer()
    page = window.page
    assert window.text("article.you") == "What is skipped?"
    assert [item.inner_text().split("\n")[0] for item in page.locator(".body > div > ol > li").all()] == [
        "First point with code",
        "Second point",
    ]
    assert page.locator(".body li strong").inner_text() == "First"
    assert page.locator(".body li > code").inner_text() == "code"
    assert page.locator(".body ol ul li").inner_text() == "deeper, \u6b6a \U0001f600"
    assert page.locator(".body .heading").inner_text() == "A heading"
    assert page.locator(".body pre").inner_text() == "def skip(x):\n    return x[x > 0]  # **not bold**"
    n = math.ceil(len(server.answer) / 4)
    assert re.search(rf"{n} tokens, [\d.]+ tokens/s, first after [\d.]+ s", window.text("article footer"))
    page.get_by_role("button", name="Copy").click()
    wait_for(lambda: page.evaluate("navigator.clipboard.readText()") == server.answer)
    assert page.locator("#say").text_content() == f"Answer: {server.answer}"  # once, at the end
    [request] = server.requests
    assert request["stream"] and request["max_tokens"] == 1024 and request["temperature"] == 0.8


def test_settings_and_history_are_sent_and_new_chat_forgets(
    open_page: Callable[..., Opened], server: FakeServer
) -> None:
    server.answer = "Yes."
    window = open_page()
    page = window.page
    page.click("#settings summary")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "")
    page.fill("#system", "Be short.")
    for question in ("One?", "Two?"):
        window.ask(question)
        window.wait_for_answer()
    assert server.requests[1]["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Two?"},
    ]
    assert server.requests[1]["temperature"] == 0 and server.requests[1]["max_tokens"] is None
    page.click("#new")
    assert page.locator("article").count() == 0
    window.ask("Three?")
    window.wait_for_answer()
    assert [message["content"] for message in server.requests[2]["messages"]] == ["Be short.", "Three?"]
    page.fill("#temperature", "7")
    page.click("#settings summary")
    window.ask("Four?")  # refused by the form, which opens to show why
    assert len(server.requests) == 3 and page.locator("#settings").get_attribute("open") is not None


def test_enter_sends_and_shift_enter_begins_a_line(open_page: Callable[..., Opened], server: FakeServer) -> None:
    window = open_page()
    page = window.page
    page.press("#question", "Enter")  # nothing to send
    page.click("#question")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    window.wait_for_answer()
    assert [request["messages"][-1]["content"] for request in server.requests] == ["one\ntwo"]
    assert page.input_value("#question") == ""


def test_answer_is_stopped(open_page: Callable[..., Opened], server: FakeServer) -> None:
    server.delay_s = 0.5  # the whole answer takes longer than any wait for its first word
    window = open_page()
    page = window.page
    ways = (lambda: page.keyboard.press("Escape"), lambda: page.click("#stop"), lambda: page.click("#new"))
    for n, stop in enumerate(ways):
        window.ask(f"Question {n}")
        wait_for(lambda: window.text(".answering .body").startswith("Ten"))
        part = window.text(".body")
        stop()
        window.wait_for_answer()
        wait_for(lambda n=n: server.n_gone == n + 1)
        if page.locator("article").count():
            assert "stopped" in window.text("article footer")
            assert window.text(".body").startswith(part)
    assert page.locator("article").count() == 0
    # What was written before the stop counts as said.
    assert [message["content"][:3] for message in server.requests[1]["messages"]] == ["Que", "Ten", "Que"]


def test_events_are_read_however_they_are_cut(open_page: Callable[..., Opened]) -> None:
    text = ': ping\r\n\r\ndata: {"a": "\u6b6a \U0001f600"}\n\nevent: x\ndata:two\r\ndata: lines\r\n\r\ndata: [DONE]\n\ndata: cut'
    read = """async ([bytes, size]) => {
        const found = [];
        const chunks = [];
        for (let i = 0; i < bytes.length; i += size) chunks.push(new Uint8Array(bytes.slice(i, i + size)));
        const body = new ReadableStream({ start(to) { chunks.forEach((chunk) => to.enqueue(chunk)); to.close(); } });
        for await (const data of eventsOf(body)) found.push(data);
        return found;
    }"""
    page = open_page().page
    for size in (1, 2, 3, 5, 7, 1000):
        found = page.evaluate(read, [list(text.encode()), size])
        assert found == ['{"a": "\u6b6a \U0001f600"}', "two\nlines", "[DONE]"]


def test_answer_cant_become_html(open_page: Callable[..., Opened], server: FakeServer) -> None:
    hostile = [
        '<img src=x onerror="alert(1)"> **<b onclick=alert(2)>x</b>** `<script>alert(3)</script>`',
        "[here](javascript:alert(4)) <a href='javascript:alert(5)'>there</a> ![](http://outside.example/x.png)",
        "- <svg onload=alert(6)>",
        "# <iframe src=javascript:alert(7)>",
        "```html\n<script>alert(8)</script>\n```",
    ]
    server.answer = "\n\n".join(hostile)
    window = open_page()
    window.ask("<img src=x onerror=alert(9)>")
    window.wait_for_answer()
    page = window.page
    assert page.locator("#log :is(img, script, a, svg, iframe, b)").count() == 0
    assert window.text("article.you") == "<img src=x onerror=alert(9)>"
    for part in (
        "<img src=x onerror=",
        "<script>alert(3)</script>",
        "](javascript:alert(4))",
        "<svg",
        "<script>alert(8)",
    ):
        assert part in window.text(".body")
    server.refusal = (400, {"error": {"message": "<img src=x onerror=alert(10)>"}})
    window.expected = "400"
    window.ask("again")
    window.wait_for_text("article .error", "<img src=x")


def test_odd_text_is_rendered_in_time(open_page: Callable[..., Opened]) -> None:
    page = open_page().page
    for odd in (
        "`" * 50_000,
        "` " * 25_000,
        "**a " * 12_000,
        "*" * 50_000,
        " - " * 20_000,
        "- a\n" * 5_000,
        "~~~\n" * 9_999,
    ):
        start = time.monotonic()
        page.evaluate("(text) => render(document.createElement('div'), text)", odd)
        assert time.monotonic() - start < 5, odd[:10]


def test_refusal_is_shown_and_can_be_tried_again(open_page: Callable[..., Opened], server: FakeServer) -> None:
    window = open_page()
    window.expected = "status of (429|400|500|502)"
    for status, body, shown in (
        (400, {"error": {"message": "prompt: 9000 tokens"}}, "^prompt: 9000 tokens$"),
        (500, {"detail": "out of paper"}, "^out of paper$"),
        (502, "", "answered 502"),
        (429, {"error": {"message": "128 requests wait"}}, "^The server is busy. 128 requests wait$"),
    ):
        server.refusal = (status, body)
        window.ask("Hello?")
        window.wait_for_text("article .error", shown)
    n = window.page.locator("article").count()
    server.refusal = None
    window.page.get_by_role("button", name="Try again").last.click()
    window.wait_for_text(".body", "That is all.")
    assert window.page.locator("article").count() == n
    assert [message["content"] for message in server.requests[-1]["messages"]] == ["Hello?"]  # others have no answer


def test_answer_that_ends_early_says_so(open_page: Callable[..., Opened], server: FakeServer) -> None:
    window = open_page()
    server.finish_reason = "length"
    window.ask("Hello?")
    window.wait_for_text("article footer", "ended at the limit of tokens")
    server.breaks_after = 3
    window.ask("Hello?")
    window.wait_for_text("article .error", "the engine failed: out of paper")
    server.breaks_silently = True
    window.ask("Hello?")
    window.wait_for_text("article .error", "ended before the answer did")
    assert window.text(".body").startswith("Ten")


def test_key_is_asked_for_and_kept_for_the_tab(open_page: Callable[..., Opened], server: FakeServer) -> None:
    server.key = "sesame"
    window = open_page()
    window.expected = "401"
    page = window.page
    window.wait_for_text("#state", "API key needed")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    wait_for(lambda: page.locator("#key-form").is_visible() and page.input_value("#key") == "")
    window.ask("Hello?")
    window.wait_for_text("article .error", "wrong API key")
    page.fill("#key", "sesame")
    page.press("#key", "Enter")
    window.wait_for_text("#state", "2 running")
    page.get_by_role("button", name="Try again").click()
    window.wait_for_text(".body", "That is all.")
    page.reload()
    window.wait_for_text("#state", "2 running")
    assert not page.locator("#key-form").is_visible()
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 1]


def test_log_follows_its_end_only_where_the_reader_is_there(
    open_page: Callable[..., Opened], server: FakeServer
) -> None:
    server.answer = "\n\n".join(f"Line {i}" for i in range(60))
    server.delay_s = 0.01
    window = open_page()
    window.ask("Long?")
    at_end = "$('log').scrollHeight - $('log').scrollTop - $('log').clientHeight < 40"
    window.wait_for_text(".body", "Line 40")
    assert window.page.evaluate(at_end)
    window.page.evaluate("$('log').scrollTop = 50")
    window.wait_for_answer()
    assert window.page.evaluate("$('log').scrollTop") == 50


# --- figures ---


def test_figures_are_shown(open_page: Callable[..., Opened], server: FakeServer) -> None:
    window = open_page()
    window.wait_for_text("#state", "2 running")
    shown = {
        "#model": "tiny.gguf",
        "#speed": "42.5",
        "#speed-more": "up to 42.5, prompts 310 tokens/s",
        "#skipped": "61 %",
        "#skipped-more": "12.3 GB of 20.1 GB",
        "#density": "15 %",
        "#candidates": "19 %",
        "#split": "No hot/cold split",
        "#running": "2",
        "#waiting": "1",
        "#finished": "stop 1,200, length 7; refused 3",
        "#modes": "3 layers exact, 27 layers predicted",
        "#kernels": "avx2",
        "#context": "4,096 tokens for each of 4 requests",
        "#slots li:first-child": "generating, 1,024 tokens",
        "#slots": "idle",
    }
    for selector, text in shown.items():
        window.wait_for_text(selector, re.escape(text))


def test_map_shows_layers_over_time(open_page: Callable[..., Opened], server: FakeServer) -> None:
    server.n_hot = [4096 - 100 * i for i in range(30)]
    server.stats["gpu_share"] = 0.7
    window = open_page()
    page = window.page
    wait_for(lambda: page.evaluate("columns.length") >= 3)
    # The newest column is at the right, and each layer there has its colour.
    wait_for(lambda: page.evaluate("columns.at(-1)"))
    seen = page.evaluate("""() => {
        const map = $("map");
        const at = (y) => [...map.getContext("2d").getImageData(map.width - 2, Math.floor((y + 0.5) * map.height / 30), 1, 1).data];
        return [columns.at(-1).map((layer) => layer.density), Array.from({ length: 30 }, (_, y) => at(y))];
    }""")
    bottom, top = (float(window.text(f"#scale-{end}").split("\xa0")[0]) / 100 for end in ("bottom", "top"))
    assert 0 <= bottom <= min(seen[0]) and max(seen[0]) <= top <= 1
    colours = page.evaluate("[...strip.getContext('2d').getImageData(0, 0, 256, 1).data]")
    for density, colour in zip(seen[0], seen[1]):
        i = round((density - bottom) / (top - bottom) * 255)
        assert colour == colours[4 * i : 4 * i + 4]
    window.wait_for_text("#split", "Hot neurons, on a GPU: 32 %.*They are 70 % of the rows")
    assert page.locator("#hot").is_visible()
    box = page.locator("#map").bounding_box()
    page.mouse.move(box["x"] + 50, box["y"] + box["height"] * 4.5 / 30)
    window.wait_for_text("#readout", "Layer 4, predicted: .* % of 8,192 neurons used, .* % candidates; 3,696 hot")
    page.mouse.move(5, 5)
    window.wait_for_text("#readout", "Point at a layer")
    page.focus("#map")
    for key, layer in (("ArrowDown", 1), ("End", 29), ("PageUp", 19), ("Home", 0), ("ArrowUp", 0)):
        page.keyboard.press(key)
        assert window.text("#readout").startswith(f"Layer {layer},")
        assert page.get_attribute("#map", "aria-valuenow") == str(layer)
        assert page.get_attribute("#map", "aria-valuetext").startswith(f"Layer {layer},")
    page.click("text=candidates >> nth=0")
    window.wait_for_text("#scale-top", "100 %")  # layers without a predictor read every gate row
    page.click("#table-box summary")
    window.wait_for_text("#table tr:nth-child(11)", r"10\s+exact\s+8,192\s+[\d.]+ %\s+100 %\s+38 %")
    assert page.locator("#table tr").count() == 30


def test_pause_is_one_empty_column(open_page: Callable[..., Opened], server: FakeServer) -> None:
    window = open_page()
    count = "columns.filter((column) => column === null).length"
    wait_for(lambda: window.page.evaluate("columns.length") >= 1)
    server.is_idle = True
    server.stats["tokens_per_s"] = 0.0
    window.wait_for_text("#speed", "^0$")
    n = server.n_polls
    wait_for(lambda: server.n_polls > n + 2)
    assert window.page.evaluate(count) == 1


def test_model_without_a_plan_says_how_to_make_one(open_page: Callable[..., Opened], server: FakeServer) -> None:
    server.has_plan = False
    server.stats["read_bytes"] = server.stats["dense_bytes"] = 0
    window = open_page()
    window.wait_for_text("#no-plan", r"no plan[\s\S]*powerinfer profile tiny.gguf --text text.txt")
    for selector in ("#layers", "#bytes"):
        assert not window.page.locator(selector).is_visible()
    assert window.page.locator("#sparsity").is_disabled()


def test_sparsity_is_chosen(open_page: Callable[..., Opened], server: FakeServer) -> None:
    window = open_page()
    window.wait_for_text("#state", "running")
    window.expected = "400"
    window.page.select_option("#sparsity", "exact")
    wait_for(lambda: server.stats["sparsity"] == "exact")
    window.page.select_option("#sparsity", "predicted")
    window.wait_for_text("#sparsity-error", "tiny.gguf: no predictors")
    wait_for(lambda: window.page.input_value("#sparsity") == "exact")  # figures asked for before may still arrive
    server.stats["sparsity"] = "dense"  # somebody else
    wait_for(lambda: window.page.input_value("#sparsity") == "dense")


def test_server_that_goes_away_leaves_no_stale_figures(open_page: Callable[..., Opened], server: FakeServer) -> None:
    window = open_page()
    window.expected = "ERR_|502"
    window.wait_for_text("#state", "running")
    server.stop()
    window.wait_for_text("#state", "server not reachable")
    assert window.text("#figures") == "" and window.text("#trouble")
    window.ask("Hello?")
    window.wait_for_text("article .error", "not reachable")
    server.start()
    window.wait_for_text("#state", "running")
    assert window.text("#trouble") == "" and window.text("#speed") == "42.5"


def test_hidden_tab_asks_rarely(open_page: Callable[..., Opened], server: FakeServer) -> None:
    window = open_page()
    window.wait_for_text("#state", "running")
    window.page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    n = server.n_polls
    wait_for(lambda: server.n_polls > n)  # the poll that finds out
    time.sleep(1.2)
    assert server.n_polls <= n + 2
    n = server.n_polls
    window.page.evaluate(
        "delete document.hidden; document.dispatchEvent(new Event('visibilitychange', { bubbles: true }))"
    )
    wait_for(lambda: server.n_polls > n + 1)


# --- the real server ---


@pytest.fixture
def real_server() -> Iterator[str]:
    """The address of a `powerinfer serve` with tiny-relu and its plan."""
    command = [sys.executable, "-m", "powerinfer_py.cli", "serve", str(MODEL), "--port", "0", "-np", "2", "-c", "512"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            found = next(filter(None, (re.match(r"listening on (http://\S+)", line) for line in process.stdout)), None)
            assert found, f"powerinfer serve ended with {process.wait()}"
            yield found[1] + "/"
        finally:
            process.terminate()


def test_real_server_answers_and_shows_what_it_skipped(browser: Browser, real_server: str) -> None:
    window = Opened(browser, real_server)
    window.wait_for_text("#state", "idle")
    assert window.text("#skipped-more") == "nothing computed yet"
    window.page.click("#settings summary")
    window.page.fill("#max-tokens", "100")
    window.ask("What is a list?")
    window.wait_for_text("article footer", r"ended at the limit of tokens, 100 tokens, [\d.]+ tokens/s")
    assert len(window.text(".body")) > 100
    window.wait_for_text("#finished", "length 1; refused 0")
    wait_for(lambda: window.page.evaluate("columns.some((column) => column?.length === 6)"))
    assert float(window.text("#skipped").split("\xa0")[0]) > 70
    assert float(window.text("#density").split("\xa0")[0]) < 20
    window.page.select_option("#sparsity", "dense")
    window.page.fill("#max-tokens", "")  # to the end of the context
    window.ask("Go on.")
    window.wait_for_text("#modes", "6 layers dense")
    window.wait_for_text("#finished", "length 2; refused 0")
    window.expected = "status of 400"
    window.ask("much " * 600)
    window.wait_for_text("article .error", "prompt: .* tokens; expected")
    window.close()


# --- looks ---

CONTRASTS = """() => {
    const channel = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const luminance = ([r, g, b]) => 0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
    const back = (node) => {
        for (; node; node = node.parentElement) {
            const colour = parse(getComputedStyle(node).backgroundColor);
            if (colour.length === 3) return colour;
        }
    };
    const found = [];
    for (const node of document.querySelectorAll("body *")) {
        const own = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
        if (!(own || node.placeholder) || !node.checkVisibility() || node.matches(":disabled, option, noscript")) continue;
        const style = getComputedStyle(node, node.placeholder && !node.value ? "::placeholder" : null);
        const [a, b] = [luminance(parse(style.color)), luminance(back(node))].sort((x, y) => y - x);
        const isLarge = parseFloat(style.fontSize) >= 24;
        found.push([node.tagName + "#" + node.id + "." + node.className, (a + 0.05) / (b + 0.05), isLarge]);
    }
    return found;
}"""


@pytest.mark.parametrize("width", [1280, 320])
def test_text_can_be_read(open_page: Callable[..., Opened], server: FakeServer, width: int) -> None:
    """In both themes and in a narrow window: contrast, nothing wider than the window, everything reachable by Tab."""
    server.n_hot = [100] * 30
    window = open_page(viewport={"width": width, "height": 640}, reduced_motion="reduce")
    page = window.page
    window.ask("Why " + "very" * 30 + " long?")
    window.wait_for_answer()
    server.refusal = (429, {"error": {"message": "later"}})
    window.expected = "429"
    window.ask("Again?")
    window.wait_for_text("article .error", "busy")
    page.click("#settings summary")
    for side in ("chat", "engine"):
        if width == 320 and side == "engine":
            page.click("#switch")
        wait_for(lambda: page.locator("#figures").is_visible() or width == 320)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", background))) > 384) == (scheme == "light")
            found = page.evaluate(CONTRASTS)
            assert len(found) > (8 if side == "chat" and width == 320 else 20)
            assert not [(name, ratio) for name, ratio, is_large in found if ratio < (AA_LARGE if is_large else AA)]
        for selector in ("html", "#log", "#ask", "#engine"):
            widths = f"[document.querySelector('{selector}')].flatMap((e) => [e.scrollWidth, e.clientWidth])"
            scroll_width, client_width = page.evaluate(widths)
            assert scroll_width <= client_width, selector
    assert page.evaluate("document.getAnimations().length") == 0
    names = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        names.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    wanted = (
        {"map", "sparsity"} if width == 320 else {"question", "send", "new", "temperature", "system", "map", "sparsity"}
    )
    assert wanted <= names


def test_colour_scale_is_even(open_page: Callable[..., Opened]) -> None:
    """Steps of equal size in OKLab, and lightness alone, which all eyes see, tells them apart."""
    page = open_page().page
    pixels = None
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # the page hears of it a little later
        old, read = pixels, "[...strip.getContext('2d').getImageData(0, 0, 256, 1).data]"
        wait_for(lambda old=old, read=read: page.evaluate(read) != old)
        pixels = page.evaluate(read)
        labs = [oklab(*pixels[i : i + 3]) for i in range(0, 1024, 4)][::15]
        steps = [math.dist(a, b) for a, b in zip(labs, labs[1:])]
        mean = sum(steps) / len(steps)
        assert max(abs(step / mean - 1) for step in steps) < MAX_UNEVENNESS
        lightness = [lab[0] for lab in labs]
        assert sorted(lightness, reverse=scheme == "light") == lightness
        assert abs(lightness[-1] - lightness[0]) > 0.6


def oklab(*rgb: int) -> tuple[float, float, float]:
    """An sRGB colour of 0..255 as (L, a, b). Source: Ottosson, "A perceptual color space for image processing"."""
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (v / 255 for v in rgb))
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )
