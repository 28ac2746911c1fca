"""How a report looks: its colours for light and dark screens, and the style sheet. Paper has the light ones.

Builds HTML and SVG: every text and every attribute is escaped, to keep text in a run's files from becoming markup.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

#: Text on ``paper`` and ``card`` has a contrast of at least 4.5, parts of charts at least 3, as WCAG 2.2 demands (AA).
LIGHT: Mapping[str, str] = {
    "paper": "#f4f5f7",
    "card": "#ffffff",
    "text": "#1b1f24",
    "quiet": "#555d68",
    "line": "#d9dde3",
    "link": "#0b57c2",
    "good": "#1a6d33",
    "bad": "#b3211d",
    "training": "#2563c9",
    "starting": "#a86400",
    "saving": "#0d8277",
    "repeating": "#cf2f2f",
    "stuck": "#9c2a9c",
    "queued": "#7a828e",
    "held": "#7555c4",
    "down": "#3d444e",
}
DARK: Mapping[str, str] = {
    "paper": "#0f1216",
    "card": "#181c22",
    "text": "#e7eaee",
    "quiet": "#a7afba",
    "line": "#343b45",
    "link": "#7db2ff",
    "good": "#6fd08c",
    "bad": "#ff8a84",
    "training": "#5c9cff",
    "starting": "#e0a030",
    "saving": "#3fc0b0",
    "repeating": "#ff6e6e",
    "stuck": "#e07be0",
    "queued": "#8c95a2",
    "held": "#aa90f2",
    "down": "#d3d8df",
}
TEXTS = ("text", "quiet", "link", "good", "bad")
SURFACES = ("paper", "card")
#: What the timeline tells apart, with the words of its legend, and the categories of ``booking.py`` in each.
GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "training": ("training, evaluating", ("training", "evaluating")),
    "starting": ("start-up", ("launching", "importing", "rendezvous", "restoring", "first_step")),
    "saving": ("blocked by a save", ("saving",)),
    "repeating": ("repeated steps", ("repeating",)),
    "stuck": ("hung, waiting for a straggler", ("hung", "straggler")),
    "queued": ("queued", ("queued",)),
    "held": ("held", ("held", "limited")),
    "down": ("down or unknown", ("down", "unknown")),
}
#: The group of each category.
GROUP_OF = {category: group for group, (_, categories) in GROUPS.items() for category in categories}


def _variables(colours: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def style_sheet() -> str:
    """The whole style sheet, without any text of a run."""
    parts = [
        f":root{{color-scheme:light dark;{_variables(LIGHT)}}}",
        f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}",
        f"@media print{{:root{{color-scheme:light;{_variables({**LIGHT, 'paper': LIGHT['card']})}}}}}",
        *(
            f".f-{name}{{fill:var(--{name});background:var(--{name})}}.s-{name}{{stroke:var(--{name})}}"
            for name in GROUPS
        ),
    ]
    return "".join(parts) + _RULES


_RULES = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:20px 16px 48px;background:var(--paper);color:var(--text);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5em;line-height:1.25;margin:0}
h2{font-size:1.15em;margin:0 0 8px}
h3{font-size:1em;margin:20px 0 2px}
p{margin:0 0 8px}
a{color:var(--link)}
.quiet{color:var(--quiet)}
.small{font-size:.87em}
.verdict{font-size:1.15em;margin:10px 0 14px;max-width:46em}
.badge{display:inline-block;font-weight:600;font-size:.87em;border:1.5px solid currentColor;border-radius:99px;
 padding:0 10px;margin:0 0 8px;white-space:nowrap}
.good{color:var(--good)}.bad{color:var(--bad)}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:0 0 16px}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:16px;margin:0 0 16px}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,auto));gap:12px 16px;margin:0 0 16px;padding:0}
.facts dt{color:var(--quiet);font-size:.87em}.facts dd{margin:0;font-size:1.25em;font-weight:600;line-height:1.3}
.note{border-left:4px solid var(--starting);padding:2px 0 2px 12px;margin:0 0 12px}
svg{display:block;width:100%;overflow:visible}
svg.plot{padding-left:44px}
svg text{fill:var(--quiet);font-size:11px;font-family:inherit;paint-order:stroke;stroke:var(--card);stroke-width:3px}
.grid{stroke:var(--line);stroke-width:1;vector-effect:non-scaling-stroke}
.curve{fill:none;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}
.band{stroke:none;opacity:.22}
.faint{opacity:.5;stroke-width:1.2;stroke-dasharray:3 3}
.dots{stroke-width:8}
.edge{stroke:var(--quiet);stroke-width:1;stroke-dasharray:2 4;vector-effect:non-scaling-stroke}
.track{fill:var(--line);opacity:.55}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:6px 0 12px;padding:0;list-style:none;font-size:.87em}
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:6px;vertical-align:-1px}
.lane path{shape-rendering:crispEdges}
.lane{margin:0 0 9px;break-inside:avoid}
.lane p{margin:0 0 2px;font-size:.87em;line-height:1.35}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(300px,100%),1fr));gap:8px 28px}
figure{margin:0 0 8px;break-inside:avoid;min-width:0}
figcaption{font-size:.87em;color:var(--quiet);margin:0 0 4px}
.metric{break-inside:avoid}
.scroll{overflow-x:auto}
.scroll td:first-child,.scroll th:first-child{position:sticky;left:0;background:var(--card)}
table{border-collapse:collapse;width:100%;font-size:.93em}
th,td{text-align:left;vertical-align:top;padding:4px 12px 4px 0;border-bottom:1px solid var(--line)}
th{font-weight:600;color:var(--quiet);white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
td.bar{width:45%;min-width:90px;vertical-align:middle}
td.when{white-space:nowrap}
.cat{overflow-wrap:normal}
.wide td,.wide th{overflow-wrap:normal;padding-right:10px}.wide th{white-space:normal;vertical-align:bottom}
.wide .best td{font-weight:600}
.several{max-width:1400px}
pre,code{font:12.5px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{margin:4px 0 12px;
 padding:10px 12px;background:var(--paper);border:1px solid var(--line);border-radius:6px;white-space:pre-wrap}
details{margin:0 0 8px}
summary{cursor:pointer;font-weight:600}
:focus-visible{outline:2px solid var(--link);outline-offset:2px}
@page{margin:12mm}
@media print{body{max-width:none;padding:0;font-size:12px}nav{display:none}
 section{padding:12px;border-color:#999}
 *{print-color-adjust:exact;-webkit-print-color-adjust:exact}h2,h3,.legend,section>p{break-after:avoid}
 tr{break-inside:avoid}.scroll{overflow:visible}
 .wide{font-size:.8em}.wide td,.wide th{min-width:0;padding-right:6px;white-space:normal}}
@media (max-width:560px){body{padding:12px 8px 32px}section{padding:12px}td.bar{width:32%;min-width:60px}
 .when .day{display:block}}
"""


#: Characters that XML cannot contain, not even escaped.
_NOT_XML = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
#: Letters that reverse the order of the text around them, with which a name could imitate a different one.
_REORDERING = re.compile("[\u202a-\u202e\u2066-\u2069]")


class Markup(str):
    """Text that is markup already. Only this module makes it from other text, and ``page.py`` from its style sheet."""

    __slots__ = ()


def escaped(value: object) -> Markup:
    """A value as text for an element or an attribute. ``Markup`` stays as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_REORDERING.sub("?", _NOT_XML.sub("?", str(value)))))


def joined(*parts: object) -> Markup:
    """The parts in order, without None."""
    return Markup("".join(escaped(part) for part in parts if part is not None))


def tag(name: str, /, *children: object, **attributes: Any) -> Markup:
    """An element. ``class_`` stands for class, ``_`` for ``-``. An attribute that is None is left out."""
    names = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    given = "".join(f' {key}="{escaped(value)}"' for key, value in names.items())
    inside = joined(*children)
    return Markup(f"<{name}{given}>{inside}</{name}>" if inside or name not in _EMPTY else f"<{name}{given}/>")


def with_code(text: str) -> Markup:
    """A sentence with text between backticks as code."""
    return joined(*(tag("code", part) if place % 2 else part for place, part in enumerate(text.split("`"))))


#: Elements that are written without an end tag if they are empty: those of SVG, and the empty ones of HTML.
_EMPTY = frozenset(("svg", "g", "path", "rect", "line", "circle", "meta", "col"))


def clipped(text: object, most: int) -> str:
    """At most ``most`` characters of a text, with a mark where it was cut."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[: most - 4]} ..."
