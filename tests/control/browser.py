"""A headless browser, and helpers with which tests read a page."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

BOUND_S = 90.0
PROGRAMS = ("chromium", "chromedriver")
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,1000",
)
T = TypeVar("T")


def missing() -> list[str]:
    """Returns the programs that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class Page:
    """A tab, and what is in it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, token: str) -> None:
        """Loads the page, and signs in."""
        self.driver.get(url)
        # Remove what another test's daemon left.
        self.script("sessionStorage.clear()")
        self.driver.get(url)
        self.sign_in(token)
        self.until(lambda: self.text("connection") == "Live", "the page is not connected")

    def sign_in(self, token: str) -> None:
        """Enters a token in the page's form."""
        self.until(self.element("token").is_displayed, "the page asks for no token")
        self.element("token").send_keys(token, Keys.ENTER)

    def element(self, id_: str) -> WebElement:
        return self.driver.find_element(By.ID, id_)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, id_: str) -> str:
        return self.element(id_).text

    def rows(self, name: str) -> list[str]:
        """Returns the texts of a table's rows."""
        found: list[str] = self.script(
            "return Array.from(document.querySelectorAll(arguments[0]), row => row.textContent)",
            f"#{name}-rows tr",
        )
        return found

    def row(self, name: str, words: str) -> str:
        """Waits for a row with these words, and returns it."""

        def found() -> str | None:
            return next((row for row in self.rows(name) if words in row), None)

        return self.until(found, f"no row of {name} has {words!r}")

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def log(self) -> list[dict[str, Any]]:
        """Returns what the browser has logged since the last call."""
        return list(self.driver.get_log("browser"))  # type: ignore[no-untyped-call]

    def press(self, *keys: str) -> None:
        """Presses keys at the element with the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def activate(self, button: WebElement) -> None:
        """Presses a button by keyboard: a row added above would move it away from a pointer."""
        button.send_keys(Keys.ENTER)

    def until(self, met: Callable[[], T | None], words: str) -> T:
        """Waits until a check returns something, and returns it."""
        wait = WebDriverWait(
            self.driver, BOUND_S, poll_frequency=0.1, ignored_exceptions=[StaleElementReferenceException]
        )
        found = wait.until(lambda _: met(), words)
        assert found is not None
        return found

    def wear(self, scheme: str) -> None:
        """Makes the browser report that the reader prefers ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@contextmanager
def browser() -> Iterator[Page]:
    """Runs Chromium with an empty profile until the block ends."""
    with tempfile.TemporaryDirectory(prefix="kvxfer-page", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for argument in (*_ARGUMENTS, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(str(shutil.which("chromedriver")))
        driver = webdriver.Chrome(options, service)
        try:
            driver.set_script_timeout(BOUND_S)
            yield Page(driver)
        finally:
            driver.quit()
