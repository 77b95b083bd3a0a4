"""The playground page in headless Chromium, in front of a real server. See `tests.support.playground`."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route, expect

from preheat.local_server.server import Server
from tests.support.gateway import running_gateway
from tests.support.images import pixels
from tests.support.playground import fill, opened_page, screenshot
from tests.support.predictions import http_client
from tests.support.waiting import eventually

SCRIPT = "<img src=x onerror=window.harmed=1><script>window.harmed=1</script>"


@pytest.fixture(scope="module")
def url(server: Server) -> Iterator[str]:
    with running_gateway([server.url]) as url:
        yield url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The page, ready."""
    with opened_page(browser, url, "tiny-sdxl") as page:
        yield page


def generate(page: Page, **values: object) -> None:
    """Generate with these values of fields, and wait for the images."""
    count = page.locator(".card").count()
    fill(page, **values)
    page.click("#generate")
    expect(page.locator(".card")).to_have_count(count + int(page.input_value("#num_images")), timeout=60_000)


def photo(folder: Path) -> Path:
    """A file of 128 x 128 pixels to start from."""
    levels = np.zeros((128, 128, 3), np.uint8)
    levels[..., 2] = np.linspace(60, 255, 128, dtype=np.uint8)
    Image.fromarray(levels).save(folder / "photo.png")
    return folder / "photo.png"


def test_page_waits_for_a_server_that_starts(page: Page) -> None:
    has_started = False

    def describe(route: Route) -> None:
        if not has_started:
            route.fulfill(json={"key_required": False, "models": []})
        else:
            route.continue_()

    page.route("**/v1/description", describe)
    page.reload()
    expect(page.locator("#served")).to_have_text("No server has answered yet")
    has_started = True
    expect(page.locator("#served")).to_contain_text("tiny-sdxl")


def test_previews_arrive_before_the_image(page: Page) -> None:
    fill(page, prompt="a large red circle on a blue background", num_inference_steps=40, seed=7)
    page.click("#generate")
    expect(page.locator(".preview")).to_be_visible()
    assert page.locator(".card").count() == 0
    expect(page.locator(".preview")).to_have_attribute("data-count", re.compile("^([3-9]|1[0-9])$"))
    screenshot(page, "playground-running")
    expect(page.locator(".card")).to_have_count(1, timeout=60_000)
    expect(page.locator("#cancel")).to_be_hidden()


def test_cancel_stops_the_server(page: Page, server: Server) -> None:
    fill(page, prompt="a red circle", num_inference_steps=100, num_images=4)
    with http_client(server) as client:

        def active() -> float:
            lines = client.get("/metrics/").text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("preheat_active_images{"))

        page.click("#generate")
        expect(page.locator("#status")).to_contain_text("Step")
        assert active() > 0
        page.keyboard.press("Escape")
        expect(page.locator("#cancel")).to_be_hidden()
        eventually(lambda: active() == 0, "the server stops", 5)
    assert page.locator(".card").count() == 0
    expect(page.locator("#error")).to_be_hidden()


def test_reload_keeps_the_settings(page: Page) -> None:
    fill(page, prompt="two green squares", negative_prompt="blue", width=96, num_inference_steps=9, seed=11)
    page.select_option("#scheduler", "DDIM")
    page.select_option("#forecast", "quality")
    page.reload()
    expect(page.locator("#served")).to_contain_text("tiny-sdxl")
    values = [page.input_value(f"#{name}") for name in ("prompt", "negative_prompt", "width", "num_inference_steps")]
    assert values == ["two green squares", "blue", "96", "9"]
    assert page.input_value("#seed") == "11" and page.input_value("#scheduler") == "DDIM"
    assert page.input_value("#forecast") == "quality"


def test_offers_the_forecasts_of_the_sampler(page: Page) -> None:
    page.select_option("#forecast", "fast")
    page.select_option("#scheduler", "Heun")
    expect(page.locator("#forecast-field")).to_be_hidden()
    generate(page, prompt="two green squares", num_inference_steps=2)
    page.select_option("#scheduler", "DPM++ 2M")
    page.select_option("#forecast", "fast")
    generate(page, num_inference_steps=9)
    page.locator(".card").first.click()
    expect(page.locator("#detail-values")).to_contain_text("Forecastfast")


def test_painted_mask_changes_only_its_part(page: Page, tmp_path: Path) -> None:
    page.click("#image-section summary")
    page.set_input_files("#image", photo(tmp_path))
    expect(page.locator("#mask")).to_be_visible()
    page.locator("#mask").scroll_into_view_if_needed()
    box = page.locator("#mask").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.3 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.7 * box["height"], steps=5)
    page.mouse.up()
    screenshot(page, "playground-mask")
    page.fill("#strength", "0.9")
    generate(page, prompt="a red circle", width=128, height=128, num_inference_steps=4, seed=3)
    source = page.locator(".card img").first.get_attribute("src") or ""
    result = pixels(source.partition(",")[2])
    original = np.asarray(Image.open(photo(tmp_path)))
    assert (result[:, 64:] == original[:, 64:]).all()
    assert (result[40:90, 16:36] != original[40:90, 16:36]).any()
    page.locator(".card").first.click()
    values = page.locator("#detail-values")
    expect(values).to_contain_text("Made withinput image, mask")
    expect(values).to_contain_text("Strength0.9")
    page.click("#use-settings")
    expect(page.locator("#status")).to_have_text("Files are not kept. Choose again: input image, mask.")


def test_settings_of_an_image_without_input_remove_the_input(page: Page, tmp_path: Path) -> None:
    generate(page, prompt="a blue line", width=64, height=64, num_inference_steps=2, seed=5)
    page.click("#image-section summary")
    page.set_input_files("#image", photo(tmp_path))
    expect(page.locator("#mask")).to_be_visible()
    page.locator(".card").first.click()
    expect(page.locator("#detail-values")).not_to_contain_text("Made with")
    page.click("#use-settings")
    expect(page.locator("#mask")).to_be_hidden()


def test_details_have_settings_timings_and_download(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 860})
    generate(page, prompt="a blue line", width=64, height=64, num_inference_steps=3, seed=5)
    generate(page, prompt="another one", seed=6)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    screenshot(page, "playground-390")
    page.locator(".card").last.click()
    text = page.inner_text("#detail-values")
    assert "tiny-sdxl" in text and "CPU" in text and "denoise" in text and "Seed" in text
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == "preheat-5.png"
    page.click("#use-settings")
    assert page.input_value("#prompt") == "a blue line" and page.input_value("#seed") == "5"


def test_executes_no_script_of_a_prompt(page: Page) -> None:
    generate(page, prompt=SCRIPT, negative_prompt=SCRIPT, width=64, height=64, num_inference_steps=1)
    page.locator(".card").first.click()
    assert page.inner_text("#detail-prompt") == SCRIPT
    page.keyboard.press("Escape")
    page.reload()
    expect(page.locator("#served")).to_contain_text("tiny-sdxl")
    assert page.input_value("#prompt") == SCRIPT
    assert page.evaluate("window.harmed") is None


def test_keyboard_reaches_everything(page: Page) -> None:
    fill(page, width=64, height=64, num_inference_steps=1)
    page.focus("#prompt")
    page.keyboard.type("a red circle")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".card")).to_have_count(1)
    reached = []
    page.focus("#prompt")
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"negative_prompt", "width", "scheduler", "seed", "generate", "card"} <= set(reached)


def test_policy_allows_own_scripts_only(url: str) -> None:
    answer = httpx.get(url, trust_env=False)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert answer.headers["Content-Type"].startswith("text/html")
