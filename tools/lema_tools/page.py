"""The frame of the report: one HTML file with its own style, light and dark, and some script for
the pointer.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lema.errors import printable

__all__ = ["BEGIN", "escape", "page", "section", "table", "tiles"]

COLOURS = (
    "#3b82f6",
    "#f59e0b",
    "#ef4444",
    "#10b981",
    "#8b5cf6",
    "#ec4899",
    "#14b8a6",
    "#84a30f",
    "#f97316",
    "#94a3b8",
)

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#15181e;--dim:#667085;--line:#e4e7ec;--chip:#eef1f5}
@media(prefers-color-scheme:dark){
:root{--page:#0e1116;--card:#161b22;--ink:#e6e9ee;--dim:#8b95a5;--line:#262d37;--chip:#212833}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1240px;margin:auto;padding:28px 20px 60px}
h1{font-size:24px;line-height:1.25;margin:0;overflow-wrap:anywhere}h2{font-size:17px;margin:36px 0 12px}
h3{font-size:14px;margin:0 0 8px}
header p{margin:6px 0 0;color:var(--dim);overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:4px 14px;margin-top:14px;font-size:13px}nav a{color:var(--dim);text-decoration:none}
nav a:hover{color:var(--ink);text-decoration:underline}
.chip{display:inline-block;border-radius:99px;padding:1px 11px;font-size:13px;font-weight:600;background:var(--chip);
vertical-align:3px;margin-left:8px}
.running,.good{background:#10b98126;color:#0d9668}.ended{background:#3b82f626;color:#3b7ae0}
.stopped,.bad{background:#f59e0b2b;color:#b97708}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(136px,1fr));gap:12px;margin-top:22px}
.tiles div,figure,.card{background:var(--card);border:1px solid var(--line);border-radius:10px;
margin:0;padding:14px 16px;min-width:0}
.tiles span{display:block;color:var(--dim);font-size:13px}
.tiles b{font-size:21px;font-weight:650;display:block;line-height:1.35}
.tiles small{color:var(--dim);font-size:12.5px}
#certificates .card+.card{margin-top:14px}
figure{position:relative}figcaption{font-weight:600;font-size:14px;margin-bottom:8px;display:flex;
flex-wrap:wrap;gap:2px 14px;justify-content:space-between}
svg{display:block;width:100%;height:auto;overflow:visible}
.grid{stroke:var(--line);fill:none}.mark{stroke:var(--dim);stroke-dasharray:3 3;fill:none;opacity:.7}
.tick,.track{font-size:11.5px;fill:var(--dim)}.track{font-size:13px}
@media(max-width:640px){.tick{font-size:16px}main{padding:20px 12px 40px}}
.end{text-anchor:end}.mid{text-anchor:middle}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}.faint{stroke-width:1;opacity:.38}
.dots{stroke-width:1.2;stroke-dasharray:2 3}
.cursor path{stroke:var(--dim);opacity:.6}.cursor circle{fill:var(--card);stroke:var(--ink);stroke-width:1.5}
.tip{position:absolute;top:38px;pointer-events:none;background:var(--card);border:1px solid var(--line);
border-radius:7px;padding:4px 9px;font-size:12.5px;white-space:nowrap;box-shadow:0 3px 12px #0003}
.legend{display:inline-flex;flex-wrap:wrap;gap:2px 14px;font-weight:400;font-size:12.5px;color:var(--dim)}
.legend b{color:var(--ink);font-weight:600}.legend>span{white-space:nowrap}
.parts{display:grid;gap:0;margin-top:6px}.parts>span{display:flex;align-items:baseline;padding:3px 0;white-space:normal;
border-bottom:1px solid var(--line)}.parts>span:last-child{border:0}.parts b{margin-left:auto;padding-left:14px}
.legend i{display:inline-block;width:9px;height:9px;border-radius:2.5px;margin-right:6px}
.bar{display:flex;height:26px;border-radius:6px;overflow:hidden;background:var(--chip);margin-bottom:5px}
.bar i{display:block;min-width:1px}
.measured{border-top:3px solid var(--ink);margin:0 0 8px;min-width:3px;max-width:100%}
.measured span{font-size:12.5px;white-space:nowrap;font-weight:600}
.wide{overflow-x:auto}.wide svg{min-width:760px}
.note,.none{color:var(--dim);font-size:13px;margin:8px 0 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px}
td,th{padding:5px 14px 5px 0;text-align:left;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:anywhere}
th{color:var(--dim);font-weight:500}tr:last-child td{border-bottom:0}
td:first-child{color:var(--dim);min-width:120px;width:250px}tr.given td:first-child{color:var(--ink);font-weight:600}
tr.given td:first-child::after{content:" \\25CF";color:#3b82f6;font-size:10px}
pre{overflow-x:auto;font-size:12.5px;margin:8px 0 0}code{font-size:.93em}
summary{cursor:pointer;font-size:13.5px;color:var(--dim);padding:6px 0}details table{margin-top:4px}
footer{color:var(--dim);font-size:13px;margin-top:40px}
"""

# Tells the numbers at the pointer. The page says all without it.
SCRIPT = """
document.querySelectorAll('svg[data-points]').forEach(function(svg){
var told=JSON.parse(svg.dataset.points),cursor=svg.querySelector('.cursor'),box=svg.viewBox.baseVal,tip;
function leave(){cursor.textContent='';if(tip){tip.remove();tip=null}}
svg.addEventListener('pointermove',function(event){
var place=svg.getBoundingClientRect(),x=(event.clientX-place.left)/place.width*box.width,lines=[],at=null,step=null;
Object.keys(told).forEach(function(name){var best=null;told[name].forEach(function(one){
if(!best||Math.abs(one[1]-x)<Math.abs(best[1]-x))best=one});
if(best&&(at===null||Math.abs(best[1]-x)<Math.abs(at-x))){at=best[1];step=best[0]}
if(best)lines.push([name,best])});
if(at===null)return;leave();
var line=document.createElementNS(svg.namespaceURI,'path');line.setAttribute('d','M'+at+' 12V220');cursor.append(line);
tip=document.createElement('div');tip.className='tip';
lines=lines.filter(function(one){return Math.abs(one[1][1]-at)<2});
[['step',[0,0,+(+step).toFixed(1)]]].concat(lines).forEach(function(one){var row=document.createElement('div');
row.textContent=one[0]+' '+one[1][2];tip.append(row)});
var share=at/box.width;tip.style[share>.6?'right':'left']=(share>.6?(1-share)*100+5:share*100+5)+'%';
svg.parentNode.append(tip)});
svg.addEventListener('pointerleave',leave)});
"""


def escape(text: str, *, quote: bool = True) -> str:
    """Return a text for the page, where neither markup nor control characters in it have an
    effect.
    """
    return html.escape(printable(text), quote=quote)


BEGIN = (
    '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
)
"""With which each page begins; no other file does."""


def page(title: str, head: str, sections: Sequence[tuple[str, str, str]], foot: str) -> str:
    """Return the whole page; each section is its name in links, its title, and what is in it, as
    HTML.
    """
    colours = "".join(
        f".c{at}{{stroke:{colour}}}circle.c{at}{{fill:{colour};stroke:none}}.f{at}{{fill:{colour}}}.b{at}{{background:{colour}}}"
        for at, colour in enumerate(COLOURS)
    )
    links = "".join(f'<a href="#{name}">{escape(label)}</a>' for name, label, _ in sections)
    inside = "".join(section(name, label, body) for name, label, body in sections)
    return (
        f"{BEGIN}<title>{escape(title)}</title><style>{STYLE}{colours}</style></head><body><main>"
        f"<header>{head}<nav>{links}</nav></header>{inside}<footer>{foot}</footer></main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def section(name: str, title: str, body: str) -> str:
    """Return a section with its heading."""
    return f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>'


def tiles(numbers: Iterable[tuple[str, str, str]]) -> str:
    """Return numbers in large: what, how much, and a word on it."""
    cells = (
        f"<div><span>{escape(a)}</span><b>{escape(b)}</b><small>{escape(c)}</small></div>"
        for a, b, c in numbers
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def table(
    rows: Iterable[Sequence[Any]],
    headers: Sequence[str] = (),
    marked: Mapping[Any, bool] | None = None,
) -> str:
    """Return rows of text as a table; those whose first cell is `marked` are set off."""
    head = (
        f"<thead><tr>{''.join(f'<th>{escape(header)}</th>' for header in headers)}</tr></thead>"
        if headers
        else ""
    )
    body = []
    for row in rows:
        kind = ' class="given"' if (marked or {}).get(row[0]) else ""
        body.append(f"<tr{kind}>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>")
    return f'<div class="scroll"><table>{head}<tbody>{"".join(body)}</tbody></table></div>'
