"""How a report looks: its colours for light and dark screens, and the style sheet. Paper has the light ones."""

from __future__ import annotations

from collections.abc import Mapping

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
    "usual": "#cfdcf0",
    "slow1": "#e8b34a",
    "slow2": "#d57a1c",
    "slow3": "#bd3a1f",
    "slow4": "#6d0d1f",
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
    "usual": "#28374f",
    "slow1": "#7a5a1c",
    "slow2": "#bd7420",
    "slow3": "#f27c4c",
    "slow4": "#ffc9b8",
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
#: How much longer than the median rank a rank worked, as a share of a step: from when on it has which colour, in words.
LEVELS: Mapping[str, tuple[float, str]] = {
    "usual": (0.0, "less than 5% of a step"),
    "slow1": (0.05, "5 to 10%"),
    "slow2": (0.1, "10 to 25%"),
    "slow3": (0.25, "25 to 50%"),
    "slow4": (0.5, "more than 50%"),
}
#: The group of each category.
GROUP_OF = {category: group for group, (_, categories) in GROUPS.items() for category in categories}
#: The colours of lines, one after the other.
SERIES = ("training", "starting", "saving", "stuck", "held", "repeating", "down", "queued")


def _variables(colours: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def style_sheet() -> str:
    """The whole style sheet; nothing in it comes from a run."""
    parts = [
        f":root{{color-scheme:light dark;{_variables(LIGHT)}}}",
        f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}",
        f"@media print{{:root{{color-scheme:light;{_variables({**LIGHT, 'paper': LIGHT['card']})}}}}}",
        *(
            f".f-{name}{{fill:var(--{name});background:var(--{name})}}.s-{name}{{stroke:var(--{name})}}"
            for name in (*GROUPS, *LEVELS)
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
svg[data-low]{padding-left:44px}
[data-axis] svg,svg[data-axis]{touch-action:pan-y;user-select:none;-webkit-user-select:none;cursor:crosshair}
svg.zoomed svg,.zoomed svg svg{overflow:hidden}
.drag{position:fixed;background:var(--link);opacity:.25;pointer-events:none}
.zoombar{position:fixed;bottom:12px;left:50%;transform:translateX(-50%);max-width:calc(100% - 24px)}
.zoombar.on{display:flex;gap:12px;align-items:center;padding:6px 8px 6px 14px;background:var(--card);border-radius:8px;
 border:1px solid var(--quiet);box-shadow:0 2px 10px #0004;font-size:.93em;font-variant-numeric:tabular-nums}
button{font:inherit;font-weight:600;color:var(--link);background:none;border:1px solid var(--line);border-radius:6px;
 padding:3px 10px;cursor:pointer;white-space:nowrap}
svg text{fill:var(--quiet);font-size:11px;font-family:inherit;paint-order:stroke;stroke:var(--card);stroke-width:3px}
.grid{stroke:var(--line);stroke-width:1;vector-effect:non-scaling-stroke}
.curve{fill:none;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}
.band{stroke:none;opacity:.22}
.faint{opacity:.5;stroke-width:1.2;stroke-dasharray:3 3}
.dots{stroke-width:8}.back{opacity:.35;stroke-width:1.2}
.edge{stroke:var(--quiet);stroke-width:1;stroke-dasharray:2 4;vector-effect:non-scaling-stroke}
.track{fill:var(--line);opacity:.55}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:6px 0 12px;padding:0;list-style:none;font-size:.87em}
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:6px;vertical-align:-1px}
.legend [data-run]{cursor:pointer}.away{opacity:.08}
.lane path,.heat path{shape-rendering:crispEdges}
.lane{margin:0 0 9px;break-inside:avoid}
.lane p{margin:0 0 2px;font-size:.87em;line-height:1.35}
.heat{display:grid;grid-template-columns:fit-content(30%) minmax(0,1fr);gap:3px 10px;align-items:center;font-size:.87em;
 line-height:1.3;margin:0 0 10px}
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
@media print{body{max-width:none;padding:0;font-size:12px}nav,.hint,.zoombar.on{display:none}
 section{padding:12px;border-color:#999}
 *{print-color-adjust:exact;-webkit-print-color-adjust:exact}h2,h3,.legend,section>p{break-after:avoid}
 .heat,tr{break-inside:avoid}.scroll{overflow:visible}
 .wide{font-size:.8em}.wide td,.wide th{min-width:0;padding-right:6px;white-space:normal}}
@media (max-width:560px){body{padding:12px 8px 32px}section{padding:12px}td.bar{width:32%;min-width:60px}
 .when .day{display:block}}
"""
