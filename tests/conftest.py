"""Options of the test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser):
    parser.addoption("--only-skip", metavar="WORD,...", default=None,
                     help="fail when a test is skipped for a reason that names none of these words (continuous integration)")


def pytest_configure(config):
    words = config.getoption("--only-skip")
    if words is not None:
        config.pluginmanager.register(SkipsAreFailures([w.lower() for w in words.split(",") if w]))


class SkipsAreFailures:
    """Turns every skip whose reason names none of the allowed words into a failure of the run."""

    def __init__(self, allowed: list[str]):
        self.allowed, self.refused = allowed, []

    def note(self, report) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            if not any(word in reason.lower() for word in self.allowed):
                self.refused.append(f"{report.nodeid}: {reason}")

    pytest_runtest_logreport = pytest_collectreport = note

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if self.refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        for line in self.refused:
            terminalreporter.write_line(f"skipped, but nothing it names may be missing here: {line}", red=True)
