"""One browser for all tests of this directory."""

from collections.abc import Iterator

import pytest

from tests.report.chromium import Page, chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page
