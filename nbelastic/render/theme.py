"""Colours and shapes: of JupyterLab's theme, else of the reader's colour scheme."""

from __future__ import annotations

SYMBOLS = {
    "waiting": "○",
    "forming": "◐",
    "running": "●",
    "stopping": "◧",
    "finished": "✓",
    "failed": "✕",
    "stopped": "■",
    "detached": "⇥",
}
"""Symbol of each state. It accompanies the word, and never replaces it."""

_COLOURS = {
    # name: (JupyterLab's variable, light, dark)
    "fg": ("--jp-ui-font-color1", "#1f2328", "#e6edf3"),
    "muted": ("--jp-ui-font-color2", "#59636e", "#9aa4af"),
    "bg": ("--jp-layout-color1", "#ffffff", "#15181d"),
    "soft": ("--jp-layout-color2", "#f3f5f7", "#21262d"),
    "line": ("--jp-border-color2", "#d5dae0", "#3a424c"),
    "accent": ("--jp-brand-color1", "#0b66c3", "#58a6ff"),
    "good": ("--jp-success-color1", "#1a7f37", "#4ac26b"),
    "warn": ("--jp-warn-color1", "#b35900", "#e3a008"),
    "bad": ("--jp-error-color1", "#cf222e", "#ff7b72"),
}


def _palette(column: int) -> str:
    return "".join(
        f"--nbe-{name}:var({entry[0]},{entry[column]});" for name, entry in _COLOURS.items()
    )


_RULES = """
.nbe{color:var(--nbe-fg);background:var(--nbe-bg);font-size:13px;line-height:1.45;
font-family:var(--jp-ui-font-family,system-ui,-apple-system,"Segoe UI",sans-serif);
font-variant-numeric:tabular-nums;text-align:left;white-space:normal}
.nbe-card,.nbe-panel{border:1px solid var(--nbe-line);border-radius:8px;padding:12px 16px;
max-width:920px;box-sizing:border-box;overflow:hidden}
.nbe.nbe-card.nbe-card>*+*{margin-top:12px}
.nbe-head{display:flex;flex-wrap:wrap;align-items:center;gap:6px 12px}
.nbe-badge{display:inline-flex;align-items:center;gap:6px;padding:1px 10px 1px 8px;
border:1px solid var(--nbe-state);border-radius:99px;font-weight:600}
.nbe-badge i{color:var(--nbe-state);font-style:normal}
.nbe-waiting,.nbe-stopping,.nbe-stopped,.nbe-detached{--nbe-state:var(--nbe-warn)}
.nbe-forming,.nbe-running{--nbe-state:var(--nbe-accent)}
.nbe-finished{--nbe-state:var(--nbe-good)}
.nbe-failed{--nbe-state:var(--nbe-bad)}
.nbe-name{font-weight:600;font-size:15px;overflow-wrap:anywhere}
.nbe dl.nbe-facts{display:flex;flex-wrap:wrap;gap:6px 24px;margin:8px 0 0;padding:0}
.nbe dl.nbe-facts>div{display:flex;flex-direction:column-reverse;flex:none}
.nbe dl.nbe-facts dt,.nbe dl.nbe-facts dd{float:none;width:auto;max-width:none;white-space:nowrap}
.nbe dl.nbe-facts dt{color:var(--nbe-muted);font-size:12px;font-weight:400;margin:0;padding:0}
.nbe dl.nbe-facts dd{margin:0;padding:0;font-size:15px;font-weight:600;line-height:1.25}
.nbe dl.nbe-facts dd small{font-size:12px;font-weight:400;color:var(--nbe-muted)}
.nbe p.nbe-reason{margin:8px 0 0}
.nbe pre.nbe-error{margin:8px 0 0;padding:8px 10px;white-space:pre-wrap;overflow-wrap:anywhere;
background:var(--nbe-soft);color:var(--nbe-fg);border-left:3px solid var(--nbe-bad);
border-radius:0 4px 4px 0;font-size:12px;
font-family:var(--jp-code-font-family,ui-monospace,Menlo,Consolas,monospace)}
.nbe pre.nbe-output{margin:4px 0 0;overflow-wrap:anywhere;font-size:12px;color:var(--nbe-fg);
font-family:var(--jp-code-font-family,ui-monospace,Menlo,Consolas,monospace)}
.nbe pre.nbe-warning{border-left-color:var(--nbe-warn)}
.nbe-progress{display:flex;flex-wrap:wrap;align-items:center;gap:4px 12px}
.nbe-progress progress{flex:1 1 220px;height:10px;accent-color:var(--nbe-accent)}
.nbe-progress span{color:var(--nbe-muted)}
.nbe .nbe-figure{padding:0 6px;overflow:hidden;container-type:inline-size}
.nbe-figure>svg,.nbe-curves li>svg{display:block;width:100%;overflow:visible}
.nbe-curves li>svg{height:32px}
.nbe-lines path,.nbe-curves path{vector-effect:non-scaling-stroke}
.nbe-end{stroke:var(--nbe-accent);stroke-width:5}
.nbe svg text{fill:var(--nbe-muted);stroke:none;font-size:12px;
font-family:var(--jp-ui-font-family,system-ui,sans-serif)}
.nbe-grid{stroke:var(--nbe-line);stroke-width:1;fill:none}
.nbe-limit{stroke:var(--nbe-muted);stroke-width:1;stroke-dasharray:2 4;fill:none}
.nbe-step{stroke:var(--nbe-accent);stroke-width:2;fill:none;stroke-linejoin:round}
.nbe-under{fill:var(--nbe-accent);fill-opacity:.12;stroke:none}
.nbe-lost{stroke:var(--nbe-bad);stroke-width:2.2;fill:none}
.nbe-joined{fill:var(--nbe-good);stroke:var(--nbe-bg);stroke-width:.8}
.nbe-left{fill:var(--nbe-bg);stroke:var(--nbe-warn);stroke-width:1.6}
.nbe ul.nbe-legend{display:flex;flex-wrap:wrap;gap:2px 18px;list-style:none;margin:2px 0 0;
padding:0;color:var(--nbe-muted);font-size:12px}
.nbe ul.nbe-legend li{display:flex;align-items:center;gap:5px;margin:0}
.nbe ul.nbe-legend svg{width:12px;height:12px}
.nbe ul.nbe-curves{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(150px,100%),1fr));
gap:8px;
list-style:none;margin:0;padding:0}
.nbe ul.nbe-curves li{background:var(--nbe-soft);border-radius:6px;padding:6px 10px;margin:0;
display:flex;flex-wrap:wrap;gap:0 8px;align-items:baseline}
.nbe ul.nbe-curves span{flex:1 1 auto;overflow-wrap:anywhere}
.nbe ul.nbe-curves b{order:1}
.nbe ul.nbe-curves small{order:3;flex:1 0 100%;color:var(--nbe-muted);font-size:12px}
.nbe ul.nbe-curves li>svg{order:2;flex:1 0 100%}
.nbe-rows{overflow-x:auto;container-type:inline-size}
.nbe caption span{display:inline-block;position:sticky;left:0;max-width:100cqw}
.nbe table.nbe-ranks{border-collapse:collapse;border:0;width:100%;margin:0;font-size:12px;
color:inherit;table-layout:auto}
.nbe table.nbe-ranks caption{text-align:left;color:var(--nbe-muted);padding:0 0 4px;
caption-side:top;font-size:12px}
.nbe table.nbe-ranks th,.nbe table.nbe-ranks td{padding:3px 12px 3px 0;text-align:left;
border:0;border-top:1px solid var(--nbe-line);background:none;vertical-align:baseline;
white-space:normal;overflow-wrap:break-word;max-width:none;color:inherit}
.nbe table.nbe-ranks thead th{border-top:0;color:var(--nbe-muted);font-weight:500}
.nbe table.nbe-ranks tbody tr{background:none}
.nbe table.nbe-ranks .nbe-n{text-align:right;padding-right:20px}
.nbe table.nbe-ranks small{color:var(--nbe-muted);font-size:12px}
.nbe p.nbe-more{color:var(--nbe-muted);margin:4px 0 0}
.nbe details summary{cursor:pointer;color:var(--nbe-muted)}
.nbe ol.nbe-causes{list-style:none;margin:4px 0 0;padding:0}
.nbe ol.nbe-causes li{display:grid;grid-template-columns:minmax(4.5em,auto) minmax(0,1fr);
overflow-wrap:anywhere;margin:0}
.nbe ol.nbe-causes time{color:var(--nbe-muted)}
.nbe tr.nbe-away td,.nbe tr.nbe-away th{color:var(--nbe-muted)}
.nbe p.nbe-live{position:absolute;width:1px;height:1px;margin:0;overflow:hidden;
clip-path:inset(50%);white-space:nowrap}
.nbe p.nbe-stale{visibility:hidden;height:0;margin:0;color:var(--nbe-fg);
border-left:3px solid var(--nbe-warn);padding-left:10px;
animation:nbe-stale 1000000s step-end infinite}
@keyframes nbe-stale{0%{visibility:hidden;height:0;margin:0}
.0015%{visibility:visible;height:auto;margin:8px 0 0}}
@container (max-width:200px){.nbe-wide{display:none}}
@container (max-width:400px){
.nbe table.nbe-ranks,.nbe table.nbe-ranks caption,.nbe table.nbe-ranks tbody{display:block}
.nbe table.nbe-ranks thead{position:absolute;width:1px;height:1px;overflow:hidden;
clip-path:inset(50%)}
.nbe table.nbe-ranks tbody tr{display:flex;flex-wrap:wrap;gap:0 10px;padding:3px 0;
border-top:1px solid var(--nbe-line)}
.nbe table.nbe-ranks tbody td,.nbe table.nbe-ranks tbody th,
.nbe table.nbe-ranks tbody .nbe-n{border:0;padding:0;text-align:left;min-width:0;
overflow-wrap:anywhere}
.nbe table.nbe-ranks tbody td:empty{display:none}
.nbe table.nbe-ranks [data-label]::before{content:attr(data-label) " ";font-weight:400;
color:var(--nbe-muted)}
}
@media (max-width:420px){.nbe-card,.nbe-panel{padding:8px}
.nbe table.nbe-ranks th,.nbe table.nbe-ranks td{padding-right:8px}}
.nbe-panel{background:var(--nbe-bg)}
.nbe-panel .widget-html-content{line-height:1.45;font-size:13px;overflow:hidden}
.nbe-panel,.nbe-panel .widget-box{overflow:visible}
.nbe-panel .widget-label,.nbe-panel .widget-readout{color:var(--nbe-fg)}
.nbe-panel p.nbe-refusal{margin:0;border-left:3px solid var(--nbe-bad);padding-left:8px}
.nbe-panel button:focus-visible{outline:2px solid var(--nbe-accent);outline-offset:2px}
"""

STYLE = (
    f"<style>.nbe,.nbe-panel{{{_palette(1)}}}"
    f"@media (prefers-color-scheme:dark){{.nbe,.nbe-panel{{{_palette(2)}}}}}"
    f"{_RULES.strip()}</style>"
)
"""The style of every part, scoped to class ``nbe``. No part needs a script or another file."""
