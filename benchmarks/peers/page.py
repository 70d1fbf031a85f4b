"""The results as tables: in README.md one cell for each change, in docs/peers.md with every word of an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.launch import ROOT
from benchmarks.peers.scenario import TITLES
from benchmarks.peers.tools import TOOLS

BEGIN, END = "<!-- peers -->", "<!-- /peers -->"


def cell(results: Sequence[Mapping[str, Any]]) -> str:
    """What a tool lost after a change, over all kills."""
    failed = [one for one in results if "error" in one]
    resumed = [one for one in results if "error" not in one]
    parts = []
    if resumed:
        repeated, never = (sum(one[what] for one in resumed) / len(resumed) for what in ("repeated", "never"))
        shares = f"{_percent(repeated)} / {_percent(never)}"
        parts.append(f"**{shares}**" if repeated == never == 0 else shares)
    if failed:
        word = "refused" if all(one["refused"] for one in failed) else "error"
        word = "hangs" if all(one["error"] == "hangs" for one in failed) else word
        parts.append(f"{word}, {len(failed)} of {len(results)} times" if resumed else word)
    return "; ".join(parts)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each tool, a column for each change."""
    rows = [("resumed after a change of", *TITLES.values()), ("---",) * (1 + len(TITLES))]
    rows += [
        (tool.title, *(cell(results[name]["changes"][change]) for change in TITLES))
        for name, tool in TOOLS.items()
        if name in results
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def same_steps(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What ``0 / 0`` leaves open: whether each step also trained the samples of the undisturbed run's step."""
    ended = [one for result in results.values() for some in result["changes"].values() for one in some]
    complete = [one for one in ended if one.get("repeated") == one.get("never") == 0]
    comparable = [one for one in complete if one["same_steps"] is not None]
    same = sum(one["same_steps"] for one in comparable)
    return (
        "**0 / 0** counts samples: none was trained again, and none was lost. In the first three columns the steps are "
        f"comparable too:\nin {same} of the {len(comparable)} resumes with 0 / 0 each step trained the same samples as "
        "in the undisturbed run. In the last two they are not,\nso that nothing is said about the order."
    )


def body(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table with what must be known to read it: what README.md shows."""
    return f"{table(results)}\n\n{same_steps(results)}"


def words(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Which versions were tried, and what was said with an error."""
    rows = [("tool", "versions", "resumed as described in"), ("---",) * 3]
    for name, tool in TOOLS.items():
        if name in results:
            versions = ", ".join(f"{package} {number}" for package, number in results[name]["versions"].items())
            links = ", ".join(f"[{_host(link)}]({link})" for link in tool.documentation)
            rows.append((tool.title.replace("**", ""), versions, links))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    said: list[str] = []
    for name, tool in TOOLS.items():
        for change in TITLES if name in results else ():
            errors = {one["error"] for one in results[name]["changes"][change] if "error" in one}
            said += [f"- {tool.title}, {TITLES[change]}: ``{error[:300]}``" for error in sorted(errors)[:1]]
    return "\n".join([*lines, *(["", "What was said with an error:", "", *said] if said else [])])


def write_tables(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Between the marks in both documents."""
    for name, text in (
        ("README.md", body(results)),
        ("docs/peers.md", f"{body(results)}\n\n{words(results)}"),
    ):
        path = ROOT / name
        before = path.read_text() if path.exists() else f"{BEGIN}\n{END}\n"
        head, _, rest = before.partition(BEGIN)
        path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def _percent(value: float) -> str:
    return "0" if value == 0 else "<1 %" if value < 1 else f"{value:.0f} %"


def _host(link: str) -> str:
    return link.split("/")[2] if "//" in link else link
