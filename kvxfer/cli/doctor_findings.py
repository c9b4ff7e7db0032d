"""A doctor's report for people: the verdict, what to do first, and the findings by subject."""

from __future__ import annotations

import itertools

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvxfer.doctor import available_transports, peer_reach
from kvxfer.doctor.finding import Finding, State
from kvxfer.doctor.report import Report

# Width of tables in files and pipes, which have no width.
_WIDTH = 120
_STYLES = {State.GOOD: "green", State.NOTE: "dim", State.LIMITS: "yellow", State.BLOCKS: "bold red"}
# Steps that are shown; after these, run the doctor again.
_MOST_STEPS = 5


def problems(findings: list[Finding]) -> list[Finding]:
    """Returns what blocks, then what limits."""
    return [each for state in (State.BLOCKS, State.LIMITS) for each in findings if each.state is state]


def print_report(report: Report, *, problems_alone: bool) -> None:
    """Prints the verdict and the first steps, then all findings or only problems; ends with the verdict.

    Findings about a peer come first, and all of them are printed.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    found = problems(report.findings)
    of_peer = [each for each in report.findings if each.subject == peer_reach.SUBJECT]
    verdict = _verdict(report.findings)
    console.print(verdict)
    if problems_alone:
        _print_findings(console, of_peer, beside_subjects=True)
        of_machine = [each for each in found if each.subject != peer_reach.SUBJECT]
        _print_findings(console, of_machine, beside_subjects=True)
        return
    _print_steps(console, found)
    console.print()
    _print_findings(console, of_peer)
    _print_findings(console, [each for each in report.findings if each.subject != peer_reach.SUBJECT])
    console.print(verdict)


def _verdict(findings: list[Finding]) -> Text:
    """Returns which transports are ready, and how many findings block and limit."""
    ready = [
        each.name
        for each in findings
        if each.subject == available_transports.SUBJECT and each.state is State.GOOD
    ]
    blocks, limits = (sum(each.state is state for each in findings) for state in (State.BLOCKS, State.LIMITS))
    words = f"ready: {', '.join(ready) or 'no transport'}; "
    words += f"{_things(blocks)} block{'s' if blocks < 2 else ''}"
    words += f", {_things(limits)} limit{'s' if limits < 2 else ''}"
    return Text(words, "bold red" if blocks else "bold yellow" if limits else "bold green")


def _things(number: int) -> str:
    return "nothing" if not number else "1 thing" if number == 1 else f"{number} things"


def _print_steps(console: Console, found: list[Finding]) -> None:
    steps: dict[str, Finding] = {}
    for each in found:
        steps.setdefault(each.change, each)
    for number, (change, finding) in enumerate(itertools.islice(steps.items(), _MOST_STEPS), start=1):
        line = Text(f"{number}. {finding.subject}, {finding.name}: ", _STYLES[finding.state])
        # Commands are copied from here, so they stay on one line.
        console.print(line.append(change, "default"), soft_wrap=True)
    if len(steps) > _MOST_STEPS:
        console.print(f"{len(steps) - _MOST_STEPS} more: kvxfer doctor --problems")


def _print_findings(console: Console, findings: list[Finding], *, beside_subjects: bool = False) -> None:
    """Prints good findings in one line, others with their reason and their remedy."""
    for subject, of_subject in itertools.groupby(findings, key=lambda finding: finding.subject):
        if beside_subjects:
            console.print()
        console.print(Text(subject, "bold"))
        table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(min_width=20, max_width=28)
        table.add_column(min_width=6)
        table.add_column(overflow="fold")
        for finding in of_subject:
            table.add_row(finding.name, Text(finding.state, _STYLES[finding.state]), _words(finding))
        console.print(Padding(table, (0, 0, 0 if beside_subjects else 1, 2)))


def _words(finding: Finding) -> Text:
    words = Text(finding.found)
    if finding.state is not State.GOOD:
        words.append(f"\n{finding.why}", "dim")
    if finding.change:
        words.append(f"\n-> {finding.change}", _STYLES[finding.state])
    return words
