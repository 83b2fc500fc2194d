"""What ``husky doctor`` says: one line a finding, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from husky_mlx.errors import SwitchError

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, its state, what was found, and for warn and fail what to do."""

    name: str
    state: str
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Finding:
    return Finding(name, OK, found)


def warn(name: str, found: str, advice: str) -> Finding:
    return Finding(name, WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Finding:
    return Finding(name, FAIL, found, advice)


def installed(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


Check = Callable[[], Iterable[Finding]]


def findings(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """The findings of all checks; one that raises is a finding itself, the others still run."""
    for name, check in checks:
        try:
            yield from check()
        except SwitchError:
            yield warn(name, "not checked: a switch is set to what it does not take", "correct it")
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            yield fail(
                name,
                f"the check ended with {type(error).__name__}: {text}",
                "report it with the output of husky doctor --json",
            )


def print_finding(finding: Finding) -> None:
    print(f"{finding.state:<5} {finding.name:<18} {finding.found}", flush=True)
    if finding.advice:
        print(f"{'':<24} -> {finding.advice}", flush=True)
