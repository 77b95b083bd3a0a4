"""What the playground page shows of errors, of a request in progress and of a server that is down.

The server is scripted. See `tests.support.playground`.
"""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.gateway import running_gateway
from tests.support.images import file_of
from tests.support.playground import fill, opened_page
from tests.support.scripted_gateway import ACCEPTED, DESCRIPTION, DONE, IMAGE, lines
from tests.support.scripted_server import Answer, ScriptedServer

KEY = "sk-0123456789abcdef"
DESCRIBED: dict[str, Any] = DESCRIPTION | {
    "runtime": "eager", "device": "CPU", "native_size": [256, 256],
    "sizes": {"min": 64, "max": 1024, "multiple": 32}, "image_sizes": {"min": 64, "max": 1024, "multiple": 32},
    "has_refiner": False, "samplers": ["Euler", "LCM"], "safety": "off", "loras": ["style", "ink"],
    "controlnets": {"edges": 0, "union": 6}, "ip_adapters": {"face": 4},
    "defaults": {"num_inference_steps": 4, "guidance_scale": 3, "scheduler": "Euler", "use_refiner": False},
    "limits": {"images": 8, "steps": 100, "guidance": 30, "prompt_characters": 4000},
}  # fmt: skip
PICTURE = file_of(np.full((64, 64, 3), 90, np.uint8))


class ToyServer(ScriptedServer):
    """A deployed model that describes itself, and answers all other requests with `answer`, a test's choice."""

    def __init__(self) -> None:
        self.answer = stream()
        self.requests: list[dict[str, Any]] = []
        super().__init__(self._script)

    def _script(self, _: int, request: dict[str, Any]) -> Answer:
        if request.get("describe"):
            return lines(DESCRIBED)
        self.requests.append(request)
        return self.answer


def image(index: int) -> dict[str, Any]:
    return IMAGE | {"index": index, "seed": 7 + index, "data": PICTURE}


def stream(*events: dict[str, Any] | Callable[[], object]) -> Answer:
    """An accepted request. A function among the events is called before the next one is sent."""

    def parts() -> Iterator[bytes]:
        for event in (ACCEPTED | {"seed": 7, "steps": 8}, *events):
            if callable(event):
                event()
            else:
                yield json.dumps(event).encode() + b"\n"

    return Answer(200, parts())


def refusal(status: int, field: str | None, error: str, kind: str = "refused", **headers: str) -> Answer:
    body = {"error": error, "kind": kind, **({"field": field} if field else {})}
    return Answer(status, json.dumps(body).encode(), {name.replace("_", "-"): value for name, value in headers.items()})


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[ToyServer, str]]:
    with ToyServer() as server, running_gateway([server.url]) as url:
        yield server, url


@pytest.fixture
def server(running: tuple[ToyServer, str]) -> ToyServer:
    return running[0]


@pytest.fixture
def page(browser: Browser, running: tuple[ToyServer, str]) -> Iterator[Page]:
    with opened_page(browser, running[1], "toy/1") as page:
        fill(page, prompt="a red circle")
        yield page


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.new("RGB", (800, 500), "navy").save(path)
    return path


@pytest.fixture(scope="module")
def full_page(browser: Browser, running: tuple[ToyServer, str], photo: Path) -> Iterator[Page]:
    """A page that several cases use one after the other, with an input of each kind: the last one offered."""
    with opened_page(browser, running[1], "toy/1") as page:
        fill(page, prompt="a red circle")
        page.set_input_files("#image", photo)
        page.locator("#controls .file").last.set_input_files(photo)
        page.locator("#references .file").last.set_input_files(photo)
        page.locator("#loras .used").last.evaluate("box => { box.checked = true; }")
        yield page


UNION, INK, FACE = "[data-name=union]", "[data-name=ink]", "[data-name=face]"


@pytest.mark.parametrize(
    ("answer", "holder", "text"),
    [
        (refusal(400, "width", "width: 80 is not served here."), "#width-field", "Width: 80 is not served here."),
        (refusal(400, "loras.0.scale", "loras.0.scale: got 99, expected a number from -10 to 10, or null."), INK,
         "ink: 99 is not accepted. Give a number from -10 to 10."),
        (refusal(400, "controls.0.start", "controls.0.start: 1 is not less than end, 1."), UNION, "union: 1 is not"),
        (refusal(400, "masks.0.image", "masks.0.image: no. Set `strength`."), "[data-field=masks]",
         "Paint what to change: No. Set “Strength”."),
        (refusal(400, "n", "n: 8 images are too many.", "invalid_value"),
         "[data-field=num_images]", "Images: 8 images are too many."),
        (refusal(413, None, "The body has more than 64 MiB.", "too_large"), "[data-field=image]", "too many bytes"),
        (refusal(429, None, "full", "overloaded", Retry_After="7"), None, "The server is busy. Try again in 7 s."),
        (Answer(500, b"<html>"), None, "The server failed before the images were finished."),
        (stream({"event": "error", "status": 400, "error": "width: no.", "kind": "refused", "field": "width"}),
         "#width-field", "Width: No."),
    ],
    ids=lambda value: value if isinstance(value, str) and value[0] in "#[" else None,
)  # fmt: skip
def test_error_is_at_its_field_and_at_the_button(
    answer: Answer, holder: str | None, text: str, full_page: Page, server: ToyServer
) -> None:
    server.answer, page = answer, full_page
    page.evaluate("for (const section of document.querySelectorAll('details')) section.open = false")
    page.click("#generate")
    expect(page.locator("#error")).to_contain_text(text)
    expect(page.locator("#error")).to_be_in_viewport(ratio=1)
    assert page.locator(".problem").count() == (holder is not None)
    if holder is not None:
        problem = page.locator(f"{holder} .problem")
        expect(problem).to_be_in_viewport(ratio=1)
        assert problem.evaluate("""element => {
          const box = element.getBoundingClientRect();
          return element.contains(document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2));
        }""")
        assert page.locator(holder).evaluate("element => element.contains(document.activeElement)")


def test_checks_values_before_sending(full_page: Page, server: ToyServer) -> None:
    full_page.evaluate("for (const section of document.querySelectorAll('details')) section.open = true")
    for field, value, text in (
        ("prompt", "  ", "Prompt: Describe the image."),
        ("prompt", "x" * 4001, "The text has 4001 characters. At most 4000 are accepted."),
        ("num_images", 9, "Images: Give a whole number from 1 to 8."),
        ("num_inference_steps", 2.5, "Steps: Give a whole number from 1 to 100."),
    ):
        before, sent = full_page.input_value(f"#{field}"), len(server.requests)
        fill(full_page, **{field: value})
        full_page.click("#generate")
        expect(full_page.locator("#error")).to_contain_text(text)
        assert full_page.evaluate("document.activeElement.id") == field and len(server.requests) == sent
        fill(full_page, **{field: before})
        expect(full_page.locator("#error")).to_be_hidden()  # the field has changed


def test_network_error_says_so(page: Page) -> None:
    page.route("**/v1/models/**", lambda route: route.abort())
    page.click("#generate")
    expect(page.locator("#error")).to_contain_text("The gateway does not answer")


def test_asks_for_the_key_at_its_field(browser: Browser, server: ToyServer, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"page {KEY}\n")
    server.answer = stream(image(0), DONE)
    with running_gateway([server.url], tmp_path / "keys") as url, opened_page(browser, url, "Enter an API key") as page:
        fill(page, prompt="a red circle")
        page.click("#generate")
        expect(page.locator("#key-field .problem")).to_have_text("Enter an API key.")
        for wrong in (f"{KEY}\u200b", "wrong"):  # the first with a character of no width, which no header can hold
            fill(page, key=wrong)
            page.click("#generate")
            expect(page.locator("#error")).to_have_text("API key: This API key is not accepted.")
            expect(page.locator("#key")).to_be_focused()
        fill(page, key=KEY)
        page.click("#generate")
        expect(page.locator(".card")).to_have_count(1)


@pytest.mark.parametrize("end", ["error", "cancel"])
def test_images_appear_as_they_arrive_and_stay(end: str, page: Page, server: ToyServer) -> None:
    error, goes_on = {"event": "error", "status": 500, "kind": "failed", "error": "It failed."}, threading.Event()
    previews = [{"event": "step", "step": 2 + i, "steps": 8, "index": i, "preview": PICTURE} for i in range(4)]
    server.answer = stream(*previews, image(2), image(0), goes_on.wait, error)
    fill(page, num_images=4)
    page.click("#generate")
    expect(page.locator(".card")).to_have_count(2)
    assert page.locator("#gallery li").count() == 4 and page.locator(".preview:visible").count() == 2
    assert page.evaluate("document.activeElement.id") == "generate"  # not disabled, which would lose the focus
    assert page.get_attribute("#generate", "aria-disabled") == "true"
    if end == "cancel":
        page.click("#cancel")
    goes_on.set()
    shown = page.locator("#error" if end == "error" else "#status")
    expect(shown).to_contain_text("2 of 4 images finished.")
    assert page.locator("#gallery li .note").all_text_contents() == ["seed 7, 64 x 64", "seed 9, 64 x 64"]
    assert page.evaluate("document.activeElement.id") == "generate"


def test_says_that_the_server_is_down_and_back(page: Page, server: ToyServer) -> None:
    is_up, held = False, list[Route]()

    def answer(route: Route) -> None:
        if held:
            route.fulfill(status=200 if is_up else 503)
        else:
            held.append(route)

    expect(page.locator("#served")).to_contain_text("toy/1")  # no answer of the first load comes later
    page.route("**/health", answer)
    for _ in range(2):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#served")).to_have_text("The server does not answer")
    with page.expect_response("**/health"):
        held[0].fulfill(status=200)  # an answer to an earlier question does not say that the server is back
    expect(page.locator("#down")).to_contain_text("The server does not answer")
    description = DESCRIBED | {"release": "toy/2", "samplers": ["DDIM"]}
    page.route("**/v1/description", lambda route: route.fulfill(json={"key_required": False, "models": [description]}))
    is_up = True
    expect(page.locator("#served")).to_contain_text("toy/2")
    expect(page.locator("#down")).to_have_text("The server is back.")
    assert page.locator("#scheduler option").all_text_contents() == ["DDIM"]
    assert page.input_value("#prompt") == "a red circle"


def test_settings_of_a_result_remove_files_that_it_was_made_without(page: Page, server: ToyServer, photo: Path) -> None:

    def generate(count: int) -> None:
        server.answer = stream(image(0), DONE)
        page.click("#generate")
        expect(page.locator(".card")).to_have_count(count)

    generate(1)
    for holder in ("controls", "references"):
        page.locator(f"#{holder} .file").last.set_input_files(photo)
    generate(2)
    assert {"controls", "ip_adapters"} <= server.requests[-1].keys()
    page.locator(".card").last.click()
    page.click("#use-settings")
    generate(3)
    assert not {"controls", "ip_adapters"} & server.requests[-1].keys()


def test_photo_of_another_size_is_cropped(page: Page, server: ToyServer, photo: Path) -> None:
    server.answer = stream(image(0), DONE)
    page.evaluate(
        """(data) => {
          const dataTransfer = new DataTransfer();
          const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
          dataTransfer.items.add(new File([bytes], "photo.png", {type: "image/png"}));
          document.body.dispatchEvent(new DragEvent("drop", {bubbles: true, cancelable: true, dataTransfer}));
        }""",
        file_of(np.asarray(Image.open(photo))),
    )
    expect(page.locator("#size-note")).to_contain_text("The image has 800 x 500 pixels. The size is now 320 x 192")
    page.click("#generate")
    expect(page.locator(".card")).to_have_count(1)
    sent = server.requests[-1]
    assert (sent["width"], sent["height"], sent["resize"]) == (320, 192, "crop")


CONTRASTS = """() => {
  const light = (text) => text.match(/[0-9.]+/g).slice(0, 3).map((level) => {
    const value = level / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  }).reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0.05);
  const ratio = (one, other) => Math.max(light(one) / light(other), light(other) / light(one));
  const form = getComputedStyle(document.querySelector("form"));
  const fields = [...document.querySelectorAll("form :is(input:not([type=checkbox]), select, textarea)")];
  const styles = fields.map((field) => [getComputedStyle(field), getComputedStyle(field, "::placeholder")]);
  return [
    ratio(form.color, form.backgroundColor),
    Math.min(...styles.map(([own, hint]) => ratio(hint.color, own.backgroundColor))),
    Math.min(...styles.map(([own]) => ratio(own.borderTopColor, form.backgroundColor))),
  ];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_sufficient(scheme: Literal["light", "dark"], full_page: Page) -> None:
    full_page.emulate_media(color_scheme=scheme)
    text, placeholder, border = full_page.evaluate(CONTRASTS)
    assert text >= 4.5 and placeholder >= 4.5 and border >= 3, "WCAG 1.4.3 and 1.4.11"
